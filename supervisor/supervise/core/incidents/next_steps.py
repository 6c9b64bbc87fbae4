"""Commands for a person who looks at an incident. RUN stands for the run directory.

Pure questions: nothing is decided, recorded or done.
"""

from __future__ import annotations

from ..model.action import Refused
from ..model.policy import Policy
from ..state import rule_scope
from ..state.incident import Incident
from ..state.run_state import State
from . import action_planning, withdrawal


def rollback(policy: Policy, state: State, incident: Incident) -> str:
    """Return the command that goes back to before an incident, "" where it would be refused."""
    form = policy.verbs.get("rollback")
    stuck = state.job.returncode is not None or withdrawal.is_stalled(policy, state)
    if form is None or stuck:
        return ""
    before = incident.breach_step
    try:
        ordered = form(**action_planning.OPERATOR_ROLLBACK)
        ordered.plan(action_planning.basic_context(state, incident, before, "operator"))
    except Refused:
        return ""
    return f"supervise rollback RUN --before {before}"


def by_hand(policy: Policy, state: State, incident: Incident) -> str:
    """Return the choices of a person while no action runs by itself."""
    if state.job.returncode is not None:
        return "start it again by hand; good checkpoints: supervise checkpoints RUN"
    ways = [rollback(policy, state, incident), "supervise stop RUN"]
    if state.job.paused:
        ways.insert(0, "supervise resume RUN")
    return "choose: " + " or ".join(filter(None, ways))


def in_hold(policy: Policy, state: State, incident: Incident) -> str:
    """Return the choices of a person in a hold; a rollback does not end it."""
    ways = by_hand(policy, state, incident)
    return f"{ways}; then: supervise release RUN (automatic actions on again)"


def of_machine(policy: Policy, state: State, incident: Incident) -> str:
    """Return what to check of an incident about the machine that lasts, "" for any other."""
    if rule_scope.against_weights(policy, incident):
        return ""
    firing = {*state.firing(policy)} & {*incident.rules}
    return read(next((rule.see for rule in policy.rules if rule.id in firing), ""))


def read(runbook: str) -> str:
    """Return the command that prints a runbook, as a clause; "" for none."""
    if not runbook:
        return ""
    return f"what to check: supervise policy show RUN/policy.yaml --runbook {runbook}"


def of_rate(state: State, incident: Incident) -> str:
    """Say that the learning rate goes on being held as the cause, "" where it is not."""
    limits, monitor = incident.recovery.rate_limits, state.monitors.get(incident.case.rank)
    if not limits or monitor is None or monitor.value("lr_hold") is None:
        return ""
    return (
        f"the learning rate stays at {limits[-1]:.3g} at most until the job asks for no more; to "
        "let it go: supervise lr RUN 1.0"
    )
