"""The step: when the optimizer calls that belong together are over, and what happens then.

One training step is a round of optimizers. Only a round that closes on time is a boundary: there
the job stands right behind its optimizer step, and commands may touch it. A late one just
publishes.

Knows no metric: it calls the collectors.
"""

from __future__ import annotations

import sys
import threading
import weakref
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Optional, Sequence

from ..torch_state.records import (
    OptimizerInfo,
    Step,
    Update,
    is_state_creating_step,
    learning_rate_of,
    order_optimizers,
)

if TYPE_CHECKING:
    from ..collectors import Plan
    from ..collectors.loss import DiscardsCollector
    from ..context import ProbeContext
    from ..faults.injector import FaultInjector
    from ..ipc.commands import Commands
    from ..ipc.publisher import Publisher
    from ..runtime.scalars import Number
    from ..safeguards.around_step import Safeguards
    from ..sampling.schedule import SamplingSchedule
    from ..sampling.watch import Sampler
    from ..savepoints.controller import RollbackController
    from ..savepoints.step_history import SkipRanges
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Optimizers
    from ..torch_state.registry import GradScalerState
    from .batch_observer import BatchObserver

PATIENCE = 8  # rounds without the last optimizer before the order is learned again
# Trainings in which one before went on: the job takes turns. And shorter ones than LEAST: there are
# many of these. Project default.
RETURNS = SHORT = 8


class OptimizerRound:
    """The round under way, and what is known of those before.

    Attributes:
        members: ids of its optimizers so far, in order. before: those of the round before.
    """

    __slots__ = ("_last", "_misses", "before", "members")

    def __init__(self) -> None:
        self.members: list[int] = []
        self.before: list[int] = []
        self._last = 0  # id of the optimizer that ends a round; 0: not known yet
        self._misses = 0

    def is_at_end(self) -> bool:
        """Whether the newest member is the one that ends a round."""
        return self.members[-1] == self._last

    def add_late_optimizer(self, key: int) -> None:
        """An optimizer belongs to the round before: wait for it the next time."""
        self.before.append(key)
        self._last = key
        self._misses = 0

    def start_next_round(self, on_time: bool) -> None:
        """It is over, and the next one begins."""
        self.before, self.members = self.members, []
        if on_time:
            self._last = self.before[-1]
            self._misses = 0
            return
        self._misses += 1
        if not self._last or self._misses >= PATIENCE:
            self._last = self.before[-1]
            self._misses = 0

    def set_last_optimizer(self, key: int, earlier: Sequence[int] = ()) -> None:
        """Rounds end with this optimizer from now on (0: that is to be learned)."""
        self._last, self.before = key, list(earlier)
        self._misses = 0


LEAST = 64  # steps of a training; a shorter one says too little. As the warm-up of `nano`
# So few are one as well where they took so long: its segment costs the job 8 ms.
FEW, LONG_NS = 16, 1_000_000_000
LET_GO = "the learning rate is held no more: the job's own is used"
REPLACEABLE = "tokens_per_update"  # the one metric that a job may know better than the probe


class Readers(NamedTuple):
    """Those who look at a step and change nothing."""

    plan: Plan
    batches: BatchObserver
    sampling: SamplingSchedule
    sampler: Sampler
    scaling: GradScalerState


class Changers(NamedTuple):
    """Those who may change an update."""

    rate: LearningRate
    drills: FaultInjector
    safeguards: Safeguards


class Process(NamedTuple):
    """What the tracker asks of the process.

    Attributes:
        open: becomes a rank, if it is none yet; whether it is one.
        appeared: called with an optimizer that steps for the first time.
        another: another training begins.
    """

    open: Callable[[], bool]
    appeared: Callable[[Any], None]
    on_other_optimizer: Callable[[], None]


class StepTracker:
    """Counts steps, and calls collectors and the publisher.

    Attributes:
        on_time: whether the last step just closed behind its last optimizer.
        entries: how often `before_step` was called.
        current: the update under way.
        accumulates: whether a backward has run since the last step.

    Args:
        optimizers: those that have stepped, which the tracker keeps.
        extra: what joins the next frame beside what collectors measure.
        discards: decides which backwards were in vain.
    """

    def __init__(
        self,
        context: ProbeContext,
        process: Process,
        optimizers: Optimizers,
        extra: dict[str, Number],
        discards: DiscardedGradients,
        readers: Readers,
        changers: Changers,
    ) -> None:
        # Each is held by itself: behind a forward, one more object on the way is a cache miss.
        self._context, self._position, self._guard = context, context.position, context.guard
        self._torch, self._gate, self._reporter = context.torch, context.gate, context.reporter
        self._process, self._optimizers = process, optimizers
        self._extra, self._discards = extra, discards
        self._plan, self._batches, self._sampling, self._sampler, self._scaling = readers
        self._rate, self._drills, self._safeguards = changers
        self._in_force = self._safeguards.in_force
        # Of a rank:
        self._publisher: Any = None
        self._commands: Any = None
        self._skips: Any = None
        self._rollbacks: Any = None
        self._savepoints_part = self._guard.part("savepoints", share=1.0)
        self._began = self._position.step
        self._former: list[weakref.ref[Any]] = []  # optimizers of trainings before
        self._returns = self._short = 0  # see RETURNS and SHORT
        self._turns = 0  # returns after a whole training of others
        self._has_former = self._is_due = False
        self._began_ns = 0
        self.on_time = False
        self.entries = 0
        self.current: Optional[Update] = None
        self._round = OptimizerRound()
        self.accumulates = False
        self._skip = ""  # the whole round is skipped
        self._undecided = False  # a backward in the closure of `current` begins a step of its own
        self._ended_ns = self._mark_ns = 0

    def connect(
        self,
        publisher: Publisher,
        commands: Commands,
        skips: SkipRanges,
        rollbacks: RollbackController,
    ) -> None:
        """The process is a rank from now on."""
        self._rollbacks = rollbacks
        self._publisher, self._commands = publisher, commands
        self._skips = skips

    def before_step(
        self, optimizer: Any, closure: bool, overflow: bool = False
    ) -> Optional[Update]:
        """An optimizer is about to step, or its GradScaler keeps it from it (`overflow`).

        Returns None when this is no training step, or none that can be measured.
        """
        everyone = self._optimizers.known
        self.entries += 1
        info = everyone.get(id(optimizer))
        if info is None or info.reference() is not optimizer:
            info = OptimizerInfo(optimizer)
        elif info.refresh(optimizer):
            self._context.registry.modules.changes += 1  # who remembers what they hold looks again
        update = Update(optimizer, closure, info)
        if not info.real or is_state_creating_step(self._torch, update, self.accumulates):
            return None
        if (self._reporter.writer is None or not self._gate.on) and not self._process.open():
            return None
        key = id(optimizer)
        if key in self._round.members:
            self.finish_round(on_time=False)
        started, earlier = self._round.members, self._round.before
        late = earlier and not started and not self.accumulates and key not in earlier
        if self._drills.follows:
            self._reschedule(optimizer)
        update.scheduled = learning_rate_of(self._torch, optimizer)
        if not started:
            if self._is_due:
                self._count_return(is_turn=False)  # of those that go on
                self._begin_training()
            self._commands.run_early_commands()
        self._scale_rate(optimizer, info)
        if self._rate.search.over:
            self._begin_training_of(optimizer, info)
            late = False
        if late and not closure:
            self._round.add_late_optimizer(key)
            return None
        self.current = update
        if self._optimizers.known.get(key) is not info:
            self._appeared(key, info, optimizer)
        if closure and (late or self._round.members):
            self._undecided = True
        else:
            self._begin(update, overflow)
        return update

    def _begin(self, update: Update, overflow: bool = False) -> None:
        """The optimizer belongs to the round, or is the first of a new one."""
        safeguards, scaling = self._safeguards, self._scaling
        self._undecided = False
        members = self._round.members
        if self._rate.jumps and not members:
            self._guard.run(self._savepoints_part, self._rollbacks.save_before_rate_jump)
        if not members and not self._skip and self._in_force.acting:
            self._skip = safeguards.skip.consume_skipped_step()
        members.append(id(update.optimizer))
        self.on_time = False
        update.skip = "overflow" if overflow else self._skip
        update.scaler = scaling.scaler
        if update.scaler is not None:
            update.scale = scaling.scale()
        if not update.closure:
            self.measure(update)
        if self._in_force.acting:
            safeguards.before_update(update)
        self._guard.run_all(self._plan.now["before_update"], update)

    def _follows(self, update: Update) -> bool:
        """No backward ran inside the closure; whether its optimizer is part of the round."""
        if self._round.members:
            self._begin(update)
            return True
        self._undecided = False
        self._round.add_late_optimizer(id(update.optimizer))
        return False

    def _reschedule(self, optimizer: Any) -> None:
        factor = self._drills.schedule_factor(optimizer, self._position.step)
        if factor != 1.0:
            self._rate.reschedule(optimizer, factor)

    def _scale_rate(self, optimizer: Any, info: OptimizerInfo) -> None:
        rate, drills, everyone = self._rate, self._drills, self._optimizers.known
        drill = drills.lr_factor() if drills.active else 1.0
        index = info.first_group
        if everyone.get(id(optimizer)) is info:
            leads = not index
        else:  # it steps for the first time
            index = sum(member.groups for member in everyone.values())
            leads = not self._round.members and _takes_over(everyone.values(), info)
        rate.record_requested_rates(info, optimizer, self._position.step, drill, leads)
        ours = rate.held.now * rate.warming.now
        if drill != 1.0 or ours != 1.0 or rate.hold is not None:
            rate.apply(optimizer, drill, index, self._position.step)

    def measure(self, update: Update) -> None:
        """The gradients of `update` are final: look at them, and decide whether to go on."""
        drills = self._drills
        update.measured = True
        if self._undecided and not self._follows(update):
            return
        self._batches.before_update(self.accumulates)
        if self._sampler.kept is not None:
            self._sampler.side_pass()
        if self._sampler.keys is not None:
            self._sampler.collect_backward_samples()
        if drills.active:
            drills.before_update(update.params, update.optimizer)
        found_inf = getattr(update.optimizer, "found_inf", None)
        if found_inf is not None:
            update.found_inf = self._context.scalars.value(found_inf)
        self._guard.run_all(self._plan.now["measure"], update)
        skips = self._skips
        if (
            skips.ranges
            and not update.skip
            and len(self._round.members) == 1
            and skips.skips_current_step()
        ):
            update.skip = self._skip = "command"
        if not update.skip:
            self._safeguards.check_and_clip_gradients(update)
            self._skip = update.skip
        if not update.skip and len(self._round.members) == 1 and self._rollbacks.needs_moment_check:
            self._guard.run(
                self._savepoints_part, self._rollbacks.save_before_foreign_moments, update
            )

    def after_step(self, update: Update) -> None:
        """The optimizer is done; the round may be over."""
        if self._undecided:  # its closure was never called
            self._follows(update)
        self.current = None
        if not self._round.members:
            return
        self._ended_ns = monotonic_ns()
        if self._in_force.acting:
            self._safeguards.after_update(update)
        self._guard.run_all(self._plan.now["after_update"], update)
        if self._round.is_at_end():
            self.finish_round(on_time=True)

    def on_overflow(self, optimizer: Any) -> None:
        """The GradScaler found no finite gradients and never called `optimizer.step`."""
        try:
            update = self.before_step(optimizer, closure=False, overflow=True)
        finally:
            self._rate.restore_job_rates()
        if update is not None:
            self.after_step(update)

    @property
    def is_closure_repeated(self) -> bool:
        """Whether a closure is being evaluated once more in the same step."""
        return self.current is not None and self.current.measured

    @property
    def is_round_open(self) -> bool:
        """Whether a round was stepped that is not over yet: a forward now is the next step's."""
        return bool(self._round.members) and (self.current is None or self._undecided)

    def abandon(self, update: Update) -> None:
        """The optimizer's step raised: the job may catch that and try again."""
        self.current, self._undecided = None, False
        if self._round.members[-1:] == [id(update.optimizer)]:
            self._round.members.pop()

    def on_backward(self, loss: Optional[Number], retains: bool) -> None:
        """A backward of `loss` is about to run (None: of something that is no scalar)."""
        if self.is_round_open:
            self.finish_round(on_time=False)
        if self.current is not None and self._undecided:
            self._gate.call_without_grad(self._begin, self.current)
        if self.is_closure_repeated:
            return
        again = self.accumulates and len(self._round.members) < 2
        self._discards.before_backward(again, not self._mark_ns, retains)
        self.accumulates = True
        if loss is not None:
            self._guard.run_all(self._plan.now["after_backward"], loss)

    def finish_round(self, on_time: bool) -> None:
        """Make the round a step: collect, publish, count."""
        if not self._round.members:
            return
        position = self._position
        self._round.start_next_round(on_time)
        self.accumulates, self._skip = False, ""
        elapsed = self._ended_ns - self._mark_ns - position.held_ns if self._mark_ns else None
        if self._rollbacks.needs_step_ends:
            self._guard.run(self._savepoints_part, self._rollbacks.step_ended, elapsed)
        self._mark_ns, position.held_ns = self._ended_ns, 0
        step = Step(position.step, position.attempt, self._ended_ns, elapsed)
        values: dict[str, Number] = {}
        self._guard.run_all(self._plan.now["collect"], step, values)
        if self._extra:
            measured = values.keys() - {REPLACEABLE}
            values.update({k: v for k, v in self._extra.items() if k not in measured})
            self._extra.clear()
        self._publisher.submit(step.number, step.attempt, step.at_ns, values)
        self._reporter.beat("step")
        self._scaling.step_ended()
        if self._rate.advance_and_check_hold_end():
            self._reporter.notice("note", LET_GO)
        if self._in_force.acting:
            self._safeguards.step_ended()
        if elapsed is not None:
            self._guard.judge_costs(elapsed)
        position.step += 1
        self.on_time = on_time
        self._drills.begin_step(position.step)
        self._sampling.plan_step(position.step, self._ended_ns)
        if on_time:
            self._commands.fetch()

    def end_step_for_thread(self, optimizer: Any) -> None:
        """Another thread trains from now on and has just stepped `optimizer`: end the step."""
        self.finish_round(on_time=False)
        self._round.set_last_optimizer(id(optimizer), [id(optimizer)])
        self.accumulates, self._mark_ns = False, 0  # what lies between has no time

    def _appeared(self, key: int, info: OptimizerInfo, optimizer: Any) -> None:
        """An optimizer steps for the first time: the groups of all are counted again."""
        infos, steps = self._optimizers.known, self._position.step - self._began
        is_former = self._count_former([info]) > 0
        if is_former and not self._has_former:
            self._has_former = True
            self._count_return(is_turn=self._is_whole_training(steps))
        takes_turns = self._returns >= RETURNS
        if self._is_whole_training(steps) and _is_of_another_training(
            infos.values(), info, takes_turns
        ):
            if self._round.members:
                self._is_due = True  # with the next step: ranks count this one alike
            else:
                self._begin_training_of(optimizer, info)
                infos = {}
        elif infos and steps > 1:
            self._clear_hold()  # groups may be counted otherwise now
        if not infos:
            self._began, self._began_ns = self._position.step, monotonic_ns()
        earlier = self._count_former(infos.values()) if is_former else len(infos)
        self._optimizers.known = order_optimizers(infos, key, info, self._round.members, earlier)
        self._process.appeared(optimizer)

    def _count_former(self, infos: Iterable[OptimizerInfo]) -> int:
        """Return how many of these live and are of a training before."""
        optimizers = [info.reference() for info in infos]
        former = [reference() for reference in self._former]
        return sum(any(optimizer is other for other in former) for optimizer in optimizers)

    def _count_return(self, *, is_turn: bool) -> None:
        self._returns += 1
        self._turns += is_turn
        # Beside others that step all along, the losses of a job are as they were.
        if self._returns == RETURNS and 2 * self._turns > RETURNS:
            self._reporter.notice("turns", "optimizers of different parameters take turns")

    def _clear_hold(self) -> None:
        if self._rate.hold is not None:
            self._rate.clear_hold()
            self._reporter.notice("note", f"another optimizer steps: {LET_GO}")

    def _begin_training_of(self, optimizer: Any, info: OptimizerInfo) -> None:
        """One that the optimizers before have no part in, with the step under way."""
        former = [*self._former, *(other.reference for other in self._optimizers.known.values())]
        self._former = [reference for reference in former if reference() is not None]
        self._optimizers.known = {}
        self._rate.restore_job_rates()
        self._begin_training()
        if self._drills.follows:
            self._reschedule(optimizer)
        self._scale_rate(optimizer, info)

    def _begin_training(self) -> None:
        """One begins with the step under way; what is known of that stays."""
        self.finish_round(on_time=False)
        self._clear_hold()
        self._rate.begin_training()
        self._has_former = self._is_due = False
        self._short += self._position.step - self._began < LEAST
        self._round, self._mark_ns = OptimizerRound(), 0
        self._began, self._began_ns = self._position.step, monotonic_ns()
        self._process.on_other_optimizer()

    def _is_whole_training(self, steps: int) -> bool:
        """Whether so many steps may be a training of their own; by time on one rank alone, as all
        must decide the same."""
        if steps >= LEAST:
            return True
        may_be_short = self._position.world_size < 2 and self._short < SHORT
        return may_be_short and steps >= FEW and monotonic_ns() - self._began_ns >= LONG_NS

    def infer(self, key: int, number: Optional[int] = None) -> None:
        """Steps end under this key from now on (0: as optimizers do), at `number` if given."""
        self._round.set_last_optimizer(key)
        if number is not None:
            self._position.step, self._mark_ns = number, monotonic_ns()

    def inferred(self, update: Update) -> None:
        """An update without an optimizer is over, and its step with it."""
        self._round.members = [id(update.optimizer)]
        self.after_step(update)


def _is_of_another_training(
    infos: Iterable[OptimizerInfo], new: OptimizerInfo, takes_turns: bool
) -> bool:
    """Whether `new` is of another training than the optimizers before it.

    As in a sweep or a cross-validation: it shares no parameter with them. To the supervisor the
    next training is another program of the same rank, as behind an `exec`: a segment of its own,
    and every baseline from nothing. Step numbers go on. Stages of one model count too, and a
    discriminator that joins late: the old ones may live, and step again in the new training. Only
    in a job that takes turns they must be gone.
    """
    old = list(infos)
    return (
        bool(old)
        and all(new.ids.isdisjoint(info.ids) for info in old)
        and not (takes_turns and any(info.reference() is not None for info in old))
    )


def _takes_over(infos: Iterable[OptimizerInfo], new: OptimizerInfo) -> bool:
    """Whether `new` has parameters of the first of these, or none of them lives."""
    living = [info for info in infos if info.reference() is not None]
    return not living or not new.ids.isdisjoint(living[0].ids)


class BetweenSteps:
    """The one place where the probe may hold the job, restore its weights, or stop it."""

    def __init__(self, context: ProbeContext, tracker: StepTracker) -> None:
        self._context, self._tracker = context, tracker
        self._rollbacks: Any = (
            None  # `RollbackController` and `Commands`, once the process is a rank
        )
        self._commands: Any = None

    def connect(self, rollbacks: RollbackController, commands: Commands) -> None:
        """The process is a rank from now on."""
        self._rollbacks, self._commands = rollbacks, commands

    def run_due_work(self) -> None:
        """If a step has just ended on time: keep a savepoint, obey commands.

        Raises:
            KeyboardInterrupt: the supervisor wants the job to stop.
        """
        tracker, context = self._tracker, self._context
        if not tracker.on_time or not context.gate.on:
            return
        tracker.on_time = False
        guard, rollbacks = context.guard, self._rollbacks
        guard.finish_step_timing()
        if rollbacks.is_savepoint_due():
            guard.run(guard.part("savepoints", share=1.0), rollbacks.take_due_savepoint)
        if context.reporter.is_status_due():
            guard.run(guard.core, context.reporter.write_status)
        self._commands.run()


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
        self._zeroed: set[int] = set()  # ids of parameters, since the newest backward
        self._retained = False  # its graph

    def on_zero_grad(self, owner: Any) -> None:
        """The gradients of a module or an optimizer were zeroed."""
        if isinstance(owner, self._module):
            self._zeroed.update(map(id, owner.parameters()))
        else:
            self._zeroed.update(id(p) for group in owner.param_groups for p in group["params"])

    def before_backward(self, again: bool, is_first: bool, retains: bool) -> None:
        """A backward begins: if all gradients of this step were thrown away, so is what was seen.

        Args:
            again: it is not the first of this step, of which no optimizer has stepped yet.
            is_first: there was no step in this process. What a job tries before that has no owner,
                and need not be zeroed.
            retains: its graph, for another backward.
        """
        if again and (is_first or self.failed or self._zeroed) and self._all_gone():
            self._guard.run(self._part, self._discards.add_discarded_gradients)
            self._plan.run("forget")
            self._scaling.forget()
        self.failed, self._retained = False, retains
        if self._zeroed:
            self._zeroed = set()

    def _all_gone(self) -> bool:
        if self._retained and not self._batches.has_inputs:
            return False  # another loss of the same forward
        return not self._registry.has_uncleared_gradients(self._zeroed)


STEPS = 3  # of another thread, since the newest of the one that is watched
WAITING_NS, STILL_NS = 1_000_000_000, 10_000_000_000  # well below the time that makes a hang
USUAL = 8  # times the usual time between two steps of the thread that is watched


class TrainingThread:
    """The threads of one process, as far as they train.

    One thread is watched at a time, and all others run free: numbers of two trainings are never
    mixed. The one that is watched stays while it gives any sign of life. It is followed by another
    that steps an optimizer when it has ended, or when it has been still for long and the other
    made several steps meanwhile. A thread that waits for another is believed sooner:
    `Thread.join`, `Future.result`.

    What is not seen: the steps of the new thread until then. The first is seen from its forward
    on; of threads that begin together, the first frames may hold the others' inputs: a hook that
    asked before anybody was watched can be interrupted right behind its question.
    """

    def __init__(
        self, context: ProbeContext, tracker: StepTracker, plan: Plan, batches: BatchObserver
    ) -> None:
        self._context, self._gate = context, context.gate
        self._tracker, self._plan, self._batches = tracker, plan, batches
        self._lock = threading.Lock()
        self._began = 0, 0  # when the one that is watched was first, and how many steps were before
        self._seen = 0, 0  # its steps
        self._others = 0  # steps of others since then
        self._announced = False

    def claim_rank(self) -> None:
        """The process becomes a rank in this thread, by a backward or a step."""
        if self._gate.thread is None:
            self._watch()

    def claim_first_step(self) -> bool:
        """Whether this thread is the first to step, and is watched from here on."""
        gate, guard, watched = self._gate, self._context.guard, self._gate.thread
        if self._tracker.entries or watched in (None, get_ident()) or not gate.on:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._tracker.entries or gate.thread != watched:
                return False
            self._watch()
            guard.run(guard.core, self._forget)
        finally:
            self._lock.release()
        return not gate.must_bypass()

    def _watch(self) -> None:
        self._gate.thread = get_ident()
        self._began = monotonic_ns(), self._tracker.entries

    def _forget(self) -> None:
        """What was seen since the last step is another thread's."""
        self._batches.observe_waiting()
        self._plan.run("forget")

    def on_step(self, optimizer: Any) -> None:
        """A step that is not looked at has just been made, perhaps in another thread."""
        gate, guard, watched = self._gate, self._context.guard, self._gate.thread
        if watched is None or get_ident() == watched or not gate.on:
            return
        position = self._tracker.entries, self._context.position.step
        if position != self._seen:
            self._seen, self._others = position, 0
        self._others += 1
        if not self._stopped(watched) or not self._lock.acquire(blocking=False):
            return
        try:
            if gate.thread == watched:  # else a third one was faster
                guard.run(guard.core, self._follow, optimizer)
        finally:
            self._lock.release()

    def _stopped(self, watched: int) -> bool:
        """Whether the thread that is watched trains no more, as far as that is known."""
        gate = self._gate
        frame = sys._current_frames().get(watched)
        if frame is None:
            return True
        if self._others < STEPS or gate.inside or gate.in_backward or gate.in_forward:
            return False
        waits = frame.f_globals is vars(threading)
        newest: int = self._context.reporter.writer.newest_heartbeat_ns()
        began, previous = self._began
        usual = (newest - began) // max(1, self._tracker.entries - previous)
        limit = max(WAITING_NS if waits else STILL_NS, USUAL * usual)
        return monotonic_ns() - newest > limit

    def _follow(self, optimizer: Any) -> None:
        """This thread is watched from now on; it stands right behind its step."""
        reporter = self._context.reporter
        self._watch()
        self._tracker.end_step_for_thread(optimizer)
        self._forget()
        reporter.beat("step")
        if not self._announced:
            self._announced = True
            name = threading.current_thread().name
            reporter.notice(
                "note", f"the thread {name!r} trains from now on; the one before stopped"
            )
