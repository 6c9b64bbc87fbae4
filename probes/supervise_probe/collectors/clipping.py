"""Limits on the update: a clip of the gradient's norm, and skipped updates.

The limit is the one that the job passes to torch's clipping functions, compared with the norm that
the same call saw: what is clipped while it is scaled is counted as the job counts it.
Clips by value and by another norm than the 2-norm have no such limit.

A skip has a number, since a frame holds numbers only: 0 applied, 1 overflow under a GradScaler,
2 the safeguard against what is not finite, 3 a command of the supervisor, 4 the safeguard against
outliers.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Dict, Mapping, Optional

from ..spec import MetricSpec
from ..torch_state.records import Window
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from .gradient import GradientCollector

CLIPPING_METRICS = (
    MetricSpec(
        "grad_clip_rate",
        "%",
        "Share of the last 300 steps whose gradient norm was finite and above the job's own limit; "
        "absent before its first clip by norm.",
        "torch.nn.utils.clip_grad_norm_: total_norm > max_norm",
    ),
    MetricSpec(
        "clip_threshold",
        "1",
        "The limit that the job passed to its first clip by norm in this step.",
        "torch.nn.utils.clip_grad_norm_: max_norm",
    ),
    MetricSpec(
        "skip_reason",
        "1",
        "Why this step's update was not applied: 0 it was, 1 overflow under a GradScaler, "
        "2 skip_nonfinite, 3 command, 4 skip_outliers.",
        "this project",
    ),
)

CLIPS = 300  # steps
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
        self._clipped = Window("grad_clip_rate", CLIPS)
        self._clips = False
        self._reason = 0.0
        self.limited: Optional[bool] = None

    def after_update(self, update: Update) -> None:
        if update.skip:
            self._reason = REASONS.get(update.skip, 0.0)

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        values["skip_reason"], self._reason = self._reason, 0.0
        excess: Optional[Number] = None
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
            values.setdefault("clip_threshold", limit)
            over = clip.norm - limit
            excess = over if excess is None else self.scalars.larger(excess, over)
        if excess is not None:
            values[EXCESS] = excess

    def finish(self, values: Dict[str, float]) -> None:
        if values.get("update_skipped", 0.0) > 0.0 and values.get("skip_reason") == 0.0:
            values["skip_reason"] = 1.0  # masked by a fused optimizer, which only the device knew
        excess = values.pop(EXCESS, None)
        if excess is not None:
            self._clips = True
            self._clipped.add(0.0 < excess < inf)
        elif self._clips:
            self._clipped.add(False)
        else:
            return
        values["grad_clip_rate"] = self._clipped.percent

    def _number(self, limit: object) -> Number:
        return self.scalars.value(limit) if isinstance(limit, self.torch.Tensor) else float(limit)  # type: ignore[arg-type]

    def state(self) -> Dict[str, float]:
        state = {"grad_clip_rate.known": float(self._clips)}
        self._clipped.save(state)
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        self._clips = bool(state.get("grad_clip_rate.known", self._clips))
        self._clipped.load(state)
