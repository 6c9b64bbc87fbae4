"""News of rules for people: a new problem, one that grows, one that flaps, a fault of the wiring.

One trouble makes many rules fire within a few steps, and one rule often. They hear of it once, and
again when a value is GROWTH times what they were told last: growth is never a repetition. A rule
that changes too often is told once, then silently, until it settles or grows; one that acts, or is
of SEV0, never flaps: its next breach may be the one that matters.

A rule of the pack `wiring` is about how a job is put together, and opens no incident: there is
nothing to go back to, no action mends it, and it fires for as long as the job runs. People are told
once per kind, with the names of tensors that the probe sent beside the metric.

Source: the flap detection of Nagios. More than 6 changes in 500 steps is a project default.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from msgspec import structs

from . import advice, diagnosis, notices, reasons, rule_scope, run_notices
from .frames import LOSS
from .incident import HELD, OPEN, Incident
from .model.decisions import BREACH, RuleFlaps, RuleGrew, RuleSettled
from .model.events import Notice
from .model.interfaces import Advice, Lead, Reading
from .model.payload import WiringFacts
from .model.policy import Policy, Rule
from .rank_monitor import RankMonitor, RuleWatch
from .run_state import MessageDraft, Reported, State, StepContext
from .trends import median

GROWTH = 1.5  # times what was told last; project default
# What fires within as many frames of a message is part of what that was about: the norms lead the
# loss by a few steps. As many without a firing rule end an incident.
TOGETHER = 20
AGAIN = 500  # frames until a rule that fires again and again in a hold is told again


def record_notified_rule(state: State, rule: Rule, numbers: Mapping[str, Reading]) -> None:
    """People hear of a rule now, by its own message or by that of a worse one."""
    incident = state.incident
    name = incident.id if incident is not None else ""
    state.rules.reported[rule.id] = Reported(name, state.frame_count, breach_peaks(numbers))
    state.rules.growing.pop(rule.id, None)


def record_breaches(policy: Policy, state: State, incident: Incident) -> None:
    """People hear of an incident now, and so of each of its rules that is in breach."""
    for r, rule in enumerate(policy.rules):
        for monitor in state.monitors.values() if rule.id in incident.rules else ():
            if monitor.rules[r].code == BREACH:
                record_notified_rule(state, rule, monitor.numbers(rule))


def is_join_worth_reporting(
    policy: Policy,
    state: State,
    incident: Incident,
    rule: Rule,
    text: str,
    *,
    raised: bool,
    breach: int,
) -> bool:
    """Return whether people hear of a rule that joins an incident, before it has joined.

    A worse one is always news. A SEV0 is unless a message has just said it, in a hold once in
    AGAIN frames, as nothing follows it there; a SEV1 is once, unless the newest message is about
    the same, by a rule as grave, or the outcome of an action is or will be; a notice is where it
    explains the others, or tells of another kind of trouble, but not within something worse.

    Args:
        breach: the first step that may be part of what the rule tells.
    """
    report, now = state.rules.reported.get(rule.id), state.frame_count
    since = (
        math.inf
        if report is None or report.incident != incident.id
        else now - report.reported_frame
    )
    if raised or (incident.phase == HELD and rule.severity != "SEV2" and since > AGAIN):
        return True
    together = now - _newest(state, incident) <= TOGETHER
    is_new_kind = rule_scope.is_new_kind(incident, rule)
    if rule.severity == "SEV0":
        is_repeated = together and not is_new_kind and _repeats(policy, incident, rule)
        return since > (AGAIN if incident.phase == HELD else TOGETHER) and not is_repeated
    if since < math.inf:
        return False
    if rule_scope.explains_bad_input(policy, incident, rule):
        return True
    if rule.severity == "SEV2":
        together &= rule_scope.may_speak_against_weights(policy, incident)
        return is_new_kind and not together and incident.severity == "SEV2"
    is_one_spike = rule_scope.has_as_grave(policy, incident, rule) or rule_scope.may_be_one_spike(
        policy, incident, rule
    )
    # The outcome of an action follows, or was of a trouble that had begun by then.
    check, run = incident.deferred.weights_check, incident.run
    is_tested = check is not None and check.is_good_now and check.attempt == state.attempt
    is_known = check is not None and is_tested and breach <= check.step
    is_known |= run is not None and run.failure.withdrawn_at is None
    is_known &= rule_scope.may_be_one_spike(policy, incident, rule)
    is_silent = (together and is_one_spike) or (is_known and state.approvals.pending is None)
    return text != incident.headline and not is_silent


def _repeats(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule of an incident that is as severe reads a metric that this one does."""
    read = rule_scope.rule_metrics(policy, rule)
    siblings = (o for o in policy.rules if o.id in incident.rules and o.severity == rule.severity)
    return any(read & rule_scope.rule_metrics(policy, sibling) for sibling in siblings)


def _newest(state: State, incident: Incident) -> int:
    """Return the frame count of the newest message about a rule of an incident."""
    reports = state.rules.reported.values()
    return max(
        (report.reported_frame for report in reports if report.incident == incident.id),
        default=-TOGETHER - 1,
    )


def track_growth(state: State, rule: Rule, numbers: Mapping[str, Reading]) -> None:
    """Take down that a rule that fires has grown beyond what people were told of it.

    That is asked of a notice only while it flaps: else it is told of when it fires, and no more.
    """
    rules, incident = state.rules, state.incident
    report = rules.reported.get(rule.id)
    if rule.id in rules.flapping:
        report = report or rules.reported.setdefault(rule.id, Reported("", -AGAIN, {}))
    elif rule.severity == "SEV2" or incident is None:
        return
    elif report is None or report.incident != incident.id:  # the newest message is about it, too
        rules.reported[rule.id] = Reported(
            incident.id, _newest(state, incident), breach_peaks(numbers)
        )
        return
    for name, height in breach_peaks(numbers).items():
        height_before = report.peaks.get(name, 0.0)
        if height > height_before and height >= GROWTH * height_before:
            state.rules.growing[rule.id] = notices.breach_headline(numbers, rule.text)
            report.peaks[name] = height  # only what is beyond that is worth saying then


def report_breach_growth(ctx: StepContext, monitor: RankMonitor) -> None:
    """Tell of rules that have grown, a few frames after the message before at the earliest."""
    state, rules = ctx.state, ctx.state.rules
    for rule, watch in zip(ctx.policy.rules, monitor.rules, strict=True):
        if rule.id in rules.flapping and watch.firing and watch.code == BREACH:
            track_growth(state, rule, monitor.numbers(rule))
        if (
            rule.id not in rules.growing
            or state.frame_count - rules.reported[rule.id].reported_frame <= TOGETHER
        ):
            continue
        text, incident = rules.growing.pop(rule.id), state.incident
        if incident is None or state.silence(rule.id) is not None or rule.id in rules.muted:
            continue
        rules.reported[rule.id].reported_frame = state.frame_count
        ctx.record(RuleGrew(reason=f"{rule.id} grew: {text}", rule=rule.id, severity=rule.severity))
        if rule.severity == "SEV2" != incident.severity:  # no news within something worse
            continue
        then = advice.describe_runbook_progress(incident.run) + advice.show_runbook(rule.see)
        form = notices.RuleGrowsAfterRollback if incident.case.rolled_back else notices.RuleGrows
        grows = form(
            severity=rule.severity,
            incident=incident.id,
            rule=rule.id,
            expression=rule.text,
            numbers=text,
            step=state.step,
            advice=Advice(Lead.UNDER_WAY if incident.run else None, then),
        )
        ctx.send(grows)


def send_reminder(ctx: StepContext, incident: Incident) -> None:
    """Tell again of an incident that goes on, and that nobody has acknowledged."""
    since_ns = ctx.state.at_ns - incident.reported_ns
    if not incident.reported_ns or since_ns <= ctx.policy.repeat_s * 1e9:
        return
    if incident.severity == "SEV2" or incident.phase not in (OPEN, HELD):
        return
    pending, answer = ctx.state.approvals.pending, Advice()
    if pending is not None:
        verdict = diagnosis.classify_incident(ctx.policy, ctx.state, incident)
        answer = advice.advise_on_request(ctx.state, incident, pending, verdict)
    ctx.send(
        notices.StillOpen(
            severity=incident.severity,
            incident=incident.id,
            headline=incident.headline,
            advice=answer,
        )
    )


def breach_peaks(numbers: Mapping[str, Reading]) -> dict[str, float]:
    """Return how far each metric in breach is off, larger for worse.

    That is its height over the baseline, without one the value; not a z, whose scale may shrink.
    Below a baseline, or a lower limit, a value is as far off as its inverse would be above it.
    """
    heights: dict[str, float] = {}
    for name, reading in numbers.items():
        value, limit = reading.get("value"), reading.get("threshold")
        if reading.get("code") != "BREACH":
            continue
        if reading.get("nonfinite"):
            heights[name] = math.inf
        elif isinstance(value, float) and isinstance(limit, int | float):
            bases = (reading.get(key) for key in ("median", "reference", "level"))
            base = next((float(b) for b in bases if isinstance(b, int | float)), None)
            below = 0.0 < value < (limit if base is None else base)
            if isinstance(rise := reading.get("rise"), float):
                height = rise
            elif base is None:
                height = 1.0 / value if below else abs(value)
            else:
                height = base * (base / value - 1.0) if below else abs(value - base)
            metric = str(reading.get("metric", name))
            heights[metric] = max(height, heights.get(metric, 0.0))
    return heights


CHANGES, STEPS = 6, 500
# An advisory rule that flaps fires for so long at least, or a loss that is two losses by turns
# would fill the record. Short enough that it goes on counting as flapping. Project default.
KEEP = 100
# Firings in a row, in so many steps, each further off than the one before and the last one at least
# twice as far as the first. 6 that do not grow come in this order once in 720; 5 did in a healthy
# log. Project defaults.
RISES, WITHIN, FACTOR = 6, 2000, 2.0
GROWN = reasons.Growth(times=RISES, steps=WITHIN)


def on_rule_changed(
    ctx: StepContext, rule: Rule, rank: int, numbers: Mapping[str, Reading], *, muted: bool
) -> None:
    """The rule fired or cleared on a rank; one that is muted flaps for nobody."""
    if rule.runbook is not None or rule.severity == "SEV0":
        return
    state, rules = ctx.state, ctx.state.rules
    flips = rules.flips.setdefault((rule.id, rank), deque(maxlen=CHANGES + 1))
    flips.append(state.frame_count)
    busy = len(flips) == flips.maxlen and state.frame_count - flips[0] <= STEPS
    if busy and rule.id not in rules.flapping and not muted:
        rules.flapping.add(rule.id)
        then = (
            f"; from now on it fires for at least {KEEP} steps"
            if _advisory(ctx.policy, rule)
            else ""
        )
        text = f"{rule.id} is flapping: {len(flips)} changes in {STEPS} steps{then}"
        ctx.record(RuleFlaps(reason=text, rule=rule.id))
        if state.silence(rule.id) is not None:
            return
        beside = rule_scope.incident_alongside(ctx.policy, state.incident, rule)
        if _is_detail(state.incident, rule) and not beside:
            return
        form = notices.RuleFlappingBeside if beside else notices.RuleFlapping
        ctx.send(form(severity=rule.severity, rule=rule.id, changes=len(flips), steps=STEPS))
        record_notified_rule(state, rule, numbers)
    elif not busy:
        rules.flapping.discard(rule.id)


def record_breach_height(
    policy: Policy, state: State, rule: Rule, rank: int, numbers: Mapping[str, Reading]
) -> bool:
    """Take down how far off a notice is that fires; return whether it was worse each time."""
    about_spike = rule_scope.rule_metrics(policy, rule) & rule_scope.MOVED_BY_SPIKE
    if rule.severity != "SEV2" or rule.runbook is not None or not about_spike:
        return False
    grown, now = False, state.frame_count
    for metric, height in breach_peaks(numbers).items():
        key = rule.id, rank, metric
        rise = [entry for entry in state.rules.heights.get(key, ()) if now - entry[0] <= WITHIN]
        if rise and height <= rise[-1][1]:
            rise = []
        rise = [*rise, (now, height)][-RISES:]
        if len(rise) == RISES and FACTOR * rise[0][1] <= height < math.inf:
            grown, rise = True, []
        state.rules.heights[key] = rise
    return grown


def extend_firing(policy: Policy, state: State, rule: Rule, watch: RuleWatch) -> None:
    """An advisory rule that flaps and has just fired goes on firing for a while."""
    if rule.id in state.rules.flapping and _advisory(policy, rule):
        watch.keep_until = max(watch.keep_until, state.frame_count + KEEP)


def clear_settled_flapping(ctx: StepContext) -> None:
    """A rule that has not changed for as long as it takes to flap is told of again.

    One that fires all the while is no noise: it is told at once.
    """
    state, rules = ctx.state, ctx.state.rules
    for rule in ctx.policy.rules:
        if rule.id not in rules.flapping:
            continue
        newest = max(flips[-1] for (name, _), flips in rules.flips.items() if name == rule.id)
        if state.frame_count - newest <= STEPS:
            continue
        rules.flapping.discard(rule.id)
        if rule.id not in state.firing(ctx.policy):
            continue
        text = (
            f"{rule.id} no longer flaps: it has been firing for {state.frame_count - newest} steps"
        )
        ctx.record(RuleSettled(reason=text, rule=rule.id))
        is_known = rule.id in rules.muted or _is_detail(state.incident, rule)
        if state.silence(rule.id) is None and not is_known:
            settles = notices.RuleSettles(
                severity=rule.severity,
                rule=rule.id,
                expression=rule.text,
                steps=state.frame_count - newest,
                advice=Advice(None, advice.show_runbook(rule.see)),
            )
            ctx.send(settles)


def _is_detail(incident: Incident | None, rule: Rule) -> bool:
    """Return whether another rule opened the incident: then nobody hears of this one again."""
    return incident is not None and rule.id not in incident.rules[:1]


def _advisory(policy: Policy, rule: Rule) -> bool:
    """Return whether nothing follows from the rule: nobody needs to know when it clears."""
    mutes = any(inhibit.by_rule == rule.id for inhibit in policy.inhibit)
    return rule.runbook is None and rule.severity == "SEV2" and not mutes


FEW = 16  # losses of which the newest are compared with the first; project default
CLIPPED, LOSS_SCALE, CLIP_RATE = "clip_ratio", "clip_loss_scale", "grad_clip_rate"
MOVED, RATE, ROUNDED = "update_to_weight", "learning_rate", "weights_rounded_away"
ROWS, DIGESTS, COPIES = "batchnorm_rows", "param_digest_mismatch", "stream_copies"
NO_GRADIENT, NO_OPTIMIZER = "tensors_without_gradient", "tensors_without_optimizer"
COUNTED = (
    *(NO_GRADIENT, NO_OPTIMIZER, "tensors_of_others"),
    *("modules_in_eval", "tensors_with_stale_gradient"),
)
# Metrics, each of one kind of message.
SUBJECTS = (*COUNTED, CLIPPED, RATE, MOVED, ROUNDED, ROWS, DIGESTS, COPIES)


def on_wiring(ctx: StepContext, event: Notice) -> None:
    """Keep what the probe says beside a metric; the rule that reads it fires in a later frame."""
    facts = event.data.read(WiringFacts)
    ctx.state.rules.wiring[facts.metric] = facts


def report(ctx: StepContext, monitor: RankMonitor, rule: Rule) -> None:
    """Notify people of a rule that fires, unless they know it of another rank or rule."""
    metrics, reported = rule_scope.rule_metrics(ctx.policy, rule), ctx.state.rules.wiring_reported
    subject = next((metric for metric in SUBJECTS if metric in metrics), "")
    if not subject or subject in reported:
        return
    if subject == MOVED and ctx.state.incident is not None:
        return  # an update that an incident is about does not tell how the job is written
    reported[subject] = ctx.state.step
    facts = ctx.state.rules.wiring.get(subject, WiringFacts())
    common = run_notices.OfWiring(
        severity=rule.severity,
        rule=rule.id,
        expression=rule.text,
        names=facts.named,
        made=facts.made,
    )
    if subject in COUNTED:
        notice = _of_tensors(subject, facts, common)
    else:
        notice = _of_numbers(ctx, monitor, subject, common)
    ctx.messages.add(MessageDraft.of(notice), replace=False, subject=subject)


def _of_tensors(
    subject: str, facts: WiringFacts, common: run_notices.OfWiring
) -> run_notices.OfWiring:
    """Return a message about tensors or layers that were counted."""
    fields, count = structs.asdict(common), facts.count or -1
    if subject == "modules_in_eval":
        return run_notices.ModelInEval(**fields)
    if subject == "tensors_with_stale_gradient":
        return run_notices.GradientsAddUp(**fields)
    if subject == NO_GRADIENT:
        if count == facts.total:
            return run_notices.LossCutOff(**fields)
        return run_notices.WithoutGradient(**fields, count=count, total=facts.total)
    if subject == NO_OPTIMIZER:
        return run_notices.WithoutOptimizer(**fields, count=count)
    return run_notices.OptimizerOfOthers(**fields, count=count)


def _of_numbers(
    ctx: StepContext, monitor: RankMonitor, subject: str, common: run_notices.OfWiring
) -> run_notices.OfWiring:
    """Return a message about numbers of the newest frames."""
    fields = structs.asdict(common)
    if subject == DIGESTS:
        checks = monitor.history.series(subject)
        equal = [step for step, differing in checks if not differing]
        return run_notices.ReplicasDiffer(**fields, equal=equal[-1] if equal else None)
    newest = [value for _, value in monitor.history.series(subject)][-FEW:]
    value = median(newest) if newest else 0.0
    if subject == ROUNDED:
        return run_notices.RoundedAway(**fields, share=value)
    if subject == COPIES:
        return run_notices.StreamNotSplit(**fields, copies=value)
    if subject == ROWS:
        return run_notices.NormsAlone(**fields, rows=value)
    if subject == RATE:
        rates = monitor.history.series(RATE)
        moved = [step for step, rate in rates if rate != 0.0]
        since = next((step for step, _ in rates if moved and step > moved[-1]), None)
        return run_notices.ScheduleOver(**fields, since=since)
    if subject == CLIPPED:
        scale = monitor.value(LOSS_SCALE) or 1.0
        clip = ctx.state.rules.wiring.get(LOSS_SCALE, WiringFacts())
        return run_notices.AlwaysClipped(
            **{**fields, "made": clip.made if scale > 1.0 else ""},
            share=monitor.value(CLIP_RATE) or 0.0,
            ratio=value,
            course=describe_unmoved_loss(monitor),
            scale=f"{scale:g}" if scale > 1.0 else "",
            otherwise="" if scale > 1.0 else "raise its limit, or scale the loss down",
        )
    if value > 1.0:
        return run_notices.UpdatesTooLarge(**fields, ratio=value)
    return run_notices.WeightsStandStill(
        **fields, ratio=value, rate=monitor.value(RATE), course=describe_unmoved_loss(monitor)
    )


def describe_unmoved_loss(monitor: RankMonitor) -> str:
    """Return how the loss stands to its first values, "" where those are forgotten or it fell."""
    losses = monitor.history.series(LOSS)
    if len(losses) < 2 * FEW or losses[0][0] > FEW:
        return ""
    first, last = ([loss for _, loss in part] for part in (losses[:FEW], losses[-FEW:]))
    spread = max(first) - min(first)
    if abs(median(last) - median(first)) > spread:
        return ""
    return reasons.LossUnmoved(first=median(first), newer=median(last)).text
