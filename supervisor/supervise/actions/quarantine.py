"""Actions on the data: keep shards and batches out of the training, or release them again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.model.action import Action, Job, PlanContext, Refused
from ..core.model.payload import Json, Payload
from ..errors import ActionError


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

    def find_errors(self) -> list[tuple[str, str]]:
        if not isinstance(self.shards, str) and (not self.shards or "" in self.shards):
            return [("shards", "must name at least one shard, none of them empty")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        named = None if isinstance(self.shards, str) else list(self.shards)
        release: Json = named or {"incident": context.incident}
        return quarantine_order(context, context.step, "released", release=release)

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        return job.quarantine(args, key=key, deadline_s=self.deadline_s)


LARGEST_FRACTION = 0.5  # fraction of the shards
SHARDS_AT_ONCE = 64  # in one action; the list goes into the audit log


@dataclass(frozen=True)
class Quarantine(Action):
    """Put shards, or the batches of the steps around a breach, into the run's quarantine.

    `shards: suspects` are those that troubles keep beginning in: at least twice, and more often
    than chance allows over all shards seen (1 % for the run). One spike makes no suspect. A list
    names shards, as the job tells them. For a job that tells of no shards, `positions: breach`
    takes the batches of the six steps up to the breach by their fingerprint, and on to the newest
    step in breach that is known by then, 64 at most; when one of them is met again, after a
    rollback or in the next epoch, its update is dropped.

    An empty selection is an error, never "nothing to do" and never "all". So is a name in a job
    that tells of no shards, and one that would make the quarantine larger than `max_fraction` of
    the shards seen so far, which does not bind a person. It is kept in the run directory and
    obeyed by every later launch. With fewer than 50 shards 0.02 of them is less than one, and all
    are refused. With several ranks it works through the dataset's own list or
    `supervise_probe.is_quarantined` only, since a rank that passed over batches alone would leave
    the others waiting. All ranks take it up at the end of one step, a list for its next pass over
    the data; where one of them cannot, the result says why, and it waits for the next launch.

    Example:
        - quarantine: {shards: suspects, max_fraction: 0.02}

    Undo: unquarantine of what this incident brought in.
    Source: PaLM, arXiv:2204.02311, section 5.1: the batches of a spike did not spike from another
        checkpoint, so the data is the last to be blamed. Kubernetes MachineHealthCheck acts no more
        above `maxUnhealthy`; 2 % is ours.
    """

    destructive: ClassVar[bool] = True  # what is not trained on is not made up for
    budget: ClassVar[str | None] = "quarantine"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    shards: Literal["suspects", "none"] | tuple[str, ...] = "suspects"
    positions: Literal["none", "breach"] = "none"
    max_fraction: float = 0.02

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if self.shards == "none" and self.positions == "none":
            wrong.append(("shards", "selects nothing, and so does positions"))
        if not isinstance(self.shards, str):
            if not 1 <= len(self.shards) <= SHARDS_AT_ONCE:
                wrong.append(("shards", f"must name 1 to {SHARDS_AT_ONCE}, not {len(self.shards)}"))
            if "" in self.shards:
                wrong.append(("shards", "must not hold an empty name"))
        if not 0.0 < self.max_fraction <= LARGEST_FRACTION:
            wrong.append(
                ("max_fraction", f"must be above 0 and at most 0.5, not {self.max_fraction:g}")
            )
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        shards, limit = self._shards(context)
        entries: list[Json] = [{"kind": "shard", "name": name} for name in shards]
        if self.positions == "breach":
            entries += [{"kind": "batch", "name": str(batch)} for batch in _batches(context)]
        reason = "incidents keep starting in it" if self.shards == "suspects" else "by name"
        return quarantine_order(context, context.breach_step, reason, add=entries, most=limit)

    def _shards(self, context: PlanContext) -> tuple[tuple[str, ...], int | None]:
        """Return the names, and how many shards may be in quarantine at once."""
        if self.shards == "none":
            return (), None
        named = self.shards if isinstance(self.shards, tuple) else ()
        names = named or context.suspects
        if (
            not context.shards and not context.operator
        ):  # a person may name what the job only asks about
            by_hand = "; one that calls is_quarantined also reads a quarantine.json written by hand"
            raise Refused(
                f"the job does not report which shards its data is from{by_hand if named else ''}"
            )
        if not names:
            raise Refused(
                f"none of the {context.shards} shards seen is a suspect: incidents do not start in "
                "any of them more often than chance"
            )
        if (
            context.operator
        ):  # those seen so far are not all there are, and a person may know of more
            return names, None
        limit = math.floor(self.max_fraction * context.shards)
        limit_text = (
            f"max_fraction {self.max_fraction:.3g} of the {context.shards} shards seen so far"
        )
        if limit < 1:
            raise Refused(
                f"{limit_text} is less than one shard, so it allows none; {_least(context)}"
            )
        if len(names) > limit:
            raise Refused(f"{len(names)} shards are more than {limit_text}, which allows {limit}")
        return names, limit

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.quarantine(args, key=key, deadline_s=self.deadline_s)
        current, generation = answer.get("held"), answer["generation"]
        stale = (
            not isinstance(current, int) or not isinstance(generation, int) or current < generation
        )
        if stale:
            raise ActionError(
                f"the job holds generation {current} of the quarantine, not {generation}"
            )
        return answer

    def undo(self) -> Action | None:
        return Unquarantine()


def _least(context: PlanContext) -> str:
    """Say which fraction would allow one shard, in whole thousandths."""
    least = math.ceil(1000 / context.shards) / 1000
    if least > LARGEST_FRACTION:
        return "of so few none is ever allowed"
    return f"{least:g} is the smallest that allows one"


def _batches(context: PlanContext) -> tuple[int, ...]:
    if context.world_size > 1:
        raise Refused(
            f"{context.world_size} ranks read batches of their own; they cannot drop one update "
            "together"
        )
    if not context.batches:
        raise Refused("no batch of the steps up to the breach has a fingerprint")
    return context.batches
