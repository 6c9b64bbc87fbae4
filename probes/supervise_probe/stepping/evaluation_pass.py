"""Evaluations that a job writes by hand: `val_loss` of what it measures between two steps.

An evaluation is recognised by all of: the model that the optimizer trains is called, in eval mode
and without gradients, after one step and before the first forward of the next; `cross_entropy` or
`nll_loss` is taken behind that call; and the next forward of the training is in train mode. So
neither generation counts, which takes no loss, nor a teacher or a reference model, which no
optimizer trains. A job that trains in eval mode has none.

One loss is taken of each call, the first: behind it, other models may be evaluated. What is not
the plain loss of class indices (weighted, smoothed, not reduced) makes the whole pass unknown.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict

if TYPE_CHECKING:
    from ..collectors.progress import FrameworkCollector, TokensCollector
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Times
    from .step_tracker import StepTracker

ID = "val_loss"


class EvaluationPass:
    """What was evaluated since the newest step, in one process.

    Attributes:
        waiting: the model was called for an evaluation, and no loss was taken of that yet.
        pending: losses were taken that the next forward of the training makes an evaluation.
    """

    def __init__(
        self,
        context: ProbeContext,
        times: Times,
        tracker: StepTracker,
        sets: SampleSets,
        framework: FrameworkCollector,
        tokens: TokensCollector,
        extra: Dict[str, Number],
    ) -> None:
        """`extra`: what joins the next frame."""
        self._torch, self._gate, self._guard = context.torch, context.gate, context.guard
        self._position, self._scalars = context.position, context.scalars
        self._times, self._tracker, self._sets = times, tracker, sets
        self._framework, self._tokens, self._extra = framework, tokens, extra
        self._part = context.guard.part("evaluation")
        self.waiting = self.pending = False
        self._root: Callable[[], Any] = lambda: None
        self._known = True  # every loss of it says what a target's is
        self._step = -1
        self._sum: Number = 0.0
        self._targets: Number = 0.0

    def on_call(self, root: Any) -> None:
        """The model is called without gradients."""
        self.waiting = bool(self._guard.run(self._part, self._evaluates, root))

    def evaluates(self, root: Any) -> bool:
        """Whether a call of the model without gradients is made for an evaluation, or looks so."""
        self._root = weakref.ref(root)
        return self._evaluates_now()

    def _evaluates(self, root: Any) -> bool:
        return self.evaluates(root) and not self._framework.trainer

    def _evaluates_now(self) -> bool:
        """Whether it is between two steps, and the model in eval mode."""
        gate, tracker = self._gate, self._tracker
        started = gate.in_forward or gate.in_backward or self._times.forward_since()
        return not (started or tracker.accumulates or tracker.current or _trains(self._root()))

    def took(self, target: Any, ignored: int, reduction: str, result: Any) -> None:
        """A loss was taken behind that; `how` and the others as in `ForwardListener.loss_taken`."""
        self.waiting = False
        self._guard.run(self._part, self._took, target, ignored, reduction, result)

    def _took(self, target: Any, ignored: int, reduction: str, result: Any) -> None:
        if not self._evaluates_now():
            return
        self._tracker.close(on_time=False)  # one that waits for another optimizer is over
        if self._step != self._position.step or not self.pending:
            self._step, self._known = self._position.step, True
            self._sum = self._targets = 0.0
        if (
            reduction not in ("mean", "sum")
            or target.dtype is not self._torch.int64
            or target.is_meta
        ):
            self._known = False
        else:
            value, count = self._scalars.value(result), self._tokens.count(target, ignored)
            self._sum = self._sum + (value if reduction == "sum" else value * count)
            self._targets = self._targets + count
        self.pending = self._sets.waiting = True

    def trains(self, root: Any) -> None:
        """The first forward of the next step is about to run."""
        self.pending = False
        self._guard.run(self._part, self._end, root)

    def _end(self, root: Any) -> None:
        """What was taken is an evaluation: it joins the next frame, unless the job reports one."""
        targets = self._targets
        nothing = self._scalars.on_host(targets) and targets == 0.0
        is_evaluation = self._known and not nothing and self._step == self._position.step
        if is_evaluation and _trains(root):
            self._extra.setdefault(ID, self._sum / targets)


def _trains(root: Any) -> bool:
    """Whether a module, and what it is wrapped around, is in train mode."""
    while root is not None:
        if not root.training:
            return False
        inner = list(root.children())
        root = inner[0] if len(inner) == 1 and not root._parameters else None
    return True
