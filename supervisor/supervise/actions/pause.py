"""Pause: hold the job at a step boundary, alive, while something is found out or put right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Seconds
from ..errors import ActionError
from .resume import Resume


@dataclass(frozen=True)
class Pause(Action):
    """Pause training at the next step boundary; it continues by itself when the lease ends.

    The supervisor renews the pause while it lives, for `lease` in all. Without a renewal the job
    goes on by itself after 60 s, so that a supervisor that died or hangs strands no job. A runbook
    that is before its `resume` then fails.
    Signals are not used: a stopped process would trip the time-outs of its collectives.

    Example:
        - pause: {lease: 900s}

    Undo: resume.
    Source: 15 minutes are enough for a person to answer a page, and short beside a run of days.
    """

    changes_training: ClassVar[bool] = True  # one rank alone would leave the others in a collective
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    lease: Seconds = 900.0

    def check(self) -> list[tuple[str, str]]:
        if not 10.0 <= self.lease <= 86400.0:
            return [("lease", f"must be between 10s and 24h, not {self.lease:g}s")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"lease_s": self.lease})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("pause", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("paused_step"), int):
            raise ActionError(f"the probe answered pause without the step it holds at: {answer}")
        return answer

    def undo(self) -> Action | None:
        return Resume()
