"""Read position in the segments of a run, derived from the events that were made of them.

A supervisor that takes over from a dead one goes on behind the last frame and the last notice in
the journal: none is judged twice, and none is lost while the ring still holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.model.events import Announced, Event, Frame, Gap, Notice
from ...core.model.failure import KIND as FAILURE


@dataclass
class ReadCursor:
    """A fold over the journal of a run.

    Attributes:
        newest: per rank, when the segment was made that its newest frames came from.
        frames: (rank, made) -> frames taken or told as lost.
        letters: (rank, made) -> all notices in letters below this number were taken.
        silent: pids of the processes whose probe was told to be off.
        failures: names of the records of failures that were taken.
    """

    newest: dict[int, int] = field(default_factory=dict)
    frames: dict[tuple[int, int], int] = field(default_factory=dict)
    letters: dict[tuple[int, int], int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """Take the next event of the journal."""
        if isinstance(event, Frame):
            self._count(event.rank, 1)
        elif isinstance(event, Gap):
            self._count(event.rank, event.count)
        elif isinstance(event, Announced):
            self.newest[event.rank] = event.segment
        elif isinstance(event, Notice):
            self._noticed(event)

    def _count(self, rank: int, frames: int) -> None:
        key = (rank, self.newest.get(rank, 0))
        self.frames[key] = self.frames.get(key, 0) + frames

    def _noticed(self, event: Notice) -> None:
        if event.rank is not None and event.segment is not None and event.letter is not None:
            key = (event.rank, event.segment)
            self.letters[key] = max(self.letters.get(key, 0), event.letter + 1)
        elif event.kind == FAILURE:
            self.failures.add(str(event.data.get("record")))
        elif event.kind == "probe-off" and "pid" in event.data:
            self.silent.add(int(event.data["pid"]))
