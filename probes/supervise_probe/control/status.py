"""The probe's account of itself, which the supervisor shows to people: one small JSON object."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

if TYPE_CHECKING:
    from ..collectors import Collector
    from ..context import ProbeContext
    from ..savepoints.controller import RollbackController


def of_process(context: ProbeContext, collectors: Mapping[str, Collector]) -> Dict[str, Any]:
    """Return what is true of every process, whatever trains in it.

    `self_us` is what the probe cost from the last frame to the one before, in microseconds.
    """
    guard, states = context.guard, {}
    for name in collectors:
        part = guard.part(name)
        states[name] = "on" if part.on else f"off: {part.reason}"
    return {
        "torch": str(context.torch.__version__),
        "python": platform.python_version(),
        "collectors": states,
        "self_us": round(guard.newest_ns / 1e3, 1),
    }


def of_savepoints(rollbacks: Optional[RollbackController]) -> Dict[str, Any]:
    """Return the steps that can be gone back to, and why there are none."""
    steps = [] if rollbacks is None else rollbacks.steps
    rollback = "ready" if steps else "none yet"
    if rollbacks is not None and rollbacks.why_not:
        rollback = f"unavailable: {rollbacks.why_not}"
    return {"savepoints": steps, "rollback": rollback}


def tier(on: bool, adapted: bool) -> str:
    """Return T2 once the job reports values itself, T0 when the probe is off, else T1."""
    return "T0" if not on else "T2" if adapted else "T1"


def known(**found: Any) -> Dict[str, Any]:
    """Return those that hold anything."""
    return {name: value for name, value in found.items() if value}
