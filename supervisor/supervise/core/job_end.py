"""The end of a job, or of one training in it: a crash is answered where a start can help.

What the job's processes recorded of their ends says why it ended, and by its class whether another
start would end the same way (`policies/failures/classes.yaml`). People are notified.

Several trainings may follow one another in one launch: in a sweep, behind an `exec`, or from a
script. To the supervisor the next one is another program of its ranks. Behind a process that
crashed it is the same training, which a launcher started again, and its incident goes on. Else what
is open belongs to the one before: its band, its verification, and what was tried about it. So an
incident ends with its training, as it does with the job, a hold too. An action under way comes to
its end first, as only one is performed at a time; it is withdrawn from a job that has not met it
yet, and no other one follows. What stands is kept by the probe and would act on the next training:
it is taken back. A rule that fires meanwhile speaks when it is over. Budgets, and what operators
silenced, are of the run and stay.
"""

from __future__ import annotations

from . import (
    advice,
    approvals,
    closing,
    diagnosis,
    job_lifecycle,
    notices,
    opening,
    operator_commands,
    reasons,
    rule_scope,
    run_notices,
    runbook_runner,
)
from .incident import (
    ACTING,
    Incident,
    RunbookExecution,
    RunbookFailure,
    remove_undo,
    session_undos,
)
from .job_lifecycle import ASKED, has_crashed, has_start_failed
from .model.action import Action
from .model.checkpoint_registry import Checkpoint
from .model.decisions import (
    ACTING_MODES,
    JOB_ENDED,
    SESSION_ENDED,
    ProgramReplaced,
    RuleCleared,
    Suppressed,
    Suppressor,
    VerificationFailed,
)
from .model.events import Announced
from .model.failure import ASKED_TYPE, EXIT, LAUNCHER, NEVER, ONCE, Failure, exit_text
from .model.interfaces import Advice
from .model.policy import Runbook, entry_level
from .notices import Cause
from .rank_monitor import RankMonitor, RuleWatch
from .run_phase import RunPhase
from .run_state import JobLife, Restarts, StepContext

INTERRUPTED = (-2, 130)
ENDED_BY_SIGNAL = (*INTERRUPTED, -15, 143, -1, 129)  # those that ask for an end
KILLED = (-9, 137)
CRASHES = 3  # without going beyond the farthest of them, and no more starts; project default
EVIDENCE = "evidence"  # name of the runbook


def end_run_if_over(ctx: StepContext) -> None:
    """The run is over when the job has ended and nobody is about to start another one."""
    state, incident, job = ctx.state, ctx.state.incident, ctx.state.job
    name = (ctx.policy.job.on_crash or "") if job.ended and has_crashed(job) else ""
    run = state.run()
    if job.over or (run is not None and _awaits_action(job, run, name)):
        return
    failed = has_start_failed(state)
    end_text = notices.describe_job_end(job.returncode, job.restarted_with if failed else "")
    end_there = end_text
    if not failed:
        end_there = run_notices.JobEnd(end=exit_text(job.returncode), step=state.step).text
    if job.ended:
        job.ended, job.no_restart_reason = False, None
        if failed:
            ended = exit_text(job.returncode)
            ctx.record(VerificationFailed(reason=end_text, start_ended=ended))
        if incident is not None:
            incident.run = None  # nothing can be verified any more
        if name:
            _respond_to_crash(ctx, name, end_there)
    incident = state.incident
    if incident is not None and (incident.run is not None or state.approvals.pending):
        return
    asked = _ended_as_asked(job) or bool(_good_end(job, state.step))
    is_bad = job.returncode != 0 and not _good_end(job, state.step)
    by_itself = is_bad and not job.stopping and job.returncode not in ASKED
    if incident is None and by_itself and _is_known(job.cause):
        incident = _crash_incident(ctx, end_there)
    job.over = True
    reason = notices.describe_no_restart(str(job.no_restart_reason or ""))
    if incident is not None:
        then = _advice(ctx, incident) if is_bad else None
        restarted_with = job.restarted_with if failed else ""
        closing.close_incident(
            ctx, incident, JOB_ENDED, then, asked=asked, restarted_with=restarted_with
        )
    ctx.move("exited", f"{end_text}; {reason}" if reason else end_text)
    _notify_end(ctx, incident, reason, failed=failed)


def _awaits_action(job: JobLife, run: RunbookExecution, name: str) -> bool:
    """Return whether the outcome of an action comes first: only one is performed at a time.

    Args:
        name: the runbook that is to follow, "" for none.
    """
    if run.intent.action_id is None or job.stopping or job.end_requested:
        return False
    return bool(name) or not job.ended or "relaunch" in run.runbook.verbs[run.index :]


def _respond_to_crash(ctx: StepContext, name: str, end: str) -> None:
    """Start the runbook for a crash, unless a person is needed or it would only crash again."""
    state, incident, policy = ctx.state, ctx.state.incident, ctx.policy
    job, crashes = state.job, state.job.restarts.crashes
    farthest = Restarts.farthest_or_clear(crashes, state.step)
    if policy.mode not in ACTING_MODES:
        text, mode = f"{policy.mode}: would have run {name}", Suppressor("mode", policy.mode)
        ctx.record(Suppressed(reason=text, suppressed_by=str(mode), runbook=name))
    elif incident is not None and incident.is_held:
        job.no_restart_reason = run_notices.HeldBefore(incident=incident.id)
    elif state.step in crashes:
        job.no_restart_reason = run_notices.EndedThereBefore(step=state.step)
    elif len(crashes) >= CRASHES:
        job.no_restart_reason = run_notices.EndedTooOften(times=CRASHES, farthest=farthest)
    elif (reason := _would_fail_again(job)) is not None:
        job.no_restart_reason = reason
        _take_evidence(ctx, _crash_incident(ctx, end), notices.describe_no_restart(reason.text))
    else:
        crashes.append(state.step)
        if job.cause is not None:
            job.restarts.classes.add(job.cause.cls)
        job.restarts.cause = job.cause
        incident = _crash_incident(ctx, end)
        _, level = entry_level(policy.ladder, name, -1)
        why = notices.describe_crash(end, _failure_text(job))
        runbook_runner.start_runbook(ctx, incident, name, level, reasons.Reported(report=why))


def _would_fail_again(job: JobLife) -> run_notices.EndsTheSameWay | None:
    """Return why another start would end like this one, by the class of the failure; None: it may
    pass."""
    cause = job.cause
    if cause is None:
        return None
    if cause.relaunch == NEVER:
        return run_notices.EndsTheSameWay(failure=cause.title, cls=cause.cls)
    if cause.relaunch == ONCE and cause.cls in job.restarts.classes:
        return run_notices.EndsSoAgain(failure=cause.title, cls=cause.cls)
    return None


def _crash_incident(ctx: StepContext, end: str) -> Incident:
    """Return the incident of a crash: the open one if there is one, else a new one."""
    state, incident = ctx.state, ctx.state.incident
    failure = _failure_text(state.job)
    if incident is None:
        monitor = next(iter(state.monitors.values()), None)
        incident = opening.open_incident(
            ctx, monitor, "SEV1", end, breach=state.step + 1, failure=failure
        )
        incident.recovery.crashed = incident.breach_step
    elif incident.severity == "SEV2" and not rule_scope.may_speak_against_weights(
        ctx.policy, incident
    ):
        opening.join_crash(ctx, incident, notices.describe_crash(end, failure))
    return incident


def _take_evidence(ctx: StepContext, incident: Incident, reason: str) -> None:
    """Collect a bundle of a job that has ended and stays so."""
    if "snapshot" not in ctx.policy.verbs:
        return
    book = Runbook(EVIDENCE, (ctx.policy.verbs["snapshot"](),), ("snapshot",))
    incident.escalation.runs += 1
    incident.run = RunbookExecution(incident.escalation.runs, book, incident.severity)
    incident.phase = ACTING
    ctx.move("run", reason)
    runbook_runner.proceed_runbook(ctx, incident)


def _is_known(cause: Failure | None) -> bool:
    """Return whether a failure says why the job ended by itself; an exit does so by its class."""
    if cause is None or cause.type == ASKED_TYPE:
        return False
    return cause.kind != EXIT or bool(cause.cls)


def _failure_text(job: JobLife) -> str:
    return "" if job.cause is None else job.cause.text


def _notify_end(ctx: StepContext, incident: Incident | None, why: str, *, failed: bool) -> None:
    """Notify people of the end of the run: stopped, finished, interrupted or crashed.

    An end that was asked for, or is good, is about no incident; another one is about the one that
    it ended, whose pages it leaves open.

    Args:
        why: why the job is not started again, "" where nothing would.
        failed: the newest start ended before its first step.
    """
    state, job, step = ctx.state, ctx.state.job, ctx.state.step
    ended, good = exit_text(job.returncode), _good_end(job, step)
    if good and incident is not None and incident.is_order:  # that is no trouble
        ctx.messages.drop(incident)
    newest = state.checkpoints.newest()
    damaged = newest if newest is not None and newest.damage else None
    if good:
        meant = run_notices.EndMeant(severity="INFO", end=good, outcome=ended)
        ctx.send(meant if damaged is None else _damaged(ctx, damaged, good), replace=True)
        return
    if job.returncode == 0 and not job.stopping:
        monitor, damage = state.monitors.get(state.leader() or 0), _describe_damage(damaged)
        since = None if monitor is None else diagnosis.nonfinite_since(monitor)
        if not job_lifecycle.notify_early_end(ctx, incident, since, damage):
            ctx.send(_finished(ctx, since, damaged), replace=True)
        return
    end = _bad_end(ctx, incident, why, damaged, failed=failed)
    ctx.send(end, replace=True, incident=incident)


def _finished(
    ctx: StepContext, nonfinite_since: int | None, damaged: Checkpoint | None
) -> notices.Notice:
    """Return what people hear of an end that looks good.

    Args:
        nonfinite_since: the step since which all losses are NaN or Inf, None where they are not.
        damaged: the newest checkpoint, if it is. No frame follows in which a rule could tell it.
    """
    state, step, since = ctx.state, ctx.state.step, nonfinite_since
    if since is not None:
        return run_notices.FinishedNonfinite(
            severity="SEV1",
            step=step,
            since=since,
            damage=_describe_damage(damaged),
            advice=Advice(None, advice.advise_restart(ctx.policy, state, since)),
        )
    if damaged is not None:
        return _damaged(ctx, damaged, run_notices.FinishedAt(step=step).text)
    return run_notices.JobFinished(severity="INFO", step=step)


def _advice(ctx: StepContext, incident: Incident | None) -> Advice:
    """Return how to go on after an end that nobody asked for, or a rule."""
    job = ctx.state.job
    if job.stopping and incident is not None:
        return Advice(None, advice.advise_after_stop(ctx.policy, ctx.state, incident))
    if _ended_as_asked(job):
        return Advice(None, advice.advise_rerun_after_end(ctx.policy, ctx.state, incident))
    failed = has_start_failed(ctx.state)
    cause = job.restarts.cause if failed else None  # that may be the cause
    remedy = advice.AFTER_KILL if job.returncode in KILLED else cause.remedy if cause else ()
    if job.cause is not None:
        remedy = job.cause.remedy
    restarted_with = (job.restarted_with or "job.relaunch") if failed else ""
    return Advice(
        None, advice.advise_after_crash(ctx.policy, ctx.state, incident, remedy, restarted_with)
    )


def _bad_end(
    ctx: StepContext,
    incident: Incident | None,
    why: str,
    damaged: Checkpoint | None,
    *,
    failed: bool,
) -> notices.Notice:
    """Return what people hear of an end that nobody asked for, or a rule; see `_notify_end`."""
    job, step, cause = ctx.state.job, ctx.state.step, ctx.state.job.cause
    end, then = exit_text(job.returncode), _advice(ctx, incident)
    failure = "" if cause is None else cause.text
    if _ended_as_asked(job):
        return run_notices.EndAsked(
            severity="SEV1", signal=job.end_signal, step=step, outcome=end, advice=then
        )
    damage = _describe_damage(damaged)
    if job.stopping and incident is None:
        return run_notices.JobStopped(
            severity="SEV1", step=step, end=end, damage=damage, advice=then
        )
    if job.stopping and incident is not None:
        return run_notices.JobStoppedIn(
            severity="SEV1",
            step=step,
            end=end,
            headline=incident.headline,
            damage=damage,
            advice=then,
        )
    if failed:
        return run_notices.RestartFailed(
            severity="SEV1",
            end=end,
            failure=failure,
            cause=why,
            command=job.restarted_with,
            advice=then,
        )
    if job.unfit_host:
        return run_notices.HostUnfit(
            severity="SEV1", end=end, step=step, failure=failure, cause=why
        )
    if not why and not ctx.policy.job.on_crash:
        why = run_notices.NO_ON_CRASH
    meaning = run_notices.KILLED if job.returncode in KILLED else ""
    if cause is not None:
        meaning = cause.title
    is_said = isinstance(job.no_restart_reason, run_notices.EndsTheSameWay)
    return run_notices.JobFailed(
        severity="SEV1",
        end=end,
        step=step,
        failure=failure,
        cause=why,
        meaning="" if is_said else meaning,
        others="" if cause is None else _describe_others(job, cause),
        advice=then,
    )


def _describe_damage(damaged: Checkpoint | None) -> str:
    if damaged is None:
        return ""
    return reasons.NewestDamaged(
        checkpoint=damaged.id, path=damaged.path, damage=damaged.damage
    ).text


def _damaged(ctx: StepContext, newest: Checkpoint, end: str) -> notices.Notice:
    """Return what people hear where nothing else is wrong with the end."""
    good = ctx.state.checkpoints.good()
    return run_notices.CheckpointDamaged(
        severity="SEV1",
        end=end,
        checkpoint=newest.id,
        path=newest.path,
        damage=newest.damage,
        good=good[-1].id if good else "",
        good_step=good[-1].step if good else -1,
    )


def _good_end(job: JobLife, step: int) -> str:
    """Return the title of an end that was asked for, "" for others."""
    if job.preempted and (job.stopping or job.returncode in ASKED):
        return run_notices.EndedAfter(request=job.preempted, step=step).text
    if job.stopping:
        stopped = run_notices.StoppedBy(operator=job.stopped_by, step=step)
        return "" if job.stopped_by == "policy" else stopped.text
    was_requested = job.interrupted and job.returncode in INTERRUPTED
    return run_notices.Interrupted(step=step).text if was_requested else ""


def _ended_as_asked(job: JobLife) -> bool:
    """Return whether a signal that asked for the end of the job ended it, and no action of ours."""
    return job.end_requested and not job.stopping and job.returncode in ENDED_BY_SIGNAL


def _describe_others(job: JobLife, cause: Failure) -> str:
    """Return what else ended, in a line: one that is no consequence is shown, the rest counted."""
    other_failures = [failure for failure in job.failures if failure is not cause]
    independent = (
        failure for failure in other_failures if not failure.secondary and failure.kind != LAUNCHER
    )
    failure_shown = next((failure for failure in independent if failure.text != cause.text), None)
    if failure_shown is None:
        count = len(other_failures)
        return run_notices.OthersEnded(count=count).text if count > 1 else ""
    more = len(other_failures) - 1 or None
    return run_notices.AlsoRecorded(failure=failure_shown.text, more=more).text


def on_program_replaced(ctx: StepContext, monitor: RankMonitor, event: Announced) -> None:
    """Another program takes the place of a rank's, all of whose frames were judged."""
    state, rank, last_step = ctx.state, event.rank, monitor.step
    program = "program" if event.again else "training"
    text = f"another {program} of rank {rank} started after step {last_step} in the same launch: "
    text += "its step numbers may repeat" if event.again else "it is judged by itself"
    ctx.record(ProgramReplaced(reason=text, rank=rank, pid=event.pid, last_step=last_step))
    if event.again:
        return
    _clear_rules(ctx, monitor, rank, "its training session ended")
    incident = state.incident
    # Ranks follow one another: the one that leads, and an incident's own, end it.
    if state.leader() not in (None, rank) and (incident is None or incident.case.rank != rank):
        return
    ended = reasons.SessionEnded(step=last_step)
    if incident is None:
        _start_session(ctx, ended.text)
        return
    approvals.settle_request(ctx, "withdrawn", ended)
    if incident.deferred.session_end is None:  # others may pass until an action is over
        # Its frames are forgotten next.
        incident.case.verdict = diagnosis.classify_incident(ctx.policy, state, incident)
        incident.deferred.session_end = last_step
    close_ended_session(ctx)


def remove_ranks(ctx: StepContext, world_size: int) -> None:
    """Fewer ranks go on in the same launch: nothing more is heard of the others, nor asked."""
    state = ctx.state
    for rank in [rank for rank in state.monitors if rank >= world_size]:
        monitor = state.monitors.pop(rank)
        state.ranks.remove(rank)
        _clear_rules(
            ctx, monitor, rank, f"rank {rank} was removed: the world size is {world_size} now"
        )


def close_ended_session(ctx: StepContext) -> None:
    """Close an incident whose training is over once nothing of it is under way."""
    incident = ctx.state.incident
    if incident is None or incident.deferred.session_end is None:
        return
    deferred, run = incident.deferred, incident.run
    over = reasons.SessionOver(step=incident.deferred.session_end)
    if run is not None and run.intent.action_id is not None:
        return
    if run is not None and run.failure.reason is not None:
        _report_unfinished(ctx, incident, run, str(run.failure.reason))
    standing = session_undos(incident.recovery)
    if standing and ctx.state.job.returncode is None:
        _undo(ctx, incident, standing[0], over)
        return
    closing.close_incident(ctx, incident, SESSION_ENDED, Advice(None, advice.NEXT_SESSION))
    _start_session(ctx, f"{incident.id} is {over}")
    for event in deferred.commands:
        operator_commands.on_command(ctx, event)


def _undo(ctx: StepContext, incident: Incident, action: Action, reason: Cause) -> None:
    """Ask for it once."""
    remove_undo(incident.recovery, action)
    number, book = incident.escalation.runs, Runbook("undo", (), ())
    failure = RunbookFailure(reason, pending_undos=[action])
    run = incident.run = RunbookExecution(number, book, incident.severity, failure=failure)
    runbook_runner.intend_undo(ctx, incident, run, action, "undo")


def _report_unfinished(
    ctx: StepContext, incident: Incident, run: RunbookExecution, reason: str
) -> None:
    """People must know what an operator did not get, and what goes on in the next training."""
    if run.requested.operator:
        failed = notices.CommandFailed(
            severity="SEV2", incident=incident.id, operator=run.requested.operator, error=reason
        )
        ctx.send(failed)
    undoing, standing = run.failure.pending_undos, incident.recovery.undos
    if undoing and not any(undoing[0] is undo for _, undo in standing):
        undone = notices.UndoFailedAtEnd(severity="SEV1", incident=incident.id, error=reason)
        ctx.send(undone)


def _clear_rules(ctx: StepContext, monitor: RankMonitor, rank: int, reason: str) -> None:
    """What fired on the rank fires no more, so that it can fire again."""
    policy, state = ctx.policy, ctx.state
    for rule, watch in zip(policy.rules, monitor.rules, strict=True):
        if watch.firing or watch.blind:
            text = f"{rule.id} cleared: {reason}"
            ctx.record(RuleCleared(reason=text, rule=rule.id, severity=rule.severity, rank=rank))
    monitor.rules = [RuleWatch() for _ in monitor.rules]
    firing = state.firing(policy)
    state.rules.unmute_cleared(firing)


def _start_session(ctx: StepContext, reason: str) -> None:
    """What was tried, and how often the loss went astray, was so in the training before."""
    state = ctx.state
    if state.job.returncode is not None:
        return
    state.history.start_session(state.frame_count)
    state.phase = RunPhase()
    state.context.onsets.clear()
    ctx.move("session_started", reason)
