"""Response to a rule that fires: an incident, and a runbook where the policy names one.

All rules of an event are enlisted before anything is answered; the most severe one speaks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from . import (
    action_planning,
    approvals,
    checkpoint_wait,
    closing,
    diagnosis,
    job_lifecycle,
    notices,
    opening,
    reasons,
    rule_news,
    rule_scope,
    runbook_runner,
    withdrawal,
)
from .frames import FRAMES
from .incident import OPEN, PROBATION, Incident, RunbookExecution
from .model import state_machine
from .model.action import Refused
from .model.decisions import (
    ACTING_MODES,
    BREACH,
    SEVERITIES,
    SUPERSEDED,
    RuleCleared,
    RuleFired,
    RunbookPreempted,
    ShadowStep,
    Suppressed,
    Suppressor,
)
from .model.policy import HOLD, Policy, Rule, entry_level, minimum_level, next_level
from .notices import Cause
from .rank_monitor import RankMonitor
from .run_state import State, StepContext

AGAIN = 8  # frames between two looks at a rule that is muted for data that came back


def on_rules_changed(
    ctx: StepContext, monitor: RankMonitor, rank: int, changes: list[tuple[int, bool]]
) -> None:
    """Take `(rule index, fired)` of one rank and one event."""
    policy, state = ctx.policy, ctx.state
    was_in, firing = state.machine, set(state.firing(policy))
    began = (policy.rules[r] for r, fired in changes if fired)
    end_machine_incident(
        ctx, [rule for rule in began if not _muted(policy, state, monitor, rule, firing, was_in)]
    )
    alarms: list[tuple[Rule, RuleFired]] = []
    grown: set[str] = set()
    for r, fired in changes:
        rule = policy.rules[r]
        if fired:
            alarm = _alarm(ctx, monitor, rank, rule)
            ctx.record(alarm)
            alarms.append((rule, alarm))
        else:
            ctx.record(
                RuleCleared(
                    reason=f"{rule.id} cleared",
                    rule=rule.id,
                    severity=rule.severity,
                    rank=rank,
                    alongside=rule_scope.incident_alongside(policy, state.incident, rule),
                )
            )
        numbers = monitor.numbers(rule)
        muted_by = (
            _muted(policy, state, monitor, rule, firing, was_in)
            if fired
            else state.rules.muted.get(rule.id)
        )
        known = ("inhibit", "planned", rule_scope.RETURNED_DATA)
        muted = muted_by is not None and muted_by.cause in known
        rule_news.on_rule_changed(ctx, rule, rank, numbers, muted=muted)
        if fired:
            rule_news.extend_firing(policy, state, rule, monitor.rules[r])
            if rule_news.record_breach_height(policy, state, rule, rank, numbers):
                grown.add(rule.id)
    state.rules.unmute_cleared(firing)
    if alarms:
        worse = [(replace(rule, severity="SEV1"), a) for rule, a in alarms if rule.id in grown]
        alarms = [pair for pair in alarms if pair[0].id not in grown] + worse
        _answer(ctx, monitor, alarms, firing, was_in, grown)


def _alarm(ctx: StepContext, monitor: RankMonitor, rank: int, rule: Rule) -> RuleFired:
    """Return all that is known of a rule that fires on a rank, as it is decided now."""
    numbers = monitor.numbers(rule)
    return RuleFired(
        reason=f"{rule.id} fired: {notices.breach_headline(numbers, rule.text)}",
        rule=rule.id,
        severity=rule.severity,
        when=rule.text,
        rank=rank,
        numbers=numbers,
        phase=rule.phase or "",
        measured_step=monitor.late_stream_step(rule),
        alongside=rule_scope.incident_alongside(ctx.policy, ctx.state.incident, rule),
    )


def end_machine_incident(ctx: StepContext, rules: Sequence[Rule]) -> None:
    """An incident about the machine ends where a rule tells of the training; its rules wait."""
    policy, state, incident = ctx.policy, ctx.state, ctx.state.incident
    if incident is None or incident.phase != OPEN or incident.run is not None:
        return
    newer = next(
        (rule for rule in rules if rule_scope.displaces_machine_incident(policy, incident, rule)),
        None,
    )
    if newer is None:
        return
    for name in state.firing(policy):
        if name in incident.rules:
            state.rules.muted[name] = Suppressor("incident", opening.next_incident_id(state))
    closing.close_incident(ctx, incident, SUPERSEDED, superseded_by=newer.id)


def on_run_phase_changed(ctx: StepContext, policy: Policy, changes: list[tuple[int, bool]]) -> None:
    """Judge by the policy of the phase that begins; what fires and is worse in it is told again.

    Args:
        changes: what fired or cleared in this event, which is not answered yet.
    """
    state, new = ctx.state, {r for r, _ in changes}
    for r, (was, rule) in enumerate(zip(ctx.policy.rules, policy.rules, strict=True)):
        worse = SEVERITIES.index(rule.severity) < SEVERITIES.index(was.severity)
        if worse and r not in new and any(m.rules[r].firing for m in state.monitors.values()):
            state.rules.muted.setdefault(rule.id, Suppressor("phase", was.phase))
    ctx.policy = policy


def answer_uninhibited(ctx: StepContext, monitor: RankMonitor, rank: int) -> None:
    """Offer rules again that still fire when what muted them is gone, or has lasted.

    One that held only while an action changed the job, and fires by its `keep`, is of that action;
    one that fires by samples from then alone, as three in 128, is over. Both are offered where they
    hold again.
    """
    policy, state, muted = ctx.policy, ctx.state, ctx.state.rules.muted
    firing = set(state.firing(policy))
    free, again = [], []
    for rule, watch in zip(policy.rules, monitor.rules, strict=True):
        if rule.id not in muted:
            continue
        was_muted = muted[rule.id]
        if was_muted == Suppressor("inhibit", state_machine.ACTING) and watch.code != BREACH:
            continue
        if was_muted.cause in ("inhibit", "silence") and opening.fires_by_past_samples(
            monitor, rule, watch
        ):
            continue
        muted_by = _muted(policy, state, monitor, rule, firing, state.machine)
        if muted_by is None:
            free.append(rule)
        if muted_by is None or (muted[rule.id].cause == "brief" and muted_by != muted[rule.id]):
            again.append((rule, _alarm(ctx, monitor, rank, rule)))
            del muted[rule.id]
    if again:
        end_machine_incident(ctx, free)
        _answer(ctx, monitor, again, firing, state.machine)


def _answer(
    ctx: StepContext,
    monitor: RankMonitor,
    alarms: list[tuple[Rule, RuleFired]],
    firing: set[str],
    was_in: str,
    grown: Collection[str] = (),
) -> None:
    """Enlist what fired, most severe first, then let the first rule that acts speak."""
    state = ctx.state
    # What is about the machine last: it stands beside an incident that others of the event begin.
    alarms.sort(
        key=lambda pair: (
            SEVERITIES.index(pair[0].severity),
            rule_scope.is_machine_rule(ctx.policy, pair[0]),
        )
    )
    acting: list[Rule] = []
    is_told = False
    for rule, alarm in alarms:
        muted = _muted(ctx.policy, state, monitor, rule, firing, was_in)
        if muted is not None:
            is_phase = muted.cause == "phase"
            subject = f"the phase {muted.name} of the run" if is_phase else muted.name
            ctx.record(
                Suppressed(
                    reason=f"{rule.id} is muted by {subject}",
                    rule=rule.id,
                    severity=rule.severity,
                    suppressed_by=str(muted),
                    alongside=rule_scope.incident_alongside(ctx.policy, state.incident, rule),
                )
            )
            state.rules.muted[rule.id] = muted
            if muted.cause == rule_scope.RETURNED_DATA:
                action_planning.record_mute_by_returned_data(
                    state, monitor, rule_scope.rule_metrics(ctx.policy, rule)
                )
            if muted.cause == "incident":
                opening.notify_alongside(ctx, rule, alarm)
            if rule.severity == "SEV0" and muted.cause == "session_end":
                is_told |= opening.notify_alone(ctx, rule, alarm, worse_is_reported=is_told)
            continue
        if rule.runbook is None and rule_scope.rule_family(ctx.policy, rule) == rule_scope.WIRING:
            rule_news.report(ctx, monitor, rule)
            continue
        is_told |= opening.open_or_join_incident(
            ctx, monitor, rule, alarm, worse_is_reported=is_told, grown=rule.id in grown
        )
        if rule.runbook is None:
            continue
        mode = ctx.policy.mode_of(rule)
        if mode in ACTING_MODES:
            acting.append(rule)
        else:
            _shadow(ctx, rule, mode)
    if acting:
        _respond(ctx, monitor, acting[0])
    elif state.incident is not None and state.machine == state_machine.NOMINAL:
        ctx.move("notice", f"{state.incident.id}: {state.incident.headline}")


def _muted(
    policy: Policy, state: State, monitor: RankMonitor, rule: Rule, firing: set[str], was_in: str
) -> Suppressor | None:
    """Return what mutes a rule, None: it may speak."""
    incident = state.incident
    if rule.off:
        return Suppressor("phase", rule.phase)
    if (silent := state.silence(rule.id)) is not None and rule.severity != "SEV0":
        return Suppressor("silence", silent)
    if incident is not None and incident.deferred.session_end is not None:
        return Suppressor("session_end", incident.id)
    for inhibit in policy.inhibit:
        if rule.id not in inhibit.mute:
            continue
        if inhibit.by_rule is not None and inhibit.by_rule in firing:
            return Suppressor("inhibit", inhibit.by_rule)
        if was_in in inhibit.by_state:
            return Suppressor("inhibit", was_in)
    planned = diagnosis.matching_planned_event(policy, state, monitor, rule)
    if planned is not None:
        return Suppressor("planned", planned)
    if (passing := diagnosis.explain_passing_slowness(policy, state, monitor, rule)) is not None:
        return passing
    if (returned := _explain_returned_data(policy, state, monitor, rule)) is not None:
        return returned
    alongside = rule_scope.incident_alongside(policy, incident, rule)
    return Suppressor("incident", alongside) if alongside else None


def _explain_returned_data(
    policy: Policy, state: State, monitor: RankMonitor, rule: Rule
) -> Suppressor | None:
    """Return the data that came back where a rule sees what they did before.

    SEV0 is never that, nor are a rate that jumps, zeros, and values that are no numbers.
    """
    read, returned = rule_scope.rule_metrics(policy, rule), state.context.data_returned
    is_of_tokens = bool(read) and read <= rule_scope.OF_TOKENS and rule.severity == "SEV2"
    if is_of_tokens and 0 <= returned <= state.frame_count <= returned + FRAMES:  # sums come late
        text = f"data that came back {state.frame_count - returned} steps ago"
        return Suppressor(rule_scope.RETURNED_DATA, text)
    is_judged = is_of_tokens or rule_scope.is_moved_by_data(policy, rule)
    if rule.severity == "SEV0" or not is_judged:
        return None
    before = state.rules.muted.get(rule.id)
    if before is not None and before.cause == rule_scope.RETURNED_DATA:
        watches = zip(policy.rules, monitor.rules, strict=True)
        is_true = any(watch.held for other, watch in watches if other.id == rule.id)
        if not is_true or state.frame_count % AGAIN:
            return before  # it is kept, or judged on another rank
    numbers = monitor.numbers(rule).values()
    breaching = [reading for reading in numbers if reading.get("code") == "BREACH"]
    if any(r.get("nonfinite") or r.get("metric") == diagnosis.RATE for r in breaching):
        return None
    if any(reading.get("value") == 0.0 for reading in breaching):
        return None
    onset = monitor.first_breach(rule)
    text = action_planning.describe_returned_data(state, monitor, onset)
    if not text and rule.runbook is None:  # what asks for an action has the weights tested
        text = action_planning.describe_task_recurrence(state, monitor, onset)
    return Suppressor(rule_scope.RETURNED_DATA, text) if text else None


def _respond(ctx: StepContext, monitor: RankMonitor, rule: Rule) -> None:
    """A rule with a runbook fired, may act, and nothing mutes it."""
    policy, state, incident = ctx.policy, ctx.state, ctx.state.incident
    assert incident is not None
    assert rule.runbook is not None
    incident.trigger.asks |= policy.mode_of(rule) == "approve"
    minimum = minimum_level(policy.ladder, state.history.last_level, state.frame_count)
    name, level = entry_level(policy.ladder, rule.runbook, minimum)
    aside = level < 0  # on no level: the ladder is not about it
    book = policy.runbooks.get(name)
    changes = book is not None and any(step.changes_training for step in book.steps)
    off = not aside or (changes and not withdrawal.reports_stall(monitor, rule))
    if incident.is_held and off:
        _suppress(ctx, rule, f"{rule.id}: automatic actions are off; a person is needed", "holding")
        return
    index = policy.rules.index(rule)
    watch, answered_ranks = monitor.rules[index], _answered(state.monitors, monitor, index)
    if answered_ranks:  # the same trouble, seen from another rank
        watch.answered = True
        _suppress(ctx, rule, f"{rule.id} on rank {answered_ranks}", "answered")
        return
    if opening.predates_rollback(incident, monitor, rule):
        text = f"{rule.id}: in frames from before attempt {incident.recovery.rolled_back_to}"
        _suppress(ctx, rule, text, "acting")
        incident.deferred.rules.append(rule.id)
        return
    if incident.run is not None:
        _respond_during_runbook(ctx, monitor, rule, incident.run, (name, level))
        return
    if (waits := _waiting(policy, state, incident, rule, name, aside=aside)) is not None:
        _suppress(ctx, rule, f"{rule.id}: {incident.id} waits for {waits[0]}", waits[1])
        return
    cooldown = state.history.cooldown.get(rule.id)
    cooling = cooldown is not None and state.frame_count - cooldown[0] < rule.cooldown_steps
    reason: Cause = opening.explain_request(monitor, rule)
    cooled_level = cooldown[1] if cooling and cooldown is not None else -1
    tried_level = max(incident.escalation.level, cooled_level)
    again = not aside and (cooling or incident.phase == PROBATION) and level <= tried_level
    if again:
        reason = reasons.AlreadyTried(rule=rule.id, runbook=name, is_cooling=cooling)
        _suppress(ctx, rule, str(reason), "cooldown" if cooling else "probation", runbook=name)
        incident.escalation.level = tried_level
        _, level = next_level(policy.ladder, tried_level)
    if incident.phase == PROBATION:
        _begin_trouble(ctx, monitor, incident, rule)
    watch.answered = True
    still = withdrawal.reports_stall(monitor, rule)
    withdrawal.set_trigger(incident.trigger, rule, still=still)
    if still and job_lifecycle.give_up_stalled_job(ctx, incident, name):
        return
    if again:
        runbook_runner.escalate_incident(ctx, incident, reason)
    else:
        runbook_runner.start_runbook(
            ctx, incident, name, level, reason, escalated=not aside and name != rule.runbook
        )
    if state.approvals.pending is None:  # else nothing was tried yet
        state.history.cooldown[rule.id] = (state.frame_count, level)


def _begin_trouble(ctx: StepContext, monitor: RankMonitor, incident: Incident, rule: Rule) -> None:
    """A new trouble on probation: what is gone back before is its own begin."""
    state = ctx.state
    incident.breach_step = incident.recovery.relapse_step = monitor.first_breach(rule)
    opening.suspect_checkpoints(state, incident)
    opening.record_onset(ctx, monitor, incident, rule, incident.breach_step)


def _waiting(
    policy: Policy, state: State, incident: Incident, rule: Rule, name: str, *, aside: bool
) -> tuple[str, str] | None:
    """Return what an incident waits for that a rule must not cut short, and that as a key."""
    if checkpoint_wait.is_searching(policy, state) and opening.asks_only_limits(policy, rule):
        return f"a checkpoint, and {rule.runbook} mends nothing", "relaunch"
    is_kept = _keeps_request(policy, state, incident, rule, name, aside=aside)
    return ("approval", "approval") if is_kept else None


def _keeps_request(
    policy: Policy, state: State, incident: Incident, rule: Rule, name: str, *, aside: bool
) -> bool:
    """Return whether the request that waits stands though a rule asks for runbook `name`."""
    if state.approvals.pending is None:
        return False
    name = runbook_runner.runbook_or_substitute(policy, state, incident, name)
    return approvals.keeps_pending_request(policy, state, incident, rule, name, aside=aside)


def _suppress(ctx: StepContext, rule: Rule, reason: str, cause: str, runbook: str = "") -> None:
    """Record that a rule fired and is not answered, and what keeps it."""
    ctx.record(
        Suppressed(
            reason=reason,
            rule=rule.id,
            severity=rule.severity,
            suppressed_by=cause,
            runbook=runbook,
        )
    )


def _respond_during_runbook(
    ctx: StepContext,
    monitor: RankMonitor,
    rule: Rule,
    run: RunbookExecution,
    request: tuple[str, int],
) -> None:
    """A rule asks for a runbook, and a level, while another one runs."""
    policy, incident, (name, level) = ctx.policy, ctx.state.incident, request
    assert incident is not None
    is_kept = _keeps_request(policy, ctx.state, incident, rule, name, aside=level < 0)
    if not is_kept and opening.preempts_runbook(policy, monitor, rule, run):
        if 0 <= level <= (current_level := incident.escalation.level):
            name, level = next_level(policy.ladder, current_level)
        monitor.rules[policy.rules.index(rule)].answered = True
        _preempt(ctx, monitor, rule, name, level)
        return
    doing = "is running" if ctx.state.approvals.pending is None else "waits for approval"
    _suppress(ctx, rule, f"{rule.id}: {run.runbook.name} {doing}", "acting")
    if (
        level < 0 and rule.runbook != run.runbook.name
    ):  # else it is judged by whether that one helps
        incident.deferred.rules.append(rule.id)


def _answered(monitors: Mapping[int, RankMonitor], monitor: RankMonitor, index: int) -> str:
    """Return its rank, and another one on which the rule at that place fires and was answered."""
    for rank, other_monitor in monitors.items():
        if (
            other_monitor is not monitor
            and other_monitor.rules[index].firing
            and other_monitor.rules[index].answered
        ):
            own_rank = next(number for number, own in monitors.items() if own is monitor)
            return f"{own_rank}: answered on rank {rank}"
    return ""


def _preempt(ctx: StepContext, monitor: RankMonitor, rule: Rule, name: str, level: int) -> None:
    """Something worse came up: leave a runbook that is only being verified; never cut an action."""
    incident = ctx.state.incident
    assert incident is not None
    run = incident.run
    assert run is not None
    if run.is_busy():
        _suppress(ctx, rule, f"{rule.id}: {run.runbook.name} is executing an action", "acting")
        incident.deferred.rules.append(rule.id)
        return
    ctx.record(RunbookPreempted(reason=f"{run.runbook.name} is preempted by {rule.id}"))
    incident.run = None
    if level >= 0:
        opening.invalidate_attempt(ctx.state, incident)
    ctx.state.history.cooldown[rule.id] = (ctx.state.frame_count, level)
    still = withdrawal.reports_stall(monitor, rule)
    withdrawal.set_trigger(incident.trigger, rule, still=still)
    if still and job_lifecycle.give_up_stalled_job(ctx, incident, name):
        return
    escalated = level >= 0 and name != rule.runbook
    runbook_runner.start_runbook(
        ctx, incident, name, level, opening.explain_request(monitor, rule), escalated=escalated
    )


def answer_deferred_rules(ctx: StepContext) -> None:
    """Answer what had to wait for an action, or for a runbook's end, if it is still a reason to."""
    state, incident = ctx.state, ctx.state.incident
    if incident is None or not incident.deferred.rules:
        return
    deferred = incident.deferred
    if incident.run is not None and incident.run.is_busy():
        return
    firing = set(state.firing(ctx.policy))
    due = list(opening.due_rules(ctx.policy, state.monitors, incident))
    deferred.rules = [] if due else [name for name in deferred.rules if name in firing]
    if due:
        rule, monitor = min(due, key=lambda pair: SEVERITIES.index(pair[0].severity))
        _respond(ctx, monitor, rule)


def _shadow(ctx: StepContext, rule: Rule, mode: str) -> None:
    """Write down what enforce would have done; touch nothing."""
    incident = ctx.state.incident
    assert incident is not None
    assert rule.runbook is not None
    if ctx.state.machine == state_machine.NOMINAL:
        ctx.move("notice", f"{incident.id}: {incident.headline}")
    shadowed = incident.escalation.shadowed
    if mode == "observe" or rule.runbook in shadowed:
        return
    shadowed.append(rule.runbook)
    context = action_planning.plan_context(ctx.state, incident)
    steps: list[ShadowStep] = []
    if rule.runbook != HOLD:
        book = ctx.policy.runbooks[rule.runbook]
        for verb, action in zip(book.verbs, book.steps, strict=True):
            if not action.is_due(context):
                continue
            try:
                steps.append(ShadowStep(verb, action.plan(context)))
            except Refused as refusal:
                steps.append(ShadowStep(verb, refused=str(refusal)))
    ctx.record(
        Suppressed(
            reason=f"{mode}: would have run {rule.runbook}",
            rule=rule.id,
            severity=rule.severity,
            suppressed_by=str(Suppressor("mode", mode)),
            runbook=rule.runbook,
            would=steps,
        )
    )
    ctx.send(
        notices.RuleWouldRun(
            severity=incident.severity,
            incident=incident.id,
            rule=rule.id,
            mode=mode,
            runbook=rule.runbook,
        )
    )
