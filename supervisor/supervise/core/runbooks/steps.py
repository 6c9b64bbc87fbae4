"""One step of a runbook on its way to the job: its arguments, its budget, its intent on record."""

from __future__ import annotations

from ..incidents import action_planning
from ..model.action import Action, Refused
from ..model.decisions import (
    ActionOrder,
    ActionPlanned,
    BudgetOverridden,
    PlannedStep,
    RunbookRefused,
    Suppressed,
)
from ..model.payload import NOTHING, Payload
from ..state.incident import Incident, brief, verb_of
from ..state.run_state import IncidentHistory, State, StepContext
from ..state.runbook_execution import Intent, RunbookExecution

OVERDUE_S = 30.0  # past an action's own deadline, its outcome is in doubt


def intend(
    ctx: StepContext, incident: Incident, run: RunbookExecution, action: Action, verb: str
) -> str | None:
    """Intend a step, when it can work, is what was approved, and its budget allows it.

    Returns:
        Why not, one sentence; None when it was intended.
    """
    requested = run.requested
    try:
        args = action.plan(
            action_planning.plan_context(ctx.state, incident, requested.before, requested.operator)
        )
    except Refused as refusal:
        why = f"{verb} refused: {refusal}"
        ctx.record(RunbookRefused(reason=why, verb=verb))
        return why
    approved = run.terms.approved
    allowed = approved is None or PlannedStep(verb, args) in approved
    if action.touches_job and not allowed:
        why = f"{verb} {brief(args)}".rstrip() + " is not what was approved"
        ctx.record(RunbookRefused(reason=why, verb=verb))
        run.failure.exhausted = True
        return why
    spent = _spend(ctx, run, action, verb)
    if spent is None:
        _intend(ctx, incident, run, action, verb, f"{run.index}-{verb}", args)
    return spent


def awaited_action(state: State) -> Action:
    """Return the action that the newest intent asked for."""
    run = state.run()
    assert run is not None
    intent = run.intent
    assert intent.action_id is not None
    assert intent.action is not None
    return intent.action


def record_success(history: IncidentHistory, incident: Incident) -> None:
    """Record that the runbook in progress was verified.

    A substitute counts as tried at its own level, so that the runbook that it replaced may be
    requested again within the cooldown.
    """
    run = incident.run
    if run is None:
        return
    history.tried[run.runbook.name] = True
    for rule in incident.rules if run.terms.substitute else ():
        if rule in history.cooldown:
            history.cooldown[rule] = history.cooldown[rule][0], incident.escalation.level


def undo(
    ctx: StepContext, incident: Incident, run: RunbookExecution, action: Action, label: str
) -> None:
    """Intend to take something back; no budget and no approval stands in its way."""
    try:
        args = action.plan(action_planning.plan_context(ctx.state, incident))
    except Refused:
        args = NOTHING  # it is tried all the same: what it cannot do must be heard of
    verb = verb_of(action)
    _intend(ctx, incident, run, action, verb, f"{label}-{verb}", args)


def _spend(ctx: StepContext, run: RunbookExecution, action: Action, verb: str) -> str | None:
    """Count the intent in its budget; return why it may not be, None when it may."""
    state, kind = ctx.state, action.budget_class
    if kind is None:
        return None
    spent = state.ledger.exhausted(ctx.policy.budgets, kind, state.frame_count, state.at_ns)
    if spent is not None and not run.requested.operator:
        name, budget, used = spent
        why = f"budget {name} is spent ({used} of {budget.max})"
        text, by = f"{verb}: {why}", f"budget:{name}"
        ctx.record(Suppressed(reason=text, suppressed_by=by, verb=verb, used=used, max=budget.max))
        run.failure.exhausted = True
        return why
    if spent is not None:  # a person may, and it counts
        name, budget, used = spent
        operator = run.requested.operator
        ctx.record(
            BudgetOverridden(
                reason=f"{verb} by {operator}, although budget {name} is spent "
                f"({used} of {budget.max})",
                verb=verb,
                operator=operator,
                budget=name,
                used=used,
                max=budget.max,
            )
        )
    state.ledger.spend(kind, state.frame_count, state.at_ns)
    return None


def _intend(
    ctx: StepContext,
    incident: Incident,
    run: RunbookExecution,
    action: Action,
    verb: str,
    label: str,
    args: Payload,
) -> None:
    state, action_id = ctx.state, f"{incident.id}/{run.number}/{label}"
    overdue_ns = state.at_ns + int((action.limit_s(args) + OVERDUE_S) * 1e9)
    run.intent = Intent(action_id, action, verb, args, overdue_ns)
    order = ActionOrder(
        id=action_id,
        verb=verb,
        runbook=run.runbook.name,
        args=args,
        destructive=action.destructive,
        touches_job=action.touches_job,
    )
    ctx.record(
        ActionPlanned(
            reason=f"{verb} {brief(args)}".rstrip(),
            severity=incident.severity,
            action=order,
            budget=state.ledger.usage(ctx.policy.budgets, state.frame_count, state.at_ns),
        )
    )
    if verb == "pause":
        state.job.paused = True  # also when nobody knows what came of it
    if verb == "stop":
        state.job.stopping, state.job.stopped_by = True, run.requested.operator or "policy"
