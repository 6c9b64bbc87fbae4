"""Asking a person before the job is touched, and what becomes of the question.

One request covers a whole runbook and is made before its first step, so that nothing is paused by
waiting: evidence is taken, the job goes on, and what ends by itself meanwhile is withdrawn. It is
bound to the verbs and arguments, to their sha256, and to the policy; when any of them is another
one by the time of the answer, the request is void and a new one is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from . import action_planning, advice, diagnosis, notices, reasons, withdrawal
from .incident import HELD, Incident, format_arguments, remedy_strength
from .model import formats, state_machine
from .model.decisions import SEVERITIES, ApprovalRequested, ApprovalSettled, PlannedStep
from .model.events import Notice
from .model.payload import Delivery
from .model.policy import ALL, Approval, Policy, Rule, Runbook
from .notices import Cause
from .run_state import ApprovalLog, ApprovalRequest, State, StepContext

DENY, ALLOW = "deny", "allow"
DELIVERED = "approval-delivered"  # notice: the request has reached people
LOOK_EVERY = 10  # frames between two looks at the loss while a request waits
UNDELIVERED_S = 3600.0  # after which the timeout begins all the same; project default


def required_approval(policy: Policy, incident: Incident, book: Runbook) -> Approval | None:
    """Return the terms on which a person must be asked about the runbook, None when nobody is.

    Terms of a verb come before those of the runbook, and these before those of `all`. Of several
    steps, silence means no if it does for any of them, and after the shortest time of those.
    """
    always = policy.mode == "approve" or incident.trigger.asks
    rank, terms_of_steps = SEVERITIES.index, []
    for verb, step in zip(book.verbs, book.steps, strict=True):
        names = (name for name in (verb, book.name, ALL) if name in policy.approvals)
        terms = next((policy.approvals[name] for name in names), Approval() if always else None)
        if not step.touches_job or terms is None:
            continue
        if always or not terms.unless or rank(incident.severity) > rank(terms.unless):
            terms_of_steps.append(terms)
    denying = [terms for terms in terms_of_steps if terms.on_timeout == DENY]
    if denying:
        return min(denying, key=lambda terms: terms.timeout_s)
    return max(terms_of_steps, key=lambda terms: terms.timeout_s, default=None)


def request_approval(
    ctx: StepContext,
    incident: Incident,
    book: Runbook,
    terms: Approval,
    level: int,
    reason: Cause,
    *,
    escalated: bool,
) -> None:
    """Ask people about a runbook; an older request of the incident is void."""
    state, requests = ctx.state, ctx.state.approvals
    settle_request(ctx, "expired", reasons.ReplacedBy(runbook=book.name))
    plan = action_planning.planned_steps(state, incident, book)
    requests.request_count += 1
    pending = requests.pending = ApprovalRequest(
        f"ask-{requests.request_count}",
        incident.id,
        book.name,
        level,
        reason,
        escalated,
        incident.severity,
        plan,
        approval_digest(plan),
        ctx.policy.digest,
        state.at_ns,
        terms.timeout_s,
        state.at_ns + int((UNDELIVERED_S + terms.timeout_s) * 1e9),
        terms.on_timeout,
    )
    steps = ", ".join(f"{step.verb} {format_arguments(step.args)}".rstrip() for step in plan)
    ctx.record(
        ApprovalRequested(
            reason=f"{pending.id}: approval requested for {book.name}: {steps}",
            severity=incident.severity,
            id=pending.id,
            verb=" ".join(step.verb for step in plan),
            args=plan,
            args_sha256=pending.sha,
            policy=pending.policy,
            runbook=book.name,
            deadline_ns=pending.deadline_ns,
            timeout_s=terms.timeout_s,
            on_timeout=terms.on_timeout,
        )
    )
    if incident.phase != HELD:
        incident.reopen()
    ctx.move("ask", f"{pending.id}: {book.name} waits for approval")
    _ask(ctx, incident, pending, terms)


def _ask(ctx: StepContext, incident: Incident, pending: ApprovalRequest, terms: Approval) -> None:
    """Put the request to people, with the command that answers it."""
    asked = notices.ApprovalAsked(
        severity=incident.severity,
        incident=incident.id,
        runbook=pending.runbook,
        cause=str(pending.reason),
        plan=formats.format_plan((step.verb, step.args) for step in pending.plan),
        request=pending.id,
        timeout_s=terms.timeout_s,
        on_timeout=terms.on_timeout,
        status=withdrawal.describe_job_status(ctx.policy, ctx.state),
    )
    ctx.send(asked, replace=True)


def report_unneeded(ctx: StepContext, incident: Incident, pending: ApprovalRequest) -> None:
    """Say once that the loss came back while people are asked: nothing urges them any more."""
    if pending.unneeded or pending.granted or ctx.state.frame_count % LOOK_EVERY:
        return
    verdict = diagnosis.classify_incident(ctx.policy, ctx.state, incident)
    if verdict is None or not advice.is_request_unneeded(incident, verdict):
        return
    pending.unneeded = True
    unneeded = notices.ApprovalUnneeded(
        severity=incident.severity,
        incident=incident.id,
        runbook=pending.runbook,
        request=pending.id,
        summary=diagnosis.verdict_summary(verdict),
        advice=advice.advise_on_request(ctx.state, incident, pending, verdict),
    )
    ctx.send(unneeded)


def start_answer_timeout(ctx: StepContext, event: Notice) -> None:
    """Let the time to answer begin: at the first delivery, at the latest after `UNDELIVERED_S`.

    A message that no channel delivers must not become an answer.
    """
    pending = ctx.state.approvals.pending
    if pending is None or pending.delivered or event.data.read(Delivery).id != pending.id:
        return
    pending.delivered = True
    since_ns = min(event.at_ns, pending.requested_ns + int(UNDELIVERED_S * 1e9))
    pending.deadline_ns = since_ns + int(pending.timeout_s * 1e9)


def approval_digest(plan: Sequence[PlannedStep]) -> str:
    """Return the digest that an approval is bound to."""
    steps = msgspec.to_builtins(plan, enc_hook=dict)
    text = json.dumps(steps, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def settle_request(
    ctx: StepContext, outcome: str, reason: Cause, operator: str = ""
) -> ApprovalRequest | None:
    """End the request that waits, if any: `approved`, `denied`, `expired`, or `withdrawn`."""
    requests = ctx.state.approvals
    pending = requests.pending
    if pending is None:
        return None
    requests.settle(pending, outcome, f"{outcome} at step {ctx.state.step}: {reason}")
    ctx.record(
        ApprovalSettled(
            reason=f"{pending.id} {outcome}: {reason}",
            what=outcome,
            id=pending.id,
            operator=operator,
            args_sha256=pending.sha,
            policy=pending.policy,
            runbook=pending.runbook,
        )
    )
    return pending


def explain_stale_request(
    policy: Policy, state: State, incident: Incident, pending: ApprovalRequest
) -> Cause | None:
    """Say why a request is not what people were asked any more, None when it still is."""
    book = policy.runbooks.get(pending.runbook)
    if book is None:
        return reasons.RunbookMissing(runbook=pending.runbook)
    refused = action_planning.explain_infeasible(state, incident, book)
    if refused:
        return reasons.NoLongerPossible(refusal=refused)
    if approval_digest(action_planning.planned_steps(state, incident, book)) != pending.sha:
        return reasons.Settled.CHANGED
    return None if policy.digest == pending.policy else reasons.Settled.RELOADED


class SettledAnswer(NamedTuple):
    """The answer to an operator about a request that is settled or unknown."""

    text: Cause
    is_harmless: bool


def explain_settled_request(
    requests: ApprovalLog, name: str, requested_outcome: str
) -> SettledAnswer:
    """Return the answer to a word about a request that does not wait.

    `requested_outcome`: what the word asks for, `approved` or `denied`; said again it is harmless.
    """
    settled, pending = requests.settled.get(name), requests.pending
    verb = "approve" if requested_outcome == "approved" else "deny"
    waiting, runbook = ("", "") if pending is None else (pending.id, pending.runbook)
    if settled is None:
        unknown = notices.RequestUnknown(request=name, verb=verb, waiting=waiting, runbook=runbook)
        return SettledAnswer(unknown, is_harmless=False)
    is_same = settled[0] == requested_outcome
    over = notices.RequestOver(
        request=name, verb=verb, waiting=waiting, runbook=runbook, end=settled[1], is_same=is_same
    )
    return SettledAnswer(over, is_same)


def keeps_pending_request(
    policy: Policy,
    state: State,
    incident: Incident,
    rule: Rule,
    wanted_runbook: str,
    *,
    aside: bool,
) -> bool:
    """Return whether the request that waits stands where a rule asks for runbook `wanted_runbook`.

    The same remedy is not asked for again, and a weaker one takes the place of none, however severe
    its rule. Else a runbook on no level of the ladder does, since it answers another trouble
    (`aside`), and so does one on a level where the rule is more severe, or as severe while what is
    asked for mends nothing.
    """
    pending = state.approvals.pending
    if pending is None or pending.incident != incident.id or state.machine == state_machine.HOLDING:
        return False
    if wanted_runbook == pending.runbook:
        return True
    books, rank = policy.runbooks, SEVERITIES.index
    severer = rank(pending.severity) - rank(rule.severity)
    stronger = 0
    if wanted_runbook in books and pending.runbook in books:
        stronger = remedy_strength(books[wanted_runbook]) - remedy_strength(books[pending.runbook])
    if stronger < 0:
        return True
    return not (aside or severer > 0 or (severer == 0 and stronger > 0))
