"""Events of the calls of the outermost module: its input, signs of life, samples that are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..control.fault_injector import FaultInjector
    from ..sampling.sample_sets import SampleSets
    from ..sampling.watch import Sampler
    from ..stepping.batch_observer import BatchObserver
    from ..stepping.evaluation_pass import EvaluationPass
    from ..stepping.inferred_steps import InferredSteps
    from ..stepping.step_tracker import StepTracker

    Keep = Callable[[Any, bool, Tuple[Any, ...], Dict[str, Any]], None]
    KeepTargets = Callable[[Any, Any, int], None]


class ForwardListener:
    """One for each process: a forked child gets another.

    Attributes:
        sets: which of them wait for a forward. evaluation: what is evaluated between two steps.
        drills: for what a call asks each time.
        onlooker: sees the logits of losses that are taken without gradients, else None.
    """

    def __init__(
        self,
        context: ProbeContext,
        inferred: InferredSteps,
        tracker: StepTracker,
        drills: FaultInjector,
        batches: BatchObserver,
        sets: SampleSets,
        sampler: Sampler,
        evaluation: EvaluationPass,
    ) -> None:
        self._context, self._guard = context, context.guard
        self._inferred, self._tracker = inferred, tracker
        self.evaluation = evaluation
        self.drills, self._batches = drills, batches
        self.sets, self._sampler = sets, sampler
        self._keep: Optional[Keep] = None
        self._keep_targets: Optional[KeepTargets] = None
        self._targets_wanted = False
        self.onlooker: Optional[Callable[[Any], None]] = None

    def look_on(self, onlooker: Optional[Callable[[Any], None]]) -> None:
        """Let it see them, until it is None again."""
        self.onlooker = onlooker

    def connect(self, keep: Keep, keep_targets: KeepTargets) -> None:
        """The process is a rank.

        Args:
            keep: given the root, whether it is compiled, and its input when that is wanted as the
                fixed batch. keep_targets: given what the next loss is taken of.
        """
        self._keep, self._keep_targets = keep, keep_targets

    def evaluates(self, root: Any) -> None:
        """It is called without gradients."""
        self._context.reporter.beat("eval")
        self.evaluation.called(root)

    def before_evaluation(
        self, root: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """A drill is on in a call without gradients; return the arguments to use."""
        if self.evaluation.evaluates(root):
            return self.drills.evaluation(root, args, kwargs)
        return args, kwargs

    def before_forward(
        self, root: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """It is about to be called, with gradients on; return the arguments to use."""
        reporter = self._context.reporter
        if reporter.phase != "step":
            reporter.beat("step")
        if self._inferred.pending:
            self._inferred.sign()
        if self.drills.active:
            args, kwargs = self.drills.forward(root, args, kwargs)
        if not self._tracker.repeats:
            self._batches.inputs((*args, *kwargs.values()) if kwargs else args)
        return args, kwargs

    def enter(self, root: Any, compiled: bool, args: Tuple[Any, ...], kwargs: Any) -> None:
        """The first forward of a step with due samples is about to run."""
        sets = self.sets
        if self._tracker.open:  # it is the next step's
            return
        sets.waiting = False
        if self.evaluation.pending:
            self.evaluation.trains(root)
        self._guard.run(self._guard.part("sampler"), self._enter, root, compiled, args, kwargs)

    def _enter(self, root: Any, compiled: bool, args: Tuple[Any, ...], kwargs: Any) -> None:
        if self.sets.wanted and self._keep is not None:
            self.sets.wanted = False
            self._keep(root, compiled, args, kwargs)
            self._targets_wanted = True
        self._sampler.enter(root, compiled, args, kwargs)

    def leave(self, result: Any) -> None:
        """That forward is over; `result` is None if it raised. Never raises."""
        self._sampler.leave(result)

    # ── losses ────────────────────────────────────────────────────────────────────────────────

    def loss_taken(
        self, logits: Any, target: Any, ignored: int, loss: Any, how: str, result: Any
    ) -> None:
        """A loss was taken of `logits` against class indices, `ignored` being none of them.

        Args:
            loss: None where it says nothing that its graph is gone.
            how: `mean` or `sum` of the targets' own losses where `result` is that.
        """
        if self._tracker.repeats:
            return
        if self._inferred.pending:
            self._inferred.sign()
        self._batches.targets(target, ignored, loss, how, result)
        if self._targets_wanted and self._keep_targets is not None:
            self._targets_wanted = False
            self._keep_targets(logits, target, ignored)
        if self._sampler.wants_logits:
            self._sampler.saw_logits(logits)
