"""Answers of people to a request: approve, deny, silence."""

from __future__ import annotations

from ..incidents import approvals, closing
from ..model.action import Refused
from ..model.events import OperatorCommand
from ..model.payload import CommandArgs
from ..runbooks import runner
from ..state.incident import Incident
from ..state.run_state import ApprovalLog, ApprovalRequest, State, StepContext
from .operator_actions import Answer


def approve(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Let what was asked for run, when it is still what was asked for.

    `event.args`: `id` of the request, and perhaps `sha`, which must be the one that was told.
    """
    pending, incident = _request(ctx.state, event)
    if pending is None or incident is None:
        return _late(ctx.state.approvals, event, "approved")
    if pending.granted:
        return Answer(f"{pending.id} was already approved by {pending.granted}")
    stale = approvals.stale_reason(ctx.policy, ctx.state, incident, pending)
    if stale:
        text = f"{pending.id} expired: {stale}; a new request is created"
        return Answer(text, ok=False, then=lambda: renew_request(ctx, stale))

    def then() -> None:
        pending.granted = event.operator
        runner.start_waiting(ctx)

    return Answer(f"{pending.id} approved: {pending.runbook} starts", then=then)


def deny(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Do not let it run; the incident is held, as a person has taken it over."""
    pending, incident = _request(ctx.state, event)
    if pending is None or incident is None:
        return _late(ctx.state.approvals, event, "denied")
    if pending.granted:
        raise Refused(f"too late: {pending.id} was approved by {pending.granted}")
    text = f"{pending.id} denied: {pending.runbook} does not run; automatic actions are off"
    return Answer(text, then=lambda: _denied(ctx, incident, event.operator))


def on_tick(ctx: StepContext) -> None:
    """Decide a request that no answer in time as the policy says."""
    state, incident, pending = ctx.state, ctx.state.incident, ctx.state.approvals.pending
    if pending is None or incident is None or pending.granted:
        return
    if state.at_ns < pending.deadline_ns:
        return
    if pending.on_timeout == approvals.ALLOW:
        pending.granted = "timeout: no answer in time"
        runner.start_waiting(ctx)
    else:
        _denied(ctx, incident)


def renew_request(ctx: StepContext, why: str) -> None:
    """The request that waits is void; what its runbook wants by now is begun, or asked, anew."""
    incident, pending = ctx.state.incident, approvals.settle(ctx, "expired", why)
    if incident is None or pending is None or pending.runbook not in ctx.policy.runbooks:
        return
    incident.deferred.retry = pending.runbook, pending.level, pending.why, pending.escalated
    runner.start_waiting(ctx)  # at once, or when the evidence of the first request is taken


def _request(
    state: State, event: OperatorCommand
) -> tuple[ApprovalRequest | None, Incident | None]:
    """Return the request that is meant, and its incident; None when it does not wait."""
    pending = state.approvals.pending
    args = event.args.parse(CommandArgs)
    if pending is None or args.id != pending.id:
        return None, None
    sha = str(args.sha or "")
    if sha and not pending.sha.removeprefix("sha256:").startswith(sha.removeprefix("sha256:")):
        raise Refused(f"{pending.id} has other arguments: {pending.sha}")
    return pending, state.incident


def _late(requests: ApprovalLog, event: OperatorCommand, what: str) -> Answer:
    text, well = approvals.late_answer(requests, str(event.args.parse(CommandArgs).id), what)
    return Answer(text, ok=well)


def _denied(ctx: StepContext, incident: Incident, operator: str = "") -> None:
    """An operator denies the request, or nobody has answered it in time."""
    pending = approvals.settle(ctx, "denied", f"by {operator}" if operator else "no answer in time")
    if pending is not None:
        reason = f"denied by {operator}" if operator else "no answer in time"
        closing.hold(ctx, incident, f"{pending.runbook} does not run: {pending.id}: {reason}")
