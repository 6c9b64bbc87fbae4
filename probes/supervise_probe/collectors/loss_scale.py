"""The loss scale of the job's GradScaler; absent in a job that has none (BF16, FP32)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.grad_scaler import GradScalerState
    from ..torch_state.records import Step, Update

LOSS_SCALE_METRICS = (
    MetricSpec(
        "loss_scale",
        "1",
        "Scale in force in this step, before the scaler's own update of it.",
        "torch.amp.GradScaler",
    ),
)


class LossScaleCollector(Collector):
    """The loss scale of the job's GradScaler; absent in a job that has none (BF16, FP32).

    Takes the scale that the step was made under.
    """

    METRICS = LOSS_SCALE_METRICS

    ASLEEP = True

    def __init__(self, context: ProbeContext, scaling: GradScalerState) -> None:
        super().__init__(context)
        scaling.appeared = self.wake
        self._scale: Optional[Number] = None

    def before_update(self, update: Update) -> None:
        if update.scaler is not None:
            self._scale = update.scale

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        scale, self._scale = self._scale, None
        if scale is not None:
            values["loss_scale"] = scale
