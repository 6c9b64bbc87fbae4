"""Hold rate: keep the learning rate where it was before it jumped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Outcome, Payload, RateArgs
from ..core.model.values import Steps
from ..errors import ActionError
from ._rate import hold_shows


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
