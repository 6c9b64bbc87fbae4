"""Actions on saved states: save one now, restore an older one in process, or restart from one.

The restored state must be older than the cause, not merely than the alarm; hence `at_least`. A
relaunch reaches what a rollback in process cannot (several ranks, a process that has died, a state
that was not saved in memory), and costs what a start of the job costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, EffectCheck, Job, PlanContext, Refused
from ..core.model.checkpoint_registry import WEIGHTS_ONLY, choose_checkpoint
from ..core.model.payload import Continuity, Json, Outcome, Payload, RelaunchArgs, RollbackArgs
from ..core.model.values import Seconds, Steps
from ..errors import ActionError
from .rate_and_clips import explain_rewarm_mismatch, rewarm_due


@dataclass(frozen=True)
class Savepoint(Action):
    """Keep model, optimizer, scaler, RNG and loop variables in memory at the next step boundary.

    The policy's `savepoints` take them on a schedule; this takes one more, for instance before a
    planned change. It is held by the probe, not written to disk.

    Example:
        - savepoint

    Undo: none needed; the oldest one makes room.
    Source: a rollback in process takes a fraction of a second, a restart from a checkpoint
        minutes; the price is memory for the states kept.
    """

    changes_training: ClassVar[bool] = True  # of one rank alone it is a state that never was
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("savepoint", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("step"), int) or not answer.get("bytes"):
            raise ActionError(f"the probe saved no state: {answer}")
        return answer


@dataclass(frozen=True)
class Checkpoint(Action):
    """Write a checkpoint in the job's own format, at the end of the step under way.

    The layout is learned from a checkpoint that the job has saved itself by `torch.save`; the new
    one lies beside it as `NAME.supervise-STEP.pt` and can be resumed from like any other. Trainer
    and Lightning save it themselves. It is refused, with the reason, before the job's first own
    checkpoint, when an entry of it cannot be explained, when the job saves only after an epoch,
    with sharded state, and right behind a step that was not finite. With several ranks rank 0
    writes it, if the job's own are written by rank 0 alone. A notice says when it is there; the
    guard then verifies it as it does the job's own.

    Example:
        - checkpoint

    Undo: none needed; it overwrites nothing.
    Source: Gupta et al., Just-In-Time Checkpointing, EuroSys 2024: a checkpoint that is written
        when trouble shows loses a step where a periodic one loses half an interval.
    """

    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"path": None})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("checkpoint", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("step"), int) or not answer.get("how"):
            raise ActionError(f"the probe scheduled no checkpoint: {answer}")
        return answer


@dataclass(frozen=True)
class Rollback(Action):
    """Restore the newest savepoint at least `at_least` steps before the first breach, in process.

    Parameters, buffers, optimizer state and gradient scaler go back. The loop, its data, its
    schedule and its random numbers go on where they are, and so do the step numbers: the batches
    of before do not come again. The learning rate starts at `start` times what the job asks for and
    is back at 1.0 after `rewarm` steps; until then it is at most 1.5 times what it was at the
    savepoint. It is left as it is with `rewarm: 0`, and where it is not to blame: the run had it
    for 32 steps before, and did well.

    `moments: zero` sets the optimizer's first and second moments and its count of steps to zero
    afterwards, as if it had never made a step; an optimizer whose state cannot begin at zero
    (Rprop, L-BFGS) refuses. `moments: suspect` is for damaged moments: the probe saves the weights
    right before an update with moments that no optimizer left there, together with the moments of
    the savepoint before. That one need be older than the first breach only, if the probe batch has
    the loss with its weights that it had; where it cannot be asked, if the loss of the step of the
    first breach was in its band; else `at_least` counts as ever.

    Example:
        - rollback: {at_least: 10, start: 0.1, rewarm: 50}

    Undo: none. The steps since the savepoint stay on record; their progress is lost.
    Source: PaLM, arXiv:2204.02311, section 5.1: back to about 100 steps before the spike, without
        the batches around it. 10 steps are the scale of a small run with a savepoint every 25.
    """

    destructive: ClassVar[bool] = True
    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "rollback"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    at_least: Steps = 10
    start: float = 0.1
    rewarm: Steps = 50
    moments: Literal["restore", "zero", "suspect"] = "restore"

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if self.at_least < 0:
            wrong.append(("at_least", f"must not be negative, not {self.at_least}"))
        if not 0.0 < self.start <= 1.0:
            wrong.append(("start", f"must be above 0 and at most 1, not {self.start:g}"))
        if self.rewarm < 0:
            wrong.append(("rewarm", f"must not be negative, not {self.rewarm}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        if "rollback" in context.unavailable:
            raise Refused(context.unavailable["rollback"])
        before_step = context.breach_step - self.at_least
        if before_step < 1:
            raise Refused(
                f"the incident started at step {context.breach_step}, so no savepoint can be "
                f"{self.at_least} steps older"
            )
        rewarm = rewarm_due(context, self.start, self.rewarm)
        args = Payload({"before_step": before_step, "rewarm": rewarm})
        if self.moments == "zero":
            return args.extended(moments=self.moments)
        if self.moments == "suspect":
            args = args.extended(sign=context.breach_step)
            return args.extended(sound=True) if context.sound else args
        return args

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("rollback", args, key=key, deadline_s=self.deadline_s)
        order = args.parse(RollbackArgs)
        step, before_step = answer.get("step"), order.before_step
        if answer.get("older_moments") and order.sign is not None:
            before_step = order.sign
        if not isinstance(step, int) or step >= before_step:
            raise ActionError(
                f"the job is at step {step} after a rollback to before step {before_step}"
            )
        if not isinstance(answer.get("attempt"), int):
            raise ActionError("the probe did not say which attempt follows the rollback")
        return answer

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        outcome = check.result.parse(Outcome)
        if check.attempt != outcome.attempt or check.step <= (outcome.step or 0):
            return f"the job is at step {check.step} of attempt {check.attempt}"
        rewarm = check.args.parse(RollbackArgs).rewarm
        return explain_rewarm_mismatch(check.frame, rewarm, outcome.rate_limit)

    def tolerates(self, continuity: Continuity) -> bool:
        return False  # the probe batch has the loss that it had, or the weights are others


NEAR = 1  # frames of the beginning that may be missing: a first step that nobody could measure
SLOWEST_RELAUNCH = 20_000_000  # bytes per second, hashed, copied and hashed again; project default
LONGEST_IDLE_S = 300.0  # as in `stop`


@dataclass(frozen=True)
class Relaunch(Action):
    """Start the job again from the newest good checkpoint that is `at_least` steps older.

    Good is one that the guard verified and that was saved before the first breach; `at_least` is
    counted from there. One without an optimizer's state is taken if there is no other, unless
    `continuity` is `exact`. All ranks are stopped first: an interrupt at a step boundary, then
    TERM, then KILL. What they left and nobody had verified is verified now, for a minute at most,
    and the newest good one is chosen again, unless people approved that one. Newer checkpoints of
    the job's own are set aside, never deleted; those of other jobs are left alone. The job gets the
    arguments and the environment that the policy's `job.relaunch` gives, and a new attempt number.
    With `if_idle` a job that lives is watched for that long first, and left as it is when it works:
    CPU, bytes or a device in one of two windows, or a main thread that wakes or has moved.
    The learning rate starts at `start` times what the job asks for and is back at 1.0 after
    `rewarm` steps, with the exceptions of `rollback`. With `skip`, the updates of that many steps
    up to the first breach are dropped when they come again.

    The first step that is made again is compared with how it was. Unless `continuity` is `any`, the
    relaunch fails when the probe batch (see `job.probe_batch`) has another loss: then the weights
    are not the checkpoint's. Nor are they when its loss is far above the band that the run had
    there, with another batch twice as far: the job then counts as one that did not take the
    checkpoint, and what it saves as suspect. With `exact` it also fails when its rate, batch or
    loss is another. A job that says that it did not take the checkpoint always fails.

    Example:
        - relaunch: {at_least: 10, start: 0.1, rewarm: 50, skip: 20}

    Undo: none. What was set aside stays beside the checkpoints.
    Source: PaLM, arXiv:2204.02311, section 5.1: restarted about 100 steps before the spike and
        skipped 200 to 500 batches. 10 steps and 50 are those of `rollback`.
    """

    destructive: ClassVar[bool] = True
    ends_job: ClassVar[bool] = True
    budget: ClassVar[str | None] = "restart"
    deadline_s: ClassVar[float] = 600.0  # and a second for each SLOWEST bytes

    at_least: Steps = 10
    start: float = 0.1
    rewarm: Steps = 50
    skip: Steps = 0
    if_idle: Seconds = 0.0  # 0: in any case
    continuity: Literal["exact", "weights", "any"] = "weights"

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = [
            (name, f"must not be negative, not {value}")
            for name in ("at_least", "rewarm", "skip")
            if (value := getattr(self, name)) < 0
        ]
        if not 0.0 <= self.if_idle <= LONGEST_IDLE_S:
            longest = f"{LONGEST_IDLE_S:g}s"
            wrong.append(("if_idle", f"must be between 0s and {longest}, not {self.if_idle:g}s"))
        if not 0.0 < self.start <= 1.0:
            wrong.append(("start", f"must be above 0 and at most 1, not {self.start:g}"))
        return wrong

    def limit_s(self, args: Payload) -> float:
        order = args.parse(RelaunchArgs)
        return self.deadline_s + order.bytes / SLOWEST_RELAUNCH + order.if_idle_s

    def before(self, breach_step: int) -> int:
        """Return the step before which a checkpoint must have been saved."""
        return breach_step - self.at_least

    def plan(self, context: PlanContext) -> Payload:
        if "relaunch" in context.unavailable:
            raise Refused(context.unavailable["relaunch"])
        checkpoint = choose_checkpoint(context.good, self.before(context.breach_step))
        reason = ""
        if (
            checkpoint is not None
            and checkpoint.resumable == WEIGHTS_ONLY
            and self.continuity == "exact"
        ):
            reason, checkpoint = (
                f"; {checkpoint.id} holds weights only, so training cannot go on exactly",
                None,
            )
        if checkpoint is None:
            raise Refused(
                f"no good checkpoint from before step {self.before(context.breach_step)} "
                f"({len(context.good)} good in all){reason}"
            )
        first_skipped = max(checkpoint.step + 1, context.breach_step - self.skip + 1)
        args = Payload(
            {
                "checkpoint": checkpoint.id,
                "path": checkpoint.path,
                "step": checkpoint.step,
                "bytes": checkpoint.bytes,
                "attempt": context.attempt + 1,
                "rewarm": rewarm_due(context, self.start, self.rewarm),
                "skip": [[first_skipped, context.breach_step]] if self.skip else None,
            }
        )
        args = args.extended(if_idle_s=self.if_idle) if self.if_idle else args
        weights_only = checkpoint.resumable == WEIGHTS_ONLY
        return args.extended(resumable=WEIGHTS_ONLY) if weights_only else args

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.relaunch(args, key=key, deadline_s=self.limit_s(args))
        attempt = args.parse(RelaunchArgs).attempt
        if not isinstance(answer.get("pid"), int) or answer.get("attempt") != attempt:
            raise ActionError(f"the job was not restarted: {answer}")
        return answer

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        # Perhaps not what was ordered was put back.
        order, outcome = check.args.parse(RelaunchArgs), check.result.parse(Outcome)
        first_step = (order.step if outcome.step is None else outcome.step) + 1
        step, attempt = check.step, check.attempt
        if attempt != outcome.attempt or not first_step <= step <= first_step + NEAR:
            return f"the job is at step {step} of attempt {attempt}, not at step {first_step}"
        return explain_rewarm_mismatch(check.frame, order.rewarm)

    def tolerates(self, continuity: Continuity) -> bool:
        if self.continuity != "weights":
            return self.continuity == "any"
        batch, loss = continuity.probe_batch, continuity.loss
        if batch is not None and batch.verdict == "differs":
            return False
        limit, first_loss = continuity.limit, None if loss is None else loss.now
        return limit is None or first_loss is None or first_loss <= limit
