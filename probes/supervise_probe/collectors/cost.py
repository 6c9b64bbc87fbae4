"""The cost of the probe: thread CPU time inside all of its pieces.

One step in four is timed, and published in the next frame. A pause is no CPU time and
does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step

COST_METRICS = (
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
        "mean of the steps that were weighed, from step 16 on; after 20 of them exponential",
    ),
)

BEGIN = 16  # a first step makes what later ones use: it says nothing about them
SPAN = 20  # weighed steps whose mean it is before it becomes exponential, weight 1 / SPAN


class CostCollector(Collector):
    """The cost of the probe: thread CPU time inside all of its pieces.

    Smooths what the guard has measured.
    """

    METRICS = COST_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._guard = context.guard
        self._share = 0.0
        self._weighed = 0

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        spent, self._guard.weighed_ns = self._guard.weighed_ns, None
        if spent is not None and step.elapsed_ns:
            values["probe_self_time"] = spent / 1e9
            if step.number >= BEGIN:
                self._weighed = min(self._weighed + 1, SPAN)
                self._share += (spent / step.elapsed_ns - self._share) / self._weighed
        if self._weighed:
            values["probe_overhead_frac"] = self._share
