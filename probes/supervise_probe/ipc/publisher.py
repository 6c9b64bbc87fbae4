"""Turns the values of a step into a frame, in order, when all of them have reached the host.

Names are announced when they are first seen, so that a metric that a job does not have never takes
a column. Knows no metric.
"""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Set

from ..runtime.scalars import Number, Pending, Scalars

FLUSH_S = 1.0
DEPTH = 32  # frames that may wait for a device before the oldest goes without its late values


class Draft(NamedTuple):
    """One frame that is not published yet: `values`, unless some of them are `pending`."""

    step: int
    attempt: int
    at_ns: int
    pending: Optional[Pending]
    values: Dict[str, Number]

    def ready(self) -> bool:
        """Whether all values have arrived."""
        return self.pending is None or self.pending.ready()


class Publisher:
    """The frames of one rank.

    Attributes:
        muted: frames are dropped: a drill wants silence.

    Args:
        writer: the segment's `Writer`.
        scalars: brings values to the host.
        finish: given `(step, attempt, values)` with every value on the host, adds those that are
            derived from them.
        notice: called with a kind and a sentence about names for which a frame has no room.
    """

    def __init__(
        self,
        writer: Any,
        scalars: Scalars,
        finish: Callable[[int, int, Dict[str, float]], None],
        notice: Callable[[str, str], None],
    ) -> None:
        self._writer = writer
        self._scalars = scalars
        self._finish = finish
        self._notice = notice
        self._names: List[str] = []
        self._known: Set[str] = set()
        self._drafts: Deque[Draft] = deque()
        self._thread = 0  # that submitted the newest of them
        self._overflow = False
        self.muted = False

    @property
    def waiting(self) -> int:
        """How many frames wait for a device."""
        return len(self._drafts)

    def submit(self, step: int, attempt: int, at_ns: int, values: Dict[str, Number]) -> None:
        """Publish the frame now if the host has all its values, else at a later step."""
        pending = self._scalars.pack(values)
        if pending is None and not self._drafts:
            self._publish(step, attempt, at_ns, values)
            return
        self._drafts.append(Draft(step, attempt, at_ns, pending, values))
        self._thread = get_ident()
        while self._drafts and (self._drafts[0].ready() or len(self._drafts) > DEPTH):
            self._publish_draft(self._drafts.popleft())

    def catch_up(self) -> None:
        """Publish what has arrived, without waiting; on another thread than the training: nothing.

        A save has waited for the device, so that all that came before it is here.
        """
        while self._drafts and self._thread == get_ident() and self._drafts[0].ready():
            self._publish_draft(self._drafts.popleft())

    def flush(self) -> None:
        """Publish everything. Values that a device does not give within FLUSH_S stay absent."""
        end = time.monotonic() + FLUSH_S
        while self._drafts:
            while not self._drafts[0].ready() and time.monotonic() < end:
                time.sleep(0.001)
            self._publish_draft(self._drafts.popleft())

    def _publish_draft(self, draft: Draft) -> None:
        values = draft.values if draft.pending is None else draft.pending.read()
        self._publish(draft.step, draft.attempt, draft.at_ns, values)

    def _publish(self, step: int, attempt: int, at_ns: int, values: Dict[str, float]) -> None:
        self._finish(step, attempt, values)
        if self.muted:
            return
        if not values.keys() <= self._known:
            self._announce([name for name in values if name not in self._known])
        row: List[Optional[float]] = list(map(values.get, self._names))
        self._writer.publish(step, attempt, row, at_ns)

    def _announce(self, late: List[str]) -> None:
        room = self._writer.capacity - len(self._names)
        self._names += late[:room]
        self._known.update(late[:room])
        if room > 0:
            self._writer.announce(self._names)
        if len(late) > room and not self._overflow:
            self._overflow = True
            left_out = f"{late[room]!r} and later ones are left out"
            self._notice("note", f"a frame holds {self._writer.capacity} metrics; {left_out}")
