"""Resume: let a paused job go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job
from ..core.model.payload import Json, Payload
from ..errors import ActionError


@dataclass(frozen=True)
class Resume(Action):
    """Let the job go on from the step boundary where `pause` holds it.

    A resume that fails is the worst outcome of a runbook, since a paused job that nobody resumes
    burns its machines. So it is never refused beforehand, for any number of ranks.

    Example:
        - resume

    Undo: none; a later trouble pauses again.
    Source: the lease of `pause` is its twin: whoever may hold a job must also let it go.
    """

    deadline_s: ClassVar[float] = 30.0  # a paused job polls its mailbox, so the answer is quick

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("resume", args, key=key, deadline_s=self.deadline_s)
        if answer.get("resumed") is not True:
            raise ActionError(f"the job did not go on: {answer}", retryable=True)
        return answer
