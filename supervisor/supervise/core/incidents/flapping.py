"""Rules that change too often: told once, then silently, until they settle or grow.

One that acts, or is of SEV0, never flaps: its next breach may be the one that matters.

Source: the flap detection of Nagios. More than 6 changes in 500 steps is a project default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ..detection.rank_monitor import RuleWatch
from ..model.decisions import RuleFlaps, RuleSettled
from ..model.interfaces import WATCHER
from ..model.policy import Policy, Rule
from ..state import rule_scope
from ..state.run_state import State, StepContext
from . import next_steps, reporting

CHANGES, STEPS = 6, 500
# An advisory rule that flaps fires for so long at least, or a loss that is two losses by turns
# would fill the record. Short enough that it goes on counting as flapping. Project default.
KEEP = 100


def on_rule_changed(
    ctx: StepContext, rule: Rule, rank: int, numbers: Mapping[str, Mapping[str, Any]]
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
        ctx.notify(
            rule.severity,
            f"{rule.id} is flapping",
            verdict=f"{len(flips)} changes in {STEPS} steps",
            then="no further notification until it settles or grows",
            kind=WATCHER if rule_scope.alongside(ctx.policy, state.incident, rule) else "",
        )
        reporting.remember(state, rule, numbers)
    elif not busy:
        rules.flapping.discard(rule.id)


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
        if state.silence(rule.id) is None and rule.id not in rules.muted:
            ctx.notify(
                rule.severity,
                text,
                why=f"rule {rule.id}: {rule.text}",
                then=next_steps.read(rule.see),
            )


def _advisory(policy: Policy, rule: Rule) -> bool:
    """Return whether nothing follows from the rule: nobody needs to know when it clears."""
    mutes = any(inhibit.by_rule == rule.id for inhibit in policy.inhibit)
    return rule.runbook is None and rule.severity == "SEV2" and not mutes
