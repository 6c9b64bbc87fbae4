"""A way in which training dies, and what people have to read of it: for the jobs of `deaths.py`.

Each trains a small model, saves a checkpoint, and dies in its way. With `--resume` it goes on from
the checkpoint to its end, so that a start after the death comes to something. What must be read
stands in the decorator of each way; `{here}` in it is the line with the comment "here".
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, SAVES, DIES = 40, 10, 30
AGAIN, NOT, ASKED, UNSAVED = "started again", "not started", "asked for", "no checkpoint"
SECRET = "hq7-" + "Zx81" * 5  # in the environment of the job, as API_TOKEN
TOKEN = "hf_" + "aB3d" * 8  # known by its form
CHECKPOINT = "ckpt.pt"


@dataclass(frozen=True)
class Way:
    """One way to die.

    Attributes:
        does: what people read in the table. run: what dies.
        says: what the first message must say of the cause, each in these words.
        cls: the class of the failure, "" for none.
        then: what `on_crash` must make of it: `AGAIN`, `NOT`, `ASKED` (an end that was asked for is
            no crash), or `UNSAVED` (another start could help, but there is no checkpoint yet).
        silent: the process records nothing of its end, so `failures.json` does not name it.
        ranks: of torchrun; 1: without it. sent: a signal that comes from outside, 0 for none.
        under: the command is an argument of this one. memory: bytes of its cgroup, 0: of none.
        disk: bytes of a file system of its own at `disk`, 0: none.
    """

    does: str
    run: Callable[[], None]
    says: tuple[str, ...]
    cls: str
    then: str
    silent: bool = False
    ranks: int = 1
    sent: int = 0
    under: tuple[str, ...] = ()
    memory: int = 0
    disk: int = 0


WAYS: dict[str, Way] = {}


def way(
    does: str, *says: str, cls: str = "", then: str = AGAIN, **more: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a function into the table under its own name; see `Way`."""

    def enter(run: Callable[[], None]) -> Callable[[], None]:
        lines, first = inspect.getsourcelines(run)
        marked = [first + place for place, line in enumerate(lines) if "# here" in line]
        here = f"{Path(inspect.getfile(run)).name}:{marked[0]}" if marked else ""
        said = tuple(each.format(here=here) for each in says)
        WAYS[run.__name__] = Way(does, run, said, cls, then, **more)
        return run

    return enter


def training(loader: Any = None) -> Iterator[int]:
    """Train, and yield each step behind its update; one rank of several where torchrun says so."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    trained = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if "--resume" in sys.argv:
        kept = torch.load(CHECKPOINT)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        first = kept["step"]
    rows = iter(loader) if loader is not None else None
    for step in range(first, STEPS):
        batch = torch.randn(8, 16) if rows is None else next(rows)
        loss = (trained(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        if step == SAVES and os.environ.get("RANK", "0") == "0":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"random": torch.get_rng_state(), "step": step + 1}
            torch.save(state, CHECKPOINT)
        yield step


def dying() -> Iterator[None]:
    """Train, and yield where it is time to die: once, never after a resume."""
    for step in training():
        if step == DIES and "--resume" not in sys.argv:
            yield


def join() -> int:
    """Enter the group of torchrun's ranks; return ours."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()
