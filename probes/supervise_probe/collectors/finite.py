"""Values that are not finite, among those that the probe has anyway.

NaN and Inf spread through a 2-norm, so the gradient's norm stands for all gradients and the
update's for all weights, at no cost. A gradient that overflowed under a GradScaler is not counted:
the scaler looked for it, and the weights never saw it.
"""

from __future__ import annotations

import math
from typing import Dict

from ..spec import MetricSpec
from . import Collector as Base

METRICS = (
    MetricSpec(
        "nan_inf_events",
        "1",
        "How many of loss, gradient norm and update norm are NaN or Inf in this step; an overflow "
        "that a GradScaler caught counts 0.",
        "this project",
    ),
)


class Collector(Base):
    """Looks at the finished frame."""

    def finish(self, values: Dict[str, float]) -> None:
        names = ["train_loss_raw", "update_norm"]
        if not ("loss_scale" in values and values.get("update_skipped")):
            names.append("grad_global_norm")
        values["nan_inf_events"] = float(
            sum(1 for name in names if not math.isfinite(values.get(name, 0.0)))
        )
