"""The result of a scenario, as far as assertions and coverage need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.model import state_machine
from ..core.model.decisions import Decision


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
        return [
            at
            for at, d in self.log
            if d.kind == "rule" and d.rule == rule and d.data["what"] == what
        ]

    def on(self, rule: str) -> list[bool]:
        """Return, for each frame, whether the rule fires on some rank after it."""
        firing: set[Any] = set()
        found, done = [], 0
        for frame in range(len(self.states)):
            while done < len(self.log) and self.log[done][0] <= frame:
                decision = self.log[done][1]
                done += 1
                if decision.kind == "rule" and decision.rule == rule:
                    rank = decision.data.get("rank")
                    (firing.add if decision.data["what"] == "fired" else firing.discard)(rank)
            found.append(bool(firing))
        return found

    def suppressed(self, by: str, rule: str | None = None) -> list[int]:
        """Return the frames at which a suppression by `by` (a prefix) was recorded."""
        return [
            at
            for at, d in self.log
            if d.kind == "suppressed"
            and str(d.data.get("suppressed_by", "")).startswith(by)
            and rule in (None, d.rule)
        ]

    # ── actions and messages ─────────────────────────────────────────────────────────────────────

    def intents(self) -> list[tuple[int, str]]:
        """Return `(frame, verb)` of every action that was started."""
        return [(at, d.data["action"]["verb"]) for at, d in self.log if d.kind == "intent"]

    def incidents(self) -> list[tuple[int, str]]:
        """Return `(frame, severity)` whenever an incident was opened or raised."""
        return [
            (at, str(d.severity))
            for at, d in self.log
            if d.kind == "incident" and d.data.get("what") in ("opened", "raised")
        ]

    def messages(self, text: str) -> list[int]:
        """Return the frames of the notifications that contain this text."""
        return [
            at
            for at, d in self.log
            if d.kind == "notify_intent"
            and text in " ".join(str(part) for part in d.data["message"].values())
        ]
