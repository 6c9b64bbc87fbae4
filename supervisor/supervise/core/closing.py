"""End of an incident: closed, held for a person, or given up."""

from __future__ import annotations

from . import advice, approvals, diagnosis, notices, opening, withdrawal
from .incident import CLOSED, HELD, QUIET_STEPS, Incident, RunbookExecution
from .model.decisions import RECOVERED, Advice, IncidentClosed, IncidentHeld, RunbookRefused
from .model.payload import Outcome
from .model.policy import PAGE, STOP, Runbook
from .run_state import StepContext


def exhaust(ctx: StepContext, incident: Incident) -> str:
    """Nothing that is left can help: a SEV0 from now on; return what then becomes of the job."""
    state = ctx.state
    incident.severity, incident.escalation.exhausted = "SEV0", (state.frame_count, state.at_ns)
    give_up = ctx.policy.give_up
    if give_up == PAGE:
        return ""
    unless = "it recovers" if give_up == STOP else "its rules of SEV0 are clear"
    return f"; the job is stopped unless {unless} within {QUIET_STEPS} steps (give_up: {give_up})"


def hold(
    ctx: StepContext,
    incident: Incident,
    reason: str,
    *,
    exhausted: bool = False,
    remedies: bool = False,
) -> None:
    """Stop acting and wait for a person. The job itself is left as it is; an ended one is over.

    Args:
        exhausted: the trouble outlived the ladder; then the class says that no knob will fix it.
        remedies: a remedy was to help, and no other is left.
    """
    policy, state = ctx.policy, ctx.state
    approvals.settle(ctx, "withdrawn", f"{incident.id} is held")
    incident.phase, incident.run, incident.deferred.retry = HELD, None, None
    state.rules.reported.clear()  # what fires from now on is answered by nobody else
    state.rules.growing.clear()
    opening.invalidate_attempt(state, incident)
    if state.job.returncode is not None:
        state.job.no_restart_reason = reason
        return
    case = incident.case
    case.exhausted |= exhausted
    case.verdict = diagnosis.classify(policy, state, incident) if exhausted else case.verdict
    verdict, status = case.verdict, withdrawal.job_status(policy, state)
    then = exhaust(ctx, incident) if exhausted or remedies else ""
    ctx.move("hold", reason)
    ctx.record(IncidentHeld(reason=f"held: {reason}", severity=incident.severity, spike=verdict))
    held = notices.Held(
        severity=incident.severity if incident.severity != "SEV2" else "SEV1",
        incident=incident.id,
        cause=reason,
        summary=diagnosis.summary(verdict),
        status=status,
        advice=Advice(None, advice.in_hold(policy, state, incident) + then),
    )
    ctx.send(held, replace=True)


def hold_after_runbook(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """Hold as the last step of a runbook says, whatever became of the evidence before it."""
    if incident.phase == HELD and run.failure.reason is None:
        run.index += 1  # it ran in a hold: people know
        return
    reason = f"{run.runbook.name}: {incident.headline}"
    reason += f"; {run.failure.reason}" if run.failure.reason else ""
    hold(ctx, incident, reason, exhausted=run.terms.escalated)


def report_unactionable(
    ctx: StepContext,
    incident: Incident,
    book: Runbook,
    refusal: str,
    substitute: str = "",
    *,
    exhausted: bool,
) -> None:
    """Say that the runbook that is wanted cannot work here, and why.

    Args:
        exhausted: nor will it, and nothing else is left.
        substitute: the runbook that it stands in for, and why that cannot work, with "; ".
    """
    name, ended = book.name, ctx.state.job.returncode is not None
    then = exhaust(ctx, incident) if exhausted and is_remedy(book) and not ended else ""
    status = "" if ended else withdrawal.job_status(ctx.policy, ctx.state)
    ctx.record(RunbookRefused(reason=f"{name} cannot run: {refusal}", runbook=name))
    ctx.state.job.no_restart_reason = f"{name}: {refusal}"
    ways = advice.manual_steps(ctx.policy, ctx.state, incident)
    notice = notices.NothingPossible(
        severity=incident.severity if incident.severity != "SEV2" else "SEV1",
        incident=incident.id,
        headline=incident.headline,
        status=status,
        runbook=f"{substitute}{name}",
        refusal=refusal,
        advice=Advice(None, f"{ways}; all reasons: supervise why RUN {incident.id}{then}"),
    )
    ctx.send(notice, replace=True)


def note_ranks(
    ctx: StepContext,
    incident: Incident,
    run: RunbookExecution,
    outcome: Outcome,
    reason: str,
) -> None:
    """Take what an action that failed says of the ranks: that some differ, or never act at once."""
    if outcome.inconsistent:
        run.failure.ranks_differ = True
        _report_ranks_differ(ctx, incident, run.intent.verb, reason)
    unfenceable = outcome.unfenceable
    if isinstance(unfenceable, str) and unfenceable and "fence" not in ctx.state.job.unavailable:
        _report_unfenceable(ctx, unfenceable)


def _report_unfenceable(ctx: StepContext, reason: str) -> None:
    """No command that all ranks must carry out at one step is tried again in this launch."""
    ctx.state.job.unavailable["fence"] = f"the ranks cannot act at one step: {reason}"
    form = notices.RanksUnfenceable
    if ctx.policy.job.relaunch:
        form = notices.RanksUnfenceableRelaunch
    ctx.send(form(severity="SEV2", cause=reason))


def _report_ranks_differ(ctx: StepContext, incident: Incident, verb: str, reason: str) -> None:
    """Some ranks carried out an action and others did not: a SEV0, whatever it began with."""
    incident.severity, incident.headline = (
        "SEV0",
        f"{verb} was not carried out by all ranks: {reason}",
    )
    ctx.send(notices.RanksDiffer(severity="SEV0", incident=incident.id, headline=incident.headline))


def is_remedy(book: Runbook) -> bool:
    """Return whether a runbook changes the training, or starts it again."""
    return any(step.changes_training or step.ends_job for step in book.steps)


def close(
    ctx: StepContext,
    incident: Incident,
    reason: str,
    outcome: str,
    then: Advice | None = None,
    *,
    superseded_by: str = "",
) -> None:
    """Close an incident; a request that waits for it is withdrawn.

    Args:
        outcome: see `IncidentClosed`. then: what comes next, where more is known of it.
        superseded_by: the rule that begins another one, about something else.
    """
    approvals.settle(ctx, "withdrawn", f"{incident.id} is over")
    ctx.state.checkpoints.judge(incident.id, ctx.state.attempt if outcome == RECOVERED else None)
    acted = incident.escalation.runs > 0
    verdict = incident.case.verdict
    if not (incident.deferred.session_end or superseded_by):
        verdict = diagnosis.classify(ctx.policy, ctx.state, incident)
    incident.phase = CLOSED
    ctx.record(
        IncidentClosed(
            reason=f"closed: {reason}",
            severity=incident.severity,
            acted=acted,
            opened_step=incident.opened_step,
            breach_step=incident.breach_step,
            rules=tuple(incident.rules),
            spike=verdict,
            superseded_by=superseded_by,
            outcome=outcome,
        )
    )
    summary = ""
    if verdict is not None:
        diagnosis.remember_onset(ctx.state.context, incident.case)
        summary = diagnosis.summary(verdict)
    if then is None:
        then = advice.at_end(ctx.policy, ctx.state, incident, verdict)
    # Over by itself: no alarm; who heard of it hears of its end whatever its severity.
    is_notice = incident.severity == "SEV2" and not acted
    is_quiet = incident.is_order or superseded_by or is_notice
    severity = "INFO" if is_quiet else incident.severity
    closed = notices.Closed(
        severity=severity, incident=incident.id, outcome=reason, summary=summary, advice=then
    )
    ctx.send(closed)
    if acted:
        ctx.state.history.last_level = (incident.escalation.level, ctx.state.frame_count)
    ctx.state.incident = None
