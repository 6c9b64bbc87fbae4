"""The command `clip`: a bound on the gradient norm, applied after the job's own clip.

The norm is taken over all parameters of one optimizer, after the job's clip; above the bound all
its gradients are scaled down by the same factor, as torch.nn.utils.clip_grad_norm_ does. On an
accelerator nothing is waited for. A norm that is not finite is left alone: no factor repairs it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Dict, Mapping

from ..errors import Refused

if TYPE_CHECKING:
    from ..collectors.gradient import Collector as GradientCollector
    from ..collectors.limits import Collector as LimitsCollector
    from ..context import ProbeContext
    from ..runtime.active_safeguards import InForce
    from ..torch_state.records import Update


class GradientClip:
    """One bound.

    Args:
        past: the newest norms, and the limit of the job's own clip.
    """

    def __init__(
        self,
        context: ProbeContext,
        in_force: InForce,
        gradient: GradientCollector,
        past: LimitsCollector,
    ) -> None:
        self._torch, self._scalars = context.torch, context.scalars
        self._status_changed = context.reporter.status_changed
        self._in_force, self._gradient, self._past = in_force, gradient, past
        self._left = 0  # steps; 0 with a bound: until it is lifted

    def do_clip(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Put a bound in force for `steps` (0: until lifted), or `lift` it.

        The bound is `max_norm`, else `factor` times the limit of the job's newest clip by norm,
        else `factor` times the median norm of the newest 128 steps. The result has it as a number.
        """
        if args.get("lift"):
            self._in_force.clip_bound = None
            self._status_changed()
            return {"clip_bound": None}
        steps = int(args.get("steps", 0))
        bound = self._absolute(args)
        if not 0.0 < bound < inf or steps < 0:
            raise Refused(f"clip to {bound} for {steps} steps: a norm above 0, no negative step")
        self._in_force.clip_bound, self._left = bound, steps
        self._in_force.acting = True
        self._status_changed()
        return {"clip_bound": bound, "steps": steps}

    def _absolute(self, args: Mapping[str, Any]) -> float:
        if args.get("max_norm") is not None:
            return float(args["max_norm"])
        past = self._past
        if past.limit is not None:
            return float(args["factor"]) * float(past.limit)
        if past.gradient_norms:
            ascending = sorted(past.gradient_norms)
            return float(args["factor"]) * float(ascending[len(ascending) // 2])
        raise Refused("no clip and no gradient norm was seen so far: a factor has nothing to scale")

    def limit(self, update: Update) -> None:
        """Scale down the final gradients of `update` where their norm is too large."""
        bound: Any = self._in_force.clip_bound
        if update.skip or bound is None:
            return
        torch, scalars = self._torch, self._scalars
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in update.params]
        if not gradients:
            return
        still_scaled = getattr(update.optimizer, "grad_scale", None)
        if still_scaled is not None:  # a fused optimizer unscales inside its kernel
            bound = bound * scalars.value(still_scaled)
        norm = self._gradient.norm_of(gradients)
        if scalars.on_host(norm) and scalars.on_host(bound):
            if bound < norm < inf:
                for gradient in gradients:
                    gradient.mul_(bound / norm)
            return
        norm = torch.as_tensor(norm)
        over = (norm > bound) & torch.isfinite(norm)
        factor = torch.where(over, bound / norm, torch.ones_like(norm))
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, non_blocking=True))

    @property
    def busy(self) -> bool:
        """Whether a bound is in force."""
        return self._in_force.clip_bound is not None

    def step_ended(self) -> None:
        """A step ended."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._in_force.clip_bound = None
                self._status_changed()
