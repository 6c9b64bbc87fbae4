"""Loops that a job writes by hand: its updates (`p -= lr * p.grad`), and its evaluations."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Optional

from ..torch_state.records import OptimizerInfo, Step, Update

if TYPE_CHECKING:
    from ..collectors import Plan
    from ..collectors.loss import LossCollector
    from ..collectors.progress import CountersCollector, FrameworkCollector, TokensCollector
    from ..context import ProbeContext
    from ..faults.injector import FaultInjector
    from ..runtime.scalars import Number, Pending
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Times
    from .step_tracker import BetweenSteps, StepTracker

PATIENCE = 32  # backwards without an optimizer before anything is looked at
LOOKS = 4  # backwards whose graphs are searched for weights
PROOF = 3  # updates that must be seen
WATCH = 64  # backwards in which they must be seen
AGAIN = 1024  # backwards between two searches, once a job is known to write its updates
NODES = 100_000  # of a graph that are searched
COMPARED = 1024  # values of each weight that must have changed, where counters are blind
WHY = "the job updates its weights without an optimizer"


class HandWrittenOptimizer:
    """Stands in for the optimizer that the job does not have."""

    def __init__(self, params: list[Any]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]
        self.state: dict[Any, Any] = {}


class Callbacks(NamedTuple):
    """Who is called with what was found.

    Attributes:
        appeared: called with what stands in for an optimizer, before its first step.
        without_optimizer: called with why optimizer features are out of reach; "": they are back.
    """

    appeared: Callable[[Any], None]
    without_optimizer: Callable[[str], None]


class InferredSteps:
    """The inferred steps of one process.

    A step is the backwards up to a change of the weights; it is over at the first forward, loss,
    batch or backward behind that change, and its time runs from one such sign to the next. Loss,
    gradient norm, update norm, tokens and batch are those of any other job. Rates, skipping and
    going back are out of reach, as `status` reports; gradients are measured as the last backward
    left them, before the job averages them over ranks or clips them by hand.

    Nothing is inferred before PATIENCE backwards went by without an optimizer in this process, and
    PROOF updates were then seen: until there nothing is published. The first optimizer that steps
    ends it for good. Weights that the job replaces by new tensors at each step are not followed.

    No value is read to find a step: version counters and addresses show a change, and where these
    are blind (`p.data.add_`), gradients that were thrown away do.

    Attributes:
        on: no optimizer has stepped yet.
        active: the job is known to write its updates by hand.
        pending: a backward has run, and its step may be over.
    """

    def __init__(
        self,
        context: ProbeContext,
        tracker: StepTracker,
        boundary: BetweenSteps,
        plan: Plan,
        drills: FaultInjector,
        measured: tuple[LossCollector, CountersCollector],
        callbacks: Callbacks,
    ) -> None:
        self._context, self._gate = context, context.gate
        self._tracker, self._boundary = tracker, boundary
        self._plan, self._drills, self._callbacks = plan, drills, callbacks
        self._loss, self._counters = measured
        self.on = True
        self.active = self.pending = False
        self._backwards = 0
        self._search_at = PATIENCE
        self._looks = 0
        self._leaves: dict[int, tuple[Any, int]] = {}  # by id: weak reference, times found
        self._watch = 0  # backwards left in which updates must be seen
        self._seen = 0  # updates, while watching
        self._hands: Optional[HandWrittenOptimizer] = None
        self._known: Optional[OptimizerInfo] = None
        self._update: Optional[Update] = None  # measured, but not over yet
        self._since = 0  # backwards of the step under way
        self._usual = 0  # backwards of the step before
        self._weights: list[tuple[int, int]] = []
        self._grads: list[Optional[tuple[int, int]]] = []
        self._visible = False  # version counters showed an update
        self._blind = False  # the job makes room for gradients only when the next loss is there
        self._old: list[tuple[Any, Any]] = []  # pieces of weights, and what they were
        self._proof: Optional[Pending] = None

    # ── what the hooks call ───────────────────────────────────────────────────────────────────

    def before_backward(self, tensors: Any) -> None:
        """A backward is about to run, from one tensor or several."""
        if self._gate.inside or self._context.reporter.writer is None:
            return
        if self._looks:
            self._count_leaves(tensors)
            self._looks -= 1
            if not self._looks:
                self._searched()
        elif self._backwards >= self._search_at and not self._watch:
            self._looks = LOOKS
        self._backwards += 1

    def after_backward(self) -> None:
        """It has run."""
        if self._known is None or self._gate.inside:
            return
        self._since += 1
        if self.active:
            self._gate.call_without_grad(self._measure)
        params = self._known.params
        self._weights = [_storage(p) for p in params]
        self._grads = [_mark(p) for p in params]
        self.pending = True
        if self._watch:
            self._watch -= 1
            if not self._watch:
                self._give_up()

    def sign(self, backward: bool = False) -> None:
        """A forward, a loss, a batch or a backward is about to come: the step may be over."""
        guard = self._context.guard
        guard.run(guard.core, self._gate.call_without_grad, self._settle, backward)
        self._boundary.run_due_work()

    def end(self) -> None:
        """The process ends; a step that is as long as the one before has had its update."""
        if self.pending:
            self._blind = True
            self._gate.call_without_grad(self._settle, False)

    def optimizer_steps(self) -> None:
        """An optimizer steps: from now on it alone decides where a step ends."""
        if self.active:
            self._unmeasure()
            self._tracker.infer(0)
            self._callbacks.without_optimizer("")
            self._context.reporter.status_changed()
        self.on = self.active = self.pending = False
        self._hands = self._known = None
        self._leaves.clear()
        self._old.clear()

    # ── which weights there are ───────────────────────────────────────────────────────────────

    def _count_leaves(self, tensors: Any) -> None:
        single = isinstance(tensors, self._context.torch.Tensor)
        roots = [tensors] if single else list(tensors)
        for leaf in _leaves(roots):
            reference, times = self._leaves.get(id(leaf), (None, 0))
            if reference is None or reference() is not leaf:
                reference, times = weakref.ref(leaf), 0
            self._leaves[id(leaf)] = reference, times + 1

    def _searched(self) -> None:
        """Weights are leaves that stay; in a checkpointed block the module alone knows them."""
        repeated = [reference() for reference, times in self._leaves.values() if times > 1]
        params = {id(p): p for p in repeated if p is not None}
        self._leaves.clear()
        for module in self._context.registry.modules:
            for p in module.parameters(recurse=False):
                if p.requires_grad and p.grad is not None:
                    params[id(p)] = p
        self._search_at = self._backwards + AGAIN if self.active else 2 * self._backwards
        parameters = self._known
        if not params or (parameters is not None and parameters.ids == params.keys()):
            return
        self._hands = HandWrittenOptimizer(list(params.values()))
        self._known = OptimizerInfo(self._hands)
        self._update, self.pending = None, False
        self._callbacks.appeared(self._hands)  # its modules' forwards are signs
        if not self.active:
            self._watch, self._seen, self._since = WATCH, 0, 0
            tensors = [getattr(p, "_local_tensor", p) for p in self._known.params]
            pieces = [tensor.detach().reshape(-1)[:COMPARED] for tensor in tensors]
            self._old = [(piece, piece.clone()) for piece in pieces]

    def _give_up(self) -> None:
        """Backward has another purpose here, as it seems."""
        self.pending = False
        self._hands = self._known = self._proof = None
        self._old.clear()

    # ── where a step ends ─────────────────────────────────────────────────────────────────────

    def _settle(self, backward: bool) -> None:
        if self._known is None or not self._over(backward):
            if backward:
                self._unmeasure()
            return
        self.pending = False
        length, self._since = self._since, 0
        if self.active:
            self._close()
        else:
            self._seen += 1
            if self._seen >= PROOF and length == self._usual and self._proven():
                self._activate(length)
        self._usual = length

    def _over(self, backward: bool) -> bool:
        assert self._known is not None
        params = self._known.params
        if any(_storage(p) != was for p, was in zip(params, self._weights)):
            self._visible = True
            return True
        if any(_mark(p) != was for p, was in zip(params, self._grads)):
            self._blind = self._blind or (backward and not self._visible)
            return True
        return self._blind and self._since >= self._usual

    def _proven(self) -> bool:
        """Whether weights have changed since the watch began; on a device known a step late."""
        if self._visible:
            return True
        scalars = self._context.scalars
        if self._proof is None:
            changed: Any = 0.0
            for piece, old in self._old:
                changed = changed + scalars.value((piece != old).any())
            self._proof = scalars.pack({"changed": changed})
            if self._proof is None:
                return bool(changed)
        if not self._proof.ready():
            return False
        proof, self._proof = self._proof, None
        return bool(proof.read().get("changed"))

    def _activate(self, length: int) -> None:
        """What was seen so far belongs to steps that are over: count them, and begin."""
        assert self._known is not None
        self.active, self._watch = True, 0
        self._old.clear()
        number = self._backwards // length
        self._plan.run("after_update", Update(self._hands, False, self._known))
        self._forget()
        steps_before = self._counters.state()[
            "steps_seen"
        ]  # of the launches that this one goes on from
        self._counters.rewind({"steps_seen": steps_before + number})
        self._search_at = self._backwards + AGAIN
        self._tracker.infer(id(self._hands), self._context.config.first_step + number)
        self._callbacks.without_optimizer(WHY)
        self._context.reporter.notice(
            "note",
            f"{WHY}: steps are inferred from backward, the first {number} have no frame; "
            "rate, skipping and rollback are out of reach",
        )

    # ── what a step is ────────────────────────────────────────────────────────────────────────

    def _measure(self) -> None:
        """The weights are the old ones; the gradients are final if the step is as long as usual."""
        update = self._update
        if update is None:
            assert self._known is not None
            self._update = update = Update(self._hands, False, self._known)
            self._plan.run("before_update", update)
        if self._since >= self._usual:
            update.measured = True
            if self._drills.active:
                self._drills.before_update(update.params)
            self._plan.run("measure", update)

    def _unmeasure(self) -> None:
        """More gradients come to those that were measured: only the sum counts."""
        if self._update is None or not self._update.measured:
            return
        self._update = None
        loss = self._loss.total
        self._forget()
        self._loss.total = loss

    def _forget(self) -> None:
        self._plan.run("collect", Step(0, 0, 0, None), {})

    def _close(self) -> None:
        """Of a step that was shorter than the one before, gradients have no metric."""
        update, self._update = self._update, None
        if update is not None:
            self._tracker.infer(id(self._hands))
            self._tracker.inferred(update)


def _leaves(roots: list[Any]) -> Iterator[Any]:
    """Find the tensors that a backward from `roots` gives gradients to."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited = set(stack)
    while stack and len(visited) < NODES:
        node = stack.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                stack.append(following)


def _storage(p: Any) -> tuple[int, int]:
    tensor = getattr(p, "_local_tensor", p)
    return tensor._version, tensor.data_ptr()


def _mark(p: Any) -> Optional[tuple[int, int]]:
    grad = p.grad
    return None if grad is None else (id(grad), grad._version)


ID = "val_loss"


class EvaluationPass:
    """What was evaluated since the newest step, in one process.

    An evaluation is recognised by all of: the model that the optimizer trains is called, in eval
    mode and without gradients, after one step and before the first forward of the next;
    `cross_entropy` or `nll_loss` is taken behind that call; and the next forward of the training
    is in train mode. So neither generation counts, which takes no loss, nor a teacher or a
    reference model, which no optimizer trains. A job that trains in eval mode has none.

    One loss is taken of each call, the first: behind it, other models may be evaluated. What is
    not the plain loss of class indices (weighted, smoothed, not reduced) makes the whole pass
    unknown.

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
        extra: dict[str, Number],
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
        started = gate.in_forward or gate.in_backward or self._times.had_forward_since_step()
        return not (started or tracker.accumulates or tracker.current or _trains(self._root()))

    def add_loss(self, target: Any, ignored: int, reduction: str, result: Any) -> None:
        """A loss was taken behind that; the others as in `ForwardListener.on_class_loss`."""
        self.waiting = False
        self._guard.run(self._part, self._took, target, ignored, reduction, result)

    def _took(self, target: Any, ignored: int, reduction: str, result: Any) -> None:
        if not self._evaluates_now():
            return
        self._tracker.finish_round(on_time=False)  # one that waits for another optimizer is over
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
