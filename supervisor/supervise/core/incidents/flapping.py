"""Rules that change too often: told once, then silently, until they settle or grow.

One that acts, or is of SEV0, never flaps: its next breach may be the one that matters.

One that is worse each time it comes back, though it ends by itself, is a trouble that grows: told
once, as a SEV1.

Source: the flap detection of Nagios. More than 6 changes in 500 steps is a project default.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from ..detection.rank_monitor import RuleWatch
from ..model.decisions import RuleFlaps, RuleSettled
from ..model.interfaces import WATCHER, Reading
from ..model.policy import Policy, Rule
from ..state import rule_scope
from ..state.incident import Incident
from ..state.run_state import State, StepContext
from . import next_steps, reporting

CHANGES, STEPS = 6, 500
# An advisory rule that flaps fires for so long at least, or a loss that is two losses by turns
# would fill the record. Short enough that it goes on counting as flapping. Project default.
KEEP = 100
# Firings in a row, in so many steps, each further off than the one before and the last one at least
# twice as far as the first. 6 that do not grow come in this order once in 720; 5 did in a healthy
# log. Project defaults.
RISES, WITHIN, FACTOR = 6, 2000, 2.0
GROWN = f"{RISES} times within {WITHIN} steps, each time further off than before"


def on_rule_changed(
    ctx: StepContext, rule: Rule, rank: int, numbers: Mapping[str, Reading]
) -> None:
    """The rule fired or cleared on a rank."""
    if rule.runbook is not None or rule.severity == "SEV0":
        return
    state, rules = ctx.state, ctx.state.rules
    flips = rules.flips.setdefault((rule.id, rank), deque(maxlen=CHANGES + 1))
    flips.append(state.frame_count)
    busy = len(flips) == flips.maxlen and state.frame_count - flips[0] <= STEPS
    if busy and rule.id not in rules.flapping:
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
        beside = rule_scope.alongside(ctx.policy, state.incident, rule)
        if _is_detail(state.incident, rule) and not beside:
            return
        ctx.notify(
            rule.severity,
            f"{rule.id} is flapping",
            verdict=f"{len(flips)} changes in {STEPS} steps",
            then="no further notification until it settles or grows",
            kind=WATCHER if beside else "",
        )
        reporting.remember(state, rule, numbers)
    elif not busy:
        rules.flapping.discard(rule.id)


def has_grown(
    policy: Policy, state: State, rule: Rule, rank: int, numbers: Mapping[str, Reading]
) -> bool:
    """Take down how far off a notice is that fires; return whether it was worse each time."""
    about_spike = rule_scope.metrics(policy, rule) & rule_scope.MOVED_BY_SPIKE
    if rule.severity != "SEV2" or rule.runbook is not None or not about_spike:
        return False
    grown, now = False, state.frame_count
    for metric, height in reporting.peaks(numbers).items():
        key = rule.id, rank, metric
        rise = [one for one in state.rules.heights.get(key, ()) if now - one[0] <= WITHIN]
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


def clear_settled(ctx: StepContext) -> None:
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
        known = rule.id in rules.muted or _is_detail(state.incident, rule)
        if state.silence(rule.id) is None and not known:
            ctx.notify(
                rule.severity,
                text,
                why=f"rule {rule.id}: {rule.text}",
                then=next_steps.read(rule.see),
            )


def _is_detail(incident: Incident | None, rule: Rule) -> bool:
    """Return whether another rule opened the incident: then nobody hears of this one again."""
    return incident is not None and rule.id not in incident.rules[:1]


def _advisory(policy: Policy, rule: Rule) -> bool:
    """Return whether nothing follows from the rule: nobody needs to know when it clears."""
    mutes = any(inhibit.by_rule == rule.id for inhibit in policy.inhibit)
    return rule.runbook is None and rule.severity == "SEV2" and not mutes
