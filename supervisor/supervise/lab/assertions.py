"""The result of a scenario, and the check of its expectations against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ..catalog.scenarios import Expectation, Names, Scenario
from ..catalog.yaml_document import ListNode, MapNode, Node
from ..core.model import state_machine
from ..core.model.decisions import (
    SEVERITIES,
    ActionPlanned,
    Decision,
    IncidentOpened,
    IncidentRaised,
    Notified,
    RuleCleared,
    RuleFired,
    Suppressed,
)
from ..core.model.state_machine import STATES


class TransitionCoverage(dict[str, Any]):
    """A transition table that records which pairs of state and event were looked up."""

    class Row(dict[str, str]):
        """The transitions of one state."""

        def __init__(self, state: str, moves: dict[str, str], seen: set[tuple[str, str]]) -> None:
            super().__init__(moves)
            self._state, self._seen = state, seen

        def get(self, event: str, default: Any = None) -> Any:
            self._seen.add((self._state, event))
            return super().get(event, default)

    def __init__(self, table: state_machine.Table) -> None:
        self.seen: set[tuple[str, str]] = set()
        rows = {state: dict(table.get(state, {})) for state in state_machine.STATES}
        super().__init__({state: self.Row(state, row, self.seen) for state, row in rows.items()})
        self["any"] = dict(table.get("any", {}))


@dataclass(slots=True)
class ScenarioResult:
    """The result of a scenario.

    Attributes:
        log: `(frame, decision)` in order; frames count from 0 and never decrease.
        states: state of the run after each frame. spent: by frame, intents per class of budget.
        active: ids of the rules whose metrics the scenario has.
        visited: pairs of state and event. replay_differences: where a restarted supervisor decided
            differently.
    """

    log: list[tuple[int, Decision]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    spent: dict[int, dict[str, int]] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    visited: set[tuple[str, str]] = field(default_factory=set)
    replay_differences: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        return len(self.states) - 1

    # ── rules ─────────────────────────────────────────────────────────────────────────────────────

    def changes(self, rule: str, what: str) -> list[int]:
        """Return the frames at which a rule `fired` or `cleared`, on any rank."""
        form = RuleFired if what == "fired" else RuleCleared
        return [at for at, d in self.log if isinstance(d, form) and d.rule == rule]

    def on(self, rule: str) -> list[bool]:
        """Return, for each frame, whether the rule fires on some rank after it."""
        firing: set[int] = set()
        found, done = [], 0
        for frame in range(len(self.states)):
            while done < len(self.log) and self.log[done][0] <= frame:
                decision = self.log[done][1]
                done += 1
                if isinstance(decision, RuleFired) and decision.rule == rule:
                    firing.add(decision.rank)
                elif isinstance(decision, RuleCleared) and decision.rule == rule:
                    firing.discard(decision.rank)
            found.append(bool(firing))
        return found

    def suppressed(self, by: str, rule: str | None = None) -> list[int]:
        """Return the frames at which a suppression by `by` (a prefix) was recorded."""
        return [
            at
            for at, d in self.log
            if isinstance(d, Suppressed)
            and d.suppressed_by.startswith(by)
            and rule in (None, d.rule)
        ]

    # ── actions and messages ─────────────────────────────────────────────────────────────────────

    def intents(self) -> list[tuple[int, str]]:
        """Return `(frame, verb)` of every action that was started."""
        return [(at, d.action.verb) for at, d in self.log if isinstance(d, ActionPlanned)]

    def incidents(self) -> list[tuple[int, str]]:
        """Return `(frame, severity)` whenever an incident was opened or raised."""
        return [
            (at, str(d.severity))
            for at, d in self.log
            if isinstance(d, IncidentOpened | IncidentRaised)
        ]

    def messages(self, text: str) -> list[int]:
        """Return the frames of the notifications that contain this text."""
        return [
            at
            for at, d in self.log
            if isinstance(d, Notified)
            and text in " ".join(str(part) for part in structs.astuple(d.message))
        ]


SHOWN = 8  # frames that a sentence lists


@dataclass(frozen=True, slots=True)
class Failure:
    """One expectation that failed. `index` is its number, -1 for the whole scenario."""

    index: int
    message: str


def failures(form: Scenario, result: ScenarioResult, names: Names) -> list[Failure]:
    """Return the expectations that failed; empty: the scenario passes."""
    found = [Failure(-1, f"after a restart: {message}") for message in result.replay_differences]
    for index, expect in enumerate(form.expect):
        message = _beyond_end(expect, result) or _check(expect, result, names)
        if message is not None:
            found.append(Failure(index, message))
    return found


def node_of(node: Node, failure: Failure) -> Node:
    """Return the node of the failed expectation; `node` is that of the scenario."""
    held = node.get("expect") if isinstance(node, MapNode) else None
    if isinstance(held, ListNode) and 0 <= failure.index < len(held.items):
        return held.items[failure.index]
    return node


def _beyond_end(expect: Expectation, result: ScenarioResult) -> str | None:
    frame = expect.at if expect.between is None else expect.between[0]
    if frame is not None and frame > result.last:
        return f"the scenario ends at frame {result.last}"
    return None


def _check(expect: Expectation, result: ScenarioResult, names: Names) -> str | None:
    first, last = expect.window(result.last)
    subject = expect.subject()
    if subject == "never":
        return _check_never(expect, result, names, first, last)
    if subject == "rule":
        return _check_rule(expect, result, names, first, last)
    if subject == "state":
        return _check_state(expect, result, first, last)
    if subject == "actions":
        return _check_actions(expect, result, first, last)
    if subject == "budget":
        used = result.spent[last]
        wrong = {n: used.get(n, 0) for n, c in (expect.budget or {}).items() if used.get(n, 0) != c}
        return ", ".join(f"budget {n}: {c} used" for n, c in wrong.items()) or None
    if subject == "severity":
        at = [frame for frame, severity in result.incidents() if severity == expect.severity]
        return _check_count(expect, at, first, last, f"an incident of {expect.severity}")
    if subject == "message":
        at = result.messages(expect.message or "")
        return _check_count(expect, at, first, last, f"a message with {expect.message!r}")
    at = result.suppressed(expect.suppressed or "")
    return _check_count(expect, at, first, last, f"suppression by {expect.suppressed}")


def _check_count(
    expect: Expectation, at: Sequence[int], first: int, last: int, what: str
) -> str | None:
    """Compare how often something occurred in the window with what is expected."""
    occurred = [frame for frame in at if first <= frame <= last]
    if expect.count is not None:
        text = f"{what} {len(occurred)} times, not {expect.count}: {_frames_text(occurred)}"
        return None if len(occurred) == expect.count else text
    what = what.removeprefix("an ").removeprefix("a ")
    return None if occurred else f"no {what} {_window_text(expect)}: {_frames_text(at)}"


def _frames_text(frames: Sequence[int]) -> str:
    if not frames:
        return "it never occurred"
    more = ", ..." if len(frames) > SHOWN else ""
    return "it occurred at " + ", ".join(str(frame) for frame in frames[:SHOWN]) + more


def _check_rule(
    expect: Expectation, result: ScenarioResult, names: Names, first: int, last: int
) -> str | None:
    rule = names.rule(expect.rule or "") or ""
    how = expect.is_ or "firing"
    if how == "muted":
        at = sorted((*result.suppressed("inhibit:", rule), *result.suppressed("phase:", rule)))
        return _check_count(expect, at, first, last, f"muting of {rule}")
    if how in ("on", "quiet"):
        wanted = how == "on"
        on = result.on(rule)
        wrong = [frame for frame in range(first, min(last, result.last) + 1) if on[frame] != wanted]
        verb_now = "does not fire" if wanted else "fires"
        return f"{rule} {verb_now} at {wrong[0]}" if wrong else None
    at = result.changes(rule, "fired" if how == "firing" else "cleared")
    verb = "fired" if how == "firing" else "cleared"
    what = f"{rule} {verb}"
    if expect.count is not None:
        return _check_count(expect, at, first, last, what)
    # The first occurrence counts: earlier is a false alarm, later is too late.
    if first in at if expect.at is not None else at and first <= at[0] <= last:
        return None
    text = f"{what} at {', '.join(map(str, at[:SHOWN]))}" if at else f"{rule} never {verb}"
    return f"{text}; expected {_window_text(expect)}"


def _window_text(expect: Expectation) -> str:
    if expect.at is not None:
        return f"at {expect.at}"
    if expect.between is not None:
        return f"between {expect.between[0]} and {expect.between[1]}"
    if expect.end:
        return "at the end"
    return "once" if expect.by is None else f"by {expect.by}"


def _check_state(expect: Expectation, result: ScenarioResult, first: int, last: int) -> str | None:
    seen = result.states[first : last + 1]
    if expect.state in seen:
        return None
    return f"the state is {' then '.join(dict.fromkeys(seen)) or 'none yet'}, not {expect.state}"


def _check_actions(
    expect: Expectation, result: ScenarioResult, first: int, last: int
) -> str | None:
    verbs = [verb for at, verb in result.intents() if first <= at <= last]
    wanted = list(expect.actions or ())
    text = f"actions were {', '.join(verbs) or 'none'}"
    if not wanted:
        return text if verbs else None
    if expect.count is not None:
        wrong = [v for v in dict.fromkeys(wanted) if verbs.count(v) != expect.count]
        if wrong:
            return f"{text}; {wrong[0]} {verbs.count(wrong[0])} times, not {expect.count}"
        if expect.count == 0:
            return None
    rest = iter(verbs)
    if all(verb in rest for verb in wanted):
        return None
    return f"{text}; expected {', '.join(wanted)}, in this order"


def _check_never(
    expect: Expectation, result: ScenarioResult, names: Names, first: int, last: int
) -> str | None:
    for name in expect.never or ():
        rule = names.rule(name)
        if rule is not None:
            at = result.changes(rule, "fired")
        elif name in SEVERITIES:
            at = [frame for frame, severity in result.incidents() if severity == name]
        elif name in STATES:
            at = [frame for frame, state in enumerate(result.states) if state == name]
        else:
            at = [frame for frame, verb in result.intents() if verb == name]
        occurred = [frame for frame in at if first <= frame <= last]
        if occurred:
            return f"{rule or name} must not occur: {_frames_text(occurred)}"
    return None
