"""What kept, or would have kept, a rule that fires from acting at some moment of a run.

The same questions in the same order as `core.handlers.rule_fired` asks them when a rule fires;
there the first one that says no ends the matter, here all are told.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.model import escalation
from ..core.model.action import PlanContext, Refused
from ..core.model.decisions import ACTING_MODES
from ..core.model.policy import HOLD, Policy, Rule
from ..core.state.incident import HELD, PROBATION
from ..core.state.run_state import State


def of(
    rule: Rule, policy: Policy, state: State, was_in: str, *, fired: bool
) -> list[dict[str, str]]:
    """Return `{"by", "text"}` for everything in the way of the rule's runbook.

    Args:
        state: after the moment's event; was_in: the state of the machine before it.
        fired: the rule fired in that event: what then held it back has a record of its own, and
            the state shows what it led to.
    """
    found = [*_muted(rule, policy, state, was_in), *_mode(rule, policy)]
    if rule.runbook is not None and not fired:
        found += _incident(rule, policy, state)
        found += _cooldown(rule, state)
        found += _runbook(rule, policy, state)
    return [{"by": by, "text": text} for by, text in found]


def _muted(rule: Rule, policy: Policy, state: State, was_in: str) -> Iterator[tuple[str, str]]:
    firing = set(state.firing(policy))
    for inhibit in policy.inhibit:
        if rule.id not in inhibit.mute:
            continue
        if inhibit.by_rule is not None and inhibit.by_rule in firing:
            yield f"inhibit:{inhibit.by_rule}", f"muted by {inhibit.by_rule}, which is firing"
        if was_in in inhibit.by_state:
            yield f"inhibit:{was_in}", f"muted while the run is {was_in}"


def _mode(rule: Rule, policy: Policy) -> Iterator[tuple[str, str]]:
    if rule.runbook is None:
        yield "runbook", "it has no runbook: when it fires it only tells people"
        return
    mode = policy.mode_of(rule)
    if mode not in ACTING_MODES:
        whose = "the rule's own mode" if mode != policy.mode else "the policy's mode"
        yield f"mode:{mode}", f"{whose} is {mode}: {rule.runbook} is not run"


def _incident(rule: Rule, policy: Policy, state: State) -> Iterator[tuple[str, str]]:
    incident = state.incident
    if incident is None:
        return
    aside = rule.runbook not in policy.ladder.rungs
    if incident.phase == HELD and not aside:
        yield "holding", f"{incident.id} is held: a person is needed"
    if incident.run is not None:
        yield "acting", f"{incident.id}: {incident.run.runbook.name} is running"
    if incident.phase == PROBATION and not aside:
        steps = incident.ending.probation_until - state.pace
        left = max(steps, incident.recovery.settled - state.step)
        yield "probation", f"{incident.id} is on probation for {left} more steps: the ladder climbs"


def _cooldown(rule: Rule, state: State) -> Iterator[tuple[str, str]]:
    last = state.history.cooldown.get(rule.id)
    if last is None:
        return
    since = state.pace - last[0]
    if since < rule.cooldown_steps:
        yield (
            "cooldown",
            (
                f"its runbook ran {since} steps ago and its cooldown is {rule.cooldown_steps}: "
                "a new breach climbs the ladder"
            ),
        )


def _runbook(rule: Rule, policy: Policy, state: State) -> Iterator[tuple[str, str]]:
    """Say which budget is spent, and which action cannot work here."""
    assert rule.runbook is not None
    floor = escalation.floor(policy.ladder, state.history.floor, state.pace)
    name, _ = escalation.entry(policy.ladder, rule.runbook, floor)
    if name != rule.runbook:
        yield "ladder", f"after the last incident the ladder begins with {name}"
    if name == HOLD:
        yield "hold", "it would only have held the run for a person"
        return
    book = policy.runbooks[name]
    where = PlanContext(
        "none",
        state.step,
        state.step,
        state.attempt,
        state.job.world_size,
        rule.severity,
        state.job.unable,
    )
    for verb, action in zip(book.verbs, book.steps, strict=True):
        try:
            action.aim(where)
        except Refused as refusal:
            yield "refused", f"{name} cannot run here: {verb}: {refusal}"
        kind = action.budget
        if kind is not None:
            spent = state.ledger.exhausted(policy.budgets, kind, state.pace, state.at_ns)
            if spent is not None:
                yield (
                    f"budget:{spent[0]}",
                    f"budget {spent[0]} is spent ({spent[2]} of {spent[1].max})",
                )
