"""News of a rule for people: a new problem, or one that grows.

One trouble makes many rules fire within a few steps, and one rule often. They hear of it once, and
again when a value is GROWTH times what they were told last: growth is never a repetition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..detection.rank_monitor import RankMonitor
from ..model.decisions import RuleGrew
from ..model.interfaces import Reading
from ..model.policy import Policy, Rule
from ..state import rule_scope
from ..state.incident import HELD, OPEN, Incident, headline
from ..state.run_state import Reported, State, StepContext
from . import next_steps

GROWTH = 1.5  # times what was told last (evidence.md 5)
# What fires within as many frames of a message is part of what that was about: the norms lead the
# loss by a few steps. As many without a firing rule end an incident.
TOGETHER = 20
AGAIN = 500  # frames until a rule that fires again and again in a hold is told again


def remember(state: State, rule: Rule, numbers: Mapping[str, Reading]) -> None:
    """People hear of a rule now, by its own message or by that of a worse one."""
    incident = state.incident
    name = incident.id if incident is not None else ""
    state.rules.reported[rule.id] = Reported(name, state.frame_count, peaks(numbers))
    state.rules.growing.pop(rule.id, None)


def joins_as_news(
    policy: Policy, state: State, incident: Incident, rule: Rule, text: str, *, raised: bool
) -> bool:
    """Return whether people hear of a rule that joins an incident, before it has joined.

    A worse one is always news. A SEV0 is unless a message has just said it; a SEV1 is once, unless
    the newest message is about the same; a notice is where it explains the others, or tells of
    another kind of trouble, but not within something worse.
    """
    known, now = state.rules.reported.get(rule.id), state.frame_count
    since = math.inf if known is None or known.incident != incident.id else now - known.at
    if raised or (incident.phase == HELD and rule.severity != "SEV2" and since > AGAIN):
        return True
    together = now - _newest(state, incident) <= TOGETHER
    other = rule_scope.new_kind(incident, rule)
    if rule.severity == "SEV0":
        same = together and not other and _repeats(policy, incident, rule)
        return since > TOGETHER and not same
    if since < math.inf:
        return False
    if rule_scope.explains(policy, incident, rule):
        return True
    if rule.severity == "SEV2":
        together &= rule_scope.against_weights(policy, incident)
        return other and not together and incident.severity == "SEV2"
    one = not other or rule_scope.may_be_one_spike(policy, incident, rule)
    return text != incident.headline and not (together and one)


def _repeats(policy: Policy, incident: Incident, rule: Rule) -> bool:
    """Return whether a rule of an incident that is as severe reads a metric that this one does."""
    read = rule_scope.metrics(policy, rule)
    others = (o for o in policy.rules if o.id in incident.rules and o.severity == rule.severity)
    return any(read & rule_scope.metrics(policy, other) for other in others)


def _newest(state: State, incident: Incident) -> int:
    """Return the frame count of the newest message about a rule of an incident."""
    known = state.rules.reported.values()
    return max((one.at for one in known if one.incident == incident.id), default=-TOGETHER - 1)


def track_growth(state: State, rule: Rule, numbers: Mapping[str, Reading]) -> None:
    """Take down that a rule that fires has grown beyond what people were told of it.

    That is asked of a notice only while it flaps: else it is told of when it fires, and no more.
    """
    rules, incident = state.rules, state.incident
    known = rules.reported.get(rule.id)
    if rule.id in rules.flapping:
        known = known or rules.reported.setdefault(rule.id, Reported("", -AGAIN, {}))
    elif rule.severity == "SEV2" or incident is None:
        return
    elif known is None or known.incident != incident.id:  # the newest message is about it, too
        rules.reported[rule.id] = Reported(incident.id, _newest(state, incident), peaks(numbers))
        return
    for name, height in peaks(numbers).items():
        before = known.peaks.get(name, 0.0)
        if height > before and height >= GROWTH * before:
            state.rules.growing[rule.id] = headline(numbers, rule.text)
            known.peaks[name] = height  # only what is beyond that is worth saying then


def report_growth(ctx: StepContext, monitor: RankMonitor) -> None:
    """Tell of rules that have grown, a few frames after the message before at the earliest."""
    state, rules = ctx.state, ctx.state.rules
    for rule, watch in zip(ctx.policy.rules, monitor.rules, strict=True):
        if rule.id in rules.flapping and watch.firing:
            track_growth(state, rule, monitor.numbers(rule))
        if (
            rule.id not in rules.growing
            or state.frame_count - rules.reported[rule.id].at <= TOGETHER
        ):
            continue
        text, incident = rules.growing.pop(rule.id), state.incident
        if incident is None or state.silence(rule.id) is not None or rule.id in rules.muted:
            continue
        rules.reported[rule.id].at = state.frame_count
        ctx.record(RuleGrew(reason=f"{rule.id} grew: {text}", rule=rule.id, severity=rule.severity))
        if rule.severity == "SEV2" != incident.severity:  # no news within something worse
            continue
        ctx.notify(
            rule.severity,
            f"{incident.id}: {rule.id} grows",
            verdict=text,
            why=f"rule {rule.id}: {rule.text}",
            then=next_steps.read(rule.see),
        )


def repeat(ctx: StepContext, incident: Incident) -> None:
    """Tell again of an incident that goes on, and that nobody has acknowledged."""
    since_ns = ctx.state.at_ns - incident.reported_ns
    if not incident.reported_ns or since_ns <= ctx.policy.repeat_s * 1e9:
        return
    if incident.severity == "SEV2" or incident.phase not in (OPEN, HELD):
        return
    pending = ctx.state.approvals.pending
    answer = f"supervise approve RUN {pending.id}; " if pending is not None else ""
    ctx.notify(
        incident.severity,
        f"{incident.id}: still open, and nobody has acknowledged it",
        verdict=incident.headline,
        then=f"{answer}to end these reminders: supervise ack RUN",
    )


def peaks(numbers: Mapping[str, Reading]) -> dict[str, float]:
    """Return how far each metric in breach is off, larger for worse.

    That is its height over the baseline, without one the value; not a z, whose scale may shrink.
    Below a baseline, or a lower limit, a value is as far off as its inverse would be above it.
    """
    found: dict[str, float] = {}
    for name, reading in numbers.items():
        value, limit = reading.get("value"), reading.get("threshold")
        if reading.get("code") != "BREACH":
            continue
        if reading.get("nonfinite"):
            found[name] = math.inf
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
            found[metric] = max(height, found.get(metric, 0.0))
    return found
