"""Rollback: restore the weights of before the trouble began, and go on more gently.

The savepoint must be older than the cause, not merely than the alarm; hence `at_least`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, EffectCheck, Job, PlanContext, Refused
from ..core.model.payload import Continuity, Json, Outcome, Payload, RollbackArgs
from ..core.model.values import Steps
from ..errors import ActionError
from ._rate import rewarm_due, rewarm_shows


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

    def check(self) -> list[tuple[str, str]]:
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

    def effect(self, check: EffectCheck) -> str | None:
        outcome = check.result.parse(Outcome)
        if check.attempt != outcome.attempt or check.step <= (outcome.step or 0):
            return f"the job is at step {check.step} of attempt {check.attempt}"
        rewarm = check.args.parse(RollbackArgs).rewarm
        return rewarm_shows(check.frame, rewarm, outcome.rate_limit)

    def tolerates(self, continuity: Continuity) -> bool:
        return False  # the probe batch has the loss that it had, or the weights are others
