"""Numbers that the job reports itself; they join the frame of the step under way.

What is no number is left out, and a notice says so once per name; a report can never fail in the
job, nor keep other values from being taken. Values on an accelerator are not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Mapping, Set

from ..runtime.guard import from_signal_handler

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..data.shard_tracker import ShardTracker
    from ..runtime.scalars import Number

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
        self, context: ProbeContext, extra: Dict[str, Number], shards: ShardTracker
    ) -> None:
        self._torch, self._scalars = context.torch, context.scalars
        self._gate, self._reporter = context.gate, context.reporter
        self._room, self._extra = context.config.capacity, extra
        self._shards = shards
        self.adapted = False
        # What is reported before the first step waits until the process is a rank.
        self._waiting: Dict[str, str] = {}  # name -> why it is left out
        self._listed: Set[str] = set()

    def take(self, values: Mapping[str, Any]) -> None:
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
                if from_signal_handler(error):
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
        if self._torch.is_grad_enabled() and not self._gate.off_duty():
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
