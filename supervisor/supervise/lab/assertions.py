"""The result of a scenario, and the check of its expectations against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
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
from ..core.rule_scope import RETURNED_DATA

MUTES = ("inhibit", "phase", RETURNED_DATA)  # causes of the condition `muted`


class TransitionCoverage(dict[str, Any]):
    """A transition table that records which pairs of state and event were looked up."""

    class Row(dict[str, str]):
        """The transitions of one state."""

        def __init__(
            self, state: str, moves: dict[str, str], transitions: set[tuple[str, str]]
        ) -> None:
            super().__init__(moves)
            self._state, self._seen = state, transitions

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
    def last_frame(self) -> int:
        return len(self.states) - 1

    # ── rules ─────────────────────────────────────────────────────────────────────────────────────

    def changes(self, rule: str, change: str) -> list[int]:
        """Return the frames at which a rule `fired` or `cleared`, on any rank."""
        form = RuleFired if change == "fired" else RuleCleared
        return [frame for frame, d in self.log if isinstance(d, form) and d.rule == rule]

    def rule_firing_by_frame(self, rule: str) -> list[bool]:
        """Return, for each frame, whether the rule fires on some rank after it."""
        firing: set[int] = set()
        frames, restarts = [], 0
        for frame in range(len(self.states)):
            while restarts < len(self.log) and self.log[restarts][0] <= frame:
                decision = self.log[restarts][1]
                restarts += 1
                if isinstance(decision, RuleFired) and decision.rule == rule:
                    firing.add(decision.rank)
                elif isinstance(decision, RuleCleared) and decision.rule == rule:
                    firing.discard(decision.rank)
            frames.append(bool(firing))
        return frames

    def suppressed(self, by: str, rule: str | None = None) -> list[int]:
        """Return the frames at which a suppression by a cause, or by `<cause>:<name>`, was."""
        return [
            frame
            for frame, d in self.log
            if isinstance(d, Suppressed)
            and by in (d.cause, d.suppressed_by)
            and rule in (None, d.rule)
        ]

    # ── actions and messages ─────────────────────────────────────────────────────────────────────

    def intents(self) -> list[tuple[int, str]]:
        """Return `(frame, verb)` of every action that was started."""
        return [(frame, d.action.verb) for frame, d in self.log if isinstance(d, ActionPlanned)]

    def incidents(self) -> list[tuple[int, str]]:
        """Return `(frame, severity)` whenever an incident was opened or raised."""
        return [
            (frame, str(d.severity))
            for frame, d in self.log
            if isinstance(d, IncidentOpened | IncidentRaised)
        ]

    def messages(self, text: str) -> list[int]:
        """Return the frames of the notifications that contain this text."""
        return [
            frame
            for frame, d in self.log
            if isinstance(d, Notified)
            and text in " ".join(str(part) for part in structs.astuple(d.message))
        ]


SHOWN = 8  # frames that a sentence lists


@dataclass(frozen=True, slots=True)
class Failure:
    """One expectation that failed. `index` is its number, -1 for the whole scenario."""

    index: int
    message: str


def failed_expectations(form: Scenario, result: ScenarioResult, names: Names) -> list[Failure]:
    """Return the expectations that failed; empty: the scenario passes."""
    replay_failures = [
        Failure(-1, f"after a restart: {message}") for message in result.replay_differences
    ]
    for index, expect in enumerate(form.expect):
        message = _beyond_end(expect, result) or _check(expect, result, names)
        if message is not None:
            replay_failures.append(Failure(index, message))
    return replay_failures


def node_of(node: Node, failure: Failure) -> Node:
    """Return the node of the failed expectation; `node` is that of the scenario."""
    section = node.get("expect") if isinstance(node, MapNode) else None
    if isinstance(section, ListNode) and 0 <= failure.index < len(section.items):
        return section.items[failure.index]
    return node


def _beyond_end(expect: Expectation, result: ScenarioResult) -> str | None:
    frame = expect.at if expect.between is None else expect.between[0]
    if frame is not None and frame > result.last_frame:
        return f"the scenario ends at frame {result.last_frame}"
    return None


def _check(expect: Expectation, result: ScenarioResult, names: Names) -> str | None:
    start, end = expect.window(result.last_frame)
    subject = expect.subject()
    if subject == "never":
        return _check_never(expect, result, names, start, end)
    if subject == "rule":
        return _check_rule(expect, result, names, start, end)
    if subject == "state":
        return _check_state(expect, result, start, end)
    if subject == "actions":
        return _check_actions(expect, result, start, end)
    if subject == "budget":
        used = result.spent[end]
        wrong = {n: used.get(n, 0) for n, c in (expect.budget or {}).items() if used.get(n, 0) != c}
        return ", ".join(f"budget {n}: {c} used" for n, c in wrong.items()) or None
    if subject == "severity":
        frames = [frame for frame, severity in result.incidents() if severity == expect.severity]
        return _check_count(expect, frames, start, end, f"an incident of {expect.severity}")
    if subject == "message":
        frames = result.messages(expect.message or "")
        return _check_count(expect, frames, start, end, f"a message with {expect.message!r}")
    frames = result.suppressed(expect.suppressed or "")
    return _check_count(expect, frames, start, end, f"suppression by {expect.suppressed}")


def _check_count(
    expect: Expectation, frames: Sequence[int], start: int, end: int, subject: str
) -> str | None:
    """Compare how often something occurred in the window with what is expected."""
    occurred = [frame for frame in frames if start <= frame <= end]
    if expect.count is not None:
        text = f"{subject} {len(occurred)} times, not {expect.count}: {_frames_text(occurred)}"
        return None if len(occurred) == expect.count else text
    subject = subject.removeprefix("an ").removeprefix("a ")
    return None if occurred else f"no {subject} {_window_text(expect)}: {_frames_text(frames)}"


def _frames_text(frames: Sequence[int]) -> str:
    if not frames:
        return "it never occurred"
    tail = ", ..." if len(frames) > SHOWN else ""
    return "it occurred at " + ", ".join(str(frame) for frame in frames[:SHOWN]) + tail


def _check_rule(
    expect: Expectation, result: ScenarioResult, names: Names, start: int, end: int
) -> str | None:
    rule = names.rule(expect.rule or "") or ""
    condition = expect.is_ or "firing"
    if condition == "muted":
        frames = sorted(chain.from_iterable(result.suppressed(cause, rule) for cause in MUTES))
        return _check_count(expect, frames, start, end, f"muting of {rule}")
    if condition in ("on", "quiet"):
        expected = condition == "on"
        on = result.rule_firing_by_frame(rule)
        wrong = [
            frame
            for frame in range(start, min(end, result.last_frame) + 1)
            if on[frame] != expected
        ]
        verb_now = "does not fire" if expected else "fires"
        return f"{rule} {verb_now} at {wrong[0]}" if wrong else None
    frames = result.changes(rule, "fired" if condition == "firing" else "cleared")
    verb = "fired" if condition == "firing" else "cleared"
    subject = f"{rule} {verb}"
    if expect.count is not None:
        return _check_count(expect, frames, start, end, subject)
    # The first occurrence counts: earlier is a false alarm, later is too late.
    if start in frames if expect.at is not None else frames and start <= frames[0] <= end:
        return None
    text = (
        f"{subject} at {', '.join(map(str, frames[:SHOWN]))}" if frames else f"{rule} never {verb}"
    )
    return f"{text}; expected {_window_text(expect)}"


def _window_text(expect: Expectation) -> str:
    if expect.at is not None:
        return f"at {expect.at}"
    if expect.between is not None:
        return f"between {expect.between[0]} and {expect.between[1]}"
    if expect.end:
        return "at the end"
    return "once" if expect.by is None else f"by {expect.by}"


def _check_state(expect: Expectation, result: ScenarioResult, start: int, end: int) -> str | None:
    states = result.states[start : end + 1]
    if expect.state in states:
        return None
    return f"the state is {' then '.join(dict.fromkeys(states)) or 'none yet'}, not {expect.state}"


def _check_actions(expect: Expectation, result: ScenarioResult, start: int, end: int) -> str | None:
    verbs = [verb for frame, verb in result.intents() if start <= frame <= end]
    expected = list(expect.actions or ())
    text = f"actions were {', '.join(verbs) or 'none'}"
    if not expected:
        return text if verbs else None
    if expect.count is not None:
        wrong = [v for v in dict.fromkeys(expected) if verbs.count(v) != expect.count]
        if wrong:
            return f"{text}; {wrong[0]} {verbs.count(wrong[0])} times, not {expect.count}"
        if expect.count == 0:
            return None
    remaining = iter(verbs)
    if all(verb in remaining for verb in expected):
        return None
    return f"{text}; expected {', '.join(expected)}, in this order"


def _check_never(
    expect: Expectation, result: ScenarioResult, names: Names, start: int, end: int
) -> str | None:
    for name in expect.never or ():
        rule = names.rule(name)
        if rule is not None:
            frames = result.changes(rule, "fired")
        elif name in SEVERITIES:
            frames = [frame for frame, severity in result.incidents() if severity == name]
        elif name in STATES:
            frames = [frame for frame, state in enumerate(result.states) if state == name]
        else:
            frames = [frame for frame, verb in result.intents() if verb == name]
        occurred = [frame for frame in frames if start <= frame <= end]
        if occurred:
            return f"{rule or name} must not occur: {_frames_text(occurred)}"
    return None
