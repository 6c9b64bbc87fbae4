"""Life of the job's processes: started, noticed, ended, started again, over.

A job that ends by itself may be started again by the runbook that `job.on_crash` names. The run is
over when the job has ended and nothing is under way that would start another one. A job that
reports success before it has made the planned steps ended too early: the exit code is 0, so a
scheduler takes the run for done. An action begins only when its intent is on disk, so a disk
without space ends the protection of the run once its reserve is used up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from . import (
    advice,
    approvals,
    checkpoint_wait,
    closing,
    effect_verification,
    job_recipes,
    notices,
    opening,
    reasons,
    rule_news,
    run_notices,
    runbook_runner,
    withdrawal,
)
from .host_health import HEALTH_NOTICE
from .incident import ACTING, HELD, OPEN, OVERDUE_S, QUIET_STEPS, Incident, Reason, RunbookExecution
from .model.checkpoint_registry import is_temporary
from .model.decisions import (
    ActionFailed,
    ActionRef,
    JobLaunched,
    JobRelaunching,
    NoticeTaken,
    RunAdopted,
)
from .model.events import Adopted, Exited, Launched, Notice
from .model.failure import (
    ASKED_TYPE,
    FAILURE_NOTICE,
    LOG_FAILURE,
    SIGNAL,
    SIGNALS,
    THREAD_FAILURE,
    Failure,
    exit_text,
)
from .model.interfaces import Advice
from .model.payload import (
    ChangedMetrics,
    CheckpointState,
    Drill,
    HostHealth,
    Orphans,
    PreemptOutcome,
    RecordSpace,
    RelaunchArgs,
    Shards,
    SignalSent,
    TrainingEnd,
    WeightsOrigin,
)
from .model.policy import HOLD, Runbook
from .notices import Cause
from .rank_monitor import RankMonitor
from .run_state import END_REQUESTED, JobLife, MessageDraft, Restarts, State, StepContext


def on_training_ended(ctx: StepContext, event: Notice) -> None:
    """Keep what a library made of its plan; the last training of a process counts."""
    end = event.data.read(TrainingEnd)
    if end.done is None or end.total is None:
        return
    is_early = end.done < end.total and not end.stopped
    made = reasons.StepsMade(count=end.done, total=end.total)
    ctx.state.job.shortfall = made.text if is_early else ""


def notify_early_end(
    ctx: StepContext, incident: Incident | None, nonfinite_since: int | None, damage: str
) -> bool:
    """Notify people of an end with code 0 that came too early; return whether it did.

    Args:
        incident: that it ended, if any.
        nonfinite_since: the step since which all losses are NaN or Inf, None where they are not.
        damage: of the newest checkpoint, "" for none.
    """
    state, job = ctx.state, ctx.state.job
    shortfall, planned = job.shortfall, ctx.policy.job.steps
    steps_made = state.step + 1
    if shortfall is None and planned and steps_made < planned:
        shortfall = reasons.StepsMade(count=steps_made, total=planned).text
    if not shortfall or job.signalled or job.end_requested:
        return False
    since, then = nonfinite_since, Advice()
    if since is not None:
        then = Advice(None, advice.advise_restart(ctx.policy, state, since))
    early = run_notices.JobEndedEarly(
        severity="SEV1", shortfall=shortfall, since=since, damage=damage, advice=then
    )
    ctx.send(early, replace=True, incident=incident)
    return True


def on_host_health(ctx: StepContext, event: Notice) -> None:
    """Keep why the host is not fit; notify people of what could not be decided."""
    job, health = ctx.state.job, event.data.read(HostHealth)
    job.unfit_host = health.unfit
    if health.doubts and not job.unfit_host and health.doubts != job.host_doubts:
        job.host_doubts = health.doubts
        ctx.send(run_notices.HostDoubted(severity="SEV2", text=event.message))


def on_preempt_signal(ctx: StepContext, event: Notice) -> None:
    """Remember what waits: a supervisor that takes over passes it on."""
    job, signal = ctx.state.job, event.data.read(SignalSent)
    job.signalled = True
    if signal.held:
        job.held_signals += (signal.signal,)


def on_preempt_outcome(ctx: StepContext, event: Notice) -> None:
    """Notify people of the outcome of a request; see `runtime.preemptor` for the phases."""
    job, outcome = ctx.state.job, event.data.read(PreemptOutcome)
    phase, cause, signals = outcome.phase, outcome.cause, ", ".join(outcome.signals or ())
    if phase in ("saved", "failed"):
        job.held_signals = ()
    if phase == "saved":
        job.preempted = reasons.Preempted(cause=cause, is_saved=True).text
        path = outcome.path or ""
        path = "" if is_temporary(path) else path
        saved = run_notices.PreemptSaved(
            severity="SEV2", text=event.message, path=path, signals=signals
        )
        ctx.send(saved)
    elif phase == "failed":
        job.preempted = reasons.Preempted(cause=cause, is_saved=False).text
        good = ctx.state.checkpoints.good()
        failed = run_notices.PreemptFailed(
            severity="SEV1" if ctx.state.step >= 0 else "SEV2",
            text=event.message,
            step=ctx.state.step,
            checkpoint=good[-1].id if good else "",
            checkpoint_step=good[-1].step if good else -1,
        )
        ctx.send(failed)
    elif phase == "unavailable":
        ctx.send(run_notices.PreemptUnavailable(severity="SEV2", text=event.message))


SHORT, ENOUGH, UNPROTECTED = "record-space-short", "record-space-enough", "unprotected"


def on_disk_short(ctx: StepContext, event: Notice) -> None:
    """The disk is full: the reserve is in use."""
    _report_space(ctx, event, run_notices.RecordSpaceShort)


def on_disk_recovered(ctx: StepContext, event: Notice) -> None:
    """There is space again."""
    _report_space(ctx, event, run_notices.RecordSpaceEnough)


def on_record_ended(ctx: StepContext, event: Notice) -> None:
    """The record has ended before the run."""
    _report_space(ctx, event, run_notices.RecordEnded)


def _report_space(ctx: StepContext, event: Notice, form: type[run_notices.SpaceNotice]) -> None:
    """Notify all channels, where the run counts on actions."""
    space = event.data.read(RecordSpace)
    notice = form(
        severity=form.GRAVEST if space.acts else "SEV2",
        text=event.message,
        acts=space.acts,
        mount=space.mount,
        need_bytes=space.need_bytes,
        runs=space.runs,
        reserve_bytes=space.reserve_bytes,
        seconds=space.seconds,
    )
    draft = MessageDraft.of(notice)
    draft.to_all = notice.acts
    ctx.messages.add(draft, replace=False)


def supervision_ended_message(error: str, *, acts: bool, pid: int | None = None) -> MessageDraft:
    """Return what every channel is told where an error of ours has ended the supervision.

    Args:
        pid: of the supervisor, where another one can take over from it.
    """
    form = run_notices.Unprotected if acts else run_notices.Unwatched
    draft = MessageDraft.of(form(severity="SEV1", error=error, pid=pid))
    draft.to_all = True
    return draft


# Signals that people and schedulers send, as subprocess and shells report them: INT, TERM, HUP,
# USR1, USR2 (before Grid Engine's KILL).
ASKED = frozenset(code for n in (2, 15, 1, 10, 12) for code in (-n, 128 + n))
DRILL = {  # of a failure, in the place of what its signal means
    "cls": "drill",
    "title": "a drill ended it, on purpose",
    "then": "nothing to look for: leave out --drill crash",
}
# 125 is "never again" of s6, 64 to 78 are what sysexits.h has for wrong usage, and 75 there asks a
# scheduler for another ctx: a job that says one of these knows better than we do.
MEANT = frozenset((125, *range(64, 79)))
HANGS = 2  # starts because it stood still, without going beyond the farthest; project default
IDLE_S = 10.0  # as in the runbook stop-and-page: one that works is left to a person
REPEAT_S = 900.0  # between two pages of the same; as long as an approval waits for an answer
GIVE_UP = "give-up"  # name of the runbook


ON_NOTICE: Mapping[str, Callable[[StepContext, Notice], None]] = {
    "continuity": effect_verification.on_continuity,
    "resume-refused": effect_verification.on_continuity,
    "wiring": rule_news.on_wiring,
    withdrawal.ENDED: withdrawal.on_pause_ended,
    "signal": on_preempt_signal,
    "training-ended": on_training_ended,
    "preempt": on_preempt_outcome,
    HEALTH_NOTICE: on_host_health,
    approvals.DELIVERED: approvals.start_answer_timeout,
    SHORT: on_disk_short,
    ENOUGH: on_disk_recovered,
    UNPROTECTED: on_record_ended,
    "checkpoint-saved": opening.on_save_notice,
    "note": opening.on_note,
}


def on_launched(ctx: StepContext, event: Launched) -> None:
    """Others run in the place of processes that ended: what is known of those counts no more."""
    state, job = ctx.state, ctx.state.job
    job.returncode, job.ended, job.no_restart_reason = None, False, None
    job.seen_ended = False
    job.preempted, job.shortfall, job.unfit_host = "", None, ""
    job.launched = event.attempt
    if state.incident is not None:
        # It was taken back from a training that had just begun.
        state.incident.deferred.session_end = None
    job.failures.clear()
    job.drill_signal = ""
    job.pids, job.ended_ns = {event.pid}, 0
    state.checkpoints.limit_wrong_starts(event.attempt)
    for monitor in state.monitors.values():
        monitor.mark_exited()
    for verb in ("rollback", "fence"):  # of the process that is gone
        job.unavailable.pop(verb, None)
    if event.attempt:
        run, settings = state.run(), ctx.policy.job.relaunch
        order = RelaunchArgs()
        if run is not None and run.intent.verb == "relaunch":
            order = run.intent.args.parse(RelaunchArgs)
        job.restarted_with = job_recipes.describe_relaunch(
            settings, order.path or job_recipes.CHECKPOINT, order.step
        )
        text = f"the job was restarted as attempt {event.attempt}, with {job.restarted_with}"
        ctx.record(JobLaunched(reason=text, pid=event.pid))


def on_notice(ctx: StepContext, event: Notice) -> None:
    """Take what was noticed about the watching, or about the job's checkpoints."""
    state, job = ctx.state, ctx.state.job
    if event.kind == FAILURE_NOTICE and _is_by_drill(job, event):
        event = replace(event, data=event.data.extended(**DRILL))
    ctx.record(
        NoticeTaken(
            reason=event.message,
            what=event.kind,
            rank=event.rank,
            at_step=event.step,
            details=event.data,
        )
    )
    for rank, monitor in state.monitors.items():
        _update_monitor(monitor, event, of_rank=event.rank in (None, rank))
    if event.kind == "drill" and (drill := event.data.read(Drill)).fault == "crash":
        number = None if drill.params is None else drill.params.signal
        job.drill_signal = SIGNALS.get(number or 0, "")
    if event.kind == FAILURE_NOTICE:
        _on_failure(ctx, event.data.read(Failure))
    if event.kind == "shard":
        state.context.attribution.add_names(event.rank, event.data.read(Shards).shards or {})
    if event.kind == "signal" and (signal := event.data.read(SignalSent)).final:
        job.end_requested, job.end_signal = True, job.end_signal or signal.signal
        job.interrupted |= signal.typed
        job.unavailable["relaunch"] = END_REQUESTED
        if job.returncode is not None and _relaunch_id(state) is not None:
            _on_job_ended(ctx)
    if event.kind == "checkpoint":
        opening.on_checkpoint_notice(state, event.data.parse(CheckpointState))
        runbook_runner.start_waiting_runbook(ctx)  # perhaps what lacked one
    if event.kind == "checkpoint-search":
        checkpoint_wait.on_checkpoint_search(state, event)
        runbook_runner.start_waiting_runbook(ctx)
    if event.kind in ON_NOTICE:
        ON_NOTICE[event.kind](ctx, event)
    if event.kind == "checkpoint-choice":
        checkpoint_wait.retarget_relaunch(ctx)
    verb, _, suffix = event.kind.rpartition("-")
    if suffix == "unavailable":
        job.unavailable[verb] = event.message
        _notify_lost(ctx, verb, event.message)
    if event.kind == "capabilities":
        job.lost = frozenset(job.unavailable)
    _notify_people(ctx, event)


def _is_by_drill(job: JobLife, event: Notice) -> bool:
    """Return whether a process was ended by the signal that a drill sends."""
    failure = event.data.read(Failure)
    return failure.kind == SIGNAL and failure.type == job.drill_signal


def _on_failure(ctx: StepContext, failure: Failure) -> None:
    """Keep how a process ended; people hear once of what the job may survive."""
    failures = ctx.state.job.failures
    if failure.kind == LOG_FAILURE and not any(
        previous.cls == failure.cls for previous in failures
    ):
        line = run_notices.LogFailure(
            severity="SEV2",
            meaning=failure.title,
            text=failure.text,
            advice=Advice(None, failure.remedy),
        )
        ctx.send(line)
    if failure.kind == THREAD_FAILURE and not any(
        previous.kind == THREAD_FAILURE for previous in failures
    ):
        ctx.send(run_notices.ThreadFailure(severity="SEV2", text=failure.text))
    failures.append(failure)


def _notify_lost(ctx: StepContext, verb: str, reason: str) -> None:
    """Say once that something cannot be done any more which people were told could be."""
    job = ctx.state.job
    if job.lost is None or verb in job.lost or verb != "rollback" or job.returncode is not None:
        return
    job.lost |= {verb}
    then = advice.advise_relaunch_only(ctx.policy)
    ctx.send(run_notices.RollbackLost(severity="SEV2", cause=reason, advice=then))


def _update_monitor(monitor: RankMonitor, event: Notice, *, of_rank: bool) -> None:
    if event.kind == "suspended":  # silence meanwhile means nothing
        monitor.reset_deadlines(event.at_ns)
    elif event.kind in ("measurement-changed", "collector-off") and of_rank:
        monitor.reset_detectors(event.data.read(ChangedMetrics).metrics)
    elif event.kind == "weights-restored" and of_rank:
        origin = event.data.read(WeightsOrigin)
        monitor.weights_of = origin.attempt, origin.to
    elif event.kind in ("probe-off", "segment-fault"):
        monitor.probe_off |= of_rank


def _notify_people(ctx: StepContext, event: Notice) -> None:
    """Say to people what they have to know of it."""
    state, job = ctx.state, ctx.state.job
    if event.kind == "stopped":
        ctx.send(run_notices.JobSuspended(severity="SEV2", text=event.message))
    if event.kind == "slow-start":
        ctx.send(run_notices.StartSlow(severity="SEV2", text=event.message))
    if event.kind == "identity-changed":
        ctx.send(run_notices.ProgramChanged(severity="SEV2", text=event.message))
    if event.kind in ("orphans", "orphans-left"):
        are_left, orphans = event.kind == "orphans-left", event.data.read(Orphans)
        if are_left:  # a start would end them first
            job.unavailable["relaunch"] = event.message
        found = run_notices.OrphansFound(
            severity="SEV1" if are_left else "SEV2",
            text=event.message,
            consequence=orphans.verdict,
            command=orphans.end,
        )
        ctx.send(found)
    if event.kind in run_notices.UNMONITORED:
        ctx.send(run_notices.Unmonitored(severity="SEV2", text=event.message, event=event.kind))
    # Each rank reports the same, so people are told by one.
    is_first = event.rank == min(state.monitors, default=event.rank)
    if event.kind == "report" and is_first:
        ctx.send(run_notices.MetricsMissing(severity="SEV2", text=event.message))
    if event.kind == "turns" and not state.context.takes_turns:
        state.context.takes_turns = True
        ctx.send(run_notices.OptimizersTakeTurns(severity="SEV2", text=event.message))
    if event.kind == "discards" and is_first:
        ctx.send(run_notices.UpdatesDiscarded(severity="SEV1", text=event.message))


def on_exited(ctx: StepContext, event: Exited) -> None:
    """The job's processes are gone; what is under way comes to its end before that is answered."""
    state, incident = ctx.state, ctx.state.incident
    state.job.returncode, state.job.ended_ns = event.returncode, event.at_ns
    if incident is not None:
        under_way = [] if incident.run is None else incident.run.failure.pending_undos
        incident.recovery.outstanding = bool(incident.recovery.undos or under_way)
        incident.recovery.undos.clear()  # it ended with the process
    run = state.run()
    order = None if run is None else run.intent.args.read(RelaunchArgs)
    started = order is not None and order.attempt == state.job.launched > 0
    if _relaunch_id(state) is not None and not (state.job.end_requested or started):
        text = f"the job {exit_text(state.job.returncode)}, to be restarted"
        ctx.record(JobRelaunching(reason=text))
    else:
        _on_job_ended(ctx)


def _relaunch_id(state: State) -> str | None:
    """Return the id of the relaunch that is under way."""
    run = state.run()
    return run.intent.action_id if run is not None and run.intent.verb == "relaunch" else None


def has_start_failed(state: State) -> bool:
    """Return whether the newest start came to nothing: no step of it was seen, and it failed.

    An end that was asked for, by a signal too, is no failure.
    """
    job = state.job
    has_frame = any(monitor.attempt >= job.launched for monitor in state.monitors.values())
    was_requested = job.stopping or job.end_requested or job.returncode in ASKED
    return bool(job.launched and job.returncode) and not (has_frame or was_requested)


def _on_job_ended(ctx: StepContext) -> None:
    """The job has ended, and what is under way does not start it again."""
    state, relaunch = ctx.state, _relaunch_id(ctx.state)
    if relaunch is not None and state.job.end_requested:
        error = str(reasons.Settled.END_REQUESTED)
        reason = f"{relaunch} failed: {error}"
        ctx.record(ActionFailed(reason=reason, action=ActionRef(relaunch), error=error))
    over = reasons.JobOver(returncode=state.job.returncode)
    approvals.settle_request(ctx, "withdrawn", over)
    state.job.ended = True


def has_crashed(job: JobLife) -> bool:
    """Return whether the job ended by itself and not as it, or anybody, meant to."""
    was_requested = job.cause is not None and job.cause.type == ASKED_TYPE
    return is_crash(job.returncode or 0) and not (
        job.stopping or job.end_requested or was_requested
    )


def is_crash(returncode: int) -> bool:
    """Return whether a process that ended so did not mean to, and was not asked to."""
    return bool(returncode) and returncode not in ASKED and returncode not in MEANT


def give_up_stalled_job(ctx: StepContext, incident: Incident, name: str) -> bool:
    """Give up a job that stands still, where runbook `name` would only start it once more in vain.

    Its evidence is taken, and it is ended if it does nothing; where a person must be asked for
    that, it is held. Hangs may pass by themselves, so one more start is tried than for a crash.
    """
    policy, step, hangs = ctx.policy, ctx.state.step, ctx.state.job.restarts.hangs
    if name == HOLD or "relaunch" not in policy.runbooks[name].verbs:
        return False
    farthest = Restarts.farthest_or_clear(hangs, step)
    if len(hangs) < HANGS:
        hangs.append(step)
        return False
    why = reasons.StallsAgain(times=HANGS, farthest=farthest)
    reason = withdrawal.runbook_reason(policy, ctx.state, incident)
    if not _end_with_evidence(ctx, incident, why, reason, if_idle=IDLE_S):
        closing.hold_incident(ctx, incident, why)
    return True


def _end_with_evidence(
    ctx: StepContext, incident: Incident, why: Cause, reason: Reason | None, **stop: float
) -> bool:
    """Take evidence and end the job; return False where a person must be asked for that."""
    policy, verbs = ctx.policy, ("snapshot", "stop")
    if not set(verbs) <= set(policy.verbs):
        return False
    book = Runbook(GIVE_UP, (policy.verbs["snapshot"](), policy.verbs["stop"](**stop)), verbs)
    if approvals.required_approval(policy, incident, book) is not None:
        return False
    incident.escalation.runs += 1
    incident.run = RunbookExecution(incident.escalation.runs, book, incident.severity)
    incident.phase = ACTING
    incident.run.terms.reason = reason
    incident.headline += f"; {why}"
    ctx.move("run", f"given up: {why}")
    form = notices.GivenUpIfIdle if stop else notices.GivenUp
    given_up = form(severity=incident.severity, incident=incident.id, cause=str(why))
    ctx.send(given_up, replace=True)
    runbook_runner.proceed_runbook(ctx, incident)
    return True


def stop_or_repeat_exhausted(ctx: StepContext, incident: Incident) -> None:
    """While a trouble lasts that nothing can help: stop the job, if the policy says so, or repeat.

    A person who has acknowledged it decides alone.
    """
    state, since = ctx.state, incident.escalation.exhausted
    if since is None or incident.phase not in (OPEN, HELD) or incident.acknowledged_by:
        return
    if state.job.returncode is not None or not withdrawal.trouble_lasts(
        ctx.policy, state, incident
    ):
        return
    frame_count, reported_ns = since
    lasted, history = state.frame_count - frame_count, state.history.tried_runbooks
    ends = lasted >= QUIET_STEPS and withdrawal.policy_ends_job(ctx.policy, state, incident)
    if ends and incident.run is None and GIVE_UP not in history:
        history[GIVE_UP] = False
        if _end_with_evidence(ctx, incident, reasons.NothingHelped(steps=lasted), None):
            return
    if state.at_ns - reported_ns > min(REPEAT_S, ctx.policy.hold_reminder_s) * 1e9:
        incident.escalation.exhausted = frame_count, state.at_ns
        form, ways = (
            notices.StillUnhelped,
            advice.advise_manual_choices(ctx.policy, state, incident),
        )
        if incident.phase == HELD:
            state.held_ns = state.at_ns  # its own reminder would say the same
            form, ways = (
                notices.StillOff,
                advice.advise_choices_in_hold(ctx.policy, state, incident),
            )
        unhelped = form(
            severity="SEV0",
            incident=incident.id,
            steps=lasted,
            status=withdrawal.describe_job_status(ctx.policy, state),
            headline=incident.headline,
            advice=Advice(None, ways),
        )
        ctx.send(unhelped)


def on_adopted(ctx: StepContext, event: Adopted) -> None:
    """Say so, and let every deadline begin anew: nobody listened meanwhile."""
    took_over = reasons.TookOver(pid=event.pid, seconds=event.unwatched_ns / 1e9, alive=event.alive)
    text = took_over.text
    ctx.record(RunAdopted(reason=text, alive=event.alive))
    ctx.send(run_notices.MonitoredAgain(severity="INFO", text=text))
    state = ctx.state
    for monitor in state.monitors.values():
        monitor.reset_deadlines(event.at_ns)
    pending = state.approvals.pending
    if pending is not None:
        pending.requested_ns += event.unwatched_ns
        pending.deadline_ns += event.unwatched_ns
    run = state.run()
    if run is not None:
        run.verification.frame_ns = event.at_ns
        if run.intent.action_id is not None:
            within_s = runbook_runner.awaited_action(state).limit_s(run.intent.args) + OVERDUE_S
            run.intent.deadline_ns = event.at_ns + int(within_s * 1e9)
