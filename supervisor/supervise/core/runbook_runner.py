"""Runbooks in progress: intent, effect, commit, and what happens when one fails.

A step is intended (and on disk) before it is performed; its outcome comes back as `Finished`. The
engine itself carries out `hold`, `notify`, `undo` and `verify`. A failed runbook first takes back
what it can, then follows `if_it_fails`; one that did not help is taken back before the next level.
"""

from __future__ import annotations

from . import (
    action_planning,
    advice,
    approvals,
    checkpoint_wait,
    closing,
    job_recipes,
    notices,
    opening,
    reasons,
    withdrawal,
)
from .incident import (
    ACTING,
    OPEN,
    OVERDUE_S,
    PROBATION,
    WAY_BACK_VERBS,
    AwaitedEffect,
    Incident,
    Intent,
    OperatorRequest,
    RollbackFailure,
    RunbookExecution,
    RunbookFailure,
    StartTerms,
    escalation_undos,
    format_arguments,
    note_rollback_failure,
    record_committed,
    record_uncertain,
    remove_undo,
    undos_after_failure,
    verb_of,
)
from .model import state_machine
from .model.action import Action, Refused
from .model.decisions import (
    ActionFailed,
    ActionFinished,
    ActionOrder,
    ActionPlanned,
    ActionRef,
    BudgetOverridden,
    LateOutcome,
    PauseEnded,
    PlannedStep,
    RunbookRefused,
    RunbookWithdrawn,
    Suppressed,
    Suppressor,
    VerificationPassed,
    VerificationStarted,
)
from .model.events import Finished
from .model.interfaces import Advice, AdviceSteps, Lead, Severity, sentences
from .model.payload import NOTHING, Outcome, Payload, WeightsArgs
from .model.policy import HOLD, Policy, Runbook, first_relaunch, level_of, next_level
from .notices import Cause
from .run_state import ApprovalRequest, IncidentHistory, State, StepContext


def intend_step(
    ctx: StepContext, incident: Incident, run: RunbookExecution, action: Action, verb: str
) -> Cause | None:
    """Intend a step, when it can work, is what was approved, and its budget allows it.

    Returns:
        Why not; None when it was intended.
    """
    requested = run.requested
    try:
        args = action.plan(
            action_planning.plan_context(
                ctx.state, incident, requested.before_step, requested.operator
            )
        )
    except Refused as refusal:
        refused = reasons.StepRefused(verb=verb, refusal=str(refusal))
        ctx.record(RunbookRefused(reason=refused.text, verb=verb))
        return refused
    approved = run.terms.approved
    allowed = approved is None or PlannedStep(verb, args) in approved
    if action.touches_job and not allowed:
        unapproved = reasons.StepUnapproved(order=f"{verb} {format_arguments(args)}".rstrip())
        ctx.record(RunbookRefused(reason=unapproved.text, verb=verb))
        run.failure.exhausted = True
        return unapproved
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
    history.tried_runbooks[run.runbook.name] = True
    for rule in incident.rules if run.terms.substitute else ():
        if rule in history.cooldown:
            history.cooldown[rule] = history.cooldown[rule][0], incident.escalation.level


def intend_undo(
    ctx: StepContext, incident: Incident, run: RunbookExecution, action: Action, label: str
) -> None:
    """Intend to take something back; no budget and no approval stands in its way."""
    try:
        args = action.plan(action_planning.plan_context(ctx.state, incident))
    except Refused:
        args = NOTHING  # it is tried all the same: what it cannot do must be heard of
    verb = verb_of(action)
    _intend(ctx, incident, run, action, verb, f"{label}-{verb}", args)


def _spend(
    ctx: StepContext, run: RunbookExecution, action: Action, verb: str
) -> reasons.BudgetSpent | None:
    """Count the intent in its budget; return why it may not be, None when it may."""
    state, kind = ctx.state, action.budget_class
    if kind is None:
        return None
    spent = state.ledger.exhausted(ctx.policy.budgets, kind, state.frame_count, state.at_ns)
    if spent is not None and not run.requested.operator:
        name, budget, used = spent
        reason = reasons.BudgetSpent(budget=name, used=used, most=budget.max)
        text, cause = f"{verb}: {reason}", str(Suppressor("budget", name))
        ctx.record(
            Suppressed(reason=text, suppressed_by=cause, verb=verb, used=used, max=budget.max)
        )
        run.failure.exhausted = True
        return reason
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
            reason=f"{verb} {format_arguments(args)}".rstrip(),
            severity=incident.severity,
            action=order,
            budget=state.ledger.usage(ctx.policy.budgets, state.frame_count, state.at_ns),
        )
    )
    if verb == "pause":
        state.job.paused = True  # also when nobody knows what came of it
    if verb == "stop":
        state.job.stopping, state.job.stopped_by = True, run.requested.operator or "policy"


def start_runbook(
    ctx: StepContext,
    incident: Incident,
    name: str,
    level: int,
    why: Cause,
    *,
    escalated: bool = False,
    substitute: str = "",
    approved: ApprovalRequest | None = None,
) -> None:
    """Start runbook `name` for the incident, ask for it, or hold when the ladder says so.

    Args:
        escalated: it was not asked for: what is below it on the ladder was tried.
        substitute: the runbook that it stands in for, and why that cannot work here; a stand-in
            has none itself.
        approved: the request that people said yes to.
    """
    if name == HOLD:
        closing.hold_incident(ctx, incident, why, exhausted=escalated, remedies=bool(substitute))
        return
    policy, state, escalation = ctx.policy, ctx.state, incident.escalation
    incident.deferred.retry, escalation.exhausted = None, None
    book = policy.runbooks[name]
    refusal = action_planning.explain_infeasible(state, incident, book)
    if refusal and book.if_refused and not substitute:
        _start_substitute(ctx, incident, book, level, why, refusal)
        return
    asked = None if refusal or approved else approvals.required_approval(policy, incident, book)
    escalation.runs += 1
    reason = withdrawal.runbook_reason(policy, state, incident)
    terms = StartTerms(
        reason, escalated, bool(substitute), entry_level=escalation.level, reduced_reason=refusal
    )
    incident.run = RunbookExecution(escalation.runs, book, incident.severity, terms=terms)
    if asked is not None:
        terms.reduced_reason = "it waits for approval"
        approvals.request_approval(ctx, incident, book, asked, level, why, escalated=escalated)
    elif refusal:
        escalation.level = level
        checkpoint_wait.report_refused(
            ctx, incident, book, refusal, why, escalated=escalated, substitute=substitute
        )
    else:
        escalation.level, state.history.tried_runbooks[name] = level, "verify" not in book.verbs
        terms.approved = None if approved is None else approved.plan
        if any(step.touches_job for step in book.steps):
            _enter_acting(ctx, incident, f"runbook {name}: {why}")
            if not action_planning.begins_with_weights_check(
                policy, ctx.state, incident, incident.run
            ):
                _announce(ctx, incident, incident.run, why)
    proceed_runbook(ctx, incident)


def _announce(ctx: StepContext, incident: Incident, run: RunbookExecution, reason: Cause) -> None:
    """Nothing stands against a runbook that touches the job: people are told that it runs."""
    ctx.state.history.last_level = (incident.escalation.level, ctx.state.frame_count)
    effect = advice.describe_runbook(ctx.state, incident, run.runbook)
    live: AdviceSteps = ()
    then = sentences(f"{run.runbook.name}: {effect}" if effect else "")
    if (order := checkpoint_wait.relaunch_order(ctx.state, incident, run.runbook)) is not None:
        command_text = job_recipes.describe_relaunch(
            ctx.policy.job.relaunch, order.path, order.step
        )
        again = reasons.StartsAgain(
            checkpoint=order.checkpoint,
            step=order.step,
            command=command_text,
            idle_s=order.if_idle_s or None,
        )
        then = sentences(again.text)
    if closing.is_rate_hold(ctx.state, incident, run.runbook):
        live = (advice.advise_free_rate(incident),)
    if "stop" in run.runbook.verbs:
        stopped = "the job is stopped once evidence is collected"
        then = sentences(stopped, "how to start it again follows")
    starts = notices.ActionStarts(
        severity=incident.severity,
        incident=incident.id,
        runbook=run.runbook.name,
        cause=str(reason),
        advice=Advice(Lead.UNDER_WAY, then, live),
    )
    ctx.send(starts)


def start_waiting_runbook(ctx: StepContext) -> None:
    """Start what waited: what people said yes to, or are asked anew, or what can work by now."""
    state, incident = ctx.state, ctx.state.incident
    if incident is None or incident.run is not None:
        return
    anew = incident.deferred.retry or checkpoint_wait.runbook_unblocked_by_checkpoint(
        ctx.policy, state, incident
    )
    if anew is not None:
        name, level, reason, escalated = anew
        start_runbook(ctx, incident, name, level, reason, escalated=escalated)
        return
    if checkpoint_wait.pause_for_checkpoint(ctx, incident):
        proceed_runbook(ctx, incident)
        return
    if (failed := checkpoint_wait.explain_failed_search(ctx.policy, state)) is not None:
        closing.hold_incident(ctx, incident, failed)
        return
    pending = state.approvals.pending
    if pending is None or not pending.granted:
        return
    answer = reasons.Answered(operator=pending.granted)
    approvals.settle_request(ctx, "approved", answer, pending.granted)
    for rule in ctx.policy.rules:
        if rule.id in incident.rules and rule.runbook is not None:
            state.history.cooldown[rule.id] = (state.frame_count, pending.level)
    start_runbook(
        ctx,
        incident,
        pending.runbook,
        pending.level,
        reasons.ApprovedBy(cause=pending.reason, operator=pending.granted),
        escalated=pending.escalated,
        approved=pending,
    )


def operator_request_text(book: Runbook, operator: str) -> str:
    """Return that an operator asked for a runbook."""
    return reasons.RequestedBy(runbook=book.name, operator=operator).text


def start_requested_runbook(
    ctx: StepContext, incident: Incident, book: Runbook, operator: str, before_step: int | None
) -> None:
    """Start what an operator asked for; whoever calls has seen that it can work here."""
    escalation = incident.escalation
    escalation.runs, escalation.exhausted = escalation.runs + 1, None
    requested = OperatorRequest(operator, before_step)
    incident.run = RunbookExecution(escalation.runs, book, incident.severity, requested=requested)
    _enter_acting(ctx, incident, operator_request_text(book, operator))
    proceed_runbook(ctx, incident)


def runbook_or_substitute(policy: Policy, state: State, incident: Incident, name: str) -> str:
    """Return the runbook that runs where `name` is wanted: another one where it cannot work."""
    book = policy.runbooks.get(name)
    if book is None or not book.if_refused:
        return name
    is_refused = action_planning.explain_infeasible(state, incident, book)
    return _substitute(state, book) if is_refused else name


def _substitute(state: State, book: Runbook) -> str:
    """Return what a runbook names for where it cannot work, unless that did not help."""
    return HOLD if state.history.tried_runbooks.get(book.if_refused) is False else book.if_refused


def _start_substitute(
    ctx: StepContext, incident: Incident, book: Runbook, level: int, reason: Cause, refusal: str
) -> None:
    """Try what the runbook names for where it cannot work; what did not help is not tried again."""
    name = _substitute(ctx.state, book)
    text = f"{book.name} cannot run: {refusal}; {name} is used instead"
    ctx.record(RunbookRefused(reason=text, runbook=book.name, substitute=name))
    start_runbook(
        ctx,
        incident,
        name,
        level_of(ctx.policy.ladder, name, level),
        reason,
        substitute=notices.RunbookImpossible(runbook=book.name, refusal=refusal).text,
    )


def _enter_acting(ctx: StepContext, incident: Incident, reason: str) -> None:
    incident.phase = ACTING
    ctx.move("run", reason)


def _send_evidence(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    goes_on = run.index + 1 < len(run.runbook.steps)
    evidence = notices.EvidenceOf(
        severity=incident.severity,
        incident=incident.id,
        headline=incident.headline,
        standstill=run.standstill,
        advice=Advice(Lead.UNDER_WAY, advice.describe_runbook_progress(run))
        if goes_on
        else Advice(),
    )
    ctx.send(evidence)


def proceed_runbook(ctx: StepContext, incident: Incident) -> None:
    """Take the runbook to the next step that must wait for something."""
    while (run := incident.run) is not None:
        if incident.deferred.session_end is not None:
            return  # nothing follows, see `job_end`
        failure = run.failure
        if failure.pause_ended and failure.reason is None:
            ctx.record(PauseEnded(reason=f"{run.runbook.name}: {failure.pause_ended}"))
            ended = reasons.Reported(report=failure.pause_ended)
            fail_step(ctx, incident, ended, is_sent=False)
            return
        if failure.reason is not None:
            if not failure.pending_undos or ctx.state.job.returncode is not None:
                _after_failure(ctx, incident, run)
            else:
                intend_undo(ctx, incident, run, failure.pending_undos[0], "undo")
            return
        if run.index >= len(run.runbook.steps):
            _on_runbook_done(ctx, incident, run)
            return
        action, verb = run.runbook.steps[run.index], run.runbook.verbs[run.index]
        if _is_left_out(ctx, incident, run, action, verb):
            run.index += 1
        elif verb == "verify":
            within = run.runbook.verification.within
            run.verification.deadline_frame = ctx.state.frame_count + within
            run.verification.frame_ns = ctx.state.at_ns
            text = f"recovery is due within {within} steps: "
            text += f"{run.runbook.verification.clear_for} in a row without trouble"
            ctx.record(VerificationStarted(reason=text))
            return
        elif verb == "notify":
            _send_evidence(ctx, incident, run)
            run.index += 1
        elif verb == HOLD:
            closing.hold_after_runbook(ctx, incident, run)
        elif verb == "undo":
            if incident.recovery.undos:
                newest = incident.recovery.undos[-1][1]
                intend_undo(ctx, incident, run, newest, f"{run.index}-undo")
                return
            run.index += 1
        elif action.destructive and (
            lost_reason := withdrawal.explain_lost_reason(ctx.policy, ctx.state, action)
        ):
            withdraw_runbook(ctx, incident, lost_reason)
            return
        else:
            reason = intend_step(ctx, incident, run, action, verb)
            if reason is not None:
                fail_step(ctx, incident, reason, is_sent=False)
            return


def _is_left_out(
    ctx: StepContext, incident: Incident, run: RunbookExecution, action: Action, verb: str
) -> bool:
    """Return whether a step is passed over; of a job that has ended there is only evidence, and
    another start."""
    checks = verb == action_planning.VERB
    if checks and not action_planning.needs_weights_check(ctx.policy, ctx.state, incident, run):
        return True
    dead = ctx.state.job.returncode is not None and verb != "relaunch"
    context = action_planning.basic_context(ctx.state, incident, None, run.requested.operator)
    if not action.is_due(context):
        return True
    only_evidence = bool(run.terms.reduced_reason) or dead
    return only_evidence and (action.touches_job or checks or verb == "verify")


def on_action_finished(ctx: StepContext, event: Finished) -> None:
    """Take an action's outcome; anything that nobody waits for is only noted."""
    incident, run = ctx.state.incident, ctx.state.run()
    if incident is None or run is None or run.intent.action_id != event.action_id:
        late, action = f"late outcome of {event.action_id}", ActionRef(event.action_id)
        ctx.record(LateOutcome(reason=late, ok=event.ok, action=action, result=event.result))
        return
    run.intent.action_id, result = None, event.result
    job, outcome = ctx.state.job, event.result.read(Outcome)
    job.seen_ended |= outcome.job_ended
    if job.stopping:  # refused, or the job had ended by itself: then its own end counts
        job.stopping = event.ok and outcome.exit_code is not None
    if not event.ok and run.intent.action is not None and run.intent.action.destructive:
        lost_reason = withdrawal.explain_lost_reason(ctx.policy, ctx.state, run.intent.action)
        if lost_reason:
            withdraw_runbook(ctx, incident, lost_reason, ActionRef(event.action_id), result)
            return
    if not event.ok:
        action, error = ActionRef(event.action_id), event.error or ""
        reason = f"{event.action_id} failed: {error}"
        failure, refused = run.failure, outcome.refused
        failure.refused = failure.reason is None and refused and not failure.pause_ended
        incident.recovery.out_of_reach |= failure.refused and run.intent.verb == "rollback"
        ctx.record(ActionFailed(reason=reason, action=action, result=result, error=error))
        dispensable = run.intent.action is not None and run.intent.action.is_dispensable
        no_space = outcome.no_space and run.intent.verb == "snapshot"
        if no_space or (failure.refused and dispensable):  # the remedy goes on without it
            failure.refused, run.index = False, run.index + 1
            proceed_runbook(ctx, incident)
            return
        note_rollback_failure(incident.recovery, run.intent.verb, RollbackFailure.FAILED)
        closing.record_rank_failure(ctx, incident, run, outcome, error)
        failed = reasons.StepFailed(verb=run.intent.verb, error=error)
        fail_step(ctx, incident, failed, is_sent=not refused)
        return
    done_text = f"{event.action_id} done {format_arguments(result, observed=True)}".rstrip()
    ctx.record(ActionFinished(reason=done_text, action=ActionRef(event.action_id), result=result))
    _record_committed(ctx.state, incident, run, result, outcome)
    if run.intent.verb == action_planning.VERB and run.failure.reason is None:
        _on_weights_checked(ctx, incident, run, result)
    proceed_runbook(ctx, incident)


def _on_weights_checked(
    ctx: StepContext, incident: Incident, run: RunbookExecution, result: Payload
) -> None:
    """The runbook is withdrawn where batches are to blame, but for its evidence; else it runs."""
    if reason := action_planning.explain_good_weights(ctx.state, incident, run, result):
        action_planning.reduce_to_evidence(ctx, incident, run, reason, result)
        _untry(ctx, incident, reasons.Reported(report=reason))
        return
    new = action_planning.evidence_for_rollback(ctx.state, incident, result)
    incident.deferred.weights_check = None
    order = run.intent.args.parse(WeightsArgs)
    bad_step = result.read(Outcome).first_bad_step(order.within, order.before_step)
    if bad_step is not None:  # its weights are no remedy
        incident.breach_step = bad_step
        opening.suspect_checkpoints(ctx.state, incident)
    trouble = reasons.IncidentTrouble(
        rule=incident.trigger.asked_by, headline=incident.headline, evidence=new
    )
    _announce(ctx, incident, run, trouble)


def _record_committed(
    state: State, incident: Incident, run: RunbookExecution, result: Payload, outcome: Outcome
) -> None:
    intent, job = run.intent, state.job
    assert intent.action is not None
    if intent.verb in ("resume", "relaunch"):
        job.paused = False
    if intent.verb == "relaunch" and outcome.attempt != job.launched:
        # Another process runs that nobody has told of; one that was may have ended since.
        job.returncode, job.ended, job.seen_ended = None, False, False
    if run.failure.reason is not None:
        remove_undo(incident.recovery, run.failure.pending_undos.pop(0))
    elif run.runbook.verbs[run.index] == "undo":
        remove_undo(incident.recovery, intent.action)
    else:
        record_committed(incident, run, intent.action, intent.verb, outcome)
        if intent.verb in WAY_BACK_VERBS:
            state.rules.growing.clear()  # of the attempt that is gone
        run.committed.append(run.index)
        run.standstill = outcome.standstill or run.standstill
        # The attempt tells a frame after a rollback from one before the action.
        attempt = state.attempt if outcome.seen_attempt is None else outcome.seen_attempt
        effect = AwaitedEffect(run.index, intent.verb, intent.args, result, attempt)
        run.verification.effects.append(effect)
        run.index += 1


def withdraw_runbook(
    ctx: StepContext,
    incident: Incident,
    reason: Cause,
    action: ActionRef | None = None,
    result: Payload | None = None,
) -> None:
    """Leave a runbook whose reason is gone: what it did is taken back, and nothing else is tried.

    Its rules may ask for it again: this one does not count as tried.
    """
    _untry(ctx, incident, reason, action, result)
    fail_step(ctx, incident, reason, is_sent=False)


def _untry(
    ctx: StepContext,
    incident: Incident,
    reason: Cause,
    action: ActionRef | None = None,
    result: Payload | None = None,
) -> None:
    run, state = incident.run, ctx.state
    assert run is not None
    name = run.runbook.name
    text = f"{name} withdrawn: {reason}"
    ctx.record(
        RunbookWithdrawn(reason=text, runbook=name, cause=str(reason), action=action, result=result)
    )
    run.failure.withdrawn_at = state.step
    incident.escalation.called_off += 1  # its evidence may still be under way
    incident.escalation.level = run.terms.entry_level
    state.history.tried_runbooks.pop(run.runbook.name, None)
    state.history.cooldown.pop(incident.trigger.asked_by, None)


def fail_step(ctx: StepContext, incident: Incident, reason: Cause, *, is_sent: bool = True) -> None:
    """A step failed: take back what can be, newest first; with `is_sent` the step itself too."""
    run, recovery = incident.run, incident.recovery
    assert run is not None
    failure, run.intent.action_id = run.failure, None
    if incident.deferred.session_end is not None:
        record_uncertain(recovery, run)
        failure.reason = reason
    elif failure.reason is None and run.runbook.verbs[run.index] != "undo":
        failure.reason = reason
        if not failure.ranks_differ:
            failure.pending_undos = undos_after_failure(
                recovery, run, run.index if is_sent else None
            )
    else:  # an undo: it is not tried again, a person must know
        assert run.intent.action is not None
        remove_undo(recovery, run.intent.action)
        remaining_undos = failure.pending_undos[1:]
        if failure.reason is None:
            remaining_undos = undos_after_failure(recovery, run, None)
        failure.reason, failure.pending_undos, failure.exhausted = (
            failure.reason or reason,
            remaining_undos,
            True,
        )
        if failure.withdrawn_at is not None:
            incident.escalation.called_off -= 1  # of what it did something is left
        incident.raise_severity("SEV0")
        ctx.send(notices.UndoFailed(severity="SEV0", incident=incident.id, error=str(reason)))
    proceed_runbook(ctx, incident)


def _after_failure(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    failure, reason = run.failure, run.failure.reason
    assert reason is not None
    fallback, incident.run = run.runbook.if_it_fails, None
    if ctx.state.job.returncode is not None:  # nothing is left to be acted upon
        incident.phase, ctx.state.job.no_restart_reason = OPEN, reason
    elif run.terms.waits:
        incident.reopen()
        start_waiting_runbook(ctx)
    elif failure.withdrawn_at is not None and not failure.exhausted:
        _stop_acting(ctx, incident, run, reason)
    elif failure.ranks_differ:
        start_runbook(ctx, incident, *first_relaunch(ctx.policy), reason, escalated=True)
    elif run.requested.operator:
        _on_request_done(ctx, incident, run)
    elif failure.exhausted or incident.escalation.runs > 2 * len(ctx.policy.runbooks) + 1:
        closing.hold_incident(ctx, incident, reason, remedies=True)
    elif failure.ineffective:
        escalate_incident(ctx, incident, reason, fallback)
    elif incident.is_held:
        closing.hold_incident(ctx, incident, reason)
    elif failure.refused and run.runbook.if_refused and not run.terms.substitute:
        level = incident.escalation.level
        _start_substitute(ctx, incident, run.runbook, level, reason, str(reason))
    elif HOLD in run.runbook.verbs:
        closing.hold_after_runbook(ctx, incident, run)
    elif fallback == HOLD:
        closing.hold_incident(ctx, incident, reason, remedies=closing.is_remedy(run.runbook))
    else:
        start_runbook(ctx, incident, fallback, level_of(ctx.policy.ladder, fallback, -1), reason)


# Of a runbook that is not needed: at most a question is left.
CALLED_OFF: dict[Lead | None, Severity] = {Lead.NOTHING: "INFO", Lead.LATER: "SEV2"}


def _stop_acting(
    ctx: StepContext, incident: Incident, run: RunbookExecution, reason: Cause
) -> None:
    """The reason for a runbook is gone: the incident is watched until its rules stay quiet."""
    incident.reopen()
    if not incident.is_held:
        ctx.move("given_up", f"{run.runbook.name} withdrawn: {reason}")
    if not run.terms.repeated:
        then = advice.advise_after_withdrawal(ctx.policy, ctx.state, incident)
        # People know of the loss by then, and good weights ask for nothing.
        check, verdict = incident.deferred.weights_check, incident.case.verdict
        is_harmless = then.lead is not None and check is not None and not check.changed
        is_harmless &= action_planning.is_loss_all(ctx.policy, ctx.state, incident, verdict)
        severity = CALLED_OFF.get(then.lead, incident.severity)
        withdrawn = notices.ActionWithdrawn(
            severity="INFO" if is_harmless else severity,
            incident=incident.id,
            runbook=run.runbook.name,
            cause=str(reason),
            step=run.failure.withdrawn_at if ctx.state.step >= 0 else None,
            headline=incident.headline,
            advice=then,
        )
        ctx.send(withdrawn, replace=True)
    start_waiting_runbook(ctx)


def escalate_incident(
    ctx: StepContext, incident: Incident, reason: Cause, fallback: str = HOLD
) -> None:
    """What was tried did not help: it is taken back, and then comes the next level.

    Args:
        fallback: what comes instead where it is on none.
    """
    opening.invalidate_attempt(ctx.state, incident)
    closing.blame_rate_after_relapse(ctx, incident)
    book = closing.runbook_at_lower_rate(ctx.policy, ctx.state, incident)
    if book is not None and not incident.is_held:
        start_runbook(ctx, incident, book.name, incident.escalation.level, reason)
        return
    stands = len(incident.recovery.rate_limits) < 2  # back at two held rates: it is not the rate
    standing = escalation_undos(incident.recovery, rate_stands=stands)
    if standing:
        incident.phase = ACTING
        number = incident.escalation.runs
        book = Runbook("undo", (), (), if_it_fails=fallback)
        failure = RunbookFailure(reason, standing, ineffective=True)
        incident.run = RunbookExecution(number, book, incident.severity, failure=failure)
        proceed_runbook(ctx, incident)
        return
    if incident.is_held:
        closing.hold_incident(ctx, incident, reason)
        return
    level_tried = incident.escalation.level
    name, level = next_level(ctx.policy.ladder, level_tried)
    if level_tried < 0 and fallback != HOLD:
        name, level = fallback, level_of(ctx.policy.ladder, fallback, -1)
    start_runbook(ctx, incident, name, level, reason, escalated=level_tried >= 0)


def _on_runbook_done(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """The runbook is through without a verify step: it only told, took evidence, or stopped."""
    incident.run = None
    if run.failure.withdrawn_at is not None:
        _stop_acting(ctx, incident, run, reasons.Reported(report=run.terms.reduced_reason))
    elif run.requested.operator:
        _on_request_done(ctx, incident, run)
    elif any(run.runbook.steps[i].touches_job for i in run.committed) and not run.terms.waits:
        _on_probation(ctx, incident, reasons.RunbookDone(runbook=run.runbook.name))
    else:
        incident.reopen()
        if ctx.state.machine == state_machine.ACTING:  # it preempted one that was verified
            ctx.move("given_up", reasons.ChangesNothing(runbook=run.runbook.name).text)
        start_waiting_runbook(ctx)


def _on_request_done(ctx: StepContext, incident: Incident, run: RunbookExecution) -> None:
    """What an operator asked for is done, or could not be: the incident goes on from there."""
    requested, failed = run.requested, run.failure.reason
    if failed is not None:
        ctx.send(
            notices.CommandFailed(
                severity="SEV2",
                incident=incident.id,
                operator=requested.operator,
                error=str(failed),
            )
        )
    if incident.is_held:
        incident.reopen()
    elif failed is None:
        done = reasons.RunbookDone(runbook=run.runbook.name, operator=requested.operator)
        _on_probation(ctx, incident, done)
    else:
        incident.reopen()
        ctx.move("given_up", str(failed))
    start_waiting_runbook(ctx)


def _on_probation(ctx: StepContext, incident: Incident, reason: Cause) -> None:
    if incident.is_held:  # that stands until somebody releases it
        incident.reopen()
        start_waiting_runbook(ctx)
        return
    if ctx.state.approvals.pending is not None or incident.deferred.retry is not None:
        incident.reopen()
        ctx.move("ask", f"{reason}; a request of {incident.id} waits")
        start_waiting_runbook(ctx)
        return
    incident.phase = PROBATION
    incident.ending.probation_until = ctx.state.frame_count + ctx.policy.probation_steps
    ctx.move("verified", str(reason))


def on_verified(ctx: StepContext, incident: Incident, reason: Cause) -> None:
    """The runbook did what it was for: on to probation."""
    record_success(ctx.state.history, incident)
    incident.run = None
    ctx.record(VerificationPassed(reason=str(reason), severity=incident.severity))
    _on_probation(ctx, incident, reason)
    if incident.phase == PROBATION:
        wrong = advice.advise_after_faulty_restart(ctx.state, incident)
        form = notices.RunsDifferently if wrong else notices.RecoveredSoFar
        recovered = form(
            severity=incident.severity,
            incident=incident.id,
            steps=ctx.policy.probation_steps,
            proof=str(checkpoint_wait.add_restored_step(reason, incident)),
            advice=advice.advise_in_case_of_relapse(ctx.policy, ctx.state, incident),
        )
        ctx.send(recovered)
