"""All safeguards of one process: temporary changes of steps, without a rollback.

Each is an object whose `do_<verb>` executes one command at a step boundary; what stays in force is
applied here around every step. Without an order, a step is bit-identical. One that fails twice is
switched off by the guard, with a notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Tuple

from .gradient_clip import GradientClip
from .loss_scale import LossScale
from .nonfinite import ARMED, NonfiniteGuards
from .profile import Profile
from .skip import Skip
from .skip_outliers import NAME, SkipOutliers
from .update_clip import UpdateClip

if TYPE_CHECKING:
    from ..collectors.gradient import Collector as GradientCollector
    from ..collectors.limits import Collector as LimitsCollector
    from ..collectors.loss import Collector as LossCollector
    from ..context import ProbeContext
    from ..runtime.active_safeguards import InForce
    from ..torch_state.records import Optimizers, Update


class Safeguards:
    """The safeguards, and their calls around a step.

    Args:
        in_force: shared with the collectors that measure what the safeguards did.
    """

    def __init__(
        self,
        context: ProbeContext,
        in_force: InForce,
        optimizers: Optimizers,
        gradient: GradientCollector,
        limits: LimitsCollector,
        loss: LossCollector,
    ) -> None:
        guard = self._guard = context.guard
        self.in_force = in_force
        self.orders = NonfiniteGuards(context, in_force, gradient, loss)
        self.outliers = SkipOutliers(context, in_force, loss)
        self.skip = Skip(in_force)
        self.clip = GradientClip(context, in_force, gradient, limits)
        self.update_clip = UpdateClip(context, in_force, gradient, limits, optimizers)
        self._scale = LossScale(context.registry)
        self._profile = Profile(context, in_force)
        self._steps = (
            *(self.orders, self.outliers, self.skip),
            *(self.clip, self.update_clip, self._profile),
        )
        # Ordered by a policy or a person, so their cost is not limited to a share of the step.
        self._orders_part = guard.part("safeguards", share=1.0)
        self._outliers_part = guard.part(NAME, share=1.0)
        self._clip_part = guard.part("clip", share=1.0)
        self._update_part = guard.part("update_clip", share=1.0)

    def doers(self) -> Tuple[Any, ...]:
        """Return the objects that execute commands."""
        return self.skip, self.clip, self.update_clip, self._scale, self._profile

    def gradients(self, update: Update) -> None:
        """Check and clip the gradients of `update`, which are final for the first time."""
        self._guard.run(self._orders_part, self.orders.judge, update)
        if self.outliers.state and not update.skip:
            self._guard.run(self._outliers_part, self.outliers.judge, update)
        if self.in_force.clip_bound is not None and not update.skip:
            self.limit(update)

    def limit(self, update: Update) -> None:
        """Clip the final gradients of `update`: once, or after each evaluation of a closure."""
        if self.in_force.clip_bound is not None:
            self._guard.run(self._clip_part, self.clip.limit, update)

    def before_update(self, update: Update) -> None:
        """Copy the weights of one optimizer, which is about to step."""
        if self.update_clip.rule is not None:
            self._guard.run(self._update_part, self.update_clip.keep, update)

    def after_update(self, update: Update) -> None:
        """Limit the update of one optimizer, which has stepped or was skipped."""
        if self.update_clip.rule is not None:
            self._guard.run(self._update_part, self.update_clip.limit, update)

    def step_ended(self) -> None:
        """Count a step whose frame has been collected."""
        for each in self._steps:
            each.step_ended()
        self.in_force.acting = any(each.busy for each in self._steps)

    def restored(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.outliers.restored(step)

    def end(self) -> None:
        """The process ends."""
        self._profile.end("the job ended")

    def cannot(self, why: str) -> None:
        """Mark all safeguards as unable to act, for that reason; "" undoes it."""
        self.orders.set_state(why)
        self.outliers.cannot(why)
        if self.update_clip.state:
            self.update_clip.state = f"cannot act: {why}" if why else ARMED

    def standing(self) -> Dict[str, str]:
        """Return the state of each safeguard, for the status."""
        others = {NAME: self.outliers.state, "update_clip": self.update_clip.state}
        return {**self.orders.describe(), **{name: how for name, how in others.items() if how}}

    def describe(self) -> Dict[str, Any]:
        """Return what is in force, for the status."""
        rule = self.update_clip.rule
        found: Dict[str, Any] = {}
        if self.in_force.clip_bound is not None:
            found["clip"] = self.in_force.clip_bound
        if rule is not None:
            found["update_clip"] = {"window": rule.window, "sigma": rule.sigma}
        return found
