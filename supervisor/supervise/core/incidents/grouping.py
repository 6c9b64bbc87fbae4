"""A rule that fires opens an incident, or joins the open one; what is new about it is told.

A rule of a pack that has no other one in the incident tells of another kind of trouble, however
severe. Where nothing so far spoke against the weights and it does, the incident begins with it: a
slow host, which may have been there for long, says nothing about what came later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detection.rank_monitor import RankMonitor
from ..model.policy import Rule
from ..state import rule_scope
from ..state.incident import HELD, OPEN, Incident, first_breach
from ..state.run_state import StepContext
from . import data_suspicion, opening


def group(
    ctx: StepContext,
    monitor: RankMonitor,
    rule: Rule,
    numbers: Mapping[str, Mapping[str, Any]],
    text: str,
    *,
    told: bool = False,
) -> bool:
    """Open an incident for a rule, or let the rule join the open one.

    Args:
        told: people hear of a worse rule in the same event.

    Returns:
        Whether people are told of this one.
    """
    state, incident = ctx.state, ctx.state.incident
    breach = first_breach(numbers, monitor.step)
    if incident is None:
        incident = opening.open_incident(
            ctx, monitor, rule.severity, text, breach=breach, rule=rule.id, see=rule.see
        )
        data_suspicion.record_onset(ctx, monitor, incident, rule, breach)
    elif not _joins(ctx, monitor, incident, rule, breach, text):
        return False
    if told or rule.id in state.rules.flapping:
        return False
    then = f"watching; read runbook {rule.see}" if rule.see else "watching"
    ctx.notify(
        rule.severity,
        f"{incident.id}: {rule.id} at step {state.step}",
        verdict=text,
        why=f"when: {rule.text}",
        then=then,
    )
    return True


def _joins(
    ctx: StepContext, monitor: RankMonitor, incident: Incident, rule: Rule, breach: int, text: str
) -> bool:
    """Let a rule join the open incident; return whether that is news to people."""
    policy, idle = ctx.policy, incident.run is None
    news = rule_scope.new_kind(incident, rule)
    begins = idle and incident.phase == OPEN and not rule_scope.of_machine(policy, rule)
    begins = begins and not rule_scope.against_weights(policy, incident)
    raised = incident.join(rule.id, rule.severity)
    # What was advisory until now may be much older than the trouble.
    moved = begins or (raised and idle)
    if moved:
        incident.breach_step = breach
    if moved or raised:
        incident.headline = text
    if moved:
        opening.record_baseline(policy, ctx.state, monitor, incident)
    data_suspicion.on_rule_joined(ctx, monitor, incident, rule, breach, moved=moved)
    what, reason = "joined", f"{rule.id} joins"
    if raised:
        what, reason = "raised", f"raised to {rule.severity} by {rule.id}: {text}"
    since: dict[str, Any] = {"breach_step": incident.breach_step} if moved or raised else {}
    ctx.record(
        "incident",
        reason,
        rule=rule.id,
        severity=rule.severity,
        what=what,
        runbook=rule.see,
        **since,
    )
    return raised or news or (incident.phase == HELD and rule.severity != "SEV2")
