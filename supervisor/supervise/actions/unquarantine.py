"""Unquarantine: data may be trained on again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload


def quarantine_order(context: PlanContext, step: int, reason: str, **change: Json) -> Payload:
    """Return a change of the quarantine with what is on record about it."""
    return Payload(
        {
            **change,
            "step": step,
            "attempt": context.attempt,
            "incident": context.incident,
            "by": context.operator or "policy",
            "why": reason,
        }
    )


@dataclass(frozen=True)
class Unquarantine(Action):
    """Release what the incident brought into the quarantine, or the shards that are named.

    What has been passed over meanwhile does not come back; the next pass over the data has it
    again. With several ranks it counts from one step on, or from the next launch, as the
    quarantine itself.

    Example:
        - unquarantine: {shards: incident}

    Undo: none; `quarantine` puts it back.
    Source: a quarantine that did not help accused the wrong data; `undo` of that action.
    """

    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    shards: Literal["incident"] | tuple[str, ...] = "incident"

    def check(self) -> list[tuple[str, str]]:
        if not isinstance(self.shards, str) and (not self.shards or "" in self.shards):
            return [("shards", "must name at least one shard, none of them empty")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        named = None if isinstance(self.shards, str) else list(self.shards)
        release: Json = named or {"incident": context.incident}
        return quarantine_order(context, context.step, "released", release=release)

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        return job.quarantine(args, key=key, deadline_s=self.deadline_s)
