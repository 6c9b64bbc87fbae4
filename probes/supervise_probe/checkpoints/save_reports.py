"""The notice of a checkpoint that was saved: where it is, of which step, and how it was written.

If the job renames the file afterwards, the supervisor finds it by the device and inode in the
notice.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

if TYPE_CHECKING:
    from ..collectors.framework import Collector as FrameworkCollector
    from ..context import ProbeContext
    from ..runtime.position import Position

REPORTED_MAX = 64  # paths

Reported = Dict[str, Tuple[int, int]]  # path -> attempt and step


class SaveReports:
    """Reports a checkpoint once per path and step.

    Attributes:
        saving: a save is in progress; one inside another is part of it.

    Args:
        settle: ends a step without an optimizer, if there is one.
    """

    def __init__(
        self, context: ProbeContext, library: FrameworkCollector, settle: Callable[[], None]
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._library, self._settle = library, settle
        self._batch_facts: Callable[[], Dict[str, Any]] = dict
        self._counters: Callable[[], Dict[str, float]] = dict
        self.saving = False

    def connect(
        self, batch_facts: Callable[[], Dict[str, Any]], counters: Callable[[], Dict[str, float]]
    ) -> None:
        """Add what these return to each report: about the probe batch, and the counters."""
        self._batch_facts, self._counters = batch_facts, counters

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self._position.step

    def begins(self) -> None:
        """Set the phase "checkpoint": a save begins."""
        self.saving = True
        self._reporter.beat("checkpoint")

    def ends(self) -> None:
        """Reset the phase: the save ended or raised."""
        self.saving = False
        self._reporter.beat("step")

    def report(self, reported: Reported, path: str, seconds: float, how: str, place: Any) -> None:
        """Report a save, and add its time to the next frame.

        Args:
            reported: earlier reports of the same way of saving. place: the file, or its path.
        """
        self._settle()
        self._library.saved(seconds)
        position = self._position
        at = (position.attempt, position.step)
        if reported.get(path) == at:
            return
        while len(reported) >= REPORTED_MAX:
            del reported[next(iter(reported))]
        reported[path] = at
        data = {
            "path": path,
            "step": position.step,
            "file": stamp_of(place, path),
            **self.facts(seconds, how),
            **self._batch_facts(),
        }
        message = f"step {position.step} was saved by {how}"
        self._reporter.notice("checkpoint-saved", message, data)

    def facts(self, seconds: float, how: str) -> Dict[str, Any]:
        """Return the facts of a save that has just ended."""
        return {**save_facts(self._position, seconds, how), "counters": self._counters()}


def save_facts(position: Position, seconds: float, how: str) -> Dict[str, Any]:
    """Return the facts of any save; the supervisor reads them as a `SaveReport`."""
    return {
        "attempt": position.attempt,
        "seconds": round(seconds, 3),
        "how": how,
        "ranks": position.world_size,
        "python": sys.executable,
    }


def name_of(place: Any) -> str:
    """Return the absolute path of a path or of an open file with a name, else ""."""
    if not isinstance(place, (str, os.PathLike)):
        place = getattr(place, "name", None)
    if isinstance(place, os.PathLike):
        place = os.fspath(place)
    if not isinstance(place, str) or "://" in place:
        return ""
    return os.path.abspath(place)


def stamp_of(place: Any, path: str) -> Optional[Dict[str, int]]:
    """Return what identifies the file after a rename, None where that is unknown.

    Device and inode, size in bytes, and time of writing by the clock of its file system.
    """
    try:
        number = place.fileno() if hasattr(place, "fileno") else path
        found = os.stat(number)
    except (OSError, ValueError):
        return None
    device, inode = found.st_dev, found.st_ino
    return {"device": device, "inode": inode, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
