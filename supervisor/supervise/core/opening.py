"""The beginning of an incident: by a rule, a crash, or an operator; and which rule joins or waits.

A slow host says nothing about what comes later, and a loss nothing about the host: a rule about the
machine stands beside an incident of the training, and an incident about the machine ends where one
of the training begins. One about silence is joined by both, and begins anew with the training.

Data: an incident may stay open, or held, while the same data makes trouble in one epoch after the
other. Each onset is evidence of its own, as that of another incident would be: one that comes
behind as many quiet frames as end an incident that nobody acts on, with a window that holds
none of the steps in breach before them; or the first one of a new attempt. What flaps around
an onset, or lasts, is the same trouble and counts once: its steps say how the run is, not what
it was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec import structs

from . import advice, diagnosis, notices, rule_news, rule_scope, withdrawal
from .approvals import ALLOW
from .frames import STATISTICS
from .incident import (
    HELD,
    OPEN,
    QUIET_STEPS,
    Incident,
    Onset,
    RunbookExecution,
    is_limiting_runbook,
)
from .model.checkpoint_registry import Checkpoints
from .model.decisions import (
    BREACH,
    OK,
    SEVERITIES,
    IncidentOpened,
    IncidentRaised,
    RuleBlind,
    RuleFired,
    RuleJoined,
    ShardsSuspected,
)
from .model.events import Notice
from .model.interfaces import Advice, Lead, Reading
from .model.payload import CheckpointState, Save, Unverified
from .model.policy import Policy, Rule
from .model.verdicts import BandRange, MechanismSigns, SlowStep
from .rank_monitor import RankMonitor, RuleWatch
from .run_state import ApprovalRequest, Reported, State, StepContext
from .shard_attribution import BEFORE

FINGERPRINT = "batch_fingerprint"
BATCHES = 64  # of one trouble; what lasts longer is no matter of its data. Project default


def record_onset(
    ctx: StepContext,
    monitor: RankMonitor,
    incident: Incident,
    rule: Rule,
    breach: int,
    *,
    is_new: bool = False,
) -> None:
    """The trouble of an incident began at step `breach`, for the first time or again.

    Args:
        monitor: of the rank that it was seen on.
        rule: that tells of it.
        is_new: it is an onset of its own; else it takes the place of the last one.
    """
    state, old, advisory = ctx.state, incident.onset, rule.severity == "SEV2"
    if (old.attempt, old.breach) == (monitor.attempt, breach):  # another rule tells of the same
        old.advisory &= advisory
        return
    incident.onset = Onset(
        monitor.attempt, breach, advisory, breach - BEFORE - 1, state.frame_count, monitor.step
    )
    _add_batches(monitor, incident, breach)
    _add_batches(monitor, incident, monitor.step)
    attribution = state.context.attribution
    attribution.mark_incident(incident.id, breach, monitor.attempt, is_new=is_new)
    suspects = attribution.suspects()
    if suspects:
        accounts = {name: attribution.account(name) for name in suspects}
        texts = [
            f"{name} ({account.blamed} of {account.troubles}, p {account.p:.2g})"
            for name, account in accounts.items()
        ]
        text = f"incidents keep starting in {', '.join(texts)}"[:400]
        ctx.record(ShardsSuspected(reason=text, suspects=accounts))


def on_rule_joined(
    ctx: StepContext,
    monitor: RankMonitor,
    incident: Incident,
    rule: Rule,
    breach: int,
    *,
    moved: bool = False,
) -> None:
    """A rule fires that is, by now, of the open incident. `moved`: the incident begins there."""
    track_breach(ctx.policy, ctx.state, monitor, incident)
    onset = incident.onset
    clear = onset.lull is not None and breach - BEFORE > onset.lull
    is_new = clear or monitor.attempt > onset.attempt
    if is_new or moved or (onset.advisory and rule.severity != "SEV2"):
        record_onset(ctx, monitor, incident, rule, breach, is_new=is_new)


def on_relapse(state: State, incident: Incident) -> None:
    """A rule of the incident is in breach on probation: evidence if it was taken back meanwhile."""
    onset = incident.onset
    if state.attempt > onset.attempt:
        onset.attempt, onset.lull = state.attempt, None
        state.context.attribution.mark_incident(incident.id, state.step, state.attempt)


def is_training_quiet(state: State) -> bool:
    """Return whether the next loss tells of its shard: no trouble is open, or it has been quiet."""
    incident = state.incident
    return incident is None or state.frame_count - incident.onset.frame_count > QUIET_STEPS


def track_breach(policy: Policy, state: State, monitor: RankMonitor, incident: Incident) -> None:
    """Look whether the newest frame of a rank is in breach, and its batch part of the trouble."""
    rules = [
        rule
        for rule, watch in zip(policy.rules, monitor.rules, strict=True)
        if watch.code == BREACH and rule.id in incident.rules
    ]
    if not rules:
        return
    onset, frame_count = incident.onset, state.frame_count
    if frame_count - onset.frame_count > QUIET_STEPS:
        onset.lull = onset.step
    onset.frame_count, onset.step = frame_count, monitor.step
    approved = _batches_are_approved(state.approvals.pending, incident.run)
    if (
        monitor.attempt == onset.attempt
        and not approved
        and any(_has_breach_now(monitor, rule) for rule in rules)
    ):
        _add_batches(monitor, incident, monitor.step)


def _add_batches(monitor: RankMonitor, incident: Incident, step: int) -> None:
    """Take the batch of `step` for one of the trouble, and those just before it.

    A step in breach further away stands alone: what lies between was healthy.
    """
    onset = incident.onset
    first_step = onset.last_step + 1 if step - onset.last_step <= BEFORE + 1 else step
    batches = [
        int(v)
        for frame_step, v in monitor.history.series(FINGERPRINT)
        if first_step <= frame_step <= step
    ]
    onset.batches = (*onset.batches, *batches)[:BATCHES]
    onset.last_step = max(onset.last_step, step)


def fires_by_past_samples(monitor: RankMonitor, rule: Rule, watch: RuleWatch) -> bool:
    """Return whether a rule that fires does so by its `keep`, or by earlier samples alone.

    One that holds since nothing is in breach, by `not`, holds now.
    """
    if watch.code != BREACH:
        return watch.code == OK
    is_met = any(monitor.codes[i] == BREACH for i in _leaves(monitor, rule))
    return is_met and not _has_breach_now(monitor, rule)


def _has_breach_now(monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a metric is in breach in this very frame; a reading may last longer."""
    return any(monitor.watches[i].raw == BREACH for i in _leaves(monitor, rule))


def _leaves(monitor: RankMonitor, rule: Rule) -> list[int]:
    """Return which of the detectors behind a rule read metrics."""
    detectors = monitor.policy.detectors
    names = monitor.policy.detectors_of(rule)
    return [monitor.index[name] for name in names if detectors[name].metrics]


def _batches_are_approved(pending: ApprovalRequest | None, run: RunbookExecution | None) -> bool:
    """Return whether people said yes to the batches as they are, or their silence will."""
    if pending is not None and (pending.granted or pending.on_timeout == ALLOW):
        return True
    return run is not None and run.terms.approved is not None


def open_or_join_incident(
    ctx: StepContext,
    monitor: RankMonitor,
    rule: Rule,
    alarm: RuleFired | RuleBlind,
    *,
    worse_is_reported: bool = False,
    grown: bool = False,
) -> bool:
    """Open an incident for a rule, or let the rule join the open one.

    Args:
        alarm: the decision that the rule fired, or cannot be evaluated.
        worse_is_reported: people hear of a worse rule in the same event.
        grown: they hear of it though it flaps.

    Returns:
        Whether people are told of this one.
    """
    state, incident = ctx.state, ctx.state.incident
    numbers: Mapping[str, Reading] = alarm.numbers if isinstance(alarm, RuleFired) else {}
    breach = monitor.first_breach(rule) if numbers else monitor.step_of(rule)
    news, explains = True, False
    slow = diagnosis.slow_step_of_rule(ctx.policy, monitor, rule, breach)
    mechanisms = diagnosis.compare_mechanisms(ctx.policy, monitor, rule)
    growth = diagnosis.explain_by_rate(ctx.policy, monitor, rule)
    text = notices.RuleNumbers(
        numbers=_text(rule, alarm, _levels(monitor, breach)) if slow is None else slow.text,
        growth=rule_news.GROWN.text if grown and slow is None else "",
        rate_growth="" if growth is None else growth.text,
        mechanisms="" if mechanisms is None else mechanisms.text,
    ).text
    if incident is None:
        incident = open_incident(
            ctx,
            monitor,
            rule.severity,
            text,
            breach=breach,
            rule=rule.id,
            see=rule.see,
            slow=slow,
            mechanisms=mechanisms,
        )
        record_onset(ctx, monitor, incident, rule, breach)
    else:
        explains = rule_scope.explains_bad_input(ctx.policy, incident, rule)
        news = _joins(ctx, monitor, incident, rule, breach, text)
    incident.forward = incident.forward or (monitor.broken_forward(rule) if numbers else None)
    if (rule.id in state.rules.flapping and not grown) or not (news or worse_is_reported):
        rule_news.track_growth(state, rule, numbers)
        return False
    rule_news.record_notified_rule(state, rule, numbers)
    if worse_is_reported:
        if explains:
            explanation = notices.Explanation(subject=rule.title or rule.id, numbers=text)
            ctx.messages.explain(incident, explanation.text)
        return False
    _report(ctx, monitor, incident, rule, alarm, text)
    return True


def _levels(monitor: RankMonitor, breach: int) -> Callable[[str], float | None]:
    return partial(diagnosis.level_before, monitor, breach=breach)


def explain_request(monitor: RankMonitor, rule: Rule) -> notices.RuleRequest:
    """Return why a rule asks for its runbook, by its own numbers: an incident may have others."""
    levels = _levels(monitor, monitor.first_breach(rule))
    numbers = notices.breach_headline(monitor.numbers(rule), "it still fires", levels)
    return notices.RuleRequest(rule=rule.id, numbers=numbers)


def _report(
    ctx: StepContext,
    monitor: RankMonitor,
    incident: Incident,
    rule: Rule,
    alarm: RuleFired | RuleBlind,
    text: str,
) -> None:
    """Notify people of a rule of the open incident."""
    skipped = monitor.value(diagnosis.SKIPPED) == 1.0 or bool(incident.case.excursion.skipped)
    skipped = skipped and STATISTICS not in rule_scope.rule_metrics(ctx.policy, rule)
    now: Lead | None = Lead.SKIPPED if skipped else advice.automatic_action_lead(ctx.policy, rule)
    if incident.run is not None:
        now = Lead.UNDER_WAY
    elif incident.escalation.runs:  # something was done about it
        now = None
    now = Lead.OFF if incident.phase == HELD else now
    form: type[notices.OfRule] = notices.RuleFires
    then, subject = advice.advise_closer_look(ctx.policy, ctx.state, rule), rule.id
    if isinstance(alarm, RuleBlind):
        form, then = notices.RuleIsBlind, ()
    else:
        subject = rule.title or notices.breach_symptom(alarm.numbers) or rule.id
    if now in (Lead.NO_ACTION, Lead.ONLY_WATCHED) and rule.severity == "SEV2":
        then = advice.advise_without_action(ctx.policy, monitor, rule) + then
    if now == Lead.UNDER_WAY:
        then = advice.describe_runbook_progress(incident.run) + then
    notice = form.from_alarm(
        rule,
        alarm,
        ctx.state.step,
        numbers=text,
        subject=subject,
        incident=incident.id,
        advice=Advice(now, then),
    )
    ctx.send(notice)


def _text(
    rule: Rule,
    alarm: RuleFired | RuleBlind,
    level_before: Callable[[str], float | None] = lambda metric: None,
) -> str:
    """Return the numbers of a rule in one line, or why there are none."""
    if isinstance(alarm, RuleBlind):
        return alarm.reason
    return notices.breach_headline(alarm.numbers, rule.text, level_before)


def notify_alone(
    ctx: StepContext, rule: Rule, alarm: RuleFired, *, worse_is_reported: bool
) -> bool:
    """Tell of a SEV0 while the incident of the training before comes to its end; return True.

    It opens an incident of its own after that, if it still fires then.
    """
    if not worse_is_reported:
        subject = rule.title or notices.breach_symptom(alarm.numbers) or rule.id
        alone = notices.RuleFiresAlone.from_alarm(
            rule, alarm, ctx.state.step, numbers=_text(rule, alarm), subject=subject
        )
        ctx.send(alone)
    return True


def notify_alongside(ctx: StepContext, rule: Rule, alarm: RuleFired | RuleBlind) -> None:
    """Tell once of a rule that is apart from the open incident; it waits for the end of that."""
    state, incident = ctx.state, ctx.state.incident
    assert incident is not None
    key, report = f"beside {incident.id}", state.rules.reported.get(rule.id)
    if rule.id in state.rules.flapping or (report is not None and report.incident == key):
        return
    form: type[notices.RuleFiresBeside] = notices.RuleIsBlindAlongside
    subject, heights = "", {}
    if isinstance(alarm, RuleFired):
        form, subject = notices.RuleFiresBeside, rule.title or rule.id
        heights = rule_news.breach_peaks(alarm.numbers)
    state.rules.reported[rule.id] = Reported(key, state.frame_count, heights)
    notice = form.from_alarm(
        rule,
        alarm,
        state.step,
        numbers=_text(rule, alarm),
        subject=subject,
        advice=advice.advise_on_separate_rule(incident, rule.see),
    )
    ctx.send(notice)


def _joins(
    ctx: StepContext, monitor: RankMonitor, incident: Incident, rule: Rule, breach: int, text: str
) -> bool:
    """Let a rule join the open incident; return whether that is news to people."""
    policy, idle = ctx.policy, incident.run is None
    worse = SEVERITIES.index(rule.severity) < SEVERITIES.index(incident.severity)
    news = rule_news.is_join_worth_reporting(
        policy, ctx.state, incident, rule, text, raised=worse, breach=breach
    )
    begins = idle and incident.phase == OPEN and not rule_scope.is_machine_rule(policy, rule)
    begins = begins and not rule_scope.may_speak_against_weights(policy, incident)
    raised = incident.join(rule.id, rule.severity)
    incident.case.data_returned = None  # this one is not theirs
    # What was advisory until now may be much older than the trouble.
    moved = begins or (raised and idle)
    if moved:
        incident.breach_step = breach
    if moved or raised:
        incident.headline = text
    if moved:
        record_incident_baseline(policy, ctx.state, monitor, incident)
    on_rule_joined(ctx, monitor, incident, rule, breach, moved=moved)
    joined = RuleJoined(
        reason=f"{rule.id} joins",
        rule=rule.id,
        severity=rule.severity,
        runbook=rule.see,
        breach_step=incident.breach_step if moved or raised else None,
    )
    reason = f"raised to {rule.severity} by {rule.id}: {text}"
    facts = structs.asdict(joined) | {"reason": reason, "headline": text}
    ctx.record(IncidentRaised(**facts) if raised else joined)
    return news


def is_more_severe(rule: Rule, run: RunbookExecution) -> bool:
    """Return whether a rule is more severe than what a run was started for."""
    return SEVERITIES.index(rule.severity) < SEVERITIES.index(run.severity)


def preempts_runbook(
    policy: Policy, monitor: RankMonitor, rule: Rule, run: RunbookExecution
) -> bool:
    """Return whether a rule that fires does not wait for the end of a run.

    What is no worse joins: the run is judged by it, too. But a verification goes by frames, and
    learns nothing from silence; what answers that is on no level. And what only limits what comes
    next mends no harm that is done.
    """
    if is_more_severe(rule, run):
        return True
    if rule.runbook not in policy.ladder.levels:
        return withdrawal.reports_stall(monitor, rule)
    is_other = rule.runbook != run.runbook.name
    return is_other and is_limiting_runbook(run.runbook) and rule.severity == run.severity


def asks_only_limits(policy: Policy, rule: Rule) -> bool:
    """Return whether a rule asks for a runbook that only limits."""
    book = policy.runbooks.get(rule.runbook or "")
    return book is not None and is_limiting_runbook(book)


def predates_rollback(incident: Incident, monitor: RankMonitor, rule: Rule) -> bool:
    """Return whether a rule fires for frames from before the job was taken back, and for no other.

    Silence is none of them.
    """
    return monitor.attempt < incident.recovery.rolled_back_to and not withdrawal.reports_stall(
        monitor, rule
    )


def due_rules(
    policy: Policy, monitors: Mapping[int, RankMonitor], incident: Incident
) -> Iterable[tuple[Rule, RankMonitor]]:
    """Return the rules that wait and are to be answered now, each with where it fires.

    When the job was taken back meanwhile, a rule is due only if a frame after that is in breach.
    """
    run = incident.run
    for r, rule in enumerate(policy.rules):
        for monitor in monitors.values() if rule.id in incident.deferred.rules else ():
            watch = monitor.rules[r]
            if not watch.firing or predates_rollback(incident, monitor, rule):
                continue
            calm = incident.recovery.rolled_back_to and watch.code != BREACH
            if not calm and (run is None or preempts_runbook(policy, monitor, rule, run)):
                yield rule, monitor


def open_incident(
    ctx: StepContext,
    monitor: RankMonitor | None,
    severity: str,
    text: str,
    *,
    breach: int,
    rule: str | None = None,
    see: str = "",
    slow: SlowStep | None = None,
    mechanisms: MechanismSigns | None = None,
    order: tuple[str, str] = ("", ""),
    failure: str = "",
) -> Incident:
    """Open an incident, and say so.

    Args:
        monitor: whose frames are asked about it; None: nothing was ever seen of the job.
        text: what it is about, one line. breach: the first step that may be part of it.
        see: the runbook that people read. slow: since when steps take longer, where it is that.
        mechanisms: which of them moved first, where one did.
        order: the operator who ordered it, and the verb.
        failure: the error that ended the job.
    """
    state, headline = ctx.state, notices.describe_crash(text, failure)
    incident_id = next_incident_id(state)
    state.history.opened += 1
    incident = state.incident = Incident(
        incident_id,
        state.step,
        breach,
        severity,
        [rule] if rule else [],
        headline=headline,
        slow=slow,
        ordered_by=order[0],
    )
    record_incident_baseline(ctx.policy, state, monitor, incident)
    band = incident.case.band
    ctx.record(
        IncidentOpened(
            reason=f"{severity} {rule}: {text}" if rule else f"{severity} {headline}",
            rule=rule,
            severity=severity,
            headline=text,
            failure=failure,
            runbook=see,
            breach_step=breach,
            band=None if band is None else BandRange(band.level, band.limit),
            slow_step=slow,
            highest_rate=diagnosis.highest_rate(state, monitor),
            mechanisms=mechanisms,
            requested_by=order[0],
            verb=order[1],
        )
    )
    return incident


def next_incident_id(state: State) -> str:
    """Return the id of the incident that is opened next."""
    return f"inc-{state.history.opened + 1}"


def join_crash(ctx: StepContext, incident: Incident, text: str) -> None:
    """A crash joins an advisory incident that says nothing against the weights.

    It began when the process ended, however long the host has been slow: what was saved until then
    is as good as before.
    """
    incident.raise_severity("SEV1")
    incident.headline = text
    incident.breach_step = incident.recovery.crashed = ctx.state.step + 1
    monitor = ctx.state.monitors.get(incident.case.rank)
    record_incident_baseline(ctx.policy, ctx.state, monitor, incident)
    ctx.record(
        IncidentRaised(
            reason=f"raised to SEV1 by a crash: {text}",
            severity="SEV1",
            headline=text,
            runbook="",
            breach_step=incident.breach_step,
        )
    )


def record_incident_baseline(
    policy: Policy, state: State, monitor: RankMonitor | None, incident: Incident
) -> None:
    """Take down what was before it; what was saved since its first breach is not to be trusted."""
    if monitor is not None:
        rank = next(rank for rank, candidate in state.monitors.items() if candidate is monitor)
        diagnosis.start_loss_case(policy, state, monitor, rank, incident)
    suspect_checkpoints(state, incident)


def suspect_checkpoints(state: State, incident: Incident) -> None:
    """Suspect checkpoints saved at or after the first breach, for good. Not for advisory rules:

    one signal alone is unusual often enough to leave no checkpoint of a long run in good repute.
    """
    if incident.severity != "SEV2":
        _suspect_from(state.checkpoints, incident, state.attempt, incident.breach_step)


def invalidate_attempt(state: State, incident: Incident) -> None:
    """What was tried did not help: of an attempt that began since the trouble, nothing is good."""
    attempt = max(state.attempt, state.job.launched)
    tainted = incident.recovery.suspect_from
    if tainted and attempt > min(tainted):
        _suspect_from(state.checkpoints, incident, attempt, 0)


def _suspect_from(checkpoints: Checkpoints, incident: Incident, attempt: int, step: int) -> None:
    tainted = incident.recovery.suspect_from
    first_step = tainted[attempt] = min(step, tainted.get(attempt, step))
    checkpoints.mark_suspect(attempt, first_step, _since(incident))


def _since(incident: Incident) -> str:
    return notices.SavedLate(incident=incident.id).text


def on_checkpoint_notice(state: State, checkpoint: CheckpointState) -> None:
    """Take the guard's notice of a checkpoint."""
    reputation = _reputation(state.incident, checkpoint.attempt, checkpoint.step)
    state.checkpoints.add_noticed(checkpoint, *reputation)


def on_save_notice(ctx: StepContext, event: Notice) -> None:
    """Take the job's report of a save, which has no verdict yet."""
    state, save = ctx.state, event.data.read(Save)
    attempt = state.attempt if save.attempt is None else save.attempt
    step = state.step if event.step is None else event.step - 1
    if save.path:
        reputation = _reputation(state.incident, attempt, step)
        state.checkpoints.record_save(save.path, attempt, step, *reputation)


def on_note(ctx: StepContext, event: Notice) -> None:
    """Take a note, perhaps that there will be no verdict on a save."""
    if given_up := event.data.read(Unverified).unverified:
        ctx.state.checkpoints.drop_saves(*given_up)


def _reputation(incident: Incident | None, attempt: int, step: int) -> tuple[str, str]:
    """Return why a save is suspect, and the incident that it is on trial for; "" for neither."""
    tainted = {} if incident is None else incident.recovery.suspect_from
    if incident is None or not tainted:
        return "", ""
    if attempt in tainted:
        return "" if 0 <= step < tainted[attempt] else _since(incident), ""
    return "", incident.id if attempt > min(tainted) else ""
