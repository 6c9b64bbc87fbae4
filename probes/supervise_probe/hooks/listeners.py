"""Listeners that patched functions and training libraries call: one for each event of the job."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ..checkpoints.resume import Reported, path_of_target
from ..runtime import evidence
from ..runtime.guard import is_from_signal_handler

if TYPE_CHECKING:
    from ..checkpoints.resume import Resume, SaveReports
    from ..collectors.batch import BatchCollector, WorkerCopyDetector
    from ..collectors.gradient import GradientCollector, GroupsCollector
    from ..collectors.job_wiring import JobWiringCollector
    from ..collectors.loss import LossCollector
    from ..collectors.progress import FrameworkCollector
    from ..collectors.quarantine import QuarantineCollector
    from ..context import ProbeContext
    from ..faults.injector import FaultInjector
    from ..sampling.sample_sets import SampleSets
    from ..shards import ShardTracker
    from ..stepping.batch_observer import BatchObserver
    from ..stepping.hand_written import InferredSteps
    from ..stepping.step_tracker import (
        BetweenSteps,
        Changers,
        DiscardedGradients,
        StepTracker,
        TrainingThread,
    )
    from ..torch_state.records import Optimizers, Update
    from ..torch_state.registry import GradScalerState


class TrainerListener:
    """What an adapter may report of the library whose loop trains.

    All is called between two steps, in the thread that trains.
    """

    def __init__(self, library: FrameworkCollector, resume: Resume) -> None:
        self.trained_by, self.length = library.set_training_library, library.length
        self.ended = library.record_loop_end
        self.epoch, self.report = library.epoch, library.report
        self.take_order = library.take_order
        self.steer, self.began = resume.steer, resume.report_outcome


class Listeners:
    """One for the life of the process, since a patch stays; a forked child puts others in.

    Attributes:
        step: backward and the optimizer's step. forward: the outermost module, and losses.
        loader: batches. saves: checkpoints. trainer: what a training library knows.
    """

    __slots__ = ("forward", "loader", "saves", "step", "trainer")

    step: StepListener
    forward: ForwardListener
    loader: LoaderListener
    saves: SaveListener
    trainer: TrainerListener


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
    wiring: JobWiringCollector


class StepListener:
    """One for each process: a forked child gets another.

    Attributes:
        tracker, boundary, inferred, drills, rate, wiring: for what a hook asks at each call; a
            method between would cost more than the question.

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
        self._batches, self._scaling, self._sets, self.wiring = measured[3:]
        self.rate, self.drills, self._safeguards = changers
        self._open, self._attach = open_, attach
        self._gradient_part = self._guard.part("gradient")
        self._wiring_part = self._guard.part("job_wiring")

    # ── backward ──────────────────────────────────────────────────────────────────────────────

    def before_backward(self, tensors: Any, retains: Any) -> None:
        """A backward is about to run, from one tensor or several."""
        guard, inferred = self._guard, self.inferred
        if inferred.pending:
            inferred.sign(backward=True)
        guard.run(self._core, self._saw_backward, tensors, retains)
        if self.wiring.residues:
            guard.run(self._wiring_part, self.wiring.begin_backward)
        if inferred.on:
            guard.run(self._core, inferred.before_backward, tensors)

    def after_backward(self) -> None:
        """It has run, or raised."""
        guard = self._guard
        guard.run(self._core, self.drills.after_backward)
        guard.run(self._core, self.inferred.after_backward)
        if self.wiring.residues:
            guard.run(self._wiring_part, self.wiring.end_backward)

    def on_backward_error(self) -> None:
        """It raised."""
        self._discards.failed = True

    def _saw_backward(self, tensors: Any, retains: Any) -> None:
        torch = self._torch
        loss: Any = None
        roots = [tensors]
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
        self.tracker.on_backward(loss, bool(retains))
        self._batches.before_backward()
        if type(loss) is float and loss != loss:
            self._batches.before_backward_of_nan(roots)

    def on_zero_grad(self, owner: Any) -> None:
        """The gradients of a module or an optimizer were zeroed behind a backward."""
        self._guard.run(self._core, self._discards.on_zero_grad, owner)

    def prepares(self) -> None:
        """The gradients were zeroed before the first step: the model is about to be called."""
        self._guard.run(self._core, self._attach)

    # ── clips ─────────────────────────────────────────────────────────────────────────────────

    def before_clip(self, params: list[Any]) -> None:
        """The gradients of `params` are about to be clipped."""
        sets = self._sets
        if "gradients" in sets.due:
            clip_squares = self._groups.before_clip
            sets.run("gradients", self._gate.call_without_grad, clip_squares, params)

    def clipped(
        self,
        params: list[Any],
        norm: Any,
        limit: Any,
        joint: bool = False,
        by_value: bool = False,
    ) -> None:
        """They had this norm, None where it is not known; for the rest see `Clip`."""
        record = self._gradient.record_clip_norm
        self._guard.run(self._gradient_part, record, params, norm, limit, joint, by_value)

    def averaged(self, parts: int) -> None:
        """The gradients were divided by the number of micro-batches, whose losses were not."""
        self._loss.averaged(parts)

    # ── a GradScaler ──────────────────────────────────────────────────────────────────────────

    def scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        """`scaler.scale(outputs)` returned `result`."""
        self._guard.run(self._core, self._scaling.on_scale, scaler, outputs, result)

    def unscaled(self, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called."""
        self._guard.run(self._core, self._scaling.on_unscale, optimizer)

    def before_scaler_step(self, scaler: Any) -> int:
        """`scaler.step` begins; return what `after_scaler_step` is to be given."""
        self._scaling.enter(scaler)
        return self.tracker.entries

    def after_scaler_step(self, optimizer: Any, entries: int) -> None:
        """It is over: if it never called `optimizer.step`, the gradients overflowed."""
        if self.tracker.entries == entries:
            without_grad = self._gate.call_without_grad
            self._guard.run(self._core, without_grad, self.tracker.on_overflow, optimizer)

    def leave_scaler_step(self) -> None:
        """It is over, or raised."""
        self._scaling.scaler = None

    # ── an optimizer's step ───────────────────────────────────────────────────────────────────

    def claim_first_step(self) -> bool:
        """Whether this thread is the first to step, and is watched from here on."""
        return self._threads.claim_first_step()

    def on_unwatched_step(self, optimizer: Any) -> None:
        """A step that is not looked at has just been made, perhaps in another thread."""
        try:  # not `guard.run`: the clocks are of the thread that is watched
            self._threads.on_step(optimizer)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self._guard.failed(self._core, error)

    def before_step(self, optimizer: Any, closure: bool) -> Optional[Update]:
        """An optimizer is about to step; None when there is nothing to be seen of it."""
        guard, without_grad = self._guard, self._gate.call_without_grad
        update: Optional[Update] = guard.run(
            guard.core, without_grad, self.tracker.before_step, optimizer, closure
        )
        return update

    def measure(self, update: Update) -> None:
        """Its gradients are final, after the first evaluation of its closure."""
        without_grad = self._gate.call_without_grad
        self._guard.run(self._core, without_grad, self.tracker.measure, update)

    def limit(self, update: Update) -> None:
        """They are again, after another evaluation."""
        without_grad = self._gate.call_without_grad
        self._guard.run(self._core, without_grad, self._safeguards.limit, update)

    def abandon(self, update: Update) -> None:
        """It raised: the job may catch that and try again."""
        self.tracker.abandon(update)

    def restore_rate(self) -> None:
        """Put back the learning rate that the job had set."""
        self._guard.run(self._core, self.rate.restore_job_rates)

    def after_step(self, update: Update) -> None:
        """It has stepped, or was kept from it."""
        without_grad = self._gate.call_without_grad
        self._guard.run(self._core, without_grad, self.tracker.after_step, update)

    def end(self) -> None:
        """The process ends: the step under way is over."""
        self.inferred.end()
        self.tracker.finish_round(on_time=False)


if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..faults.injector import FaultInjector
    from ..sampling.sample_sets import SampleSets
    from ..sampling.watch import Sampler
    from ..stepping.batch_observer import BatchObserver
    from ..stepping.hand_written import EvaluationPass, InferredSteps
    from ..stepping.step_tracker import StepTracker

    Keep = Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], None]
    KeepTargets = Callable[[Any, Any, int], None]
    KeepPair = Callable[[Any, Any, Callable[..., Any]], None]


class ForwardListener:
    """One for each process: a forked child gets another.

    Attributes:
        sets: which of them wait for a forward. evaluation: what is evaluated between two steps.
        drills: for what a call asks each time.
        onlooker: sees the logits of losses that are taken without gradients, else None.
        wants_pair: the next loss of a target as large as the output is to be told.
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
        self._keep_pair: Optional[KeepPair] = None
        self._targets_wanted = self.wants_pair = False
        self.onlooker: Optional[Callable[[Any], None]] = None

    def set_onlooker(self, onlooker: Optional[Callable[[Any], None]]) -> None:
        """Let it see them, until it is None again."""
        self.onlooker = onlooker

    def connect(self, keep: Keep, keep_targets: KeepTargets, keep_pair: KeepPair) -> None:
        """The process is a rank.

        Args:
            keep: given the root, whether it is compiled, and its input when that is wanted as the
                fixed batch. keep_targets, keep_pair: given what the next loss is taken of.
        """
        self._keep, self._keep_targets, self._keep_pair = keep, keep_targets, keep_pair

    def evaluates(self, root: Any) -> None:
        """It is called without gradients."""
        self._context.reporter.beat("eval")
        self.evaluation.on_call(root)

    def before_evaluation(
        self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A drill is on in a call without gradients; return the arguments to use."""
        if self.evaluation.evaluates(root):
            return self.drills.evaluation(root, args, kwargs)
        return args, kwargs

    def before_forward(
        self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """It is about to be called, with gradients on; return the arguments to use."""
        reporter = self._context.reporter
        if reporter.phase != "step":
            reporter.beat("step")
        if self._inferred.pending:
            self._inferred.sign()
        if self.drills.active:
            args, kwargs = self.drills.forward(root, args, kwargs)
        if not self._tracker.is_closure_repeated:
            self._batches.add_inputs(args, kwargs)
        return args, kwargs

    def before_sampled_forward(
        self, root: Any, compiled: bool, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """The first forward of a step with due samples is about to run."""
        sets = self.sets
        if self._tracker.is_round_open:  # it is the next step's
            return
        sets.waiting = False
        if self.evaluation.pending:
            self.evaluation.trains(root)
        self._guard.run(self._guard.part("sampler"), self._enter, root, compiled, args, kwargs)

    def _enter(self, root: Any, compiled: bool, args: tuple[Any, ...], kwargs: Any) -> None:
        if self.sets.wanted and self._keep is not None:
            self.sets.wanted = False
            self._keep(root, compiled, args, kwargs)
            self._targets_wanted = self.wants_pair = True
        self._sampler.enter(root, compiled, args, kwargs)

    def leave(self, result: Any) -> None:
        """That forward is over; `result` is None if it raised. Never raises."""
        self._sampler.leave(result)

    # ── losses ────────────────────────────────────────────────────────────────────────────────

    def on_class_loss(
        self, logits: Any, target: Any, ignored: int, loss: Any, reduction: str, result: Any
    ) -> None:
        """A loss was taken of `logits` against class indices, `ignored` being none of them.

        Args:
            loss: None where it says nothing that its graph is gone.
            reduction: `mean` or `sum` of the targets' own losses where `result` is that.
        """
        if self._tracker.is_closure_repeated:
            return
        if self._inferred.pending:
            self._inferred.sign()
        self._batches.add_targets(target, ignored, loss, reduction, result)
        if self._targets_wanted and self._keep_targets is not None:
            self._targets_wanted = False
            self._keep_targets(logits, target, ignored)
        if self._sampler.wants_logits:
            self._sampler.add_logits(logits)

    def keep_loss_pair(
        self, output: Any, target: Any, result: Any, take: Callable[..., Any], *options: Any
    ) -> None:
        """`result` is what `take` gave of these, with these positional and keyword options."""
        if not self._tracker.is_closure_repeated and self._keep_pair is not None:
            pair, loss = (self._keep_pair, output, target), (result, take, *options)
            self._guard.run(self._guard.part("sampler"), self._hand_on, *pair, *loss)

    def _hand_on(
        self,
        keep: KeepPair,
        output: Any,
        target: Any,
        result: Any,
        take: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Hand a loss of one element on that depends on no other tensor."""
        tensor, options = self._context.torch.Tensor, (*args, *kwargs.values())
        if result.numel() == 1 and not any(isinstance(v, tensor) for v in options):
            self.wants_pair = False
            keep(output, target, partial(_take_with, take, args, kwargs))


def _take_with(take: Any, args: Any, kwargs: Any, output: Any, target: Any) -> Any:
    return take(output, target, *args, **kwargs)


class LoaderListener:
    """One for each process: a forked child gets another.

    Attributes:
        inferred: a batch may be the sign that a step without an optimizer is over.
        shards: which shard each batch comes from.
        beat: shows a sign of life.
    """

    def __init__(
        self,
        context: ProbeContext,
        inferred: InferredSteps,
        batch: BatchCollector,
        shards: ShardTracker,
        quarantine: QuarantineCollector,
        streams: WorkerCopyDetector,
        attach: Callable[[], None],
    ) -> None:
        """`attach`: sees the calls of the outermost modules."""
        guard = self._guard = context.guard
        self.beat, self._marks = context.reporter.beat, context.config.marks
        self.inferred, self.shards = inferred, shards
        self._batch, self._held, self._attach = batch, quarantine, attach
        self._streams = streams
        self._shards_part, self._held_part = guard.part("shards"), guard.part("quarantine")
        self._wiring_part = guard.part("job_wiring")

    def must_skip_batch(self, iterator: Any, batch: Any, reported: int) -> bool:
        """Return whether the batch must be passed over; else it is a step's."""
        guard, shards, quarantine = self._guard, self.shards, self._held
        origins = guard.run(self._shards_part, shards.origins, iterator, batch, reported) or []
        if (
            origins
            and quarantine.manifest.shards
            and guard.run(self._held_part, quarantine.must_skip_batch, origins)
        ):
            return True
        if self._streams.is_open:
            guard.run(self._wiring_part, self._streams.add_loader_batch, iterator, batch)
        # The outermost module shows its input better, once it is known and if it is given tensors.
        if not self._batch.seen:
            guard.run(guard.part("batch"), self._saw_batch, batch)
        guard.run(self._shards_part, shards.add_loaded_batch, iterator, origins)
        return False

    def _saw_batch(self, batch: Any) -> None:
        self._batch.hash_loaded_batch(_members(batch))
        self._attach()

    def exhausted(self) -> None:
        """Nothing else is handed out than what is in quarantine."""
        self._guard.run(self._held_part, self._held.disable_skipping)

    def before_data_pass(self, loader: Any) -> None:
        """A pass over the data is about to begin; its workers are forked before the first step."""
        if getattr(loader, "num_workers", 0):
            part = self._guard.part("evidence", share=1.0)
            self._guard.run(part, evidence.dump_stacks_on_signals, self._marks)
        self._guard.run(self._held_part, self._held.lists.filter_before_pass, loader)


def _members(batch: Any) -> list[Any]:
    values = dict.values(batch) if isinstance(batch, dict) else batch  # a job's own may raise
    return list(values) if isinstance(batch, (dict, list, tuple)) else [batch]


ENOUGH = 0.5  # of the trained parameters' elements make a checkpoint; project default
LOOKS = 100_000  # objects that are looked at before a file is none
DEPTH = 6  # of dicts in dicts
OPTIMIZER = {"state", "param_groups"}  # the keys of an optimizer's state


class SaveListener:
    """Hears of every save. One for each process: a forked child gets another.

    Attributes:
        reports: sets the phase during a save, and reports those that are checkpoints.
    """

    def __init__(
        self,
        context: ProbeContext,
        optimizers: Optimizers,
        drills: FaultInjector,
        reports: SaveReports,
        library: FrameworkCollector,
    ) -> None:
        self._torch, self._registry = context.torch, context.registry
        self._guard, self._reporter = context.guard, context.reporter
        self._optimizers, self._drills, self.reports = optimizers, drills, reports
        self._library = library
        self._reported: dict[str, Reported] = {}  # by the way of saving
        self._learn: Callable[[Any, str], None] = lambda thing, path: None

    def connect(self, learn: Callable[[Any, str], None]) -> None:
        """The process is a rank: `learn` is given what `torch.save` saved, and the path."""
        self._learn = learn

    @property
    def reports_saves(self) -> bool:
        """Whether this process reports."""
        return self._reporter.writer is not None

    def on_save(self, seconds: float, thing: Any, target: Any, method: str) -> None:
        """The job has saved `thing` at `place`."""
        path = path_of_target(target)
        if path and method == "torch.save":
            self._learn(thing, path)
        if path and self._holds_the_model(thing):
            self.reports.report(
                self._reported.setdefault(method, {}), path, seconds, method, target
            )
            self._drills.after_save(path)

    def report_library_save(
        self, seconds: float, save_target: Callable[[], tuple[str, Optional[int]]]
    ) -> None:
        """A library has saved its own checkpoint.

        Args:
            save_target: returns its path, "" where another rank reports it, and the library's step,
                None where it counts none.
        """
        self._library.save_ended(seconds)
        path, step = save_target()
        if path:
            path = os.path.abspath(path)
            step = self.reports.step if step is None else step
            facts = self.reports.batch_facts()
            report = {
                "path": path,
                "step": step,
                **self.reports.facts(seconds, "its library"),
                "evaluation": facts.get("evaluation", facts.get("probe_batch")),  # for no resume
            }
            self.reports.send(f"step {step} was saved in {path}", report)

    def _holds_the_model(self, content: Any) -> bool:
        """Whether tensors shaped as the trained parameters make up half of their elements.

        An optimizer's state is shaped alike, and is left out. Nothing is read or copied.
        """
        torch = self._torch
        shapes, elements = self._trained()
        flat = all(len(shape) < 2 for shape in shapes)  # sharded as one vector: any shape may come
        count, looks = 0, 0
        todo: list[tuple[Any, int]] = [(content, 0)]
        while todo and elements and looks < LOOKS:
            thing, depth = todo.pop()
            looks += 1
            kind = type(thing)
            if issubclass(kind, torch.Tensor):
                if thing.is_floating_point() and (flat or tuple(thing.shape) in shapes):
                    count += thing.numel()
            elif issubclass(kind, torch.nn.Module):
                count += sum(p.numel() for p in thing.parameters())
            elif (
                issubclass(kind, dict) and depth < DEPTH and not set(dict.keys(thing)) >= OPTIMIZER
            ):
                todo += [(value, depth + 1) for value in dict.values(thing)]
            if count >= ENOUGH * elements:
                return True
        return False

    def _trained(self) -> tuple[set[tuple[int, ...]], int]:
        """Return the shapes of the trained parameters, and how many elements they have."""
        parameters = {id(p): p for p in self._optimizers.parameters()}
        if not parameters:
            modules = self._registry.modules
            parameters = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        shapes = set()
        for parameter in parameters.values():
            shapes.add(tuple(parameter.shape))
            local = getattr(parameter, "_local_tensor", None)
            if local is not None:
                shapes.add(tuple(local.shape))
        return shapes, sum(p.numel() for p in parameters.values())
