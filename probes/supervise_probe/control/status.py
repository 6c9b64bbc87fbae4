"""The probe's account of itself, which the supervisor shows to people.

Read-only over the probe's parts; one small JSON object.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Dict

from ..stepping.inferred_steps import WHY

if TYPE_CHECKING:
    from ..probe import Probe


def describe(probe: Probe) -> Dict[str, Any]:
    """Return the status.

    `tier` is T2 once the job reports values itself, T0 when the probe is off. `self_us` is what
    the probe cost from the last frame to the one before, in microseconds.
    """
    rollbacks = probe.rollbacks
    steps = [] if rollbacks is None else rollbacks.steps
    rollback = "ready" if steps else "none yet"
    if rollbacks is not None and rollbacks.why_not:
        rollback = f"unavailable: {rollbacks.why_not}"
    collectors = {}
    for name in probe.collectors:
        part = probe.guard.part(name)
        collectors[name] = "on" if part.on else f"off: {part.reason}"
    status: Dict[str, Any] = {
        "tier": "T0" if not probe.on else "T2" if probe.adapted else "T1",
        "torch": str(probe.torch.__version__),
        "python": platform.python_version(),
        "collectors": collectors,
        "update_to_weight": probe.collectors["updates"].mode,
        "mfu": probe.collectors["flops"].told,
        "savepoints": steps,
        "rollback": rollback,
        "paused": probe.commands is not None and probe.commands.paused,
        "drills": probe.drills.names(),
        "sampling": probe.sampling.describe(),
        "self_us": round(probe.guard.newest_ns / 1e3, 1),
    }
    if probe.boundary.handmade.active:
        status["steps"] = f"inferred from backward: {WHY}"
    shards = probe.collectors["shards"].newest()
    if shards:
        status["shards"] = shards
    quarantine = probe.collectors["quarantine"].describe()
    if quarantine:
        status["quarantine"] = quarantine
    orders = probe.tools.standing()
    if orders:
        status["standing_orders"] = orders
    in_force = probe.tools.describe()
    if in_force:
        status["in_force"] = in_force
    return status
