"""The time that savepoints and evaluations add to the steps of the example, and their memory.

    python benchmarks/savepoints.py [--takes 24] [--every 200] [--turns 40]

Trains `examples/nano` in this process with the probe's `SavepointManager`, a savepoint behind every
sixth step: kept in memory, and spilled to disk (memory for one and a half). The share is the time
in `take` over `every` steps. Beside it stands what the two steps behind a savepoint take longer
than the three before the next one, where caches are cold and a thread is writing; on a busy machine
that is noise of either sign. All times are wall times, medians over the savepoints of a kind.

Then a checkpoint of the example is evaluated by `supervise checkpoint eval`, on held-out windows
for minutes, beside bare steps of this process: the evaluation runs for LEG steps and is stopped for
as many, by turns that begin with either. The ratio is the median over pairs of turns, its interval
a bootstrap over these; the busy share is the evaluation's CPU time over the time of its turns.
Below a half other programs had the other core, and nothing is said.

Exit code 1 when the share of one kind is above 1 %, memory above its budget, or a step more than
2 % longer beside an evaluation.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch
from step_job import EXAMPLE, LEG, load_example, nano_step

from supervise_probe.savepoints.manager import SavepointManager
from supervise_probe.torch_state.registry import Registry

LIMIT = 0.01  # of the step time
WARM_UP, BETWEEN = 10, 6  # steps
KEEP = 4
ROOM = 1 << 40  # bytes: no limit
BESIDE = 0.02  # of the step time, added by an evaluation on another core
SUPERVISE = [sys.executable, "-m", "supervise"]
POLICY = """
version: supervise/v1
policy: evaluated
mode: observe
use: [checkpoint, quality]
job: {evaluate: {every: checkpoint}}
"""
BUSY = 0.5  # least share of the other core
STARTED_S = 5.0  # of CPU time: torch is imported, and the model proved
DRAWS = 1000  # of the bootstrap


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
        allowed = one.save(number, 0, None)["bytes"] * 3 // 2
    spill = directory if kind == "spilled" else None
    savepoints = SavepointManager(torch, registry, KEEP, allowed, spill)
    taking, behind, before, held, taken = [], [], [], 0, 0
    while taken < takes:
        while savepoints.busy:
            time.sleep(0.001)
        began = time.perf_counter()
        savepoints.save(number, 0, None)
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


@contextmanager
def evaluation(folder: Path) -> Iterator[psutil.Process]:
    """Train the example for a few steps, and yield the process that evaluates its checkpoint."""
    (folder / "policy.yaml").write_text(POLICY)
    flags = ["-q", "--policy", "policy.yaml", "--run-dir", "run", "--", sys.executable]
    steps = ["--steps", "40", "--checkpoint-every", "20"]
    training = [*SUPERVISE, "run", *flags, str(EXAMPLE), *steps]
    subprocess.run(training, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    held_out = load_example().load_text()[1].to(torch.int32).numpy().astype("uint16")
    (folder / "val.bin").write_bytes(held_out.tobytes() * 200)
    words = ["eval", "ckpt-1", "--run", "run", "--val", "val.bin", "--tokens", str(1 << 40)]
    command = subprocess.Popen(
        [*SUPERVISE, "checkpoint", *words], cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        while True:
            for child in psutil.Process(command.pid).children(recursive=True):
                if sum(child.cpu_times()[:2]) > STARTED_S and child.nice() == 19:
                    try:
                        yield child
                    finally:
                        child.kill()  # also where it is stopped
                    return
            if command.poll() is not None:
                raise SystemExit("savepoints.py: the evaluation ended before it was looked at")
            time.sleep(0.1)
    finally:
        command.wait()


def beside_evaluation(turns: int, folder: Path) -> bool:
    """Print how much longer a step takes beside an evaluation; return whether that is too much."""
    step, number, busy = nano_step("nano"), 0, [0.0, 0.0]
    pairs: list[dict[bool, float]] = []
    with evaluation(folder) as process:
        for pair in range(turns):
            medians = {}
            for runs in (pair % 2 == 0, pair % 2 == 1):
                (process.resume if runs else process.suspend)()
                times, used, began = [], sum(process.cpu_times()[:2]), time.perf_counter()
                for _ in range(LEG):
                    start = time.perf_counter()
                    step(number)
                    times.append(time.perf_counter() - start)
                    number += 1
                if runs:
                    busy[0] += sum(process.cpu_times()[:2]) - used
                    busy[1] += time.perf_counter() - began
                medians[runs] = median(times[1:])  # the caches of the first are those of before
            pairs.append(medians)
        process.resume()
    ratios = [each[True] / each[False] for each in pairs]
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(ratios, k=turns)) for _ in range(DRAWS))
    low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
    share = busy[0] / busy[1]
    verdict = "PASS" if median(ratios) <= 1.0 + BESIDE else "FAIL"
    verdict = verdict if share >= BUSY else "inconclusive"
    print(
        f"{'beside an evaluation':20} {median(each[False] for each in pairs) * 1e3:8.1f}  "
        f"x{median(ratios):.4f}  {low:.4f} .. {high:.4f} in {turns} pairs of {LEG} steps; it was "
        f"busy for {share:.0%}  {verdict}"
    )
    return verdict == "FAIL"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--takes", type=int, default=24, help="savepoints of each kind")
    parser.add_argument("--every", type=int, default=200, help="steps between two, for the share")
    parser.add_argument("--turns", type=int, default=40, help="pairs, beside an evaluation")
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
    if args.turns:
        with tempfile.TemporaryDirectory() as directory:
            failed = beside_evaluation(args.turns, Path(directory)) or failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
