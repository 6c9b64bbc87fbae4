"""What people say to a request, or do not: approve, deny, silence."""

from __future__ import annotations

from ..incidents import approvals, closing
from ..model.action import Refused
from ..model.approval_request import Pending
from ..model.events import OperatorCommand
from ..runbooks import runner
from ..state.approval_log import ApprovalLog
from ..state.incident import Incident
from ..state.run_state import State, StepContext
from .operator_actions import Answer


def approve(turn: StepContext, event: OperatorCommand) -> Answer:
    """Let what was asked for run, when it is still what was asked for.

    `event.args`: `id` of the request, and perhaps `sha`, which must be the one that was told.
    """
    pending, incident = _request(turn.state, event)
    if pending is None or incident is None:
        return _late(turn.state.approvals, event, "approved")
    if pending.granted:
        return Answer(f"{pending.id} was approved by {pending.granted} already")
    stale = approvals.stale(turn.policy, turn.state, incident, pending)
    if stale:
        text = f"{pending.id} is void: {stale}; what is wanted now is asked for anew"
        return Answer(text, ok=False, then=lambda: again(turn, stale))

    def then() -> None:
        pending.granted = event.operator
        runner.start_waiting(turn)

    return Answer(f"{pending.id} is approved: {pending.runbook} runs", then=then)


def deny(turn: StepContext, event: OperatorCommand) -> Answer:
    """Do not let it run; the incident is held, as a person has taken it over."""
    pending, incident = _request(turn.state, event)
    if pending is None or incident is None:
        return _late(turn.state.approvals, event, "denied")
    if pending.granted:
        raise Refused(f"too late: {pending.id} was approved by {pending.granted}")
    text = f"{pending.id} is denied: {pending.runbook} does not run, {incident.id} is held"
    return Answer(text, then=lambda: _denied(turn, incident, f"by {event.operator}"))


def unanswered(turn: StepContext) -> None:
    """Decide a request that nobody answered in time as the policy says."""
    state, incident, pending = turn.state, turn.state.incident, turn.state.approvals.pending
    if pending is None or incident is None or pending.granted:
        return
    if state.at_ns < pending.deadline_ns:
        return
    if pending.on_timeout == approvals.ALLOW:
        pending.granted = "silence: nobody answered in time"
        runner.start_waiting(turn)
    else:
        _denied(turn, incident, "nobody answered in time")


def again(turn: StepContext, why: str) -> None:
    """The request that waits is void; what its runbook wants by now is begun, or asked, anew."""
    incident, pending = turn.state.incident, approvals.settle(turn, "expired", why)
    if incident is None or pending is None or pending.runbook not in turn.policy.runbooks:
        return
    incident.deferred.anew = pending.runbook, pending.rung, pending.why, pending.climbed
    runner.start_waiting(turn)  # at once, or when the evidence of the first request is taken


def _request(state: State, event: OperatorCommand) -> tuple[Pending | None, Incident | None]:
    """Return the request that is meant, and its incident; None when it does not wait."""
    pending = state.approvals.pending
    if pending is None or event.args.get("id") != pending.id:
        return None, None
    sha = str(event.args.get("sha") or "")
    if sha and not pending.sha.removeprefix("sha256:").startswith(sha.removeprefix("sha256:")):
        raise Refused(f"{pending.id} is about other arguments: {pending.sha}")
    return pending, state.incident


def _late(requests: ApprovalLog, event: OperatorCommand, what: str) -> Answer:
    text, well = approvals.late(requests, str(event.args.get("id")), what)
    return Answer(text, ok=well)


def _denied(turn: StepContext, incident: Incident, why: str) -> None:
    pending = approvals.settle(turn, "denied", why)
    if pending is not None:
        closing.hold(turn, incident, f"{pending.runbook} was denied: {why}")
