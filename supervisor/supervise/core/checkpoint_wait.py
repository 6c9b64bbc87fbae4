"""A relaunch waits until the newest checkpoints are verified.

Checkpoints are verified slowly while a job needs its cores, so a relaunch may come too early: it is
aimed a second time when the job has been stopped and what it left is verified. What people approved
stays as they saw it. When none was verified at all, it is refused, and tried again when one is.
Where there are some to verify, the job is paused meanwhile: it would train on with what the
relaunch is to throw away, take the cores that the verifier needs, and perhaps overwrite the very
checkpoint.
"""

from __future__ import annotations

from . import action_planning, approvals, closing, notices, reasons, withdrawal
from .incident import OPEN, OVERDUE_S, AwaitedCheckpoint, Incident, RunbookExecution, RunbookStart
from .model.action import Refused
from .model.decisions import ACTING_MODES, ActionReplanned, ReplannedAction
from .model.events import Notice
from .model.payload import CheckpointSearch, RelaunchArgs
from .model.policy import Policy, Runbook
from .notices import Cause
from .run_state import State, StepContext

SEARCH_S = 15.0  # for the first look at what there is; the budget of our recovery note
LEASE_S = 86400.0  # of the pause while a checkpoint is verified, or a person is awaited after that


def retarget_relaunch(ctx: StepContext) -> None:
    """Let the relaunch under way go back to the newest checkpoint that is good by now, and say so.

    Where none is any more, what was intended stands: whoever performs it finds out.
    """
    incident, run = ctx.state.incident, ctx.state.run()
    if incident is None or run is None or not run.intent.awaits_outcome("relaunch"):
        return
    intent, action = run.intent, run.intent.action
    assert action is not None
    if run.terms.approved is not None:
        return
    try:
        args = action.plan(
            action_planning.plan_context(ctx.state, incident, run.requested.before_step)
        )
    except Refused:
        return
    old = intent.args.parse(RelaunchArgs)
    args = args.extended(attempt=old.attempt)
    new = args.parse(RelaunchArgs)
    if new.checkpoint == old.checkpoint:
        return
    intent.args = args
    intent.deadline_ns = ctx.state.at_ns + int((action.limit_s(args) + OVERDUE_S) * 1e9)
    text = f"relaunch goes back to {new.checkpoint} of step {new.step}, not to "
    text += f"{old.checkpoint} of step {old.step}"
    order = ReplannedAction(intent.action_id, intent.verb, args)
    ctx.record(ActionReplanned(reason=text, action=order))


def relaunch_order(state: State, incident: Incident, book: Runbook) -> RelaunchArgs | None:
    """Return the arguments of the relaunch that a runbook would order now, None for none."""
    for verb, step in zip(book.verbs, book.steps, strict=True):
        if verb == "relaunch":
            try:
                args = step.plan(action_planning.basic_context(state, incident))
                return args.parse(RelaunchArgs)
            except Refused:
                return None
    return None


def report_refused(
    ctx: StepContext,
    incident: Incident,
    book: Runbook,
    refusal: str,
    reason: Cause,
    *,
    escalated: bool,
    substitute: str = "",
) -> None:
    """Tell people that a runbook cannot work here; one that only lacks a checkpoint may later."""
    waits = action_planning.lacks_checkpoint(ctx.state, incident, book)
    closing.report_unactionable(ctx, incident, book, refusal, substitute, exhausted=not waits)
    if not waits:
        return
    incident.deferred.awaiting_checkpoint = AwaitedCheckpoint(
        incident.escalation.runs, book.name, reason, escalated, ctx.state.at_ns
    )
    if ctx.state.job.returncode is not None:
        return  # only while its evidence is taken; that is no time to wait for
    awaits = notices.CheckpointAwaited(
        severity=incident.severity,
        incident=incident.id,
        runbook=book.name,
        before_step=awaited_checkpoint_bound(ctx.policy, ctx.state),
    )
    ctx.send(awaits, replace=True)


def runbook_unblocked_by_checkpoint(
    policy: Policy, state: State, incident: Incident
) -> RunbookStart | None:
    """Return the runbook that lacked a checkpoint, when it can work by now.

    Only while nothing else was done about the incident, and as long as a rule of it that acts still
    fires or the loss is out of its band; of a job that has ended no rule can tell.
    """
    deferred = incident.deferred
    if (
        (request := deferred.awaiting_checkpoint) is None
        or incident.phase != OPEN
        or state.approvals.pending is not None
    ):
        return None
    book = policy.runbooks.get(request.name)
    if request.number != incident.escalation.runs or book is None:
        return None
    if state.job.returncode is None and not _has_reason(policy, state, incident):
        return None
    if action_planning.explain_infeasible(state, incident, book):
        return None
    deferred.awaiting_checkpoint = None
    levels, name = policy.ladder.levels, request.name
    reason = reasons.CheckpointAvailable(cause=request.reason)
    level = levels.index(name) if name in levels else -1
    return RunbookStart(name, level, reason, request.escalated)


def on_checkpoint_search(state: State, event: Notice) -> None:
    """Take how many checkpoints without a verdict may be what a relaunch waits for."""
    incident = state.incident
    if incident is not None and incident.deferred.awaiting_checkpoint is not None:
        search = event.data.read(CheckpointSearch)
        incident.deferred.awaiting_checkpoint.candidates = search.candidates


def pause_for_checkpoint(ctx: StepContext, incident: Incident) -> bool:
    """Pause the job while what a relaunch waits for is verified; return whether it is to be.

    Not one that stands still: it ruins nothing meanwhile, and could not take the order.
    """
    policy, state = ctx.policy, ctx.state
    request, before_step = (
        awaited_checkpoint(policy, state),
        awaited_checkpoint_bound(policy, state),
    )
    if request is None or before_step is None or not request.candidates or request.pauses:
        return False
    if (
        policy.job.relaunch is None
        or policy.job.relaunch.wait != "pause"
        or "pause" not in policy.verbs
        or state.job.paused
    ):
        return False
    book = Runbook("wait", (policy.verbs["pause"](lease=LEASE_S),), ("pause",))
    terms = approvals.required_approval(policy, incident, book)
    if incident.trigger.still or terms is not None or not _has_reason(policy, state, incident):
        return False
    if action_planning.explain_infeasible(state, incident, book):
        return False
    request.pauses = True
    run = RunbookExecution(incident.escalation.runs, book, incident.severity)
    run.terms.waits, incident.run = True, run
    paused = notices.PausedForCheckpoint(
        severity=incident.severity,
        incident=incident.id,
        candidates=request.candidates,
        before_step=before_step,
        runbook=request.name,
    )
    ctx.send(paused, replace=True)
    return True


def explain_failed_search(policy: Policy, state: State) -> reasons.NoGoodCheckpoint | None:
    """Say why a job that was paused for a checkpoint waits in vain, None while it does not."""
    request, before_step = (
        awaited_checkpoint(policy, state),
        awaited_checkpoint_bound(policy, state),
    )
    if request is None or before_step is None or request.candidates != 0 or not request.pauses:
        return None
    return reasons.NoGoodCheckpoint(before_step=before_step) if state.job.paused else None


def is_searching(policy: Policy, state: State) -> bool:
    """Return whether a relaunch waits for a checkpoint, and one may still turn out to be good."""
    request = awaited_checkpoint(policy, state)
    if request is None:
        return False
    soon = state.at_ns - request.since_ns < SEARCH_S * 1e9
    return soon if request.candidates is None else request.candidates > 0


def awaits_checkpoint(state: State, incident: Incident) -> bool:
    """Return whether an incident waits for a checkpoint, and its loss is out of its band.

    Baselines get used to a ruined loss, and its rules clear: that does not end it.
    """
    lacks = incident.deferred.awaiting_checkpoint is not None
    silent = any(state.silence(rule) is not None for rule in incident.rules)
    return lacks and not silent and withdrawal.is_loss_out_of_band(state, incident)


def awaited_checkpoint(policy: Policy, state: State) -> AwaitedCheckpoint | None:
    """Return the relaunch that waits for a good checkpoint, None while none does.

    From the moment that it was refused, whatever ran before it, and while its evidence is taken.
    """
    incident = state.incident
    if incident is None or state.job.returncode is not None:
        return None
    request, run = incident.deferred.awaiting_checkpoint, incident.run
    if request is None or request.number != incident.escalation.runs:
        return None
    refused = run is not None and run.terms.reduced_reason and run.runbook.name == request.name
    if incident.phase != OPEN and not refused:
        return None
    return request if request.name in policy.runbooks else None


def awaited_checkpoint_bound(policy: Policy, state: State) -> int | None:
    """Return the step before which the checkpoint must lie that a refused relaunch waits for.

    None while none does.
    """
    request, incident = awaited_checkpoint(policy, state), state.incident
    book = None if request is None else policy.runbooks[request.name]
    if book is None or incident is None:
        return None
    bounds = (step.before(incident.breach_step) for step in book.steps)
    return next((bound for bound in bounds if bound is not None), None)


def add_restored_step(reason: Cause, incident: Incident) -> Cause:
    """Return a verdict with the step that the incident was taken back to."""
    recovery = incident.recovery
    step, is_loop_kept = recovery.restored_step, recovery.loop_kept
    if step is None:
        return reason
    return reasons.RestoredTo(step=step, is_loop_kept=is_loop_kept, cause=reason)


def _has_reason(policy: Policy, state: State, incident: Incident) -> bool:
    return _has_acting_rule(policy, state, incident) or awaits_checkpoint(state, incident)


def _has_acting_rule(policy: Policy, state: State, incident: Incident) -> bool:
    """Return whether a rule of the incident fires that may act."""
    firing = set(state.firing(policy)) & set(incident.rules) - set(state.rules.muted)
    return any(
        rule.id in firing
        and rule.runbook is not None
        and policy.mode_of(rule) in ACTING_MODES
        and state.silence(rule.id) is None
        for rule in policy.rules
    )
