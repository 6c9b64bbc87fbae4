"""step(policy, state, event) -> (state, decisions). The only place where something is decided.

Order within one event: the detectors and rules of the rank, then inhibition, then the incident,
then actions. So the order of rules does not matter, and a cause that trips in the same step as its
consequences mutes them in time.

`step` is pure as seen from outside: the same state and event give the same state and decisions. It
uses up the state it is given; keep a deep copy to go back. Hence a replay, which folds the
recorded events through it and compares its decisions with the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import MISSHAPEN, StoreError
from . import (
    action_planning,
    advice,
    approvals,
    checkpoint_wait,
    closing,
    diagnosis,
    effect_verification,
    job_end,
    job_lifecycle,
    notices,
    opening,
    operator_commands,
    policy_reload,
    reasons,
    rule_fired,
    rule_news,
    rule_scope,
    run_notices,
    runbook_runner,
    spike_classifier,
)
from .frames import JobFrames
from .incident import (
    OPEN,
    PROBATION,
    QUIET_STEPS,
    Incident,
    RollbackFailure,
    note_rollback_failure,
)
from .model import state_machine
from .model.decisions import (
    ACTING_MODES,
    BREACH,
    CLEARED,
    REBASELINED,
    RECOVERED,
    ActionInDoubt,
    ActionRef,
    Decision,
    FramesMissing,
    IncidentClassified,
    NearMiss,
    Rebaselined,
    RuleBlind,
    decision_record,
)
from .model.events import (
    LOADING,
    SUSPENDED,
    Adopted,
    Announced,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    LateFrame,
    Launched,
    Notice,
    OperatorCommand,
    Reloaded,
    Tick,
)
from .model.interfaces import REBASELINE, Advice, AdviceSteps, Step
from .model.payload import Json
from .model.policy import HOLD, Policy, Rule, next_level
from .model.verdicts import SpikeClass, Verdict
from .rank_monitor import RankMonitor
from .run_phase import LR_PHASE
from .run_state import JobLife, NoteMemory, State, StepContext

# Frames between two notes of one kind of a detector; behind MANY_NOTES twice as many after each, up
# to DOUBLINGS times: those of noisy step times were 4 of 10 records of a long run.
NOTE_STEPS, MANY_NOTES, DOUBLINGS = 100, 8, 6
UNSEEN_STEPS = 20  # without a frame, and people are told: a recovery needs as many; project default


def initial_state(policy: Policy) -> State:
    """Return the state before the first event."""
    return State(job=JobLife(unavailable=dict(policy.unavailable)))


def step(policy: Policy, state: State, event: Event) -> tuple[State, list[Decision]]:
    """Judge one event."""
    ctx = StepContext(state.phase.policy_in_phase(policy), state, event)
    if event.at_ns > state.at_ns:
        state.at_ns = event.at_ns
    _release(ctx, policy, event)
    if isinstance(event, Announced | Reloaded):
        ctx.policy = policy  # what binds monitors to it takes it as it is written
    if isinstance(event, Frame | LateFrame):
        _take_frame(ctx, policy, event)
    elif isinstance(event, Tick):
        _on_tick(ctx, event)
    elif isinstance(event, Announced):
        _on_announced(ctx, event)
    elif isinstance(event, Finished):
        runbook_runner.on_action_finished(ctx, event)
        _run_deferred(ctx)
    elif isinstance(event, Gap):
        _on_gap(ctx, policy, event)
    elif isinstance(event, Notice):
        job_lifecycle.on_notice(ctx, event)
    elif isinstance(event, OperatorCommand):
        operator_commands.on_command(ctx, event)
    elif isinstance(event, Launched):
        job_lifecycle.on_launched(ctx, event)
    elif isinstance(event, Adopted):
        job_lifecycle.on_adopted(ctx, event)
    elif isinstance(event, Exited):
        job_lifecycle.on_exited(ctx, event)
    elif isinstance(event, Reloaded):
        policy_reload.on_reloaded(ctx, event)
    if state.job.returncode is not None:
        job_end.end_run_if_over(ctx)
    return state, ctx.close()


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def _monitor(policy: Policy, state: State, rank: int) -> RankMonitor:
    monitors = state.monitors
    if rank not in monitors:
        monitors[rank] = RankMonitor(policy)
        state.monitors = dict(sorted(monitors.items()))
    return state.monitors[rank]


def _is_removed(state: State, rank: int) -> bool:
    """Return whether an elastic restart left out this rank: what it sent is read late."""
    return rank >= state.job.world_size and rank not in state.monitors


def _on_gap(ctx: StepContext, policy: Policy, event: Gap) -> None:
    rank, count = event.rank, event.count
    if _is_removed(ctx.state, rank):
        return
    text = f"rank {rank}: {count} frames were lost"
    ctx.record(FramesMissing(reason=text, rank=rank, first_seq=event.first_seq, count=count))
    _monitor(policy, ctx.state, rank).lost += count


def _on_announced(ctx: StepContext, event: Announced) -> None:
    state, rank = ctx.state, event.rank
    monitor = _monitor(ctx.policy, state, rank)
    names = event.names
    if event.world_size > 1:
        if _is_successor(state, event):
            state.ranks.forget(rank)
        names = state.ranks.announce(rank, names)
    if event.world_size < state.job.world_size and _is_successor(state, event):
        job_end.remove_ranks(ctx, event.world_size)
    if monitor.is_replaced_by(event.program):
        job_end.on_program_replaced(ctx, monitor, event)
    effect_verification.on_rank_announced(state, monitor, event)
    monitor.announce(names, event.program)
    state.context.attribution.bind_metrics(rank, event.names, event.program)
    state.job.world_size = event.world_size
    state.job.pids.add(event.pid)
    if event.again:
        state.job.failures.clear()  # a launcher has answered them


def _is_successor(state: State, event: Announced) -> bool:
    """Return whether another program is that rank from now on."""
    monitor = state.monitors.get(event.rank)
    return monitor is not None and monitor.program not in (None, event.program)


def _take_frame(ctx: StepContext, base_policy: Policy, frame: Frame | LateFrame) -> None:
    """Judge a frame; of several ranks, one of the job when all have sent the step."""
    state, attribution = ctx.state, ctx.state.context.attribution
    if isinstance(frame, LateFrame):
        _take_late_frame(ctx, base_policy, frame)
        return
    if _is_removed(state, frame.rank) or frame.attempt < state.job.launched:  # of an ended process
        return
    if frame.rank in attribution.columns:
        attribution.feed(frame, calm=opening.is_training_quiet(state))
    if state.job.world_size < 2:
        _on_frame(ctx, base_policy, frame)
    else:
        _judge(ctx, base_policy, state.ranks.add(frame, state.at_ns, state.job.world_size))


def _take_late_frame(ctx: StepContext, base_policy: Policy, frame: LateFrame) -> None:
    """Judge what was measured of an earlier step, with what is known of the rank that leads."""
    state = ctx.state
    leader = state.leader() if state.ranks.leader is None else state.ranks.leader
    rank = 0 if leader is None else leader
    monitor = _monitor(base_policy, state, rank)
    changes = monitor.feed_late(frame, state.frame_count)
    _record_notes(ctx, monitor)
    if changes:
        rule_fired.on_rules_changed(ctx, monitor, rank, changes)


def _release(ctx: StepContext, base_policy: Policy, event: Event) -> None:
    """Judge frames that wait for other ranks, where these are late or will not come."""
    ranks, world_size = ctx.state.ranks, ctx.state.job.world_size
    if world_size < 2:
        return
    if isinstance(event, Launched):
        ctx.state.ranks = JobFrames()
    elif isinstance(event, Tick):
        _judge(ctx, base_policy, ranks.release_overdue(event.at_ns, world_size))
    elif _is_cut(ctx.state, event):
        _judge(ctx, base_policy, ranks.flush(world_size))


def _is_cut(state: State, event: Event) -> bool:
    """Return whether what the leader sends after this event does not follow what it sent before."""
    if isinstance(event, Exited):
        return True
    if isinstance(event, Announced):
        return event.rank == state.ranks.leader and _is_successor(state, event)
    return isinstance(event, Gap) and event.rank == state.ranks.leader


def _judge(ctx: StepContext, base_policy: Policy, frames: list[Frame]) -> None:
    for frame in frames:
        _on_frame(ctx, base_policy, frame)


def _on_frame(ctx: StepContext, base_policy: Policy, frame: Frame) -> None:
    state, rank, step = ctx.state, frame.rank, frame.step
    monitor = state.monitors.get(rank) or _monitor(base_policy, state, rank)
    if state.ranks.leader is None:
        is_leader = not rank or (leader := state.leader()) is None or rank <= leader
    else:
        is_leader = rank == state.ranks.leader
        leading = None if is_leader else state.monitors.get(state.ranks.leader)
        # What the leader cannot judge, as the loss of the last stage of a pipeline, stays here.
        monitor.delegate_rules(frozenset() if leading is None else leading.of_job)
    if is_leader:  # rank 0 does whenever it speaks
        state.frame_count += 1
        state.step, state.attempt = step, frame.attempt
    if state.machine == state_machine.LAUNCHING:
        ctx.move("first_frame", f"first frame, step {step} of rank {rank}")
    if step > monitor.step + 1 and frame.attempt == monitor.attempt and monitor.step >= 0:
        _record_missing_frames(ctx, monitor, frame)
    monitor.lost = 0
    changes = monitor.feed(frame, state.frame_count)
    frames_seen = state.frame_count - state.history.session_start
    if state.machine == state_machine.WARMING and frames_seen >= ctx.policy.warmup_steps:
        ctx.move("ready", f"{frames_seen} frames seen")
    if is_leader:
        effect_verification.compare_repeated_step(ctx, monitor, frame)
        _follow_phase(ctx, base_policy, monitor, changes, frames_seen)
        effect_verification.follow_epoch(ctx, monitor, frame)
    _record_notes(ctx, monitor)
    if state.incident is not None:
        opening.track_breach(ctx.policy, state, monitor, state.incident)
    if changes:
        rule_fired.on_rules_changed(ctx, monitor, rank, changes)
    if state.rules.muted:
        rule_fired.answer_uninhibited(ctx, monitor, rank)
    if state.rules.flapping and is_leader:
        rule_news.clear_settled_flapping(ctx)
    if state.rules.flapping or state.rules.growing:
        rule_news.report_breach_growth(ctx, monitor)
    incident = state.incident
    if incident is not None and incident.deferred.rules:
        rule_fired.answer_deferred_rules(ctx)
    if incident is not None and is_leader and incident.deferred.session_end is None:
        effect_verification.judge_frame(ctx, incident, frame)
        if (pending := state.approvals.pending) is not None:
            approvals.report_unneeded(ctx, incident, pending)
        _update_incident(ctx, incident)
        job_lifecycle.stop_or_repeat_exhausted(ctx, incident)
    monitor.hold_levels(diagnosis.rules_freezing_baselines(state))


def _follow_phase(
    ctx: StepContext,
    base_policy: Policy,
    monitor: RankMonitor,
    changes: list[tuple[int, bool]],
    frames_seen: int,
) -> None:
    """Let the phase of the run follow a frame, and the policy the phase."""
    phase, lr_phase = ctx.state.phase, monitor.value(LR_PHASE)
    rate = None if lr_phase is None else monitor.value(diagnosis.SCHEDULED)
    if lr_phase is not None and rate is None:
        rate = monitor.value(diagnosis.RATE)
    if phase.advance_phase(
        monitor.step, lr_phase, rate, frames_seen=frames_seen, warmup=base_policy.warmup_steps
    ):
        rule_fired.on_run_phase_changed(ctx, phase.policy_of_new_phase(base_policy), changes)


def _record_missing_frames(ctx: StepContext, monitor: RankMonitor, frame: Frame) -> None:
    """Steps of a rank have no frame, and no gap told of them: nobody has looked at them."""
    first_step, last_step = monitor.step + 1, frame.step - 1
    unseen, incident = last_step - first_step + 1, ctx.state.incident
    if incident is not None and frame.rank == incident.case.rank:
        incident.case.excursion.unseen += unseen
    if unseen <= monitor.lost:
        return
    absent = reasons.StepsWithoutFrame(rank=frame.rank, first_step=first_step, last_step=last_step)
    text = absent.text
    ctx.record(
        FramesMissing(reason=text, rank=frame.rank, first_step=first_step, last_step=last_step)
    )
    if unseen > UNSEEN_STEPS:
        ctx.send(run_notices.StepsUnseen(severity="SEV2", text=text))


def _on_tick(ctx: StepContext, tick: Tick) -> None:
    state = ctx.state
    beats = {beat.rank: beat for beat in tick.beats}
    for rank, monitor in state.monitors.items():
        changes = monitor.tick(tick.at_ns, beats.get(rank), state.frame_count)
        if changes:
            rule_fired.on_rules_changed(ctx, monitor, rank, changes)
        for r in monitor.newly_blind(state.frame_count, tick.at_ns):
            _on_blind_rule(ctx, r, rank)
    incident, run = state.incident, state.run()
    if incident is not None and run is not None and run.intent.action_id is not None:
        if tick.at_ns > run.intent.deadline_ns:
            action_id = run.intent.action_id
            reason = f"no outcome of {action_id} before its deadline"
            ctx.record(ActionInDoubt(reason=reason, action=ActionRef(action_id)))
            verb = run.intent.verb
            note_rollback_failure(incident.recovery, verb, RollbackFailure.IN_DOUBT)
            runbook_runner.fail_step(ctx, incident, reasons.StepUnanswered(verb=verb))
            _run_deferred(ctx)
    elif incident is not None:
        waits = any(beat.phase in (SUSPENDED, LOADING) for beat in tick.beats)
        effect_verification.check_silence(ctx, incident, waits=waits)
        _update_incident(ctx, incident)
        job_lifecycle.stop_or_repeat_exhausted(ctx, incident)
    operator_commands.expire_request(ctx)
    if incident is not None and incident.acknowledged_by:
        return
    if state.incident is not None:
        rule_news.send_reminder(ctx, state.incident)
    if state.held_ns is not None and tick.at_ns - state.held_ns > ctx.policy.hold_reminder_s * 1e9:
        state.held_ns = tick.at_ns
        then: AdviceSteps = (Step("automatic actions on again", "supervise release RUN"),)
        if incident is not None:
            then = advice.advise_choices_in_hold(ctx.policy, state, incident)
        ctx.send(notices.StillHeld(severity="SEV1", advice=Advice(None, then)))


def _run_deferred(ctx: StepContext) -> None:
    """An action is over: first the words that waited for it, then what was worse than it."""
    job_end.close_ended_session(ctx)
    operator_commands.run_deferred_commands(ctx)
    rule_fired.answer_deferred_rules(ctx)


def _record_notes(ctx: StepContext, monitor: RankMonitor) -> None:
    state, incident = ctx.state, ctx.state.incident
    for name, note in monitor.notes:
        rules = (rule for rule in ctx.policy.rules if incident and rule.id in incident.rules)
        is_of_incident = any(name in ctx.policy.detectors_of(rule) for rule in rules)
        if note.kind == REBASELINE and is_of_incident and incident is not None:
            incident.ending.rebaselined = True
        past = state.rules.noted.setdefault((name, note.kind), NoteMemory())
        doublings = 0 if is_of_incident else min(max(0, past.records - MANY_NOTES), DOUBLINGS)
        apart = NOTE_STEPS << doublings
        text = f"{name}: {note.text}"
        if past.records and state.frame_count < past.frame_count + apart:
            past.unrecorded += 1
            continue
        if note.kind == REBASELINE:
            text += f"; {past.unrecorded} more since the last record" if past.unrecorded else ""
            about = Rebaselined(
                reason=text, detector=name, details=note.details, unrecorded=past.unrecorded
            )
            ctx.record(about)
        else:
            ctx.record(NearMiss(reason=text, detector=name, details=note.details))
        state.rules.noted[name, note.kind] = NoteMemory(state.frame_count, past.records + 1)
    monitor.notes.clear()


def _on_blind_rule(ctx: StepContext, index: int, rank: int) -> None:
    """A metric that was there went missing: an incident of its own, not health."""
    rule, monitor = ctx.policy.rules[index], ctx.state.monitors[rank]
    if ctx.state.silence(rule.id) is not None:
        return
    missing = _missing_metrics(ctx.policy, monitor, rule)
    is_broken = bool(missing) and all(monitor.value(metric) is not None for metric in missing)
    follows = is_broken and rule_scope.MOVED_BY_SPIKE.issuperset(missing)
    incident = ctx.state.incident
    if is_broken and not follows and incident is not None and incident.case.excursion.lasting:
        monitor.rules[index].blind = False  # it may follow too: asked again once that is over
        return
    severity = "SEV0" if rule.severity == "SEV0" else "SEV1"
    reason = f"{rule.id} cannot be evaluated on rank {rank}: no usable value of "
    reason += ", ".join(missing) or "its metrics"
    alarm = RuleBlind(reason=reason, rule=rule.id, severity=severity, rank=rank)
    blind = replace(rule, severity=severity)
    rule_fired.end_machine_incident(ctx, [blind])  # what is recorded is of the next one
    ctx.record(alarm)
    incident = ctx.state.incident
    if follows and incident is not None and incident.case.excursion.is_nonfinite:
        return  # what is NaN or Inf is what the incident is about
    if rule_scope.incident_alongside(ctx.policy, ctx.state.incident, blind):
        opening.notify_alongside(ctx, blind, alarm)
        return
    opening.open_or_join_incident(ctx, monitor, blind, alarm)
    ctx.move("notice", reason)


def _missing_metrics(policy: Policy, monitor: RankMonitor, rule: Rule) -> list[str]:
    """Return the metrics of a rule, of those that the job has, without a finite value now."""
    metrics = (m for n in policy.detectors_of(rule) for m in policy.detectors[n].metrics)
    names = filter(monitor.names.__contains__, dict.fromkeys(metrics))
    return [m for m in names if (v := monitor.value(m)) is None or v - v != 0.0]


# ── the end of an incident ────────────────────────────────────────────────────────────────────────


def _update_incident(ctx: StepContext, incident: Incident) -> None:
    """Classify an incident when it is time to, and close it when it is over."""
    policy, state, ending = ctx.policy, ctx.state, incident.ending
    verdict = diagnosis.update_diagnosis(policy, state, incident)
    if verdict is not None:
        _on_classified(ctx, incident, verdict)
    if incident.phase == PROBATION and incident.run is None:
        relapse = _relapse(policy, state, incident)
        if relapse is not None:
            rule_id, incident.recovery.relapse_step = relapse
            opening.on_relapse(state, incident)
            again = reasons.RelapseOnProbation(rule=rule_id)
            runbook_runner.escalate_incident(ctx, incident, again)
        elif (
            state.frame_count >= ending.probation_until
            and state.step >= incident.recovery.probation_step
        ):
            steps, over = policy.probation_steps, "is done" if incident.is_order else "recovered"
            closing.close_incident(ctx, incident, RECOVERED, clear_steps=steps)
            ctx.move("passed", f"{incident.id} {over}")
    elif incident.phase == OPEN:
        if (
            incident.run is None
            and (due := action_planning.withdrawn_runbook_due(state, incident)) is not None
        ):
            book, reason = due
            runbook_runner.start_runbook(
                ctx,
                incident,
                book.name,
                book.level,
                reasons.Reported(report=reason),
                escalated=book.escalated,
            )
        elif rule_scope.incident_still_fires(
            policy, state, incident
        ) or checkpoint_wait.awaits_checkpoint(state, incident):
            ending.quiet_since = None
        elif ending.quiet_since is None:
            ending.quiet_since = state.frame_count
        elif (
            incident.run is None  # its evidence may still be under way
            and state.frame_count - ending.quiet_since >= QUIET_STEPS
            and not diagnosis.awaits_recovery(policy, state, incident)
        ):
            left = ending.rebaselined and not diagnosis.is_loss_back(policy, state, incident)
            closing.close_incident(ctx, incident, REBASELINED if left else CLEARED)
            ctx.move("clear", f"{incident.id} is over")


def _on_classified(ctx: StepContext, incident: Incident, verdict: Verdict) -> None:
    """An incident is open for so long that its class can be told; no level left means hold."""
    state = ctx.state
    text = f"classified: {verdict.text}"
    ctx.record(IncidentClassified(reason=text, severity=incident.severity, spike=verdict))
    pending = state.approvals.pending
    if not (verdict.kind == SpikeClass.DATA and rule_scope.input_rules(ctx.policy, incident)):
        then = advice.advise_after_verdict(ctx.policy, state, incident, verdict)
        if pending is not None:
            then = advice.advise_on_request(state, incident, pending, verdict)
        is_no_news = incident.severity == "SEV2" and spike_classifier.is_unexplained(verdict)
        is_no_news |= action_planning.is_loss_all(ctx.policy, state, incident, verdict)
        is_quiet = incident.escalation.runs == incident.escalation.called_off
        is_quiet &= is_no_news or spike_classifier.is_loss_normal_again(verdict)
        monitor = state.monitors.get(incident.case.rank)
        diagnosed = notices.Diagnosed(
            severity="INFO" if is_quiet and pending is None else incident.severity,
            incident=incident.id,
            spike=verdict.kind,
            summary=diagnosis.verdict_summary(verdict),
            nonfinite_since=None if monitor is None else diagnosis.nonfinite_since(monitor),
            advice=then,
        )
        ctx.send(diagnosed)
    level = incident.escalation.level
    name, _ = next_level(ctx.policy.ladder, level)
    idle = incident.run is None and not incident.is_held
    awaited = incident.deferred.awaiting_checkpoint
    if awaited is not None and awaited.candidates:
        return
    lasting = verdict.kind in (SpikeClass.STRUCTURAL, SpikeClass.SCHEDULE, SpikeClass.CUT)
    if lasting and idle and level >= 0 and name == HOLD:
        exhausted = reasons.LadderExhausted(spike=verdict.kind)
        closing.hold_incident(ctx, incident, exhausted, exhausted=True)


def _relapse(policy: Policy, state: State, incident: Incident) -> tuple[str, int] | None:
    """Return a rule of the incident that acts and is in breach, and since when.

    Also one that never cleared.
    """
    levels = policy.ladder.levels
    for r, rule in enumerate(policy.rules):
        if rule.id not in incident.rules or rule.severity == "SEV2" or rule.runbook not in levels:
            continue
        mode = policy.mode_of(rule)
        if mode not in ACTING_MODES or state.silence(rule.id) is not None:
            continue
        for monitor in state.monitors.values():
            if monitor.rules[r].code == BREACH:
                return rule.id, monitor.first_breach(rule)
    return None


Loader = Callable[[str], Policy]  # from a digest; raises when the policy is not there

FIELDS = ("kind", "step", "attempt", "reason", "incident", "rule", "severity", "data")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where replay and record part.

    Attributes:
        seq: number of the audit record, None when the record has nothing there.
        event: number of the journal event that was being judged.
        recorded, replayed: the two decisions, None where one side has none.
        lacking: they part because the journal is incomplete: `event` is the first that it lacks.
    """

    seq: int | None
    event: int
    recorded: Mapping[str, Json] | None
    replayed: Mapping[str, Json] | None
    lacking: bool = False


def fold_events(
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    state: State | None = None,
    policies: Loader | None = None,
) -> Iterator[tuple[int, Event, Policy, State, list[Decision]]]:
    """Yield `(number, event, policy, state, decisions)` after each event.

    The state is the engine's own and changes with the next event.

    Args:
        policies: finds the policy that a `Reloaded` names; None: there is none.

    Raises:
        StoreError: an event of the journal makes no sense.
    """
    state = initial_state(policy) if state is None else state
    for number, event in events:
        if isinstance(event, Reloaded) and event.refused is None and policies is not None:
            policy = policies(event.digest)
        try:
            state, decisions_made = step(policy, state, event)
        except (*MISSHAPEN, AssertionError) as error:
            event_text = f"event {number} ({type(event).__name__})"
            raise StoreError(
                f"{event_text} of the journal cannot be judged: {type(error).__name__}: {error}",
                hint="the journal was changed, or another version wrote it",
            ) from error
        yield number, event, policy, state, decisions_made


def matches_record(was: Mapping[str, Json], number: int, replayed: Mapping[str, Json]) -> bool:
    """Whether the audit record `was` holds the decision `replayed` of event `number`."""
    return _number(was, "event") == number and all(was.get(f) == replayed[f] for f in FIELDS)


def compare_decisions(
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    recorded: Iterable[Mapping[str, Json]],
    policies: Loader | None = None,
) -> tuple[int, list[Difference]]:
    """Fold `events` and compare with the audit records whose actor is the engine.

    A journal may end with events whose decisions never reached the log (a killed supervisor), so
    surplus decisions of the last judged event onward are no difference. One that ends before the
    log does (it could not be written, or its end was lost) is `lacking`.

    Returns:
        `(decisions compared, differences)`; after the first difference nothing more is compared.
    """
    log = [r for r in recorded if r.get("actor") == "engine"]
    last_event = max((_number(r, "event") for r in log), default=-1)
    count, end = 0, 0
    for number, _, _, _, decisions_made in fold_events(policy, events, None, policies):
        end = number + 1
        for replayed in map(decision_record, decisions_made):
            if count == len(log):
                if number >= last_event:
                    return count, []
                return count, [Difference(None, number, None, replayed)]
            was = log[count]
            if not matches_record(was, number, replayed):
                if is_unwritten(was):
                    continue  # nor was this decision: both could not be written any more
                return count, [Difference(_number(was, "seq"), number, was, replayed)]
            count += 1
    if count < len(log):
        was = log[count]
        lacking = is_unwritten(was) or _number(was, "event") >= end
        first_event = end if lacking else _number(was, "event")
        return count, [Difference(_number(was, "seq"), first_event, was, None, lacking)]
    return count, []


def _number(record: Mapping[str, Json], name: str) -> int:
    number = record[name]
    if not isinstance(number, int):
        raise TypeError(f"{name} of an audit record is {number!r:.40}")
    return number


def is_unwritten(was: Mapping[str, Json]) -> bool:
    """Return whether an audit record is of an event that the journal could not be given."""
    return _number(was, "event") < 0
