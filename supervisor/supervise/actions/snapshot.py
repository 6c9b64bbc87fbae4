"""Snapshot: take the evidence before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..errors import ActionError


@dataclass(frozen=True)
class Snapshot(Action):
    """Write the evidence bundle of the incident into the run directory.

    The bundle holds the metric window, the last batches' fingerprints, the shards of the steps up
    to the breach, stacks of all threads, log tails, environment (secrets replaced), git state, host
    facts and RNG state. It works on a hung job too, with what can be had from outside, and says
    what is missing. It is not model state: that is a savepoint.

    Example:
        - snapshot

    Undo: none needed; it touches nothing.
    Source: Robusta runs its enrichers before its actions: evidence first, always.
    """

    touches_job: ClassVar[bool] = False
    deadline_s: ClassVar[float] = 60.0

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"incident": context.incident})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.snapshot(str(args["incident"]), key=key, deadline_s=self.deadline_s)
        if not answer.get("bytes") or not answer.get("sha256"):
            raise ActionError(f"the evidence bundle is empty: {answer}", retryable=True)
        return answer
