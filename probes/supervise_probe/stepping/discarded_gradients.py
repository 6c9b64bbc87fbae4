"""Gradients that the job throws away and goes on: what was seen of them belongs to no step.

So do jobs that leave out a batch whose gradients are not finite or too large, that look around
before they take the gradient that counts (SAM), that try again after an error inside backward, or
that warm up. Backward begins again there: `zero_grad` shows it, or the error, and that no parameter
has a gradient any more; zeros that `zero_grad(set_to_none=False)` wrote are none.

Kept are gradients that only went elsewhere: another loss of the same forward, whose graph the first
backward retained (gradient surgery), and what the job moves into buffers of its own without
`zero_grad`. Moved there and then zeroed, it looks the same as thrown away, and counts as that; so
do, the other way round, gradients that the job sets to None or zero by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Set

if TYPE_CHECKING:
    from ..collectors import Plan
    from ..collectors.discards import Collector as DiscardsCollector
    from ..context import ProbeContext
    from ..torch_state.grad_scaler import GradScalerState
    from .batch_observer import BatchObserver


class DiscardedGradients:
    """Decides, at a backward, whether the one before counts.

    Attributes:
        failed: the newest backward raised.
    """

    def __init__(
        self,
        context: ProbeContext,
        plan: Plan,
        scaling: GradScalerState,
        batches: BatchObserver,
        discards: DiscardsCollector,
    ) -> None:
        self._module = context.torch.nn.Module
        self._registry = context.registry
        self._plan, self._scaling, self._batches = plan, scaling, batches
        self._discards, self._part = discards, context.guard.part("discards")
        self._guard = context.guard
        self.failed = False
        self._zeroed: Set[int] = set()  # ids of parameters, since the newest backward
        self._retained = False  # its graph

    def zeroed(self, owner: Any) -> None:
        """The gradients of a module or an optimizer were zeroed."""
        if isinstance(owner, self._module):
            self._zeroed.update(map(id, owner.parameters()))
        else:
            self._zeroed.update(id(p) for group in owner.param_groups for p in group["params"])

    def before_backward(self, again: bool, first: bool, retains: bool) -> None:
        """A backward begins: if all gradients of this step were thrown away, so is what was seen.

        Args:
            again: it is not the first of this step, of which no optimizer has stepped yet.
            first: there was no step in this process. What a job tries before that has no owner,
                and need not be zeroed.
            retains: its graph, for another backward.
        """
        if again and (first or self.failed or self._zeroed) and self._all_gone():
            self._guard.run(self._part, self._discards.gradients)
            self._plan.run("forget")
            self._scaling.forget()
        self.failed, self._retained = False, retains
        if self._zeroed:
            self._zeroed = set()

    def _all_gone(self) -> bool:
        if self._retained and not self._batches.went_in:
            return False  # another loss of the same forward
        return not self._registry.holds_gradients(self._zeroed)
