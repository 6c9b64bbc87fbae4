"""Frames of a step: published in order, when all values of a step have reached the host.

Numbers that the job reports itself join the frame of the step under way. What is no number is left
out, and a notice says so once per name; a report can never fail in the job, nor keep other values
from being taken. Values on an accelerator are not waited for.

Names are announced when they are first seen, so that a metric that a job does not have never takes
a column. Knows no metric.
"""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from ..runtime.guard import is_from_signal_handler
from ..runtime.scalars import Number, Pending, Scalars

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..shards import ShardTracker

FLUSH_S = 1.0
DEPTH = 32  # frames that may wait for a device before the oldest goes without its late values


class Draft(NamedTuple):
    """One frame that is not published yet: `values`, unless some of them are `pending`."""

    step: int
    attempt: int
    at_ns: int
    pending: Optional[Pending]
    values: dict[str, Number]

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
        finish: Callable[[int, int, dict[str, float]], None],
        notice: Callable[[str, str], None],
    ) -> None:
        self._writer = writer
        self._scalars = scalars
        self._finish = finish
        self._notice = notice
        self._names: list[str] = []
        self._known: set[str] = set()
        self._drafts: deque[Draft] = deque()
        self._thread = 0  # that submitted the newest of them
        self._overflow = False
        self.muted = False

    @property
    def frames_waiting(self) -> int:
        """How many frames wait for a device."""
        return len(self._drafts)

    def submit(self, step: int, attempt: int, at_ns: int, values: dict[str, Number]) -> None:
        """Publish the frame now if the host has all its values, else at a later step."""
        pending = self._scalars.pack(values)
        if pending is None and not self._drafts:
            self._publish(step, attempt, at_ns, values)
            return
        self._drafts.append(Draft(step, attempt, at_ns, pending, values))
        self._thread = get_ident()
        while self._drafts and (self._drafts[0].ready() or len(self._drafts) > DEPTH):
            self._publish_draft(self._drafts.popleft())

    def publish_arrived(self) -> None:
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

    def _publish(self, step: int, attempt: int, at_ns: int, values: dict[str, float]) -> None:
        self._finish(step, attempt, values)
        if self.muted:
            return
        if not values.keys() <= self._known:
            self._announce([name for name in values if name not in self._known])
        row: list[Optional[float]] = list(map(values.get, self._names))
        self._writer.publish(step, attempt, row, at_ns)

    def _announce(self, late: list[str]) -> None:
        room = self._writer.capacity - len(self._names)
        self._names += late[:room]
        self._known.update(late[:room])
        if room > 0:
            self._writer.announce(self._names)
        if len(late) > room and not self._overflow:
            self._overflow = True
            left_out = f"{late[room]!r} and later ones are left out"
            self._notice("note", f"a frame holds {self._writer.capacity} metrics; {left_out}")


# Bytes of a name: those of the largest frame must fit into one letter. A character takes up to 4.
LONGEST = 120
MOST = 64  # names that notices list; a job may make up a new one each step


class NoNumberError(ValueError):
    """We looked, and it is none: raised by no other code than this file's."""


class JobReports:
    """What the job says by calling the package.

    Attributes:
        adapted: whether the job reports values of its own.

    Args:
        extra: what joins the next frame.
    """

    def __init__(
        self, context: ProbeContext, extra: dict[str, Number], shards: ShardTracker
    ) -> None:
        self._torch, self._scalars = context.torch, context.scalars
        self._gate, self._reporter = context.gate, context.reporter
        self._room, self._extra = context.config.capacity, extra
        self._shards = shards
        self.adapted = False
        # What is reported before the first step waits until the process is a rank.
        self._waiting: dict[str, str] = {}  # name -> why it is left out
        self._listed: set[str] = set()

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Keep `values` for the next frame, as many as a frame has room for."""
        if not self.adapted:
            self.adapted = True
            self._reporter.status_changed()
        pending = self._extra
        for name, value in values.items():
            if value is None:  # says itself that there is nothing
                continue
            if len(pending) >= self._room and name not in pending:
                break
            try:
                if len(name) > LONGEST // 4 or not name.isidentifier():  # most names cost no more
                    _check(name)
                pending[name] = self._number(value)
            except NoNumberError as error:
                self._leave_out(name, error)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                self._leave_out(name, error)
        if self._waiting and self._reporter.writer is not None:
            self._tell()

    def _number(self, value: Any) -> Number:
        """Return what a frame can hold. Raises whatever a value raises that holds no number."""
        torch = self._torch
        if isinstance(value, (int, float)):
            return float(value)
        if not isinstance(value, torch.Tensor):
            if hasattr(value, "item"):
                return float(value.item())
            raise NoNumberError(f"is no number: {type(value).__name__}")
        if value.numel() != 1:
            raise NoNumberError(f"is a tensor of {value.numel()} elements, not of one")
        if value.is_meta or value.is_complex():
            raise NoNumberError(f"is a tensor without a real number: {value.device}, {value.dtype}")
        number = self._scalars.value(value)
        if type(number) is not float and type(number) is not torch.Tensor:
            # It could not be packed with others, and take the whole frame with it.
            raise NoNumberError(f"is a {type(value).__name__}, no plain tensor")
        return number

    def _leave_out(self, name: str, error: Exception) -> None:
        if name not in self._listed and len(self._listed) + len(self._waiting) < MOST:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._waiting[name] = lines[0][:200]

    def _tell(self) -> None:
        names = "; ".join(f"{name[:LONGEST]!r} {reason}" for name, reason in self._waiting.items())
        self._listed.update(self._waiting)
        self._waiting.clear()
        self._reporter.notice("report", f"left out of what the job reports: {names[:1000]}")

    def shard(self, name: Any, offset: Any) -> None:
        """The next batch comes from there; one of an evaluation is no step's."""
        if self._torch.is_grad_enabled() and not self._gate.must_skip_hook():
            self._shards.report(name, offset)

    def end(self) -> None:
        """The process ends: what was reported for a frame that never came is listed in a notice."""
        extra = {k: v for k, v in self._extra.items() if isinstance(v, float)}
        if extra:
            values = ", ".join(f"{name} {value:.6g}" for name, value in extra.items())
            self._reporter.notice("note", f"after the last step: {values}", extra)


def _check(name: str) -> None:
    if not name or " " in name or not name.isprintable():
        raise NoNumberError("is no name of a metric: no blanks and control characters")
    if len(name.encode()) > LONGEST:
        raise NoNumberError(f"is no name of a metric: longer than {LONGEST} bytes")
