"""The time that savepoints add to the steps of the example, and their memory.

    python benchmarks/savepoints.py [--takes 24] [--every 200]

Trains `examples/nano` in this process with the probe's `SavepointManager`, a savepoint behind every
sixth step: kept in memory, and spilled to disk (memory for one and a half). The share is the time
in `take` over `every` steps. Beside it stands what the two steps behind a savepoint take longer
than the three before the next one, where caches are cold and a thread is writing; on a busy machine
that is noise of either sign. All times are wall times, medians over the savepoints of a kind.

Exit code 1 when the share of one kind is above 1 %, or memory above its budget.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from statistics import median
from typing import NamedTuple

import torch
from step_job import nano_step

from supervise_probe.savepoints.manager import SavepointManager
from supervise_probe.torch_state.registry import Registry

LIMIT = 0.01  # of the step time
WARM_UP, BETWEEN = 10, 6  # steps
KEEP = 4
ROOM = 1 << 40  # bytes: no limit


class Row(NamedTuple):
    """One kind: seconds per `take`, per step, added to the two behind; bytes held and allowed."""

    take: float
    step: float
    behind: float
    held: int
    allowed: int


def measure(registry: Registry, kind: str, takes: int, directory: str) -> Row:
    """Train with savepoints of one kind."""
    step = nano_step("nano")
    number = 0
    while number < WARM_UP:
        step(number)
        number += 1
    allowed = ROOM
    if kind == "spilled":
        one = SavepointManager(torch, registry, 1, ROOM)
        allowed = one.take(number, 0, None)["bytes"] * 3 // 2
    spill = directory if kind == "spilled" else None
    savepoints = SavepointManager(torch, registry, KEEP, allowed, spill)
    taking, behind, before, held, taken = [], [], [], 0, 0
    while taken < takes:
        while savepoints.busy:
            time.sleep(0.001)
        began = time.perf_counter()
        savepoints.take(number, 0, None)
        taking.append(time.perf_counter() - began)
        held = max(held, savepoints.nbytes)
        times = []
        while len(times) < BETWEEN:
            began = time.perf_counter()
            step(number)
            times.append(time.perf_counter() - began)
            number += 1
        behind.append(sum(times[:2]))
        before.append(sum(times[3:]) / (BETWEEN - 3))
        taken += 1
    savepoints.close()
    usual = median(before)
    return Row(median(taking[KEEP:]), usual, median(behind) - 2 * usual, held, allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--takes", type=int, default=24, help="savepoints of each kind")
    parser.add_argument("--every", type=int, default=200, help="steps between two, for the share")
    args = parser.parse_args()
    torch.set_num_threads(1)
    registry = Registry()
    registry.install(torch)
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        rows["in memory"] = measure(registry, "in memory", args.takes, directory)
        rows["spilled"] = measure(registry, "spilled", args.takes, directory)
    version = platform.python_version()
    print(
        f"Python {version}, torch {torch.__version__}, {os.cpu_count()} cores "
        f"({platform.machine()}), load {os.getloadavg()[0]:.1f}, one thread; a savepoint every "
        f"{args.every} steps, {KEEP} kept"
    )
    print(f"{'':20} {'step ms':>8} {'take ms':>8} {'share':>7} {'behind ms':>10} {'MB held':>8}")
    failed = False
    for kind, row in rows.items():
        share = row.take / (args.every * row.step)
        wrong = share > LIMIT or row.held > row.allowed
        failed = failed or wrong
        print(
            f"{kind:20} {row.step * 1e3:8.1f} {row.take * 1e3:8.2f} {share:7.3%} "
            f"{row.behind * 1e3:+10.2f} {row.held / 1e6:8.1f}  {'FAIL' if wrong else 'PASS'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
