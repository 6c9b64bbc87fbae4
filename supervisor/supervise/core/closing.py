"""End of an incident: closed, held for a person, given up, or tried again at a lower rate.

Weights that were good for some steps at a rate, and then went bad again at it, have tested the
rate as the cause. Then the runbook that went back runs again with half of that rate, before
anything is given up, as far as its budgets reach. A rollback after which the loss was never good
tells nothing of the rate, nor does one that takes the loop back to meet the same step again.
"""

from __future__ import annotations

from msgspec import structs

from . import (
    action_planning,
    advice,
    approvals,
    diagnosis,
    notices,
    opening,
    reasons,
    rule_news,
    rule_scope,
    run_phase,
    spike_classifier,
    withdrawal,
)
from .diagnosis import RATE
from .frames import LOSS
from .incident import CLOSED, Incident, RunbookExecution
from .model.decisions import (
    CLEARED,
    JOB_ENDED,
    RECOVERED,
    IncidentClosed,
    IncidentHeld,
    RateBlamed,
    RunbookRefused,
)
from .model.interfaces import Advice, AdviceSteps
from .model.payload import Outcome
from .model.policy import Policy, Runbook
from .notices import Cause
from .rank_monitor import RankMonitor
from .run_state import State, StepContext


def mark_exhausted(ctx: StepContext, incident: Incident) -> AdviceSteps:
    """Nothing that is left can help: a SEV0 from now on; return what then becomes of the job."""
    incident.raise_severity("SEV0")
    incident.escalation.exhausted = ctx.state.frame_count, ctx.state.at_ns
    return advice.describe_pending_stop(ctx.policy)


def hold_incident(
    ctx: StepContext,
    incident: Incident,
    reason: Cause,
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
    approvals.settle_request(ctx, "withdrawn", reasons.IncidentHeldFirst(incident=incident.id))
    incident.hold()
    state.rules.reported.clear()  # what fires from now on is answered by nobody else
    state.rules.growing.clear()
    rule_news.record_breaches(policy, state, incident)  # but for what the message is about
    opening.invalidate_attempt(state, incident)
    if state.job.returncode is not None and incident.run is None:  # else it is being restarted
        state.job.no_restart_reason = reason
        return
    case = incident.case
    case.exhausted |= exhausted
    if exhausted:
        case.verdict = diagnosis.classify_incident(policy, state, incident)
    verdict, status = case.verdict, withdrawal.describe_job_status(policy, state)
    then = mark_exhausted(ctx, incident) if exhausted or remedies else ()
    cause = str(reason)
    ctx.move("hold", cause)
    held_text = f"held: {cause}"
    ctx.record(
        IncidentHeld(reason=held_text, severity=incident.severity, cause=cause, spike=verdict)
    )
    limit = notices.Limit.NOTHING_LEFT if case.exhausted else None
    if limit and case.rolled_back and rule_scope.is_fed_wrongly(policy, state, incident):
        limit = notices.Limit.SAME_DATA
    held = notices.Held(
        severity=incident.severity if incident.severity != "SEV2" else "SEV1",
        incident=incident.id,
        cause=cause,
        limit=limit,
        summary=diagnosis.verdict_summary(verdict),
        status="" if state.job.seen_ended else status,  # the reason says it
        advice=Advice(None, (*advice.advise_choices_in_hold(policy, state, incident), *then)),
    )
    ctx.send(held, replace=True)


def hold_after_runbook(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """Hold as the last step of a runbook says, whatever became of the evidence before it."""
    if incident.is_held and run.failure.reason is None:
        run.index += 1  # it ran in a hold: people know
        return
    failure = "" if run.failure.reason is None else str(run.failure.reason)
    held = notices.HeldByRunbook(
        runbook=run.runbook.name, headline=incident.headline, failure=failure
    )
    hold_incident(ctx, incident, held, exhausted=run.terms.escalated)


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
        substitute: the runbook that it stands in for, and why that cannot work.
    """
    name, ended = book.name, ctx.state.job.has_ended
    then = mark_exhausted(ctx, incident) if exhausted and is_remedy(book) and not ended else ()
    status = "" if ended else withdrawal.describe_job_status(ctx.policy, ctx.state)
    ctx.record(RunbookRefused(reason=f"{name} cannot run: {refusal}", runbook=name))
    impossible = notices.RunbookImpossible(runbook=name, refusal=refusal)
    ctx.state.job.no_restart_reason = impossible
    ways = advice.advise_manual_choices(ctx.policy, ctx.state, incident)
    notice = notices.NothingPossible(
        severity=incident.severity if incident.severity != "SEV2" else "SEV1",
        incident=incident.id,
        headline=incident.headline,
        status=status,
        runbook=name,
        substituted=substitute,
        refusal=refusal,
        advice=Advice(None, (*ways, *then)),
    )
    ctx.send(notice, replace=True)


def record_rank_failure(
    ctx: StepContext, incident: Incident, run: RunbookExecution, outcome: Outcome, reason: str
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
    ctx.state.job.unavailable["fence"] = notices.RanksApart(cause=reason).text
    then = advice.advise_relaunch_only(ctx.policy)
    ctx.send(notices.RanksUnfenceable(severity="SEV2", cause=reason, advice=then))


def _report_ranks_differ(ctx: StepContext, incident: Incident, verb: str, reason: str) -> None:
    """Some ranks carried out an action and others did not: a SEV0, whatever it began with."""
    incident.raise_severity("SEV0")
    incident.headline = notices.PartlyDone(verb=verb, error=reason).text
    ctx.send(notices.RanksDiffer(severity="SEV0", incident=incident.id, headline=incident.headline))


def is_remedy(book: Runbook) -> bool:
    """Return whether a runbook changes the training, or starts it again."""
    return any(step.changes_training or step.ends_job for step in book.steps)


def close_incident(
    ctx: StepContext,
    incident: Incident,
    outcome: str,
    then: Advice | None = None,
    *,
    clear_steps: int | None = None,
    superseded_by: str = "",
    released_by: str = "",
    asked: bool = False,
    restarted_with: str = "",
) -> None:
    """Close an incident; a request that waits for it is withdrawn.

    Args:
        then: what comes next, where more is known of it. The others: see `IncidentClosed`.
    """
    job, not_restarted = ctx.state.job, ctx.state.job.no_restart_reason
    approvals.settle_request(ctx, "withdrawn", reasons.IncidentOver(incident=incident.id))
    recovered_attempt = ctx.state.attempt if outcome == RECOVERED else None
    ctx.state.checkpoints.settle_trials(incident.id, recovered_attempt)
    acted = incident.escalation.runs > 0
    verdict = incident.case.verdict
    if incident.deferred.session_end is None and not superseded_by:
        verdict = diagnosis.classify_incident(ctx.policy, ctx.state, incident)
    incident.phase = CLOSED
    closed = IncidentClosed(
        reason="",
        severity=incident.severity,
        acted=acted,
        opened_step=incident.opened_step,
        breach_step=incident.breach_step,
        rules=tuple(incident.rules),
        spike=verdict,
        outcome=outcome,
        ordered=incident.is_order,
        clear_steps=clear_steps,
        superseded_by=superseded_by,
        released_by=released_by,
        session_end=incident.deferred.session_end,
        returncode=job.returncode,
        asked=asked,
        restarted_with=restarted_with,
        not_restarted=str(not_restarted or "") if outcome == JOB_ENDED else "",
    )
    ctx.record(structs.replace(closed, reason=f"closed: {notices.describe_end(closed)}"))
    if verdict is not None:
        diagnosis.remember_onset(ctx.state.context, incident.case)
        action_planning.remember_data(ctx.state, incident)
    if then is None:
        then = advice.advise_at_end(ctx.policy, ctx.state, incident, verdict)
    _notify_end(ctx, incident, closed, then)
    if acted:
        ctx.state.history.last_level = (incident.escalation.level, ctx.state.frame_count)
    ctx.state.incident = None


def _notify_end(ctx: StepContext, incident: Incident, closed: IncidentClosed, then: Advice) -> None:
    is_notice = bool(closed.superseded_by) or _is_over_by_itself(ctx, incident, closed)
    notice = notices.Closed(
        severity="INFO" if is_notice else incident.severity,
        incident=incident.id,
        outcome=notices.describe_end(closed),
        summary=diagnosis.verdict_summary(closed.spike),
        advice=then,
    )
    ctx.send(notice)


def _is_over_by_itself(ctx: StepContext, incident: Incident, closed: IncidentClosed) -> bool:
    """Return whether an end is no alarm; who heard of it hears of its end whatever its severity."""
    escalation, verdict, is_quiet = incident.escalation, closed.spike, closed.outcome == CLEARED
    if escalation.runs:
        is_quiet |= action_planning.is_end_known(ctx.policy, ctx.state, incident, closed)
        return is_quiet and escalation.runs == escalation.called_off
    is_left = verdict is not None and not spike_classifier.is_loss_normal_again(verdict)
    return incident.severity == "SEV2" or (is_quiet and not is_left)


GOOD_STEPS = 10  # losses in their band show that the weights were good; those just before an onset
SAME_STEP = 2  # steps around the first breach, when the loop meets it again


def blame_rate_after_relapse(ctx: StepContext, incident: Incident) -> None:
    """Note what it proves that the trouble is back or never went, if it is anything."""
    state, case, recovery = ctx.state, incident.case, incident.recovery
    monitor, rate_before = state.monitors.get(case.rank), case.rate
    if monitor is None or rate_before is None or recovery.rolled_back_to != monitor.attempt:
        return
    onset = _onset(monitor, incident)
    if onset is None or (not recovery.loop_kept and abs(onset - recovery.must_pass) <= SAME_STEP):
        return
    rates = [rate for step, rate in _since(monitor, RATE) if onset - GOOD_STEPS <= step <= onset]
    limit_before = recovery.rate_limits[-1] if recovery.rate_limits else None
    weighed = run_phase.rate_cause_after_relapse(max(rates, default=0.0), rate_before, limit_before)
    if weighed is None:
        return
    case.rate, incident.breach_step = weighed, onset
    opening.suspect_checkpoints(state, incident)
    ctx.record(RateBlamed(reason=f"the learning rate is the cause: {weighed.reason}"))


def runbook_at_lower_rate(policy: Policy, state: State, incident: Incident) -> Runbook | None:
    """Return the runbook of the newest level, when it can run again at a lower rate than before."""
    level, levels = incident.escalation.level, policy.ladder.levels
    book = policy.runbooks.get(levels[level]) if 0 <= level < len(levels) else None
    rate, limits = incident.case.rate, incident.recovery.rate_limits
    if book is None or rate is None or rate.limit is None or (limits and rate.limit >= limits[-1]):
        return None
    return book if action_planning.is_affordable(policy, state, incident, book) else None


def is_rate_hold(state: State, incident: Incident, book: Runbook) -> bool:
    """Return whether a runbook is to hold the learning rate."""
    context = action_planning.basic_context(state, incident)
    pairs = zip(book.verbs, book.steps, strict=True)
    return any(verb == "hold_rate" and step.is_due(context) for verb, step in pairs)


def _onset(monitor: RankMonitor, incident: Incident) -> int | None:
    """Return where the losses left their band again since the rollback, None if they did not, or
    had never been in it."""
    band, good = incident.case.band, 0
    if band is None:
        return None
    for step, loss in _since(monitor, LOSS):
        if loss <= band.limit_at(step):
            good += 1
        elif good >= GOOD_STEPS:
            return step
    return monitor.step if good >= GOOD_STEPS and incident.case.excursion.lasting else None


def _since(monitor: RankMonitor, metric: str) -> list[tuple[int, float]]:
    """Return the values of a metric in the attempt under way."""
    began = next((f.step for f in monitor.history.frames if f.attempt == monitor.attempt), 0)
    return [point for point in monitor.history.series(metric) if point[0] >= began]
