"""Values that are not finite, among those that the probe has anyway.

NaN and Inf spread through a 2-norm, so the gradient's norm stands for all gradients and the
update's for all weights, at no cost. A gradient that overflowed under a GradScaler is not counted:
the scaler looked for it, and the weights never saw it.
"""

from __future__ import annotations

from math import isfinite
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
        get = values.get
        finite = isfinite(get("train_loss_raw", 0.0)) + isfinite(get("update_norm", 0.0))
        caught = "loss_scale" in values and get("update_skipped")
        finite += bool(caught or isfinite(get("grad_global_norm", 0.0)))
        values["nan_inf_events"] = float(3 - finite)
