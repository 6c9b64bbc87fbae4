"""Numbers that the job reports itself; they join the frame of the step under way.

What is no number is left out, and people are told so once per name; a report can never fail in the
job, nor keep other values from being taken. Values on an accelerator are not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Mapping, Set

from ..runtime.guard import from_signal_handler

if TYPE_CHECKING:
    from ..probe import Probe
    from ..runtime.scalars import Number

# Bytes of a name: those of the largest frame must fit into one letter. A character takes up to 4.
LONGEST = 120
MOST = 64  # names that people are told of; a job may make up a new one each step

# Of this process. What is reported before the first step waits until there is somebody to tell.
_waiting: Dict[str, str] = {}  # name -> why it is left out
_told: Set[str] = set()


class NoNumberError(ValueError):
    """We looked, and it is none: raised by no other code than this file's."""


def take(probe: Probe, values: Mapping[str, Any]) -> None:
    """Keep `values` for the next frame, as many as a frame has room for."""
    if not probe.adapted:
        probe.adapted = True
        probe.status_changed()
    pending = probe.boundary.reported
    for name, value in values.items():
        if value is None:  # says itself that there is nothing
            continue
        if len(pending) >= probe.config.capacity and name not in pending:
            break
        try:
            if len(name) > LONGEST // 4 or not name.isidentifier():  # most names cost no more
                _check(name)
            pending[name] = _number(probe, value)
        except NoNumberError as error:
            _leave_out(name, error)
        except Exception as error:
            if from_signal_handler(error):
                raise
            _leave_out(name, error)
    if _waiting and probe.writer is not None:
        _tell(probe)


def _number(probe: Probe, value: Any) -> Number:
    """Return what a frame can hold. Raises whatever a value raises that holds no number."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, probe.torch.Tensor):
        if hasattr(value, "item"):
            return float(value.item())
        raise NoNumberError(f"is no number: {type(value).__name__}")
    if value.numel() != 1:
        raise NoNumberError(f"is a tensor of {value.numel()} elements, not of one")
    if value.is_meta or value.is_complex():
        raise NoNumberError(f"is a tensor without a real number: {value.device}, {value.dtype}")
    number = probe.scalars.value(value)
    if type(number) is not float and type(number) is not probe.torch.Tensor:
        # It could not be packed with others, and take the whole frame with it.
        raise NoNumberError(f"is a {type(value).__name__}, no plain tensor")
    return number


def _check(name: str) -> None:
    if not name or " " in name or not name.isprintable():
        raise NoNumberError("is no name of a metric: no blanks and control characters")
    if len(name.encode()) > LONGEST:
        raise NoNumberError(f"is no name of a metric: longer than {LONGEST} bytes")


def _leave_out(name: str, error: Exception) -> None:
    if name not in _told and len(_told) + len(_waiting) < MOST:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _waiting[name] = lines[0][:200]


def _tell(probe: Probe) -> None:
    told = "; ".join(f"{name[:LONGEST]!r} {why}" for name, why in _waiting.items())
    _told.update(_waiting)
    _waiting.clear()
    probe.notice("report", f"left out of what the job reports: {told[:1000]}")


def shard(probe: Probe, name: Any, offset: Any) -> None:
    """The next batch comes from there; one of an evaluation is no step's."""
    if probe.torch.is_grad_enabled() and not probe.off_duty():
        probe.collectors["shards"].shards.tell(name, offset)


def is_quarantined(probe: Probe, name: Any) -> bool:
    """Whether a shard of this name is in quarantine."""
    held: bool = probe.collectors["quarantine"].asks(name)
    return held


def tell_rest(probe: Probe) -> None:
    """The process ends: what was reported for a frame that never came is told in words."""
    rest = {k: v for k, v in probe.boundary.reported.items() if isinstance(v, float)}
    if rest:
        told = ", ".join(f"{name} {value:.6g}" for name, value in rest.items())
        probe.notice("note", f"after the last step: {told}", rest)
