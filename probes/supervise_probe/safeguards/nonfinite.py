"""Safeguards against NaN and Inf, which act inside the job without the supervisor's delay.

`skip_nonfinite`: a step whose loss or gradient norm is NaN or Inf does not change the weights. It
acts only on values that are on the host; on an accelerator it cannot act, and the status says so.
With several ranks the loss of one, and the norm of a shard, tell only that rank: if it skipped
alone, the weights would part. So there the norm decides, where DistributedDataParallel has made
the gradients the same on all ranks. Where all are divided by the norm of all ranks' shards, as the
clips of FSDP do, a NaN in one has made each element of each shard NaN: that decides. Elsewhere it
cannot act, nor for an Inf in one shard, which makes zeros of the others.

`zero_nonfinite`: NaN and Inf in the gradients are set to zero, and the step is made with the rest.
It acts on an accelerator too, without waiting for it: one more pass over the gradients in each
step, and the frame shows where it fired. Where the job clips by norm, one NaN makes all gradients
NaN before that: such a step has no gradient at all, only momentum and decay. Under DDP the reduced
gradients are the same on all ranks, so all ranks act alike.

Each at most `max` times in `per` steps, so that a run that stays non-finite does not idle on.
Neither acts under a GradScaler, which skips such steps itself.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Mapping, Optional, Tuple

from ..runtime.scalars import Number
from ..torch_state.structure import Replicas

if TYPE_CHECKING:
    from ..collectors.gradient import GradientCollector
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import InForce, Update

APART = (
    "each of {} ranks would decide alone: only under DistributedDataParallel, or behind a clip by "
    "the norm of all shards, all see the same"
)

MAX_SKIPS, SKIP_WINDOW = 3, 128  # skips without supervision, as in the list of actions
ARMED, ON_DEVICE = "armed", "cannot act: the values live on a device"


class RateLimit:
    """At most `most` times in `per` steps. A rollback does not reset the count."""

    def __init__(self, limit: int, per: int) -> None:
        self._per = max(1, per)
        self._taken: Deque[int] = deque(maxlen=max(1, limit))
        self._now = 0

    @property
    def used(self) -> bool:
        """Whether anything was counted: before, no steps need counting."""
        return bool(self._taken)

    @property
    def is_full(self) -> bool:
        """Whether no use is left for now."""
        full = len(self._taken) == self._taken.maxlen
        return full and self._now - self._taken[0] < self._per

    def step_ended(self) -> None:
        """Count a step."""
        self._now += 1

    def take(self) -> bool:
        """Count one use; False when the limit is reached."""
        if self.is_full:
            return False
        self._taken.append(self._now)
        return True


class SkipNonfinite:
    """The order `{"max": 3, "per": 128}`, in steps.

    Attributes:
        state: for the status: `armed`, or why it cannot act.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.limit = RateLimit(int(order.get("max", MAX_SKIPS)), int(order.get("per", SKIP_WINDOW)))
        self.state = ARMED

    def why_skip(self, values: Tuple[Optional[Number], Optional[Number]]) -> Optional[str]:
        """Return why the update must not happen, or None.

        Args:
            values: loss and gradient norm of this update; None where unknown.
        """
        loss, norm = values
        if type(loss) is float and type(norm) is float and isfinite(loss) and isfinite(norm):
            self.state = ARMED
            return None
        numbers = [v for v in values if isinstance(v, (int, float))]
        on_device = any(v is not None and not isinstance(v, (int, float)) for v in values)
        self.state = ON_DEVICE if on_device else ARMED
        if all(isfinite(v) for v in numbers) or not self.limit.take():
            return None
        return "loss or gradient norm is not finite"


class ZeroNonfinite:
    """The order `{"max": 3, "per": 128}`, in steps.

    Attributes:
        state: for the status: `armed`, or why it cannot act.
    """

    def __init__(self, torch: Any, order: Mapping[str, Any]) -> None:
        self._torch = torch
        self._most, self._per = (
            int(order.get("max", MAX_SKIPS)),
            max(1, int(order.get("per", SKIP_WINDOW))),
        )
        self.limit = RateLimit(self._most, self._per)
        self.state = ARMED
        self._fired: Any = None  # on a device: the newest `per` steps in which it fired
        self._at = 0

    def step_ended(self) -> None:
        """A step ended."""
        self.limit.step_ended()
        if self._fired is not None:
            self._at = (self._at + 1) % self._per
            self._fired[self._at] = False

    def zero(self, norm: Number, gradients: List[Any]) -> Number:
        """Set non-finite elements to zero, if `norm` is not finite and the limit allows it.

        Returns:
            1 when it fired, else 0; on a device as a tensor.
        """
        torch = self._torch
        if not isinstance(norm, torch.Tensor):
            if isfinite(norm) or not self.limit.take():
                return 0.0
            for gradient in gradients:
                gradient.masked_fill_(~torch.isfinite(gradient), 0.0)
            return 1.0
        if self._fired is None or self._fired.device != norm.device:
            self._fired = torch.zeros(self._per, dtype=torch.bool, device=norm.device)
        act = ~torch.isfinite(norm) & (self._fired.sum() < self._most)
        self._fired[self._at] |= act
        for gradient in gradients:
            here = act.to(gradient.device, non_blocking=True)
            gradient.masked_fill_(~torch.isfinite(gradient) & here, 0.0)
        return act.to(norm.dtype)


class NonfiniteGuards:
    """All orders of one process."""

    def __init__(
        self,
        context: ProbeContext,
        in_force: InForce,
        gradient: GradientCollector,
        loss: LossCollector,
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._in_force, self._gradient, self._loss = in_force, gradient, loss
        orders = context.config.safeguards
        skip, zero = orders.get("skip_nonfinite"), orders.get("zero_nonfinite")
        self._skip = None if skip is None else SkipNonfinite(skip)
        self._zero = None if zero is None else ZeroNonfinite(context.torch, zero)
        self._replicas, self._scalars = Replicas(context.registry), context.scalars

    def judge(self, update: Update) -> None:
        """Repair the final gradients of `update`, or skip the update."""
        if update.scaler is not None:
            return
        if self._zero is not None and self._zeroed(self._zero, update):
            return
        if self._skip is None:
            return
        norm, loss = update.gradient_norm, self._loss.total
        ranks = self._position.world_size
        if ranks > 1:
            loss = None  # of this rank alone
            if self._gradient.clipped_jointly(update.known):
                norm = self._joint_norm(update)
            elif not self._replicas.hold(update.known.ids):
                self._skip.state = f"cannot act: {APART.format(ranks)}"
                return
        reason = self._skip.why_skip((loss, norm))
        if reason:
            self._in_force.acting = True
            update.skip = "safeguard"
            self._reporter.notice(
                "safeguard",
                f"skip_nonfinite skipped the update of step {self._position.step}: {reason}",
                {"order": "skip_nonfinite", "loss": str(loss), "gradient_norm": str(norm)},
            )

    def _joint_norm(self, update: Update) -> Optional[Number]:
        """Return NaN where the clip by the norm of all shards has left nothing else, else 0."""
        grads = (getattr(p.grad, "_local_tensor", p.grad) for p in update.params)
        gradient = next((grad for grad in grads if grad.numel()), None)
        if gradient is None:
            return 0.0
        element = self._scalars.value(gradient[(0,) * gradient.dim()])
        if not isinstance(element, float):
            return element
        return element if element != element and bool(gradient.isnan().all()) else 0.0

    def _zeroed(self, order: ZeroNonfinite, update: Update) -> bool:
        norm = update.gradient_norm
        if norm is None:
            order.state = "cannot act: the gradient norm is not measured"
            return False
        order.state = ARMED
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in update.params]
        zeroed = order.zero(norm, [g._values() if g.is_sparse else g for g in grads])
        zeroed_before = self._in_force.zeroed
        self._in_force.zeroed = zeroed if zeroed_before is None else zeroed_before + zeroed
        if not isinstance(zeroed, float) or not zeroed:
            return False
        self._reporter.notice(
            "safeguard",
            f"zero_nonfinite set the non-finite gradients of step {self._position.step} to zero",
            {"order": "zero_nonfinite", "gradient_norm": str(norm)},
        )
        return True

    @property
    def busy(self) -> bool:
        """Whether the end of a step counts for an order."""
        return self._zero is not None or (self._skip is not None and self._skip.limit.used)

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the counts."""
        self._in_force.zeroed = None
        if self._skip is not None:
            self._skip.limit.step_ended()
        if self._zero is not None:
            self._zero.step_ended()

    def set_state(self, why_not: str) -> None:
        """Mark the orders as unable to act, for that reason; "" undoes it."""
        for order in (self._skip, self._zero):
            if order is not None:
                order.state = f"cannot act: {why_not}" if why_not else ARMED

    def describe(self) -> Dict[str, str]:
        """Return the states by name of the order."""
        named = {"skip_nonfinite": self._skip, "zero_nonfinite": self._zero}
        return {name: order.state for name, order in named.items() if order is not None}
