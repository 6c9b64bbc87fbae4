"""What keeps, or would have kept, the runbook of a rule from running at some moment of a run.

The engine itself answers: the rule fires in a copy of the state, and what the engine decides then
is read. So there is one order of gates, that of `core.handlers.rule_fired`, and the first gate that
is closed is the one that is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.handlers import rule_fired
from ..core.model.decisions import ACTING_MODES, Decision
from ..core.model.events import Tick
from ..core.model.policy import Policy, Rule
from ..core.state.run_state import State, StepContext


def blocking(rule: Rule, policy: Policy, decisions: Iterable[Decision]) -> list[dict[str, str]]:
    """Return `{"by", "text"}` for everything in the way of a rule's runbook.

    Args:
        decisions: what the engine decided when the rule fired, or would have (`if_fired`).
    """
    found = {by: text for by, text in _decided(rule, decisions) if not by.startswith("mode:")}
    found.update(_static(rule, policy))
    return [{"by": by, "text": text} for by, text in found.items()]


def if_fired(
    rule: Rule, policy: Policy, state: State, machine_before: str, rank: int
) -> list[Decision]:
    """Return what the engine would decide if the rule fired on a rank; `state` stays as it is.

    Args:
        state: after the event of the moment. machine_before: state of the machine before that
            event.
    """
    state = state.copy()
    state.machine = machine_before
    ctx, monitor = StepContext(policy, state, Tick(state.at_ns)), state.monitors[rank]
    place = policy.rules.index(rule)
    monitor.rules[place].firing, monitor.rules[place].answered = True, False
    rule_fired.on_rules_changed(ctx, monitor, rank, [(place, True)])
    return ctx.decisions


def _decided(rule: Rule, decisions: Iterable[Decision]) -> Iterator[tuple[str, str]]:
    for decision in decisions:
        data = decision.data
        if decision.rule not in (None, rule.id):
            continue
        if decision.kind == "suppressed":
            yield str(data["suppressed_by"]), decision.reason
        elif decision.kind == "abort" and data.get("what") == "refused":
            yield "refused", decision.reason
        elif decision.kind == "incident" and data.get("what") == "held":
            yield "hold", decision.reason


def _static(rule: Rule, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield what the policy says about the rule at any moment."""
    if rule.runbook is None:
        yield "runbook", "it has no runbook: when it fires it only notifies people"
        return
    mode = policy.mode_of(rule)
    if mode not in ACTING_MODES:
        whose = "the rule's own mode" if mode != policy.mode else "the policy's mode"
        yield f"mode:{mode}", f"{whose} is {mode}: {rule.runbook} is not run"
