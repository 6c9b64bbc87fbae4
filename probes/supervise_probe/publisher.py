"""Turns the values of a step into a frame, in order, when all of them have reached the host.

Names are announced when they are first seen, so that a metric that a job does not have never takes
a column. Knows no metric.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional

from .scalars import Number, Pending, Scalars

FLUSH_S = 1.0
DEPTH = 32  # frames that may wait for a device before the oldest goes without its late values


class Draft(NamedTuple):
    """One frame that is not published yet."""

    step: int
    attempt: int
    at_ns: int
    pending: Pending


class Publisher:
    """The frames of one rank.

    Args:
        writer: the segment's `Writer`.
        scalars: brings values to the host.
        finish: given `(step, attempt, values)` with every value on the host, adds those that are
            derived from them.
        refused: told of a name for which a frame has no room.
    """

    def __init__(
        self,
        writer: Any,
        scalars: Scalars,
        finish: Callable[[int, int, Dict[str, float]], None],
        refused: Callable[[str], None],
    ) -> None:
        self._writer = writer
        self._scalars = scalars
        self._finish = finish
        self._refused = refused
        self._names: List[str] = []
        self._known: Dict[str, int] = {}
        self._drafts: Deque[Draft] = deque()
        self._overflow = False

    @property
    def waiting(self) -> int:
        """How many frames wait for a device."""
        return len(self._drafts)

    def submit(self, step: int, attempt: int, at_ns: int, values: Mapping[str, Number]) -> None:
        """Publish the frame now if the host has all its values, else at a later step."""
        self._drafts.append(Draft(step, attempt, at_ns, self._scalars.pack(values)))
        while self._drafts and (self._drafts[0].pending.ready() or len(self._drafts) > DEPTH):
            self._publish(self._drafts.popleft())

    def flush(self) -> None:
        """Publish everything. Values that a device does not give within FLUSH_S stay absent."""
        end = time.monotonic() + FLUSH_S
        while self._drafts:
            while not self._drafts[0].pending.ready() and time.monotonic() < end:
                time.sleep(0.001)
            self._publish(self._drafts.popleft())

    def _publish(self, draft: Draft) -> None:
        values = draft.pending.read()
        self._finish(draft.step, draft.attempt, values)
        known = self._known
        late = [name for name in values if name not in known]
        if late:
            self._announce(late)
        row: List[Optional[float]] = [None] * len(self._names)
        for name, value in values.items():
            index = known.get(name)
            if index is not None:
                row[index] = float(value)
        self._writer.publish(draft.step, draft.attempt, row, draft.at_ns)

    def _announce(self, late: List[str]) -> None:
        room = self._writer.capacity - len(self._names)
        for name in late[:room]:
            self._known[name] = len(self._names)
            self._names.append(name)
        if room > 0:
            self._writer.announce(self._names)
        if len(late) > room and not self._overflow:
            self._overflow = True
            self._refused(late[room])
