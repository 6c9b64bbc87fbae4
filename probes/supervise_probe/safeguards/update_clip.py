"""The command and safeguard `update_clip`: an unusually large update is shortened.

Usual is the mean of the newest `window` update norms plus `sigma` of their standard deviations,
once half of them are known. A longer update keeps its direction, is cut to that length, and counts
as that length afterwards, so that a spike does not raise its own limit. Moments of the optimizer
stay as they are: only the weights are taken part of the way back. Each optimizer has a window of
its own. On an accelerator nothing is waited for.

It keeps a copy of all parameters on their device and reads or writes them about nine times a step,
as much traffic as the optimizer's own; without an order it costs nothing.

Source: Marin's 32B run clips updates so (Levanter, ClipUpdateNormConfig: window 128, sigma 2);
OLMo-core's SkipStepOptimizer waits for half a window. At 2 sigma 1 to 4 % of healthy updates are
shortened a little.
"""

from __future__ import annotations

import math
import weakref
from math import inf
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Optional, Sequence

from ..context import Refused

if TYPE_CHECKING:
    from ..collectors.gradient import GradientCollector
    from ..collectors.limits import LimitsCollector
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Optimizers, SafeguardState, Update

WINDOW, SIGMA, MAX_GB = 128, 2.0, 4.0


class Rule(NamedTuple):
    """The limit: steps, standard deviations; and the bytes that the copies may take."""

    window: int
    sigma: float
    max_bytes: float

    @property
    def least(self) -> int:
        """How many norms must be known."""
        return max(2, self.window // 2)


def read_rule(order: Mapping[str, Any]) -> Rule:
    """Return the rule of an order; what it leaves out is the default."""
    rule = Rule(
        int(order.get("window", WINDOW)),
        float(order.get("sigma", SIGMA)),
        float(order.get("max_gb", MAX_GB)) * 1e9,
    )
    if rule.window < 2 or not 0.0 <= rule.sigma < math.inf:
        raise Refused(f"update_clip: invalid window {rule.window} or sigma {rule.sigma:g}")
    return rule


class UpdateClip:
    """The rule in force, and the old weights of each optimizer.

    Attributes:
        why_not: why the safeguard cannot act, "" while it can.
    """

    def __init__(
        self,
        context: ProbeContext,
        in_force: SafeguardState,
        gradient: GradientCollector,
        past: LimitsCollector,
        optimizers: Optimizers,
    ) -> None:
        """`past`: the newest norms."""
        self._context, self._in_force = context, in_force
        self._gradient, self._past, self._optimizers = gradient, past, optimizers
        order = context.config.safeguards.get("update_clip")
        self._standing = None if order is None else read_rule(order)
        self.why_not, self._is_ordered = "", order is not None
        if self._is_ordered:
            in_force.guards["update_clip"] = True
        self._ordered: Optional[Rule] = None
        self._left = 0  # steps; 0 with an order: until it is lifted
        self._kept: weakref.WeakKeyDictionary[Any, UpdateNorms] = weakref.WeakKeyDictionary()

    @property
    def rule(self) -> Optional[Rule]:
        """The rule in force: the commanded one, else that of the safeguard."""
        return self._standing if self._ordered is None else self._ordered

    def do_update_clip(self, args: dict[str, Any]) -> dict[str, Any]:
        """Put a rule in force for `steps` (0: until lifted), or `lift` it."""
        if args.get("lift"):
            self._end()
            return {"update_clip": None}
        rule, steps = read_rule(args), int(args.get("steps", 0))
        params = self._optimizers.parameters()
        reason = self._why_not(params, rule)
        if reason:
            raise Refused(reason)
        self._kept.clear()
        self._ordered, self._left = rule, max(0, steps)
        self._in_force.acting = True
        self._context.reporter.status_changed()
        return {"update_clip": {"window": rule.window, "sigma": rule.sigma}, "bytes": _size(params)}

    def cannot(self, reason: str) -> None:
        """Mark the safeguard as unable to act, for that reason; "" undoes it."""
        if self._is_ordered:
            self.why_not = reason

    def copy_weights(self, update: Update) -> None:
        """Copy the weights, before the update."""
        rule = self.rule
        if rule is None or update.skip:
            return
        norms = self._kept.get(update.optimizer)
        if norms is None or norms.params is not update.all_params:
            reason = self._why_not(update.all_params, rule)
            if reason:
                if self._standing is not None:
                    self._in_force.guards["update_clip"] = False
                self._standing, self.why_not = None, reason
                self._end()
                self._context.reporter.notice("note", f"update_clip is off: {reason}")
                return
            past = self._past.update_norms
            alone = len(self._optimizers.living()) == 1
            history = clipped_window(past, rule) if alone else []
            norms = UpdateNorms(self._context, self._gradient, update.all_params, rule, history)
            self._kept[update.optimizer] = norms
        norms.read()

    def limit(self, update: Update) -> None:
        """Shorten the update if it is too long, after it was made."""
        norms = self._kept.get(update.optimizer)
        if norms is None:
            return
        clipped = 0.0 if update.skip else norms.shorten_if_over_limit()
        clipped_before = self._in_force.clipped
        self._in_force.clipped = clipped if clipped_before is None else clipped_before + clipped

    def _why_not(self, params: list[Any], rule: Rule) -> str:
        """Return why the updates of `params` cannot be judged, "" when they can."""
        if self._context.position.world_size > 1 and any(
            hasattr(p, "_local_tensor") for p in params
        ):
            return "the parameters are sharded, and each rank sees the update of its shard only"
        size = _size(params)
        if size > rule.max_bytes:
            limit = f"max_gb is {rule.max_bytes / 1e9:g}"
            return f"a copy of the weights takes {size / 1e9:.3g} GB, {limit}"
        return ""

    @property
    def busy(self) -> bool:
        """Whether a rule is in force."""
        return self.rule is not None

    def step_ended(self) -> None:
        self._in_force.clipped = None
        if self._left:
            self._left -= 1
            if not self._left:
                self._end()

    def _end(self) -> None:
        self._ordered, self._left = None, 0
        self._kept.clear()
        self._context.reporter.status_changed()


class UpdateNorms:
    """The old weights of one optimizer, and the norms of its newest updates.

    Attributes:
        params: what it was made for.
    """

    def __init__(
        self,
        context: ProbeContext,
        gradient: GradientCollector,
        params: list[Any],
        rule: Rule,
        past: list[float],
    ) -> None:
        torch = self._torch = context.torch
        self.params = params
        self._rule = rule
        self._scalars = context.scalars
        self._norm_of = gradient.joint_norm
        self._live = _weights(params)
        self._old = [torch.empty_like(tensor) for tensor in self._live]
        filled = past + [math.nan] * (rule.window - len(past))
        self._norms = torch.tensor(filled, device=self._live[0].device, dtype=torch.float32)
        self._at = len(past) % rule.window

    def read(self) -> None:
        """Copy the weights."""
        self._torch._foreach_copy_(self._old, self._live)

    def shorten_if_over_limit(self) -> Number:
        """Take the weights part of the way back if they moved too far.

        Returns:
            1 when they did, else 0; on a device as a tensor. The copies are overwritten.
        """
        torch, scalars = self._torch, self._scalars
        torch._foreach_sub_(self._old, self._live)  # now the way back
        norm = torch.as_tensor(self._norm_of(self._old), dtype=torch.float32)
        norm = norm.to(self._norms.device, non_blocking=True)
        limit = self._limit()
        finite = torch.isfinite(norm)
        over = (norm > limit) & finite
        bounds = torch.where(
            finite & (norm > 0.0), torch.minimum(norm, limit), self._norms[self._at]
        )
        self._norms[self._at] = bounds
        self._at = (self._at + 1) % self._rule.window
        back = torch.where(over, 1.0 - limit / norm, torch.zeros_like(norm))
        if scalars.can_read_now(back):
            if over:
                torch._foreach_add_(self._live, self._old, alpha=float(back))
        else:
            for weight, way in zip(self._live, self._old):
                weight.addcmul_(way, back.to(weight.device, weight.dtype, non_blocking=True))
        return scalars.value(over)

    def _limit(self) -> Any:
        torch, norms = self._torch, self._norms
        finite = torch.isfinite(norms)
        count, none = finite.sum(), torch.zeros_like(norms)
        middle = torch.where(finite, norms, none).sum() / count
        squares = torch.where(finite, (norms - middle).square(), none).sum()
        limit = middle + self._rule.sigma * (squares / (count - 1)).sqrt()
        return torch.where(count >= self._rule.least, limit, torch.full_like(limit, math.inf))


def clipped_window(past: Sequence[float], rule: Rule) -> list[float]:
    """Return a window as it would be had the rule been in force before: spikes are shortened."""
    norms: list[float] = []
    for norm in list(past)[-rule.window :]:
        count = len(norms)
        if count >= rule.least:
            middle = sum(norms) / count
            variance = sum((norm - middle) ** 2 for norm in norms) / (count - 1)
            norm = min(norm, middle + rule.sigma * math.sqrt(variance))
        norms.append(norm)
    return norms


def _weights(params: list[Any]) -> list[Any]:
    tensors = [getattr(p, "_local_tensor", p).detach() for p in params]
    return [t for t in tensors if t.numel() and t.is_floating_point()]


def _size(params: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in _weights(params))


class GradientClip:
    """One bound.

    Args:
        past: the newest norms, and the limit of the job's own clip.
    """

    def __init__(
        self,
        context: ProbeContext,
        in_force: SafeguardState,
        gradient: GradientCollector,
        past: LimitsCollector,
    ) -> None:
        self._torch, self._scalars = context.torch, context.scalars
        self._status_changed = context.reporter.status_changed
        self._in_force, self._gradient, self._past = in_force, gradient, past
        self._left = 0  # steps; 0 with a bound: until it is lifted

    def do_clip(self, args: dict[str, Any]) -> dict[str, Any]:
        """Put a bound in force for `steps` (0: until lifted), or `lift` it.

        The bound is `max_norm`, else `factor` times the limit of the job's newest clip by norm,
        else `factor` times the median norm of the newest 128 steps. The result has it as a number.
        """
        if args.get("lift"):
            self._in_force.clip_bound = None
            self._status_changed()
            return {"clip_bound": None}
        steps = int(args.get("steps", 0))
        limit = self._absolute(args)
        if not 0.0 < limit < inf or steps < 0:
            raise Refused(f"clip to {limit} for {steps} steps: a norm above 0, no negative step")
        self._in_force.clip_bound, self._left = limit, steps
        self._in_force.acting = True
        self._status_changed()
        return {"clip_bound": limit, "steps": steps}

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
        limit: Any = self._in_force.clip_bound
        if update.skip or limit is None:
            return
        torch, scalars = self._torch, self._scalars
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in update.params]
        if not gradients:
            return
        still_scaled = getattr(update.optimizer, "grad_scale", None)
        if still_scaled is not None:  # a fused optimizer unscales inside its kernel
            limit = limit * scalars.value(still_scaled)
        norm = self._gradient.joint_norm(gradients)
        if scalars.on_host(norm) and scalars.on_host(limit):
            if limit < norm < inf:
                for gradient in gradients:
                    gradient.mul_(limit / norm)
            return
        norm = torch.as_tensor(norm)
        over = (norm > limit) & torch.isfinite(norm)
        factor = torch.where(over, limit / norm, torch.ones_like(norm))
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, non_blocking=True))

    @property
    def busy(self) -> bool:
        """Whether a bound is in force."""
        return self._in_force.clip_bound is not None

    def step_ended(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._in_force.clip_bound = None
                self._status_changed()
