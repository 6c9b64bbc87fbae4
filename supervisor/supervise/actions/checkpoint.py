"""Checkpoint: let the job's own format be written to disk now, not at its next turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..errors import ActionError


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
