"""Actions on the learning rate, and the check of a scaled rate in the first frame after one.

Three factors are multiplied: the one that `lr_scale` set, the re-warm after a rollback or a
relaunch, and what `hold_rate` leaves. Each is judged without the others, which the frame shows:
`lr_scale` is the product of all, `lr_rewarm` and `lr_hold` are two of them, absent without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Outcome, Payload, RateArgs, Rewarm
from ..core.model.values import Steps
from ..errors import ActionError

RAMP_STEPS = 5  # how far a ramp may have come in the first frame that shows it
TOLERANCE = 0.01

Metrics = Mapping[str, float | None]


def rewarm_due(context: PlanContext, start: float, steps: int) -> dict[str, float] | None:
    """Return the re-warm behind going back, None where the rate is not to blame."""
    due = steps and not context.rate_cleared
    return {"start": start, "steps": steps} if due else None


def scale_shows(frame: Metrics, scale: float, rewarm_steps: int) -> str | None:
    """Return None when the rate used is `scale` of what the re-warm leaves, else a sentence.

    With `rewarm_steps` it may be a few steps up its ramp already. A job without a rate is not
    judged.
    """
    return _shows(frame, scale, rewarm_steps, _rewarm(frame))


def rewarm_shows(frame: Metrics, rewarm: Rewarm | None, limit: float | None = None) -> str | None:
    """Return None when the rate used is at the beginning of `rewarm`, else a sentence.

    Without one, and in a job without a rate, there is nothing to be judged. `limit`: the ramp leads
    to this rate where the job asks for more, as after a rollback that did not take the loop back.
    """
    if rewarm is None:
        return None
    other_scale = (frame.get("lr_scale") or 1.0) / _rewarm(frame) / _hold(frame)
    return _shows(frame, rewarm.start, rewarm.steps, other_scale, limit)


def hold_shows(frame: Metrics, limit: float) -> str | None:
    """Return None when the rate used is at most `limit`, or back at what the job asks for."""
    used, scale = frame.get("learning_rate"), frame.get("lr_scale") or 1.0
    if used is None or used <= limit * scale / _hold(frame) * (1.0 + TOLERANCE):
        return None
    own_rate = (frame.get("learning_rate_scheduled") or 0.0) * scale
    if frame.get("lr_hold") == 1.0 and used <= own_rate * (1.0 + TOLERANCE):
        return None
    return f"the learning rate is {used:.3g}, not at most {limit:.3g}"


def _rewarm(frame: Metrics) -> float:
    return frame.get("lr_rewarm") or 1.0


def _hold(frame: Metrics) -> float:
    return frame.get("lr_hold") or 1.0


def _shows(
    frame: Metrics, scale: float, steps: int, other_scale: float, limit: float | None = None
) -> str | None:
    used, scheduled_rate = frame.get("learning_rate"), frame.get("learning_rate_scheduled")
    if used is None or not scheduled_rate:
        return None
    scheduled_rate *= _hold(frame)
    least, highest = (
        (scheduled_rate, scheduled_rate) if limit is None else (min(scheduled_rate, limit), limit)
    )
    highest *= scale + (1.0 - scale) * min(1.0, RAMP_STEPS / steps if steps else 0.0)
    if scale * least * (1.0 - TOLERANCE) <= used / other_scale <= highest * (1.0 + TOLERANCE):
        return None
    besides = "" if other_scale == 1.0 else f" times {other_scale:.3g}"
    return (
        f"the learning rate is {used / scheduled_rate:.3g} of the job's own, not {scale:g}{besides}"
    )


@dataclass(frozen=True)
class LrScale(Action):
    """Multiply the learning rate that the job asks for by `set`, for every parameter group.

    The multiplier is absolute: asking twice for 0.5 gives 0.5, not 0.25. It is put on before each
    optimizer step and taken off after it, so that it composes with any scheduler and with loops
    that write the rate themselves. With `rewarm` it rises back to 1.0 linearly over so many steps;
    with 0 it stays. A re-warm under way goes on beside it, and both are multiplied. A rollback and
    a relaunch leave it in force.

    Example:
        - lr_scale: {set: 0.5, rewarm: 200}

    Undo: lr_scale to 1.0.
    Source: LambdaLR overwrites an edited rate at its next step, StepLR carries the edit on for
        ever; hence a multiplier on, and off, each step. OPT-175B lowered its rate by hand after
        divergences (arXiv:2205.01068, section 2.5).
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "lr_scale"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    set: float
    rewarm: Steps = 0

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.set <= 1.0:
            wrong.append(("set", f"must be above 0 and at most 1, not {self.set:g}"))
        if self.rewarm < 0:
            wrong.append(("rewarm", f"must not be negative, not {self.rewarm}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"value": self.set, "rewarm_steps": self.rewarm})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("lr_scale", args, key=key, deadline_s=self.deadline_s)
        scale, requested = answer.get("lr_scale"), args.parse(RateArgs).value
        if not isinstance(scale, int | float) or not math.isclose(scale, requested, rel_tol=1e-9):
            raise ActionError(
                f"asked for a learning rate scale of {requested:g}, the job has {scale}"
            )
        return answer

    def effect(self, check: EffectCheck) -> str | None:
        order = check.args.parse(RateArgs)
        return scale_shows(check.frame, order.value, order.rewarm_steps)

    def undo(self) -> Action | None:
        return None if self.set == 1.0 else LrScale(set=1.0)


@dataclass(frozen=True)
class HoldRate(Action):
    """Let no parameter group have more than `within` times its last healthy learning rate.

    That is the rate before the first breach, and what it became since without a jump to more than
    1.5 times. It is constant: how far the schedule has moved on below the jump is not known. It
    binds only while the job asks for more, and composes with any scheduler, as `lr_scale`, which is
    put on after it. It is over when the job has asked for no more in `release` steps in a row (0:
    never), a rate counting as back that falls to what a linear warm-up may have come to meanwhile;
    or by `supervise lr RUN 1.0`. A rollback and a relaunch leave it in force. It is the one command
    that does not wait for the next boundary: it works in the update that is about to be made.

    With `tested` it is the remedy for a rate that was tested as the cause of the trouble, and left
    out where it was not. The level is then the rate that 128 steps of before had at least, with
    good weights; where the trouble came back behind a rollback at the same rate, half of that. The
    groups keep their proportions. A schedule that decays passes under it, and ends it so.

    Refused where the host knows no rate of before: in the first step, and where they are tensors on
    a device. A group that is thawed, so had none, is left alone. With a captured step nothing that
    the host sets is used.

    Example:
        - hold_rate: {within: 1.0, release: 64}

    Undo: hold_rate with lift; what is tried next does not take it back.
    Source: our runs of 13 programs (benchmarks/proving/live.md): one step behind a rate times
        thirty it loses a half to a ninth of what it loses three steps behind it. What the update
        at the jump did stays: hence the rollback in the runbook. 64: as the rate guard's steps
        until a rate is the usual one; project default.
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "lr_scale"
    deadline_s: ClassVar[float] = 120.0  # the next update may lie behind an evaluation

    within: float = 1.0
    release: Steps = 64
    tested: bool = False
    lift: bool = False

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.within < math.inf:
            wrong.append(("within", f"must be above 0, not {self.within:g}"))
        if self.release < 0:
            wrong.append(("release", f"must not be negative, not {self.release}"))
        return wrong

    def is_due(self, context: PlanContext) -> bool:
        return not self.tested or (
            context.rate_limit is not None and "fence" not in context.unavailable
        )

    @property
    def budget_class(self) -> str | None:
        return None if self.tested else self.budget  # it is a part of what goes back, which counts

    @property
    def is_dispensable(self) -> bool:
        return self.tested

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        args = Payload({"before_step": context.breach_step, "release": self.release})
        if not self.tested:
            return args.extended(within=self.within)
        return args.extended(limit=context.rate_limit, harmful=context.rate)

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("hold_rate", args, key=key, deadline_s=self.deadline_s)
        groups = answer.get("groups")
        if not isinstance(groups, int) or (groups > 0) is (args.get("lift") is True):
            raise ActionError(f"the rate of {groups} parameter groups is held")
        return answer

    def effect(self, check: EffectCheck) -> str | None:
        lifted = check.args.parse(RateArgs).lift
        limit = None if lifted else check.result.read(Outcome).rate_limit
        return None if limit is None else hold_shows(check.frame, limit)

    def undo(self) -> Action | None:
        return None if self.lift else HoldRate(lift=True)
