"""All safeguards of one process: temporary changes of steps, without a rollback.

Each is an object whose `do_<verb>` executes one command at a step boundary; what stays in force is
applied here around every step. Without an order, a step is bit-identical. One that fails twice is
switched off by the guard, with a notice.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Dict, Tuple

from ..context import Refused
from .bad_steps import ARMED, NAME, NonfiniteGuards, Skip, SkipOutliers
from .update_clip import GradientClip, UpdateClip

if TYPE_CHECKING:
    from ..collectors.gradient import GradientCollector
    from ..collectors.limits import LimitsCollector
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import InForce, Optimizers, Update
    from ..torch_state.registry import Registry


class LossScale:
    """Writes into the scalers of the job, in place: no device is waited for.

    Source: torch/amp/grad_scaler.py; `_growth_tracker` counts steps since the scale last changed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def do_loss_scale(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Set the scale of every enabled scaler to `scale`, or None: to its initial one.

        The step boundary comes before the job's own `scaler.update()`: after an overflow, the next
        step has `backoff` times this scale.
        """
        scalers = [scaler for scaler in self._registry.scalers if scaler.is_enabled()]
        if not scalers:
            raise Refused("the job has no GradScaler that is enabled")
        scale = args.get("scale")
        if scale is not None and not 0.0 < float(scale) < inf:
            raise Refused(f"a loss scale must be finite and above 0, not {scale}")
        for scaler in scalers:
            value = float(scaler._init_scale if scale is None else scale)
            if scaler._scale is None:  # made at its first use
                scaler._init_scale = value
                continue
            scaler._scale.fill_(value)
            scaler._growth_tracker.fill_(0)
        return {"loss_scale": value, "backoff": float(scalers[-1].get_backoff_factor())}


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
        self._steps = (self.orders, self.outliers, self.skip, self.clip, self.update_clip)
        # Ordered by a policy or a person, so their cost is not limited to a share of the step.
        self._orders_part = guard.part("safeguards", share=1.0)
        self._outliers_part = guard.part(NAME, share=1.0)
        self._clip_part = guard.part("clip", share=1.0)
        self._update_part = guard.part("update_clip", share=1.0)

    def doers(self) -> Tuple[Any, ...]:
        """Return the objects that execute commands."""
        return self.skip, self.clip, self.update_clip, self._scale

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
        for safeguard in self._steps:
            safeguard.step_ended()
        self.in_force.acting = any(safeguard.busy for safeguard in self._steps)

    def restored(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.outliers.restored(step)

    def cannot(self, reason: str) -> None:
        """Mark all safeguards as unable to act, for that reason; "" undoes it."""
        self.orders.set_state(reason)
        self.outliers.cannot(reason)
        if self.update_clip.state:
            self.update_clip.state = f"cannot act: {reason}" if reason else ARMED

    def standing(self) -> Dict[str, str]:
        """Return the state of each safeguard, for the status."""
        states = {NAME: self.outliers.state, "update_clip": self.update_clip.state}
        return {
            **self.orders.describe(),
            **{name: state for name, state in states.items() if state},
        }

    def describe(self) -> Dict[str, Any]:
        """Return what is in force, for the status."""
        rule = self.update_clip.rule
        active: Dict[str, Any] = {}
        if self.in_force.clip_bound is not None:
            active["clip"] = self.in_force.clip_bound
        if rule is not None:
            active["update_clip"] = {"window": rule.window, "sigma": rule.sigma}
        return active
