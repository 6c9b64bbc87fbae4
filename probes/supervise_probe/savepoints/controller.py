"""Schedule of savepoints, and the probe's own part of a rollback.

The probe's own counters of applied updates travel inside the savepoint; those of the data go on
with the loop. `SavepointManager` does the work.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from ..context import Refused
from ..runtime import files
from ..torch_state.learning_rate import LATE
from .training_state import ForeignEngine, StateWatch

if TYPE_CHECKING:
    from ..collectors import Collectors
    from ..context import ProbeContext
    from ..ipc.publisher import Publisher
    from ..safeguards.around_step import Safeguards
    from ..torch_state.learning_rate import LearningRate, Levels
    from ..torch_state.records import Optimizers, Update
    from .reference_batch import ReferenceBatch
    from .step_history import StepHistory

NAME = "savepoints-next."  # before attempt of the launch and training; beside the segments
LEAST_APART = 4  # steps: time for the other ranks to read it
UNKNOWN = -1


class SavepointSchedule:
    """The schedule as one rank sees it; ask it once at each boundary.

    Args:
        directory: that all ranks share. attempt: of the launch. training: its number there.
        leads: whether this rank decides. every: steps between two, at least.
        failed: told why the others cannot be told.
    """

    def __init__(
        self,
        directory: str,
        attempt: int,
        training: int,
        leads: bool,
        every: int,
        failed: Callable[[str], None],
    ) -> None:
        self._path = os.path.join(directory, f"{NAME}{attempt}.{training}")
        self._leads, self._every = leads, max(LEAST_APART, every)
        self._failed = failed
        self._next = UNKNOWN
        self._newest = (0, 0)  # step and time of the one before
        self._step_ns = 0

    def is_now(self, step: int) -> bool:
        """Whether all ranks are to save behind `step`: 15 us where that is to be read, else 0.1."""
        if self._next < step:
            self._next = self._decide(step + self._every) if self._leads else self._read(step)
        return self._next == step

    def record(self, step: int, now_ns: int, wait_ns: int) -> None:
        """One was, and by its cost none is to be taken for `wait_ns`."""
        previous, at_ns = self._newest
        self._newest = step, now_ns
        if at_ns and step > previous:
            self._step_ns = (now_ns - at_ns) // (step - previous)
        if self._leads:
            steps = -(-wait_ns // self._step_ns) if self._step_ns else 0
            self._next = self._decide(step + max(self._every, steps))

    def _decide(self, step: int) -> int:
        try:
            files.replace_file(self._path, b"%d" % step)
        except OSError as error:
            self._failed(f"the ranks take no savepoints together: {error}")
        return step

    def _read(self, step: int) -> int:
        try:
            return max(UNKNOWN, int(files.read_file(self._path)))
        except (OSError, ValueError):  # rank 0 has not decided yet
            return UNKNOWN


# Early ones are wanted before anything happens: so much of their time is free, 0.5 % of the first
# 20 s; nine of 11 ms, not one of 100 million parameters. Project default.
FREE_NS = 100_000_000


class TimeShare:
    """The waiting times of one process."""

    def __init__(self, share: float) -> None:
        """`share`: of the wall time that savepoints may take; 0: as much as they do."""
        self._share = share
        self._free_ns = FREE_NS
        self._newest_ns = -1  # none yet

    def wait_ns(self, cost_ns: int) -> int:
        """Return how long none is taken behind one of this cost, in ns.

        The cheaper one of the newest two counts: a single dear one was interrupted.
        """
        if not self._share or self._newest_ns < 0:
            self._newest_ns = 0
            return 0
        free, previous = min(self._free_ns, cost_ns), self._newest_ns
        self._free_ns -= free
        self._newest_ns = cost_ns - free
        return self.owed_ns(min(previous or self._newest_ns, self._newest_ns))

    def owed_ns(self, cost_ns: int) -> int:
        """Return the time of which this cost is the share, in ns."""
        return int(cost_ns / self._share) if self._share else 0


# State that starts at zero: Adam and variants, SGD, Muon, RMSprop, Adadelta, Adamax, Adafactor.
# Others (Rprop's step sizes, L-BFGS's history) do not start at zero.
STARTS_AT_ZERO = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta", "row_var", "col_var", "variance"),
    )
)

GOOD = 1.1  # times the loss that the probe batch had, for weights that are good; as `check_weights`

# Counters that go on with the loop: the data's and the schedule's.
OF_THE_LOOP = ("tokens_seen", "lr_phase.")


class RollbackParts(NamedTuple):
    """What a rollback needs beside the savepoints.

    Attributes:
        history: the newest steps.
        probe_batch: checks whether the restored weights are those that were saved.
        safeguards: forget what they have learned since.
        pace: a `Pace`: how often the moments are looked at.
        demand: measures an update and the next ones, however rarely that is done.
        training: how many trainings there were before in the process.
    """

    history: StepHistory
    probe_batch: ReferenceBatch
    safeguards: Safeguards
    pace: Any
    demand: Callable[[Update], None]
    training: int


class RollbackController:
    """The savepoints of one rank.

    Attributes:
        why_not: why no rollback is possible in this job, "" while it is.
    """

    def __init__(
        self,
        context: ProbeContext,
        collectors: Collectors,
        publisher: Publisher,
        rate: LearningRate,
        optimizers: Optimizers,
        parts: RollbackParts,
    ) -> None:
        self._torch, self._position = context.torch, context.position
        self._reporter, self._collectors = context.reporter, collectors
        self._publisher, self._rate, self._optimizers = publisher, rate, optimizers
        self._history, self._probe_batch = parts.history, parts.probe_batch
        self._safeguards, self._engine = parts.safeguards, ForeignEngine(context.registry)
        self._savepoints: Any = None
        self._joint: Optional[SavepointSchedule] = None  # of several ranks
        self._next, self._every = 0, 1
        self._jump_not_before_ns = 0
        self._watch = StateWatch(context.torch, context.scalars, optimizers, parts.pace)
        self._demand = parts.demand
        self._not_before_ns = 0  # the next savepoint, by what the newest ones cost
        self._deferred_reason = ""  # why no savepoint is taken for now, as reported
        self._unfinished: dict[int, dict[str, float]] = {}
        self._levels: dict[int, Levels] = {}  # by step of a savepoint: the rates of then
        self.why_not = ""
        config, ranks = context.config, self._position.world_size
        settings = config.savepoints
        if not settings:
            self.why_not = "no savepoints are kept"
            return
        from .manager import SavepointManager

        self._every = max(1, int(settings["every"]))
        self._time_share = TimeShare(float(settings.get("share", 0.0)))
        max_bytes = int(settings["max_bytes"])
        if ranks > 1:
            max_bytes //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))
            self._joint = SavepointSchedule(
                config.shm,
                config.attempt,
                parts.training,
                self._position.rank == 0,
                self._every,
                lambda reason: self._reporter.notice("note", reason),
            )
        self._savepoints = SavepointManager(
            context.torch,
            context.registry,
            int(settings["keep"]),
            max_bytes,
            settings.get("spill", os.path.dirname(config.marks)),
            settings.get("max_disk_bytes"),
        )

    def disable(self, reason: str) -> None:
        """Keep no savepoints from now on: no rollback can work in this job."""
        if self._savepoints is not None:
            self._savepoints = None
            self._reporter.notice("rollback-unavailable", f"no rollback is possible: {reason}")
        self.why_not = reason

    @property
    def steps(self) -> list[int]:
        """The steps to which a rollback can go."""
        return [] if self._savepoints is None else list(self._savepoints.steps)

    def is_savepoint_due(self) -> bool:
        """Whether a savepoint is due.

        None is taken after a step that was not finite, while an older one is being written, or as
        long as they would take more than their share of the time.
        """
        if self._savepoints is None:
            return False
        if self._joint is not None:
            if not self._joint.is_now(self._position.step - 1):
                return False
        elif self._position.step <= self._next or monotonic_ns() < self._not_before_ns:
            return False
        return self._history.finite and not self._savepoints.busy

    def take_due_savepoint(self) -> None:
        """Take the savepoint that is due."""
        reporter, position = self._reporter, self._position
        step = position.step - 1
        began, cpu = monotonic_ns(), thread_time_ns()
        try:
            self.save_training_state()
        except Refused as problem:
            if self._savepoints is None:
                reporter.notice("rollback-unavailable", f"no rollback is possible: {problem}")
            elif str(problem) != self._deferred_reason:
                self._deferred_reason = str(problem)
                reporter.notice("note", f"no savepoint is taken for now: {problem}")
        else:
            self._deferred_reason = ""
            for error in self._savepoints.disk_errors():
                reporter.notice("note", f"{error}; it is dropped when its memory is needed")
        self._next = self._next_multiple(step)
        now = monotonic_ns()
        position.held_ns += now - began
        wait_ns = self._time_share.wait_ns(thread_time_ns() - cpu)
        self._not_before_ns = now + wait_ns
        if self._joint is not None:
            self._joint.record(step, now, wait_ns)

    def save_before_rate_jump(self) -> None:
        """Save the weights before an update at a rate that has jumped.

        What a held rate costs are above all the steps since its savepoint. It is taken ahead of its
        time: the next one, of either kind, waits for as long again. While the jump may still be
        confirmed no other is taken.
        """
        savepoints, step = self._savepoints, self._position.step - 1
        if savepoints is None or step < 0 or not self._history.finite or savepoints.busy:
            return
        self._next = max(self._next, step + LATE)
        if step not in savepoints.steps:
            self._take_ahead(partial(self.save_training_state, within_step=True))

    @property
    def needs_moment_check(self) -> bool:
        """Whether `save_before_foreign_moments` is to be called."""
        return self._watch.on and self._watch.has_marks

    @property
    def needs_step_ends(self) -> bool:
        """Whether `step_ended` is to be called.

        From the first savepoint on, whose moments are the older ones. Replicas see the same moments
        in the same step; what only some ranks saved is never used.
        """
        return self._watch.on and bool(self._levels)

    def step_ended(self, elapsed_ns: Optional[int]) -> None:
        """All optimizers of a step have made their updates; it took so long, if that is known."""
        self._watch.step_ended(elapsed_ns)

    def save_before_foreign_moments(self, update: Update) -> None:
        """Save the weights before an update with moments that no optimizer left there.

        They may be damaged, and then those of the next savepoint are; with these weights go the
        moments of the savepoint before. It is taken ahead of its time. Damage shows in the size of
        this update, before the gradients of the next one.
        """
        position, savepoints = self._position, self._savepoints
        if not self._watch.changed_outside_optimizer(position.step):
            return
        self._demand(update)
        if not self._history.finite or savepoints.busy:
            return
        self._next = max(self._next, position.step - 1 + LATE)
        self._take_ahead(partial(self.save_training_state, within_step=True, older_moments=True))

    def _take_ahead(self, take: Callable[[], Any]) -> None:
        """Take a savepoint ahead of its time: the next one of either kind waits so much longer."""
        began, cpu = monotonic_ns(), thread_time_ns()
        if began < self._jump_not_before_ns:
            return
        with suppress(Refused):  # then there is an older one
            take()
        now = monotonic_ns()
        self._position.held_ns += now - began
        owed_ns = self._time_share.owed_ns(thread_time_ns() - cpu)
        self._not_before_ns = max(now, self._not_before_ns) + owed_ns
        self._jump_not_before_ns = self._not_before_ns

    def save_training_state(
        self, within_step: bool = False, older_moments: bool = False
    ) -> dict[str, Any]:
        """Save the state after the last step.

        Args:
            within_step: the next one has begun, but no weight has changed; the rates have, and
                those of the savepoint before count.
            older_moments: see `SavepointManager.save`.

        Raises:
            Refused: a rollback can never work in this job, and none is tried again; or the disk
                is busy with an older savepoint, or the retained one leaves no room.
        """
        reason = self._engine.explain_refusal()
        if reason:
            self._savepoints, self.why_not = None, reason
        if self._savepoints is None:
            raise Refused(self.why_not)
        from .manager import Busy, CannotRestore

        position = self._position
        step = position.step - 1
        state = self._collectors.save_state()
        self._probe_batch.add_value_to(state, self._savepoints.newest_weights)
        self._savepoints.retain_before(
            self._reporter.writer.savepoint_retention_bound(monotonic_ns())
        )
        try:
            savepoint: dict[str, Any] = self._savepoints.save(
                step, position.attempt, state, older_moments
            )
        except Busy as problem:
            raise Refused(str(problem)) from problem
        except CannotRestore as problem:
            self._savepoints, self.why_not = None, str(problem)
            raise Refused(str(problem)) from problem
        remaining = set(self.steps)
        newest = self._levels.get(max(self._levels, default=step), {})
        self._levels = {k: v for k, v in self._levels.items() if k in remaining}
        now = newest if within_step else self._rate.levels(self._optimizers.living())
        self._levels[step] = now
        if self._publisher.frames_waiting:  # this step's counts are still on a device
            self._unfinished = {k: v for k, v in self._unfinished.items() if k in remaining}
            self._unfinished[step] = state
        self._reporter.status_changed()
        return savepoint

    def complete_savepoint(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Complete the counts in the savepoint of `step`: its frame is complete."""
        self._history.remember(step, attempt, values)
        state = self._unfinished.pop(step, None)
        if state is not None:
            state.update(self._collectors.save_state())

    def do_savepoint(self, args: dict[str, Any]) -> dict[str, Any]:
        """The verb `savepoint`."""
        return self.save_training_state()

    def can_rollback(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `steps` to which one of several ranks can go back.

        `undo` are those with the weights of right before damaged moments were used, and that the
        probe batch found good; where it tells nothing, those that `args` calls `sound`.

        Raises:
            Refused: it can go nowhere.
        """
        if self._savepoints is None:
            raise Refused(self.why_not)
        before_step, sound = int(args["before_step"]), bool(args.get("sound"))
        undo = [
            step
            for step in self._savepoints.steps_with_older_moments
            if not self._probe_batch.explain_savepoint_doubt(step, before_step, GOOD, sound)
        ]
        return {"steps": self.steps, "undo": undo}

    def do_rollback(self, args: dict[str, Any]) -> dict[str, Any]:
        """The verb `rollback`.

        Args:
            args: `before_step`, `sign`, `sound`: see `roll_back`; or `to_step`, of a savepoint that
                all ranks have; `rewarm`: `{"start", "steps"}` or None; `moments`: "restore" or
                "zero".
        """
        rewarm, zero = args.get("rewarm"), args.get("moments") == "zero"
        from_step = self._position.step - 1
        if zero:
            _check_moments(self._optimizers.living())
        before_step, sign = int(args["before_step"]), int(args.get("sign", 0))
        if "to_step" in args:
            before_step, sign = int(args["to_step"]) + 1, 0
        result = self.roll_back(before_step, sign, bool(args.get("sound")))
        if result["step"] >= int(args["before_step"]):
            result["older_moments"] = True
        if zero:
            _zero_moments(self._torch, self._optimizers.living())
        if rewarm:
            levels = self._levels.get(result["step"], {})
            limit = self._rate.start_rewarm(float(rewarm["start"]), int(rewarm["steps"]), levels)
            if limit is not None:
                result["rate_limit"] = limit
        return {**result, "attempt": self._position.attempt, "from_step": from_step}

    def roll_back(self, before_step: int, sign: int = 0, sound: bool = False) -> dict[str, Any]:
        """Restore the newest savepoint before `before_step`; see `SavepointManager.restore`.

        One that only `sign` allows has the weights of right before damaged moments were used. Were
        they damaged as well? Unless the probe batch denies it, or `sound` where that tells nothing,
        it is an older one. The loop stands where it did, in a new attempt.

        Raises:
            Refused: there is none, or it cannot be restored here.
        """
        if self._savepoints is None:
            raise Refused(self.why_not)
        from .manager import CannotRestore

        try:
            restored, state = self._savepoints.restore(before_step, sign)
            doubt = partial(self._probe_batch.explain_weights_doubt, before_step, GOOD, sound)
            if "older_moments" in restored and doubt():
                restored, state = self._savepoints.restore(before_step)
        except CannotRestore as problem:
            raise Refused(str(problem)) from problem
        self._watch.forget()
        self._publisher.flush()
        step, position = int(restored["step"]), self._position
        self._reporter.notice(
            "weights-restored",
            f"the weights of step {step} are back; the loop goes on with step {position.step}",
            {"attempt": position.attempt + 1, "to": step},
        )
        of_weights = {k: v for k, v in state.items() if not k.startswith(OF_THE_LOOP)}
        self._collectors.rewind(of_weights)
        position.attempt += 1
        self._reporter.status_changed()
        self._history.stop_comparing()
        self._probe_batch.compare_after_rollback(state, step)
        self._safeguards.on_rollback(step)
        return dict(restored)

    def close(self) -> None:
        """Drop all savepoints; the process ends."""
        if self._savepoints is not None:
            self._savepoints.close()

    def become_inert(self) -> None:
        """This is the copy of a forked child, which uses it no more."""
        if self._savepoints is not None:
            self._savepoints.become_inert()

    def _next_multiple(self, step: int) -> int:
        return (step // self._every + 1) * self._every


def _check_moments(optimizers: list[Any]) -> None:
    """Raise Refused unless `_zero_moments` can reset all state."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            unknown = set(state) - STARTS_AT_ZERO if isinstance(state, dict) else {type(state)}
            if unknown:
                name = type(optimizer).__name__
                raise Refused(f"moments cannot be zeroed: {name} holds {sorted(map(str, unknown))}")


def _zero_moments(torch: Any, optimizers: list[Any]) -> None:
    """Set first and second moments and the count of steps to zero, in place."""
    with torch.no_grad():
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
                    elif value is not None:
                        state[key] = type(value)(0)
