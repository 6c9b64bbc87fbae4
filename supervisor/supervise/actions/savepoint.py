"""Savepoint: keep the model's state now, to be able to come back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job
from ..core.model.payload import Json, Payload
from ..errors import ActionError


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
