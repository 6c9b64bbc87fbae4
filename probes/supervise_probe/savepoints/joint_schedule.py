"""Savepoints of several ranks at the same steps, without a message between the ranks.

A rollback goes back to a step of which all ranks have a savepoint. Rank 0 decides by its own cost
when the next one is due, and writes that into a file. The others read it within their next steps,
long before. A rank that cannot save just then makes it a savepoint of some ranks, which no rollback
uses.
"""

from __future__ import annotations

import os
from typing import Callable

from ..runtime import files

NAME = "savepoints-next."  # before the attempt of the launch; beside the segments
LEAST_APART = 4  # steps: time for the other ranks to read it
UNKNOWN = -1


class JointSchedule:
    """The schedule as one rank sees it; ask it once at each boundary.

    Args:
        directory: that all ranks share. attempt: of the launch. leads: whether this rank decides.
        every: steps between two, at least. failed: told why the others cannot be told.
    """

    def __init__(
        self,
        directory: str,
        attempt: int,
        leads: bool,
        every: int,
        failed: Callable[[str], None],
    ) -> None:
        self._path = os.path.join(directory, f"{NAME}{attempt}")
        self._leads, self._every = leads, max(LEAST_APART, every)
        self._failed = failed
        self._next = UNKNOWN
        self._newest = (0, 0)  # step and time of the one before
        self._step_ns = 0

    def is_now(self, step: int) -> bool:
        """Whether all ranks are to save behind `step`: 15 us where that is to be read, else 0.1."""
        if self._next < step:
            self._next = self._decide(step + self._every) if self._leads else self._read(step)
        return self._next == step

    def taken(self, step: int, now_ns: int, wait_ns: int) -> None:
        """One was, and by its cost none is to be taken for `wait_ns`."""
        before, at_ns = self._newest
        self._newest = step, now_ns
        if at_ns and step > before:
            self._step_ns = (now_ns - at_ns) // (step - before)
        if self._leads:
            steps = -(-wait_ns // self._step_ns) if self._step_ns else 0
            self._next = self._decide(step + max(self._every, steps))

    def _decide(self, step: int) -> int:
        try:
            files.replace(self._path, b"%d" % step)
        except OSError as error:
            self._failed(f"the ranks take no savepoints together: {error}")
        return step

    def _read(self, step: int) -> int:
        try:
            return max(UNKNOWN, int(files.read(self._path)))
        except (OSError, ValueError):  # rank 0 has not decided yet
            return UNKNOWN
