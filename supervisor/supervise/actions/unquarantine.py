"""Unquarantine: data may be trained on again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext


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

    def plan(self, context: PlanContext) -> dict[str, Any]:
        named = None if isinstance(self.shards, str) else list(self.shards)
        return {
            "release": named or {"incident": context.incident},
            "step": context.step,
            "attempt": context.attempt,
            "incident": context.incident,
            "by": context.operator or "policy",
            "why": "released",
        }

    def perform(self, job: Job, args: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        return job.quarantine(args, key=key, deadline_s=self.deadline_s)
