"""Learning-rate scale: train more gently for a while, whatever the job's scheduler does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Payload, RateArgs
from ..core.model.values import Steps
from ..errors import ActionError
from ._rate import scale_shows


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
