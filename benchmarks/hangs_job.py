"""The jobs of `hangs.py`: ranks that stand still or fall behind, and what people must read of each.

    torchrun --nproc-per-node 4 benchmarks/hangs_job.py NAME

Each rank trains a small model under DistributedDataParallel and gloo, with rows of its own. The
last but one gets into trouble at step `BEGINS`; signals come from outside, the rank only says when.
What must be read stands in the decorator; `{here}` is the line with the comment "here".
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, BEGINS, LATE_S = 1000, 80, 0.2
# What `hang.stalled` waits, and what stacks and evidence of all ranks may take.
STALLED_S = 120.0 + 30.0
AT_ONCE_S = 30.0  # for what needs no waiting: a process that is stopped, or gone
SLOW_STEPS = 200


@dataclass(frozen=True)
class Hang:
    """One trouble.

    Attributes:
        does: what people read in the table. run: what each rank calls in a step from `BEGINS` on,
            given whether it is the one.
        says: words for what it does. where: words for the place, or for what it is slow at.
        within_s, within: the deadline of the message, in seconds or, if not 0, in steps.
        sent: a signal from outside. ranks: of the job. rank: that must be named.
        step_s: of an undisturbed step, at least.
    """

    does: str
    run: Callable[[bool], None]
    says: str
    where: str
    within_s: float = STALLED_S
    within: int = 0
    sent: int = 0
    ranks: int = 4
    step_s: float = 0.03

    @property
    def rank(self) -> int:
        return self.ranks - 2


HANGS: dict[str, Hang] = {}


def hang(
    does: str, says: str, where: str, **more: Any
) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    """Enter a function into the table under its own name; see `Hang`."""

    def enter(run: Callable[[bool], None]) -> Callable[[bool], None]:
        lines, first = inspect.getsourcelines(run)
        marked = [first + place for place, line in enumerate(lines) if "# here" in line]
        here = f"hangs_job.py:{marked[0]}" if marked else ""
        HANGS[run.__name__] = Hang(does, run, says, where.format(here=here), **more)
        return run

    return enter


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random rows from number `first` on. `late_s`: what a batch takes longer."""

    first = 0
    late_s = 0.0

    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.late_s / 8)
        return torch.randn(32, generator=torch.Generator().manual_seed(index + self.first))


class Net(torch.nn.Module):
    """Two layers. `late_s`: what a forward takes longer."""

    late_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.late_s)
        out: torch.Tensor = self.layers(batch)
        return out


ROWS, NET = Rows(), Net()
GROUPS: list[Any] = []  # one beside that of all ranks


def train(name: str) -> None:
    """Train, and get into trouble."""
    dist.init_process_group("gloo")
    GROUPS.append(dist.new_group())
    mine = dist.get_rank() == HANGS[name].rank
    ROWS.first = dist.get_rank() * len(ROWS)
    model = torch.nn.parallel.DistributedDataParallel(NET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, batch in enumerate(torch.utils.data.DataLoader(ROWS, batch_size=8)):
        if step == BEGINS and mine:
            began = {"pid": os.getpid(), "at": time.time()}
            Path("part").write_text(json.dumps(began))
            Path("part").rename("began")
        if step >= BEGINS:
            HANGS[name].run(mine)
        inputs, targets = batch.chunk(2, dim=1)
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(HANGS[name].step_s)


# ── ranks that stand still ────────────────────────────────────────────────────────────────────────


@hang("stopped (SIGSTOP)", "is stopped by a signal", "kill -CONT", within_s=AT_ONCE_S, sent=19)
def stopped(mine: bool) -> None:
    time.sleep(mine)


@hang(
    "stopped (SIGSTOP), one of two",
    "is stopped by a signal",
    "kill -CONT",
    within_s=AT_ONCE_S,
    sent=signal.SIGSTOP,
    ranks=2,
)
def stopped_of_two(mine: bool) -> None:
    time.sleep(mine)


@hang("spinning in Python", "computes", "at {here} in spinning")
def spinning(mine: bool) -> None:
    while mine:
        os.getpid()  # here


@hang("in a collective that the others do not call", "in all_reduce", "at {here} in alone")
def alone(mine: bool) -> None:
    if mine:
        dist.all_reduce(torch.zeros(1), group=GROUPS[0])  # here


@hang("waiting in its own code while the others reduce", "waits", "at {here} in waiting")
def waiting(mine: bool) -> None:
    if mine:
        time.sleep(3600)  # here


@hang("killed (SIGKILL)", "SIGKILL", "", within_s=AT_ONCE_S, sent=signal.SIGKILL)
def killed(mine: bool) -> None:
    time.sleep(mine)


# ── ranks that fall behind ────────────────────────────────────────────────────────────────────────


@hang("0.2 s later per step in its loader", "straggler", "in its input", within=SLOW_STEPS)
def slow_input(mine: bool) -> None:
    ROWS.late_s = LATE_S * mine


@hang("0.2 s later per step in its forward", "straggler", "in its forward", within=SLOW_STEPS)
def slow_forward(mine: bool) -> None:
    NET.late_s = LATE_S * mine


@hang(
    "the same, of steps of 0.5 s",
    "straggler",
    "in its forward",
    within=SLOW_STEPS,
    step_s=0.45,
)
def slow_of_long_steps(mine: bool) -> None:
    NET.late_s = LATE_S * mine


@hang(
    "0.2 s later per step outside both",
    "straggler",
    "in code outside forward and backward",
    within=SLOW_STEPS,
)
def slow_outside(mine: bool) -> None:
    time.sleep(LATE_S * mine)


if __name__ == "__main__":
    train(sys.argv[1])
