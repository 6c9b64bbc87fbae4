"""The parts of one process, put together: who is given what.

Two lots: what there is from the import of torch on (`Parts`), and what there is once the process is
a rank with a segment (`RankParts`). No part knows the others but by what it is given here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from .checkpoints.on_demand import OnDemand
from .checkpoints.resume import Resume, SaveReports
from .collectors import COUNTERS, Collectors, Plan
from .collectors.batch import (
    BatchCollector,
    BatchSanityCollector,
    ShardsCollector,
    WorkerCopyDetector,
)
from .collectors.gradient import GradientCollector, GroupsCollector
from .collectors.job_wiring import JobWiringCollector
from .collectors.limits import ClippingCollector, LimitsCollector
from .collectors.loss import DiscardsCollector, LossCollector, LossScaleCollector
from .collectors.noise import NoiseCollector, SketchCollector
from .collectors.phase import PhaseCollector, RatesCollector
from .collectors.progress import CountersCollector, FrameworkCollector, TokensCollector
from .collectors.quarantine import QuarantineCollector
from .collectors.timing_and_mfu import FlopsCollector, TimingCollector
from .collectors.training_state import OptimizerStateCollector
from .collectors.updates import UpdatesCollector
from .faults.injector import FaultInjector
from .hooks.listeners import (
    ForwardListener,
    LoaderListener,
    Measured,
    SaveListener,
    StepListener,
    Steps,
    TrainerListener,
)
from .ipc.commands import Commands, KeptSignals
from .ipc.publisher import JobReports, Publisher
from .runtime.files import Background
from .safeguards.around_step import Safeguards
from .sampling.sample_sets import FLOOR_NS, LEAST, MOMENTS, SampleSets
from .sampling.schedule import SamplingSchedule
from .sampling.watch import Sampler, Snapshots
from .sampling.weight_pairs import WeightPairs
from .savepoints.controller import RollbackController, RollbackParts
from .savepoints.reference_batch import ReferenceBatch
from .savepoints.step_history import SkipRanges, StepHistory
from .savepoints.training_state import ForeignEngine
from .stepping.batch_observer import BatchObserver
from .stepping.hand_written import WHY, Callbacks, EvaluationPass, InferredSteps
from .stepping.step_tracker import (
    BetweenSteps,
    Changers,
    DiscardedGradients,
    Process,
    Readers,
    StepTracker,
    TrainingThread,
)
from .torch_state.learning_rate import LearningRate
from .torch_state.records import Optimizers, SafeguardState
from .torch_state.registry import GradScalerState
from .torch_state.structure import WeightCopies

if TYPE_CHECKING:
    from .collectors import Collector
    from .context import ProbeContext
    from .ipc.segment import Mailbox
    from .runtime.scalars import Number
    from .torch_state.records import Times


class Sources(NamedTuple):
    """What collectors read beside the context.

    Attributes:
        extra: what joins the next frame.
    """

    optimizers: Optimizers
    scaling: GradScalerState
    rate: LearningRate
    times: Times
    sets: SampleSets
    in_force: SafeguardState
    extra: dict[str, Number]
    copies: WeightCopies
    foreign: Callable[[], str]


class Wired(NamedTuple):
    """Those that other parts call."""

    batch: BatchCollector
    batch_sanity: BatchSanityCollector
    counters: CountersCollector
    discards: DiscardsCollector
    flops: FlopsCollector
    gradient: GradientCollector
    groups: GroupsCollector
    job_wiring: JobWiringCollector
    framework: FrameworkCollector
    limits: LimitsCollector
    loss: LossCollector
    quarantine: QuarantineCollector
    shards: ShardsCollector
    tokens: TokensCollector
    updates: UpdatesCollector


def make_parts(
    context: ProbeContext,
    sources: Sources,
    look_inside: Callable[[], None],
    step_is_over: Callable[[], None],
) -> tuple[Wired, dict[str, Collector]]:
    """Make them, and by name all that need more than the context.

    For the two callables see `batch` and `framework`.
    """
    gradients = GradientCollector(context, sources.scaling, sources.copies)
    clips = ClippingCollector(context, gradients)
    losses = LossCollector(context)
    batches, origins = BatchCollector(context, look_inside), ShardsCollector(context)
    wired = Wired(
        batch=batches,
        batch_sanity=BatchSanityCollector(context, sources.sets),
        counters=CountersCollector(context),
        discards=DiscardsCollector(context, sources.scaling, gradients, losses),
        flops=FlopsCollector(context),
        gradient=gradients,
        groups=GroupsCollector(context, sources.scaling, gradients),
        job_wiring=JobWiringCollector(context, sources.foreign),
        framework=FrameworkCollector(context, sources.extra, step_is_over),
        limits=LimitsCollector(context, sources.in_force, clips),
        loss=losses,
        quarantine=QuarantineCollector(context, batches, origins),
        shards=origins,
        tokens=TokensCollector(context, sources.copies),
        updates=UpdatesCollector(context, sources.sets, sources.copies),
    )
    sketches = SketchCollector(context, sources.optimizers, sources.sets)
    return wired, {
        **wired._asdict(),
        "clipping": clips,
        "loss_scale": LossScaleCollector(context, sources.scaling),
        "noise": NoiseCollector(
            context, sources.optimizers, sources.times, wired.gradient, wired.groups, sketches
        ),
        "optimizer_state": OptimizerStateCollector(context, wired.groups),
        "phase": PhaseCollector(context, sources.optimizers, sources.rate, wired.framework),
        "rates": RatesCollector(context, sources.rate),
        "sketch": sketches,
        "timing": TimingCollector(context, sources.times),
    }


class Life(NamedTuple):
    """What parts ask of the process.

    Attributes:
        open: becomes a rank, if it is none yet; whether it is one.
        another: another training begins: everything that is of a rank is made again.
        attach: sees the calls of the outermost modules of the job's optimizers. attach_inside: sees
            those of what they are wrapped around, too.
    """

    open: Callable[[], bool]
    on_other_optimizer: Callable[[], None]
    attach: Callable[[], None]
    attach_inside: Callable[[], None]


class Parts:
    """What there is from the import of torch on.

    Attributes:
        extra: what joins the next frame beside what collectors measure.
        wired: the collectors that others call. collectors: all.
        pristine: the counters of a process that has not trained.
        rank: what there is once the process is a rank, None before.
        trainings: how many there were before this one in the process.
    """

    def __init__(self, context: ProbeContext, times: Times, life: Life) -> None:
        self.context, self._life, self._times = context, life, times
        self.rank: Any = None  # `RankParts`
        self.trainings = 0
        self.extra: dict[str, Number] = {}
        self.optimizers = Optimizers()
        self.engine = ForeignEngine(context.registry)
        self.kept_signals = KeptSignals(context)
        self.scaling = GradScalerState(context.scalars)
        config = context.config
        first_step = config.first_step if config.attempt else None
        self.rate = LearningRate(
            context.torch, context.scalars, config.marks, first_step, config.rewarm
        )
        self._measure()
        self._sample()
        self._follow_steps()
        self._listen()
        self.pristine = self.collectors.save_state()

    def _measure(self) -> None:
        context, self.sets = (
            self.context,
            SampleSets(
                self.context.guard,
                self.context.config.sampling,
                self.context.reporter.status_changed,
            ),
        )
        in_force = SafeguardState()
        sources = Sources(
            self.optimizers,
            self.scaling,
            self.rate,
            self._times,
            self.sets,
            in_force,
            self.extra,
            WeightCopies(context.registry, self.optimizers, context.position),
            self.engine.explain_refusal,
        )
        self.wired, step_count = make_parts(
            context, sources, self._life.attach_inside, self._step_is_over
        )
        wired = self.wired
        plan = Plan(context.guard, self.sets)
        self.collectors = Collectors(context, plan, step_count)
        self.batches = BatchObserver(
            context.guard,
            wired.batch,
            wired.tokens,
            wired.flops,
            wired.batch_sanity,
            wired.discards,
        )
        self.safeguards = Safeguards(
            context, in_force, self.optimizers, wired.gradient, wired.limits, wired.loss
        )
        self.drills = FaultInjector(context, self.optimizers)

    def _sample(self) -> None:
        context, sets = self.context, self.sets
        self.pairs = WeightPairs(context)
        self.sampler = Sampler(context, sets, self.extra, self.pairs)
        self.snapshots = Snapshots(context, sets, self.sampler, self.extra)
        collectors = self.collectors
        self.sampling = SamplingSchedule(
            context,
            sets,
            collectors.plan.begin_step,
            collectors.names_of_set,
            self.sampler,
            self.snapshots,
            self.pairs,
        )

    def _follow_steps(self) -> None:
        context, plan, wired = self.context, self.collectors.plan, self.wired
        discards = DiscardedGradients(context, plan, self.scaling, self.batches, wired.discards)
        changers = Changers(self.rate, self.drills, self.safeguards)
        self.tracker = StepTracker(
            context,
            Process(self._life.open, self._steps_first, self._life.on_other_optimizer),
            self.optimizers,
            self.extra,
            discards,
            Readers(plan, self.batches, self.sampling, self.sampler, self.scaling),
            changers,
        )
        self.boundary = BetweenSteps(context, self.tracker)
        self.inferred = InferredSteps(
            context,
            self.tracker,
            self.boundary,
            plan,
            self.drills,
            (wired.loss, wired.counters),
            Callbacks(self.appeared, self._without_optimizer),
        )
        self.threads = TrainingThread(context, self.tracker, plan, self.batches)
        self.steps = StepListener(
            context,
            Steps(self.tracker, self.boundary, self.inferred, discards, self.threads),
            Measured(
                wired.gradient,
                wired.groups,
                wired.loss,
                self.batches,
                self.scaling,
                self.sets,
                wired.job_wiring,
            ),
            changers,
            self._life.open,
            self._before_first_forward,
        )

    def _listen(self) -> None:
        context, wired = self.context, self.wired
        evaluation = EvaluationPass(
            context, self._times, self.tracker, self.sets, wired.framework, wired.tokens, self.extra
        )
        self.forward = ForwardListener(
            context,
            self.inferred,
            self.tracker,
            self.drills,
            self.batches,
            self.sets,
            self.sampler,
            evaluation,
        )
        shards = wired.shards.shards
        self.loader = LoaderListener(
            context,
            self.inferred,
            wired.batch,
            shards,
            wired.quarantine,
            WorkerCopyDetector(wired.batch.digest_of_memory, wired.job_wiring.record_stream_copies),
            self._before_first_forward,
        )
        self.save_reports = SaveReports(context, wired.framework, self._settle)
        self.saves = SaveListener(
            context, self.optimizers, self.drills, self.save_reports, wired.framework
        )
        self.resume = Resume(context, self._life.open, self.appeared, self._from_its_start)
        self.trainer = TrainerListener(wired.framework, self.resume)
        self.reports = JobReports(context, self.extra, shards)

    # ── what parts learn of each other ──────────────────────────────────────────────────────

    def appeared(self, optimizer: Any) -> None:
        """An optimizer is known from now on: look which modules it trains."""
        self.context.registry.optimizers.add(optimizer)  # it may be older than the probe
        self._life.attach()

    def _before_first_forward(self) -> None:
        """A batch was loaded, or the gradients zeroed: the first step is to have its input, too."""
        if not self.tracker.entries and any(True for _ in self.context.registry.optimizers):
            self._life.attach()

    def _steps_first(self, optimizer: Any) -> None:
        """One steps for the first time."""
        if self.inferred.on:
            self.inferred.optimizer_steps()
        self.appeared(optimizer)
        self.rank.probe_batch.before_first_update()

    def _settle(self) -> None:
        """A step without an optimizer may be over."""
        if self.inferred.pending:
            self.inferred.sign()

    def _step_is_over(self) -> None:
        self.tracker.finish_round(on_time=False)

    def _without_optimizer(self, reason: str) -> None:
        self.safeguards.cannot(reason)
        if reason:
            self.rank.rollbacks.disable(reason)

    def _from_its_start(self, step_count: int) -> None:
        """The job begins by itself and not where it was to go on, with `made` steps behind it."""
        self.context.position.step = step_count
        self.collectors.count_on(dict.fromkeys(COUNTERS, 0.0))
        self.rank.history.stop_comparing()

    def explain_without_optimizer(self) -> str:
        """Return why what needs an optimizer is out of reach, "" where it is not."""
        return WHY if self.inferred.active else ""

    def explain_unchangeable(self) -> str:
        """Return why the training cannot be changed from here, "" where it can."""
        return self.explain_without_optimizer() or self.engine.explain_refusal()


EXIT_S = 5.0  # of what is being written when the process ends; then the thread leaves torch


class RankParts:
    """What there is once the process is a rank: frames, commands, savepoints.

    Making it changes nothing else, so it may fail; `connect` then makes it known to the others.
    """

    def __init__(self, parts: Parts, mailbox: Mailbox, times: Times) -> None:
        context, config, wired = parts.context, parts.context.config, parts.wired
        background = self._background = parts.pairs.background = Background()
        self.publisher = Publisher(
            context.reporter.writer, context.scalars, self._finish, context.reporter.notice
        )
        self.history = StepHistory(context, background, wired.shards)
        self.commands = Commands(
            context,
            mailbox,
            parts.rate,
            parts.optimizers,
            self._batches,
            parts.explain_unchangeable,
            parts.kept_signals.install if config.keep_signals else None,
        )
        self.probe_batch = ReferenceBatch(
            context,
            parts.sets,
            parts.sampler,
            times,
            background,
            self.history,
            parts.forward.set_onlooker,
            parts.extra,
        )
        self._skips = SkipRanges(context, wired.batch, parts.optimizers, self.history)
        self.rollbacks = RollbackController(
            context,
            parts.collectors,
            self.publisher,
            parts.rate,
            parts.optimizers,
            RollbackParts(
                self.history,
                self.probe_batch,
                parts.safeguards,
                parts.sets.pace("moments", LEAST, MOMENTS, FLOOR_NS),
                wired.updates.force_measurement,
                parts.trainings,
            ),
        )
        self.on_demand = OnDemand(
            context, wired.framework, parts.save_reports, lambda: self.history.finite
        )
        self._parts, self._run_all = parts, context.guard.run_all
        self._plan = parts.collectors.plan
        self.commands.register(self.rollbacks, wired.quarantine, self.on_demand, parts.sampling)
        self.commands.register(self.probe_batch, *parts.safeguards.doers())
        parts.drills.plan(config.drills, self.publisher)

    def connect(self) -> None:
        """Become the rank of the process."""
        parts, reporter = self._parts, self._parts.context.reporter
        is_relaunched, parts.rank = parts.rank is None, self
        parts.tracker.connect(self.publisher, self.commands, self._skips, self.rollbacks)
        parts.boundary.connect(self.rollbacks, self.commands)
        parts.safeguards.outliers.connect(self.probe_batch.explain_weights_doubt)
        batch = self.probe_batch
        parts.forward.connect(batch.observe, batch.observe_targets, batch.observe_pair)
        parts.saves.connect(self.on_demand.learn_layout)
        parts.save_reports.connect(self.probe_batch.save_facts, self._counters)
        parts.resume.refuse_unstarted_order()
        since = "the relaunch" if is_relaunched else "this training"
        if parts.rate.hold is not None:
            reporter.notice("note", f"the learning rate is still held, as before {since}")
        if parts.rate.held.now != 1.0:
            factor = f"multiplied by {parts.rate.held.now:g}, as requested before {since}"
            reporter.notice("note", f"the learning rate is still {factor}")

    def _finish(self, step: int, attempt: int, values: dict[str, float]) -> None:
        """All values of a frame are on the host."""
        self._run_all(self._plan.now["add_derived_values"], values)
        self.rollbacks.complete_savepoint(step, attempt, values)

    def _counters(self) -> dict[str, float]:
        self.publisher.publish_arrived()
        return self._parts.collectors.counters()

    def _batches(self) -> Any:
        return list(self.history.seen)

    def close(self) -> None:
        """Drop all savepoints and write what a later launch needs; the process ends."""
        self.commands.close()
        try:
            self.rollbacks.close()
        finally:
            # Also the probe batch of a save at the very end: a resume is compared with it.
            if self._background.close(EXIT_S, drain=True):  # else it may be writing the history
                self.history.close()
