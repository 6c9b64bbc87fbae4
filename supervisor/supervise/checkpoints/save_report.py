"""What the loop tells the guard: where the run is, and what the job said of a save."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..core.model.events import Notice
from ..inputs import clock
from .discovery import FileIdentity


@dataclass(frozen=True)
class RunPosition:
    """Where the run is.

    Attributes:
        step: of the newest frame, -1 before the first.
        values: of the newest frame of the leading rank.
        suspects: ids of checkpoints that must not be gone back to.
        ranks: world size.
        on_trial: ids of those that may still turn out to be suspect.
    """

    step: int = -1
    attempt: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    suspects: frozenset[str] = frozenset()
    ranks: int = 1
    on_trial: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SaveReport:
    """What the job told of one save; see `save_hooks.py` of the probe.

    Attributes:
        step: 0-based, the last whole optimizer step before it.
        mark: of what was written, None where nobody could tell.
    """

    path: str
    step: int
    attempt: int
    how: str
    rank: int
    ranks: int
    wall: str
    seconds: float | None = None
    mark: FileIdentity | None = None
    python: str | None = None
    probe_batch: dict[str, Any] | None = None
    values: Mapping[str, float] = field(default_factory=dict)


def saved(event: Notice, moment: RunPosition) -> SaveReport | None:
    """Return what a notice `checkpoint-saved` tells, None if it names no path.

    The notice's step is that of the step under way: what was saved ends with the one before.
    """
    about = event.data
    path, file, seconds = about.get("path"), about.get("file"), about.get("seconds")
    if not isinstance(path, str):
        return None
    mark = None
    if file:
        told_ns = time.time_ns() - (clock.monotonic_ns() - event.at_ns)
        began_ns = -inf if seconds is None else told_ns - seconds * 1e9
        look = (int(file["size"]), int(file["mtime_ns"]), int(file["inode"]))
        mark = FileIdentity(int(file["device"]), look, began_ns, told_ns)
    return SaveReport(
        path=path,
        step=moment.step if event.step is None else event.step - 1,
        attempt=int(about.get("attempt", moment.attempt)),
        how=str(about.get("how", "its library")),
        rank=event.rank or 0,
        ranks=int(about.get("ranks", moment.ranks)),
        wall=clock.wall(),
        seconds=seconds,
        mark=mark,
        python=about.get("python"),
        probe_batch=about.get("probe_batch"),
        values=moment.values,
    )
