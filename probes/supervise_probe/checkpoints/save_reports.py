"""What is told of a checkpoint that was saved: where it is, of which step, and how it was written.

A name that the job gives to the file afterwards is not seen here: what is told of the file leads
the supervisor to it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

if TYPE_CHECKING:
    from ..collectors.framework import Collector as FrameworkCollector
    from ..context import ProbeContext
    from ..runtime.position import Position

TOLD = 64  # paths that are remembered

Told = Dict[str, Tuple[int, int]]  # path -> attempt and step


class SaveReports:
    """Tells of a checkpoint once per path and step.

    Attributes:
        saving: a save is under way; one inside another is part of that.

    Args:
        settle: a step without an optimizer may be over.
    """

    def __init__(
        self, context: ProbeContext, library: FrameworkCollector, settle: Callable[[], None]
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._library, self._settle = library, settle
        self._of_save: Callable[[], Dict[str, Any]] = dict
        self.saving = False

    def connect(self, of_save: Callable[[], Dict[str, Any]]) -> None:
        """The process is a rank: `of_save` returns what a save tells of the fixed batch."""
        self._of_save = of_save

    def begins(self) -> None:
        """A save begins: the phase is "checkpoint"."""
        self.saving = True
        self._reporter.beat("checkpoint")

    def ends(self) -> None:
        """It is over, or raised."""
        self.saving = False
        self._reporter.beat("step")

    def tell(self, told: Told, path: str, seconds: float, how: str, place: Any) -> None:
        """Tell of one, and let its time join the next frame.

        Args:
            told: what was told before by the same way of saving. place: the file, or its path.
        """
        self._settle()
        self._library.saved(seconds)
        position = self._position
        at = (position.attempt, position.step)
        if told.get(path) == at:
            return
        while len(told) >= TOLD:
            del told[next(iter(told))]
        told[path] = at
        data = {
            "path": path,
            "step": position.step,
            "file": stamp_of(place, path),
            **save_facts(position, seconds, how),
            **self._of_save(),
        }
        message = f"step {position.step} was saved by {how}"
        self._reporter.notice("checkpoint-saved", message, data)


def save_facts(position: Position, seconds: float, how: str) -> Dict[str, Any]:
    """Return what the supervisor wants to know of any save: see `Guard.saved`."""
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
    """Return what a renaming keeps of what was written, None where nobody can tell.

    Device and inode, size in bytes, and time of writing by the clock of its file system.
    """
    try:
        number = place.fileno() if hasattr(place, "fileno") else path
        found = os.stat(number)
    except (OSError, ValueError):
        return None
    device, inode = found.st_dev, found.st_ino
    return {"device": device, "inode": inode, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
