"""Parts of a step's time, as the host sees it.

On an accelerator, forward and backward times are the times until the work was queued. A part that
a job does not have (no DataLoader, a model that is never called as a whole) has no metric, and its
time counts as other time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..runtime.times import Times
    from ..torch_state.records import Step, Update

TIMING_METRICS = (
    MetricSpec(
        "step_time",
        "s",
        "Wall time from the last step's end to this one's, without holds; absent in the first.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "input_time", "s", "Time inside next() of a DataLoader, gradients on.", "CLOCK_MONOTONIC"
    ),
    MetricSpec(
        "forward_time",
        "s",
        "Time inside the outermost module, gradients on, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "backward_time",
        "s",
        "Time inside torch.autograd.backward, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "optimizer_time",
        "s",
        "Time inside optimizer.step, without collectives, and forward and backward of a closure.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "comm_time",
        "s",
        "Time inside collectives that the training thread calls, and waiting for them; without the "
        "reduction of DistributedDataParallel, which is part of backward_time; absent before the "
        "first.",
        "CLOCK_MONOTONIC around torch.distributed's functions and Work.wait",
    ),
    MetricSpec("other_time", "s", "step_time less the parts above.", "CLOCK_MONOTONIC"),
    MetricSpec(
        "dataloader_stall_frac",
        "%",
        "Time blocked in next(loader) over step time; absent where batches come from a "
        "generator or a function: then it is part of other_time.",
        "input_time / step_time",
    ),
    MetricSpec(
        "comm_time_frac",
        "%",
        "Time in collectives, as the training thread sees it, over step time.",
        "comm_time / step_time",
    ),
)

PARTS = (  # name, and that of its share of the step where it has one
    ("input_time", "dataloader_stall_frac"),
    ("forward_time", ""),
    ("backward_time", ""),
    ("optimizer_time", ""),
    ("comm_time", "comm_time_frac"),
)


class TimingCollector(Collector):
    """Parts of a step's time, as the host sees it.

    Splits the step. What ran after its last optimizer belongs to the next one.
    """

    METRICS = TIMING_METRICS

    def __init__(self, context: ProbeContext, times: Times) -> None:
        super().__init__(context)
        self._times = times
        self._before = times.ended

    def after_update(self, update: Update) -> None:
        self._times.end()

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        previous, self._before = self._before, self._times.ended
        elapsed = step.elapsed_ns
        if elapsed is None:
            return
        rest_ns = elapsed
        for (name, share), start, end in zip(PARTS, previous, self._before):
            if end:
                spent = end - start
                rest_ns -= spent
                values[name] = spent / 1e9
                if share and elapsed:
                    values[share] = 100.0 * spent / elapsed
        values["step_time"] = elapsed / 1e9
        values["other_time"] = max(0, rest_ns) / 1e9
