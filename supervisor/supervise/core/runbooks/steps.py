"""One step of a runbook on its way to the job: its arguments, its budget, its intent on record."""

from __future__ import annotations

from typing import Any

from ..incidents import action_planning
from ..model.action import Action, Refused
from ..state.incident import Incident, brief, verb_of
from ..state.incident_history import IncidentHistory
from ..state.run_state import State, StepContext
from ..state.runbook_execution import Intent, RunbookExecution

OVERDUE_S = 30.0  # past an action's own deadline, its outcome is in doubt


def intend(
    turn: StepContext, incident: Incident, run: RunbookExecution, action: Action, verb: str
) -> str | None:
    """Intend a step, when it can work, is what was approved, and its budget allows it.

    Returns:
        Why not, one sentence; None when it was intended.
    """
    order = run.order
    try:
        args = action.aim(action_planning.aim(turn.state, incident, order.before, order.operator))
    except Refused as refusal:
        why = f"{verb} refused: {refusal}"
        turn.record("abort", why, what="refused", verb=verb)
        return why
    approved = run.terms.approved
    allowed = approved is None or {"verb": verb, "args": args} in approved
    if action.touches_job and not allowed:
        why = f"{verb} {brief(args)}".rstrip() + " is not what was approved"
        turn.record("abort", why, what="refused", verb=verb)
        run.failure.exhausted = True
        return why
    spent = _spent(turn, run, action, verb)
    if spent is None:
        _intend(turn, incident, run, action, verb, f"{run.index}-{verb}", args)
    return spent


def awaited(state: State) -> Action:
    """Return the action that the newest intent asked for."""
    run = state.run()
    assert run is not None
    intent = run.intent
    assert intent.waiting_for is not None
    assert intent.action is not None
    return intent.action


def helped(history: IncidentHistory, incident: Incident) -> None:
    """What ran was verified. Where it stood in for another, its own rung is the one that was tried:

    what was refused there may be asked again within the cooldown.
    """
    run = incident.run
    if run is None:
        return
    history.tried[run.runbook.name] = True
    for rule in incident.rules if run.terms.instead else ():
        if rule in history.cooldown:
            history.cooldown[rule] = history.cooldown[rule][0], incident.escalation.rung


def take_back(
    turn: StepContext, incident: Incident, run: RunbookExecution, action: Action, label: str
) -> None:
    """Intend to take something back; no budget and no approval stands in its way."""
    try:
        args = action.aim(action_planning.aim(turn.state, incident))
    except Refused:
        args = {}  # it is tried all the same: what it cannot do must be heard of
    verb = verb_of(action)
    _intend(turn, incident, run, action, verb, f"{label}-{verb}", args)


def _spent(turn: StepContext, run: RunbookExecution, action: Action, verb: str) -> str | None:
    """Count the intent in its budget; return why it may not be, None when it may."""
    state, kind = turn.state, action.budget
    if kind is None:
        return None
    spent = state.ledger.exhausted(turn.policy.budgets, kind, state.pace, state.at_ns)
    if spent is not None and not run.order.operator:
        name, budget, used = spent
        why = f"budget {name} is spent ({used} of {budget.max})"
        turn.record(
            "suppressed",
            f"{verb}: {why}",
            suppressed_by=f"budget:{name}",
            verb=verb,
            used=used,
            max=budget.max,
        )
        run.failure.exhausted = True
        return why
    if spent is not None:  # a person may, and it counts
        name, budget, used = spent
        turn.record(
            "override",
            f"{verb} by {run.order.operator}, although budget {name} is spent "
            f"({used} of {budget.max})",
            verb=verb,
            operator=run.order.operator,
            budget=name,
            used=used,
            max=budget.max,
        )
    state.ledger.spend(kind, state.pace, state.at_ns)
    return None


def _intend(
    turn: StepContext,
    incident: Incident,
    run: RunbookExecution,
    action: Action,
    verb: str,
    label: str,
    args: dict[str, Any],
) -> None:
    state, action_id = turn.state, f"{incident.id}/{run.number}/{label}"
    overdue_ns = state.at_ns + int((action.limit_s(args) + OVERDUE_S) * 1e9)
    run.intent = Intent(action_id, action, verb, args, overdue_ns)
    turn.record(
        "intent",
        f"{verb} {brief(args)}".rstrip(),
        severity=incident.severity,
        action={
            "id": action_id,
            "verb": verb,
            "runbook": run.runbook.name,
            "args": args,
            "destructive": action.destructive,
            "touches_job": action.touches_job,
        },
        budget=state.ledger.usage(turn.policy.budgets, state.pace, state.at_ns),
    )
    if verb == "pause":
        state.job.paused = True  # also when nobody knows what came of it
    if verb == "stop":
        state.job.stopping, state.job.stopped_by = True, run.order.operator or "policy"
