"""Raise sampling: look more often for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Steps
from ..errors import ActionError

Set = Literal["attention", "activations", "routing", "weights", "gradients"]


@dataclass(frozen=True)
class RaiseSampling(Action):
    """Sample attention, activations, routing, weights and gradients every `every` steps.

    For `for` steps; then each set goes back to its own interval by itself. `sets` names some of
    them, else all that are on. During an incident samples are twice as dense anyway; this is for
    when that is not enough, and its cost is accepted: no set is switched off for it.

    Example:
        - raise_sampling: {every: 5, for: 200}

    Undo: raise_sampling with lift.
    Source: project default. 5 is a tenth of the usual interval, and 200 steps outlast the
        verification of a runbook; on the example model it costs a few percent of a step.
    """

    touches_job: ClassVar[bool] = False  # it only looks
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    every: Steps = 5
    for_: Steps = 200
    sets: tuple[Set, ...] = ()
    lift: bool = False

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if self.every < 1:
            wrong.append(("every", f"must be at least 1 step, not {self.every}"))
        if not 1 <= self.for_ <= 10_000:
            wrong.append(("for", f"must be between 1 and 10000 steps, not {self.for_}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        return Payload({"every": self.every, "steps": self.for_, "sets": list(self.sets) or None})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("raise_sampling", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("sampling"), Mapping):
            raise ActionError(f"the probe did not say how often it samples now: {answer}")
        return answer

    def undo(self) -> Action | None:
        return None if self.lift else RaiseSampling(lift=True)
