"""Effects of the supervisor's own tools on the step: limits in force, gradients that were repaired.

Also remembers what a relative limit is relative to: the newest norms, and the job's own clip. That
is a guard as well, once the job has clipped in HABIT steps in a row: from then on it is off in a
step without one. In none of the 128000 steps of 304 recorded runs that clip was there no clip.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import TYPE_CHECKING, Deque, Dict, Mapping, Optional

from ..spec import MetricSpec
from ..torch_state.records import Window
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import InForce, Step
    from .clipping import ClippingCollector

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
        self, context: ProbeContext, in_force: InForce, clipping: ClippingCollector
    ) -> None:
        super().__init__(context)
        self._in_force, self._clipping = in_force, clipping
        self._habit = 0  # steps in a row with a clip of the job's; stays at HABIT
        self.gradient_norms: Deque[float] = deque(maxlen=PAST)
        self.update_norms: Deque[float] = deque(maxlen=PAST)
        self.limit: Optional[float] = None
        self._clipped: Optional[Window] = None

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
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

    def finish(self, values: Dict[str, float]) -> None:
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
            self._clipped = Window("update_clip_rate", CLIPS)
        self._clipped.add(clipped > 0.0)
        values["update_clip_rate"] = self._clipped.percent

    def state(self) -> Dict[str, float]:
        return {"guard_active.clips": float(self._habit)}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._habit = int(state.get("guard_active.clips", self._habit))
