"""Events around the backward pass and the optimizer's step, in the order of a step.

The patches know torch; this knows who wants to hear. Calls that only look are guarded here; what
must reach the job, as an exception of a drill or of the supervisor's `stop`, is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional

from ..runtime.guard import from_signal_handler

if TYPE_CHECKING:
    from ..collectors.gradient import Collector as GradientCollector
    from ..collectors.groups import Collector as GroupsCollector
    from ..collectors.loss import Collector as LossCollector
    from ..context import ProbeContext
    from ..sampling.sample_sets import SampleSets
    from ..stepping.batch_observer import BatchObserver
    from ..stepping.between_steps import BetweenSteps
    from ..stepping.discarded_gradients import DiscardedGradients
    from ..stepping.inferred_steps import InferredSteps
    from ..stepping.step_tracker import Changers, StepTracker
    from ..stepping.training_thread import TrainingThread
    from ..torch_state.grad_scaler import GradScalerState
    from ..torch_state.records import Update


class Steps(NamedTuple):
    """Those who find out what a step is."""

    tracker: StepTracker
    boundary: BetweenSteps
    inferred: InferredSteps
    discards: DiscardedGradients
    threads: TrainingThread


class Measured(NamedTuple):
    """The others that observe gradients and losses."""

    gradient: GradientCollector
    groups: GroupsCollector
    loss: LossCollector
    batches: BatchObserver
    scaling: GradScalerState
    sets: SampleSets


class StepListener:
    """One for each process: a forked child gets another.

    Attributes:
        tracker, boundary, inferred, drills, rate: for what a hook asks at each call; a method
            between would cost more than the question.

    Args:
        open_: becomes a rank, if the process is none yet; whether it is one.
        attach: sees the calls of the outermost modules.
    """

    def __init__(
        self,
        context: ProbeContext,
        steps: Steps,
        measured: Measured,
        changers: Changers,
        open_: Callable[[], bool],
        attach: Callable[[], None],
    ) -> None:
        self._torch, self._gate, self._guard = context.torch, context.gate, context.guard
        self._reporter, self._core = context.reporter, context.guard.core
        self.tracker, self.boundary, self.inferred, self._discards, self._threads = steps
        self._gradient, self._groups, self._loss = measured[:3]
        self._batches, self._scaling, self._sets = measured[3:]
        self.rate, self.drills, self._safeguards = changers
        self._open, self._attach = open_, attach
        self._gradient_part = self._guard.part("gradient")

    # ── backward ──────────────────────────────────────────────────────────────────────────────

    def before_backward(self, tensors: Any, retains: Any) -> None:
        """A backward is about to run, from one tensor or several."""
        guard, inferred = self._guard, self.inferred
        if inferred.pending:
            inferred.sign(backward=True)
        guard.run(self._core, self._saw_backward, tensors, retains)
        if inferred.on:
            guard.run(self._core, inferred.before_backward, tensors)

    def after_backward(self) -> None:
        """It has run, or raised."""
        guard = self._guard
        guard.run(self._core, self.drills.after_backward)
        guard.run(self._core, self.inferred.after_backward)

    def backward_failed(self) -> None:
        """It raised."""
        self._discards.failed = True

    def _saw_backward(self, tensors: Any, retains: Any) -> None:
        torch = self._torch
        loss: Any = None
        if type(tensors) is torch.Tensor:  # by far the most common; the rest costs 20 us
            if tensors.is_meta or not self._open():
                return
            if tensors.numel() == 1:
                loss = self._scaling.loss(tensors)
        else:
            several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            roots = [t for t in several if isinstance(t, torch.Tensor)]
            if any(t.is_meta for t in roots) or not self._open():
                return
            for tensor in roots:
                tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor.numel() == 1 and not hasattr(tensor, "fake_mode"):
                    value = self._scaling.loss(tensor)
                    loss = value if loss is None else loss + value
        reporter = self._reporter
        if self.tracker.accumulates or reporter.phase != "step":  # else a step's end was a sign
            reporter.beat("step")
        self.tracker.saw_backward(loss, bool(retains))
        self._batches.before_backward()

    def zeroed(self, owner: Any) -> None:
        """The gradients of a module or an optimizer were zeroed behind a backward."""
        self._guard.run(self._core, self._discards.zeroed, owner)

    def prepares(self) -> None:
        """The gradients were zeroed before the first step: the model is about to be called."""
        self._guard.run(self._core, self._attach)

    # ── clips ─────────────────────────────────────────────────────────────────────────────────

    def before_clip(self, params: List[Any]) -> None:
        """The gradients of `params` are about to be clipped."""
        sets = self._sets
        if "gradients" in sets.due:
            before = self._groups.before_clip
            sets.run("gradients", self._gate.without_grad, before, params)

    def clipped(self, params: List[Any], norm: Any, limit: Any, joint: bool = False) -> None:
        """They had this norm, None where it is not known, and this limit; `joint`: see `Clip`."""
        gradient = self._gradient
        self._guard.run(self._gradient_part, gradient.saw_clip, params, norm, limit, joint)

    def averaged(self, parts: int) -> None:
        """The gradients were divided by the number of micro-batches, whose losses were not."""
        self._loss.averaged(parts)

    # ── a GradScaler ──────────────────────────────────────────────────────────────────────────

    def scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        """`scaler.scale(outputs)` returned `result`."""
        self._guard.run(self._core, self._scaling.saw_scale, scaler, outputs, result)

    def unscaled(self, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called."""
        self._guard.run(self._core, self._scaling.saw_unscale, optimizer)

    def scaler_steps(self, scaler: Any) -> int:
        """`scaler.step` begins; return what `scaler_stepped` is to be given."""
        self._scaling.enter(scaler)
        return self.tracker.entries

    def scaler_stepped(self, optimizer: Any, entries: int) -> None:
        """It is over: if it never called `optimizer.step`, the gradients overflowed."""
        if self.tracker.entries == entries:
            without_grad = self._gate.without_grad
            self._guard.run(self._core, without_grad, self.tracker.overflowed, optimizer)

    def scaler_left(self) -> None:
        """It is over, or raised."""
        self._scaling.scaler = None

    # ── an optimizer's step ───────────────────────────────────────────────────────────────────

    def steps_first(self) -> bool:
        """Whether this thread is the first to step, and is watched from here on."""
        return self._threads.steps_first()

    def stepped_unseen(self, optimizer: Any) -> None:
        """A step that is not looked at has just been made, perhaps in another thread."""
        try:  # not `guard.run`: the clocks are of the thread that is watched
            self._threads.stepped(optimizer)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._guard.failed(self._core, error)

    def before_step(self, optimizer: Any, closure: bool) -> Optional[Update]:
        """An optimizer is about to step; None when there is nothing to be seen of it."""
        guard, without_grad = self._guard, self._gate.without_grad
        found: Optional[Update] = guard.run(
            guard.core, without_grad, self.tracker.before_step, optimizer, closure
        )
        return found

    def measure(self, update: Update) -> None:
        """Its gradients are final, after the first evaluation of its closure."""
        without_grad = self._gate.without_grad
        self._guard.run(self._core, without_grad, self.tracker.measure, update)

    def limit(self, update: Update) -> None:
        """They are again, after another evaluation."""
        without_grad = self._gate.without_grad
        self._guard.run(self._core, without_grad, self._safeguards.limit, update)

    def abandon(self, update: Update) -> None:
        """It raised: the job may catch that and try again."""
        self.tracker.abandon(update)

    def restore_rate(self) -> None:
        """Put back the learning rate that the job had set."""
        self._guard.run(self._core, self.rate.restore)

    def after_step(self, update: Update) -> None:
        """It has stepped, or was kept from it."""
        without_grad = self._gate.without_grad
        self._guard.run(self._core, without_grad, self.tracker.after_step, update)

    def end(self) -> None:
        """The process ends: the step under way is over."""
        self.inferred.end()
        self.tracker.close(on_time=False)
