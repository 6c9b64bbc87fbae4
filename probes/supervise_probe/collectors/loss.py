"""The loss of a step: what the job put into backward, all of it.

Every training code divides by the accumulation steps before backward, so the sum over the
backwards of a step is the loss as its author prints it. Losses that never go through
`torch.autograd.backward` (an engine called directly) are not seen. What the job threw away is left
out; `stepping/step_tracker.py` says how that is known, and where it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step

LOSS_METRICS = (
    MetricSpec(
        "train_loss_raw",
        "loss",
        "Sum of the unscaled scalars passed to backward since the last step, in their units; their "
        "mean in a pipeline schedule that averages; absent without one.",
        "torch.autograd.backward; for a closure that is evaluated again, the first evaluation",
    ),
)


class LossCollector(Collector):
    """The loss of a step: what the job put into backward, all of it.

    Adds up losses; on a device the sum stays there.
    """

    METRICS = LOSS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self.total: Optional[Number] = None
        self._averaged: Number = 0.0  # the part of it that is final

    def after_backward(self, loss: Number) -> None:
        self.total = loss if self.total is None else self.total + loss

    def averaged(self, parts: int) -> None:
        """The gradients of the newest `parts` losses were divided by their number."""
        if self.total is not None:
            self.total = self._averaged = self._averaged + (self.total - self._averaged) / parts

    def forget(self) -> None:
        self.total, self._averaged = None, 0.0

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        total = self.total
        self.forget()
        if total is not None:
            values["train_loss_raw"] = total
