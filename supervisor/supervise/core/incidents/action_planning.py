"""What actions may know before they are begun, and whether a whole runbook can work here.

Pure questions about the state: nothing is decided, said or done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model.action import PlanContext, Refused
from ..model.checkpoint_registry import Checkpoint
from ..model.policy import Runbook
from ..state.incident import Incident
from ..state.run_state import State


def plan_context(
    state: State, incident: Incident, before: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know when its arguments are worked out; see `basic_context`."""
    attribution = state.context.attribution
    where = basic_context(state, incident, before, operator)
    return replace(where, suspects=attribution.suspects(), shards=attribution.shards)


def basic_context(
    state: State, incident: Incident, before: int | None = None, operator: str = ""
) -> PlanContext:
    """Return what an action may know but for shards, which take long to weigh.

    Args:
        before: the step that counts as the first breach; None: that of the incident.
        operator: who asked for the action; "": the policy did.
    """
    return PlanContext(
        incident=incident.id,
        step=state.step,
        breach_step=incident.breach_step if before is None else before,
        attempt=max(state.attempt, state.job.launched),  # also of a launch without a frame
        world_size=state.job.world_size,
        severity=incident.severity,
        unavailable=state.job.unavailable,
        good=state.checkpoints.good(),
        batches=incident.onset.batches,
        operator=operator,
    )


def refusal(
    state: State, incident: Incident, book: Runbook, before: int | None = None, operator: str = ""
) -> str:
    """Say why a step of the runbook cannot work here, "" when all can: asked before any is done."""
    return _refusal(plan_context(state, incident, before, operator), book)


def lacks_checkpoint(state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook that cannot work here could if there were an old good checkpoint."""
    where = plan_context(state, incident)
    if "portable" in where.unavailable:  # and none will ever come
        return False
    oldest = Checkpoint("", 0, 0, "", ok=True)
    return not _refusal(replace(where, good=(oldest, *where.good)), book)


def _refusal(where: PlanContext, book: Runbook) -> str:
    for verb, step in zip(book.verbs, book.steps, strict=True):
        try:
            step.plan(where)
        except Refused as refused:
            return f"{verb}: {refused}"
    return ""


def planned_steps(state: State, incident: Incident, book: Runbook) -> list[dict[str, Any]]:
    """Return `{"verb", "args"}` of every step that touches the job; all of them can be planned."""
    where = plan_context(state, incident)
    return [
        {"verb": verb, "args": step.plan(where)}
        for verb, step in zip(book.verbs, book.steps, strict=True)
        if step.touches_job
    ]
