"""What the probe itself costs: thread CPU time inside all of its pieces.

Counted from frame to frame, so the publishing of a frame counts in the next one. Waiting on
purpose (a pause) is no CPU time and does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step

METRICS = (
    MetricSpec(
        "probe_self_time", "s", "Thread CPU time of the probe since the last frame.", "thread_time"
    ),
    MetricSpec(
        "probe_overhead_frac",
        "1",
        "Moving average of probe_self_time / step_time.",
        "exponential, weight 0.05 for the newest step",
    ),
)

WEIGHT = 0.05


class Collector(Base):
    """Smooths what the guard has measured."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._boundary = probe.boundary
        self._share: float = -1.0

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        spent = self._boundary.spent_ns
        values["probe_self_time"] = spent / 1e9
        if step.elapsed_ns:
            share = spent / step.elapsed_ns
            self._share = share if self._share < 0 else self._share + WEIGHT * (share - self._share)
            values["probe_overhead_frac"] = self._share
