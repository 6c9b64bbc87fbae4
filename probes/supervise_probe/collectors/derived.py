"""Numbers derived from a frame and those before it: averages, shares, sums.

Plain arithmetic on the host once all values of a step are there; a rollback takes it back exactly.
Values that are not finite enter no average: one of them would stay in it for ever.

Source: the stability metrics report, rows of the same ids. A gradient that overflowed under a
GradScaler is no spike, and not counted as not finite: the weights never saw it.
"""

from __future__ import annotations

from math import exp, inf, isfinite
from typing import TYPE_CHECKING, Dict, Mapping, Optional

from ..spec import MetricSpec
from ..torch_state.records import Average, Window
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext

DERIVED_METRICS = (
    MetricSpec(
        "train_loss_ema",
        "loss",
        "Bias-corrected moving average of train_loss_raw, decay 0.99, finite losses only.",
        "m = 0.99 m + 0.01 loss; m / (1 - 0.99^t)",
    ),
    MetricSpec(
        "train_ppl",
        "1",
        "exp of the same average of train_loss; absent where that is.",
        "this project",
    ),
    MetricSpec(
        "train_val_gap",
        "nat",
        "val_loss less the same average of train_loss, in the frames that have both.",
        "the stability metrics report",
    ),
    MetricSpec(
        "overflow",
        "1",
        "1 when a GradScaler skipped this step's update, else 0, also where something else skipped "
        "it; absent in a job without one.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec(
        "overflow_rate",
        "%",
        "Share of the last 100 steps that a GradScaler skipped; absent in a job without one.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec(
        "grad_spike_score",
        "1",
        "grad_global_norm over its bias-corrected moving average, decay 0.97, of the steps before; "
        "absent in the first step and where it is not finite.",
        "|g_t| / EMA(|g|)_(t-1)",
    ),
    MetricSpec(
        "tokens_applied",
        "tokens",
        "Sum of tokens_per_update over the steps whose update was applied; a rollback takes it "
        "back.",
        "this project",
    ),
    MetricSpec(
        "nan_inf_events",
        "1",
        "How many of loss, gradient norm and update norm are NaN or Inf in this step; an overflow "
        "that a GradScaler caught counts 0.",
        "this project",
    ),
)

OVERFLOWS = 100  # steps
EXP_LIMIT = 700.0  # exp of more does not fit a float64


class DerivedCollector(Collector):
    """Numbers derived from a frame and those before it: averages, shares, sums.

    Keeps eight numbers and a word of 100 bits.
    """

    METRICS = DERIVED_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._loss = Average("train_loss_ema", 0.99)
        self._of_target = Average("train_ppl", 0.99)
        self._norm = Average("grad_spike_score", 0.97)
        self._overflows = Window("overflow_rate", OVERFLOWS)
        self._parts = (self._loss, self._of_target, self._norm, self._overflows)
        self._applied = 0.0

    def finish(self, values: Dict[str, float]) -> None:
        value_of = values.get
        mean = self._follow(self._loss, value_of("train_loss_raw"))
        if mean is not None:
            values["train_loss_ema"] = mean
        mean = self._follow(self._of_target, value_of("train_loss"))
        if mean is not None:
            values["train_ppl"] = exp(mean) if mean < EXP_LIMIT else inf
            if "val_loss" in values:
                values.setdefault("train_val_gap", values["val_loss"] - mean)
        norm = value_of("grad_global_norm")
        if norm is not None and isfinite(norm):
            average = self._norm
            if average.value:
                values["grad_spike_score"] = norm / average.value
            average.add(norm)
        skipped = value_of("update_skipped", 0.0) > 0.0
        if "loss_scale" in values:
            overflow = value_of("skip_reason", float(skipped)) == 1.0
            self._overflows.add(overflow)
            values["overflow"] = float(overflow)
            values["overflow_rate"] = self._overflows.percent
        tokens = value_of("tokens_per_update")
        if tokens is not None:
            if not skipped:
                self._applied += tokens
            values["tokens_applied"] = self._applied
        finite = isfinite(value_of("train_loss_raw", 0.0)) + isfinite(value_of("update_norm", 0.0))
        # NaN and Inf spread through a 2-norm, so the norms stand for all gradients and weights.
        is_overflow = "loss_scale" in values and value_of("update_skipped")
        finite += bool(is_overflow or isfinite(value_of("grad_global_norm", 0.0)))
        values["nan_inf_events"] = float(3 - finite)

    @staticmethod
    def _follow(average: Average, value: Optional[float]) -> Optional[float]:
        """Return the average with this value in it; None where there is no value."""
        if value is None:
            return None
        if isfinite(value):
            average.add(value)
        return average.value

    def state(self) -> Dict[str, float]:
        state = {"tokens_applied": self._applied}
        for part in self._parts:
            part.save(state)
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        self._applied = state.get("tokens_applied", self._applied)
        for part in self._parts:
            part.load(state)
