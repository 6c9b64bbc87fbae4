"""What fences cost a rank at each boundary while no command waits: `fences.py --idle`.

One boundary of a rank of two, less that of a rank alone, by turns in one process: a real mailbox
and segment, and a real gloo group whose collectives are counted. `hot`: boundary after boundary;
`cold`: 24 MB are copied in between, so that nothing of it is in a cache, as after the longest of
training steps. At most `LIMIT_US` are allowed of `hot`, which is what it computes; the number of
`cold` is that of the machine's memory, and of who else uses it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from publish import STREAMED

from supervise_probe import wire
from supervise_probe.context import Config, Reporter
from supervise_probe.ipc.commands import Commands
from supervise_probe.ipc.segment import Mailbox, Writer
from supervise_probe.runtime.guard import Guard
from supervise_probe.torch_state.records import Position

LIMIT_US = 5.0
HOT, COLD = 200_000, 400  # boundaries
BLOCK = 1000  # of them by turns


def commands_of(torch: Any, folder: Path, world: int) -> Commands:
    """Return what reads the mailbox of rank 0 of so many."""
    position = Position(0, 0)
    position.world_size = world
    folder.mkdir()
    writer = Writer.create(str(folder), "run", 0, world, slots=256)
    mailbox, reporter = Mailbox(writer), Reporter(position)
    reporter.connect(writer, mailbox, {name: i for i, name in enumerate(wire.PHASES)}, dict)
    context: Any = SimpleNamespace(
        torch=torch,
        guard=Guard(lambda part, why: print(f"{part.name} is off: {why}")),
        position=position,
        reporter=reporter,
        config=Config("run", str(folder), str(folder)),
    )
    nothing: Any = SimpleNamespace(living=list, known={})
    return Commands(context, mailbox, nothing, nothing, list, str)


def boundaries(commands: Commands, times: int) -> float:
    """Return the CPU time of so many, in us each."""
    began = time.thread_time_ns()
    for _ in range(times):
        commands.fetch()
        commands.run()
    return (time.thread_time_ns() - began) / times / 1e3


def measure() -> dict[str, tuple[float, float]]:
    """Return us a boundary, by name: of a rank alone, and of one of two."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        both = [commands_of(torch, folder / str(world), world) for world in (1, 2)]
        other = bytearray(STREAMED)
        hot: tuple[list[float], list[float]] = ([], [])
        cold: tuple[list[float], list[float]] = ([], [])
        for _ in range(HOT // BLOCK):
            for commands, found in zip(both, hot, strict=True):
                found.append(boundaries(commands, BLOCK))
        for _ in range(COLD):
            for commands, found in zip(both, cold, strict=True):
                bytes(other)  # a copy passes through the caches
                found.append(boundaries(commands, 1))
        torch.distributed.destroy_process_group()
    return {
        how: (median(found[0]), median(found[1])) for how, found in (("hot", hot), ("cold", cold))
    }


def report() -> bool:
    """Print the table; return whether both are within the limit."""
    print(f"{'caches':8}{'alone':>10}{'of two':>10}{'fences':>10}   us of CPU time a step, median")
    fine = False
    for how, (alone, several) in measure().items():
        added = several - alone
        fine |= how == "hot" and added <= LIMIT_US
        print(f"{how:8}{alone:>10.2f}{several:>10.2f}{added:>10.2f}")
    print(f"{'PASS' if fine else 'FAIL'}  at most {LIMIT_US:g} us, hot, while no command waits")
    return fine
