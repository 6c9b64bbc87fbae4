"""Profile: a trace of the next steps, as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Steps
from ..errors import ActionError

LONGEST = 20


@dataclass(frozen=True)
class Profile(Action):
    """Trace the next `steps` steps with torch.profiler, on every rank.

    Each rank writes `incidents/<id>/profile-<step>-rank-<n>.json` in the run directory when the
    steps are over, for https://ui.perfetto.dev or chrome://tracing, and a notice says so. No number
    changes, but the steps are slower, and writing holds the job for a moment. It is refused while
    the job runs a profiler of its own, and ends when the job starts one.

    Example:
        - profile: {steps: 5}

    Undo: none needed; it ends by itself.
    Source: torch.profiler.profile, export_chrome_trace. At most 20 steps: a trace grows by
        megabytes with each step of a large model.
    """

    touches_job: ClassVar[bool] = False  # evidence
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    steps: Steps = 5

    def check(self) -> list[tuple[str, str]]:
        if not 1 <= self.steps <= LONGEST:
            return [("steps", f"must be between 1 and {LONGEST}, not {self.steps}")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"incident": context.incident, "steps": self.steps})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("profile", args, key=key, deadline_s=self.deadline_s)
        if not isinstance(answer.get("path"), str):
            raise ActionError(f"the probe did not say where it writes the trace: {answer}")
        return answer
