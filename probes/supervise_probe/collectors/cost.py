"""What the probe itself costs: thread CPU time inside all of its pieces.

One step in four is weighed, and told in the next frame. Waiting on purpose (a pause) is no CPU time
and does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step

METRICS = (
    MetricSpec(
        "probe_self_time",
        "s",
        "Thread CPU time of the probe in the step before; absent where that was not weighed.",
        "thread_time",
    ),
    MetricSpec(
        "probe_overhead_frac",
        "1",
        "Moving average of probe_self_time / step_time.",
        "exponential, weight 0.05 for the newest step that was weighed",
    ),
)

WEIGHT = 0.05


class Collector(Base):
    """Smooths what the guard has measured."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._boundary = probe.boundary
        self._share: Optional[float] = None

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        spent, self._boundary.spent_ns = self._boundary.spent_ns, None
        if spent is not None and step.elapsed_ns:
            values["probe_self_time"] = spent / 1e9
            new = spent / step.elapsed_ns
            old = self._share
            self._share = new if old is None else old + WEIGHT * (new - old)
        if self._share is not None:
            values["probe_overhead_frac"] = self._share
