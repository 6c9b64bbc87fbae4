"""Limits on a step: clips, skipped updates, and the effects of the supervisor's own tools."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite
from typing import TYPE_CHECKING, Mapping, Optional

from ..torch_state.records import StepShareWindow
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import SafeguardState, Step, Update
    from .gradient import GradientCollector

LIMITS_METRICS = (
    MetricSpec(
        "clip_bound",
        "1",
        "The bound that `clip` put on the gradient norm of this step; absent without one.",
        "this project",
    ),
    MetricSpec(
        "update_clip_rate",
        "%",
        "Share of the last 300 steps whose update `update_clip` shortened; absent while it is off.",
        "Marin 32B retrospective",
    ),
    MetricSpec(
        "gradients_zeroed",
        "1",
        "1 when `zero_nonfinite` set gradients of this step to zero, else 0; absent where it is "
        "not armed.",
        "this project",
    ),
    MetricSpec(
        "skipped_bad_steps",
        "1",
        "1 when `skip_outliers` skipped the update of this step, else 0; absent where it is not "
        "ordered.",
        "OLMo-core: SkipStepOptimizer",
    ),
    MetricSpec(
        "guard_active",
        "1",
        "1 while all guards act, 0 when one of them cannot or has stopped: what the policy orders "
        "(skip_outliers, update_clip), and the job's own clip once it came in 32 steps in a row; "
        "absent without one.",
        "Marin 32B retrospective",
    ),
)

PAST = 128  # steps
CLIPS = 300  # steps, as of grad_clip_rate
HABIT = 32  # steps with a clip; project default
CLIPPED = "_update_clipped"  # on its way to the host; never published


class LimitsCollector(Collector):
    """Effects of the supervisor's own tools on the step: limits in force, gradients that were
    repaired.

    Asks the safeguards.

    Attributes:
        gradient_norms, update_norms: finite ones of the newest steps, oldest first.
        limit: of the job's newest clip by norm; None before its first.
    """

    METRICS = LIMITS_METRICS

    def __init__(
        self, context: ProbeContext, in_force: SafeguardState, clipping: ClippingCollector
    ) -> None:
        super().__init__(context)
        self._in_force, self._clipping = in_force, clipping
        self._habit = 0  # steps in a row with a clip of the job's; stays at HABIT
        self.gradient_norms: deque[float] = deque(maxlen=PAST)
        self.update_norms: deque[float] = deque(maxlen=PAST)
        self.limit: Optional[float] = None
        self._clipped: Optional[StepShareWindow] = None

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        in_force = self._in_force
        limited, self._clipping.limited = self._clipping.limited, None
        if limited is not None:
            if self._habit < HABIT:
                self._habit = self._habit + 1 if limited else 0
            if self._habit == HABIT:
                values["guard_active"] = float(limited)
        if not in_force.acting:
            return
        if in_force.clip_bound is not None:
            values["clip_bound"] = in_force.clip_bound
        if in_force.zeroed is not None:
            values["gradients_zeroed"] = in_force.zeroed
        if in_force.clipped is not None:
            values[CLIPPED] = in_force.clipped
        if in_force.outlier is not None:
            values["skipped_bad_steps"] = in_force.outlier
        if in_force.guards:
            ordered = all(in_force.guards.values())
            values["guard_active"] = float(ordered and values.get("guard_active", 1.0) == 1.0)

    def add_derived_values(self, values: dict[str, float]) -> None:
        self.limit = values.get("clip_threshold", self.limit)
        for name, past in (
            ("grad_global_norm", self.gradient_norms),
            ("update_norm", self.update_norms),
        ):
            value = values.get(name, 0.0)
            if value > 0.0 and isfinite(value):
                past.append(value)
        if "gradients_zeroed" in values:
            values["gradients_zeroed"] = min(1.0, values["gradients_zeroed"])
        clipped = values.pop(CLIPPED, None)
        if clipped is None:
            self._clipped = None
            return
        if self._clipped is None:
            self._clipped = StepShareWindow("update_clip_rate", CLIPS)
        self._clipped.add_step(clipped > 0.0)
        values["update_clip_rate"] = self._clipped.percent

    def forget_norms(self) -> None:
        """Another model trains from now on."""
        self.gradient_norms.clear()
        self.update_norms.clear()
        self.limit = None

    def state(self) -> dict[str, float]:
        return {"guard_active.clips": float(self._habit)}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._habit = int(state.get("guard_active.clips", self._habit))


CLIPPING_METRICS = (
    MetricSpec(
        "grad_clip_rate",
        "%",
        "Share of the last 300 steps whose gradient norm was finite and above the job's own limit, "
        "of a clip by value that of gradients which are all at it; absent before its first clip.",
        "torch.nn.utils.clip_grad_norm_: total_norm > max_norm; clip_grad_value_: total_norm > "
        "clip_value * sqrt(values)",
    ),
    MetricSpec(
        "clip_threshold",
        "1",
        "The limit that the job passed to its first clip by norm in this step.",
        "torch.nn.utils.clip_grad_norm_: max_norm",
    ),
    MetricSpec(
        "clip_ratio",
        "1",
        "The gradient norm that the job's clip saw, over its limit, as grad_clip_rate has it; the "
        "largest of several clips.",
        "torch.nn.utils.clip_grad_norm_: total_norm / max_norm; clip_grad_value_: total_norm / "
        "(clip_value * sqrt(values))",
    ),
    MetricSpec(
        "clip_loss_scale",
        "1",
        "The loss scale that the gradients were still multiplied by when the job clipped them; 1 "
        "where they were unscaled before, absent without a GradScaler or a clip.",
        "torch.amp.GradScaler.unscale_",
    ),
    MetricSpec(
        "skip_reason",
        "1",
        "Why this step's update was not applied: 0 it was, 1 overflow under a GradScaler, "
        "2 skip_nonfinite, 3 command, 4 skip_outliers.",
        "this project",
    ),
)

REASONS = {"overflow": 1.0, "safeguard": 2.0, "command": 3.0, "outlier": 4.0}
EXCESS = "_clip_excess"  # norm over limit on its way to the host; never published


class ClippingCollector(Collector):
    """Limits on the update: a clip of the gradient's norm, and skipped updates.

    Looks at the clips that the collector `gradient` keeps anyway.

    Attributes:
        limited: whether the job clipped in the step that is collected, to a finite limit if that is
            known; None until this was looked at.
    """

    METRICS = CLIPPING_METRICS

    def __init__(self, context: ProbeContext, gradient: GradientCollector) -> None:
        super().__init__(context)
        self._gradient = gradient
        self._clipped = StepShareWindow("grad_clip_rate", CLIPS)
        self._clips = False
        self._reason = 0.0
        self._reporter = context.reporter
        self._loss_scale: Optional[Number] = None  # of gradients that were clipped
        self._is_told = False  # where scaled gradients are clipped
        self.limited: Optional[bool] = None

    def after_update(self, update: Update) -> None:
        if update.skip:
            self._reason = REASONS.get(update.skip, 0.0)

    def before_update(self, update: Update) -> None:
        clips = self._gradient.clips
        if update.scaler is None or not clips:
            return
        self._loss_scale = 1.0
        key, ids = id(update.optimizer), update.known.ids
        if any(key not in clip.unscaled and not clip.ids().isdisjoint(ids) for clip in clips):
            self._loss_scale = update.scale
            if not self._is_told:
                self._is_told = True
                data = {"metric": "clip_loss_scale", "made": self._gradient.clipped_at or ""}
                text = "gradients are clipped while they are multiplied by the loss scale"
                self._reporter.notice("wiring", text, data)

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        values["skip_reason"], self._reason = self._reason, 0.0
        scale, self._loss_scale = self._loss_scale, None
        if scale is not None:
            values["clip_loss_scale"] = scale
        excess: Optional[Number] = None
        ratio: Optional[Number] = None
        self.limited = False
        for clip in self._gradient.clips:
            limit = clip.limit
            if limit is None:
                self.limited = True
                continue
            if type(limit) is not float:
                limit = self._number(limit)
            if type(limit) is not float or limit < inf:  # without one a job takes the norm only
                self.limited = True
            if clip.size == 0:  # it had no gradient to clip
                continue
            if clip.size:  # the most that is left: the norm where each value is at the limit
                limit = limit * clip.size**0.5
            else:
                values.setdefault("clip_threshold", limit)
            over = clip.norm - limit
            excess = over if excess is None else self.scalars.larger(excess, over)
            if type(limit) is not float or 0.0 < limit < inf:
                times = clip.norm / limit
                ratio = times if ratio is None else self.scalars.larger(ratio, times)
        if ratio is not None:
            values["clip_ratio"] = ratio
        if excess is not None:
            values[EXCESS] = excess

    def add_derived_values(self, values: dict[str, float]) -> None:
        if values.get("update_skipped", 0.0) > 0.0 and values.get("skip_reason") == 0.0:
            values["skip_reason"] = 1.0  # masked by a fused optimizer, which only the device knew
        excess = values.pop(EXCESS, None)
        if excess is not None:
            self._clips = True
            self._clipped.add_step(0.0 < excess < inf)
        elif self._clips:
            self._clipped.add_step(False)
        else:
            return
        values["grad_clip_rate"] = self._clipped.percent

    def _number(self, limit: object) -> Number:
        return self.scalars.value(limit) if isinstance(limit, self.torch.Tensor) else float(limit)  # type: ignore[arg-type]

    def state(self) -> dict[str, float]:
        state = {"grad_clip_rate.known": float(self._clips)}
        self._clipped.save_state(state)
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        self._clips = bool(state.get("grad_clip_rate.known", self._clips))
        self._clipped.load_state(state)
