"""What scenarios prove, and what nobody has tried: rules, moves of the machine, budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..catalog.scenario_subject import Subject
from ..core.model import state_machine
from ..core.model.policy import Policy
from .scenario_result import ScenarioResult

# Moves that wait for a person, come of an order, or need a training behind the scenario's own.
APART = ("ask", "given_up", "session_started")


@dataclass(slots=True)
class Coverage:
    """Counts over any number of files.

    Attributes:
        rules: id -> [scenarios in which it fires, scenarios in which it could and does not].
        where: id -> file:line:col.
        moves: policy -> pair of state and event -> scenarios.
        budgets: policy -> class -> scenarios in which it held an action back.
    """

    rules: dict[str, list[int]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    moves: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    budgets: dict[str, dict[str, int]] = field(default_factory=dict)

    def want(self, policy: Policy, *, whole: bool = True) -> None:
        """Count what a policy has, whether any scenario is about it or not.

        `whole`: also its moves and its budgets, which a pack alone does not have.
        """
        for rule in policy.rules:
            self.rules.setdefault(rule.id, [0, 0])
            self.where[rule.id] = rule.where
        if whole:
            moves = self.moves.setdefault(policy.name, {})
            for pair in pairs(policy.machine or state_machine.DEFAULT):
                moves.setdefault(pair, 0)
            budgets = self.budgets.setdefault(policy.name, {})
            for name in policy.budgets:
                budgets.setdefault(name, 0)

    def add(self, subject: Subject, played: Iterable[ScenarioResult]) -> None:
        """Count what the scenarios of a file came to; a pack alone has no moves and no budgets."""
        policy, stories = subject.policy, list(played)
        whole = not subject.names.scope
        self.want(policy, whole=whole)
        for rule in policy.rules:
            counts = self.rules[rule.id]
            for story in stories:
                fired = bool(story.changes(rule.id, "fired"))
                counts[0] += fired
                counts[1] += not fired and rule.id in story.active
        if not whole:
            return
        moves, budgets = self.moves[policy.name], self.budgets[policy.name]
        for pair in moves:
            moves[pair] += sum(pair in story.visited for story in stories)
        for name in budgets:
            budgets[name] += sum(bool(story.suppressed(f"budget:{name}")) for story in stories)

    def missing(self) -> Iterator[str]:
        """Say what no scenario shows, a sentence each."""
        for rule, (fired, quiet) in self.rules.items():
            if not fired:
                yield f"{self.where[rule]}: {rule} never fires"
            if not quiet:
                yield f"{self.where[rule]}: {rule} has its metrics nowhere without firing"
        for policy, moves in self.moves.items():
            for (state, event), seen in moves.items():
                if not seen:
                    yield f"{policy}: {event!r} never comes in {state}"
        for policy, budgets in self.budgets.items():
            for name, hit in budgets.items():
                if not hit:
                    yield f"{policy}: budget {name} is never used up"

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return, for each sort of thing, how many of how many are shown."""
        fired = sum(bool(counts[0]) for counts in self.rules.values())
        quiet = sum(bool(counts[1]) for counts in self.rules.values())
        found = {
            "rules fire": (fired, len(self.rules)),
            "rules stay quiet": (quiet, len(self.rules)),
            "moves": _shown(self.moves),
            "budgets": _shown(self.budgets),
        }
        return {name: counts for name, counts in found.items() if counts[1]}

    def percent(self) -> float:
        """Return the share of everything that is shown, 0 to 100."""
        shown = sum(part[0] for part in self.parts().values())
        total = sum(part[1] for part in self.parts().values())
        return 100.0 * shown / total if total else 100.0


def _shown(held: Mapping[str, Mapping[Any, int]]) -> tuple[int, int]:
    counts = [count for each in held.values() for count in each.values()]
    return sum(map(bool, counts)), len(counts)


def pairs(table: state_machine.Table) -> list[tuple[str, str]]:
    """Return every pair of state and event that has a move, and that a scenario can make.

    A run that has ended makes none.
    """
    return [
        (state, event)
        for state in state_machine.STATES
        for event in state_machine.EVENTS
        if event not in APART
        and state != state_machine.HALTED
        and state_machine.move(table, state, event) is not None
    ]
