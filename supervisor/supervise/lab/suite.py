"""The scenarios of a pack or a file of tests: load them, run them, report what failed and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..catalog import scenario_subject as subjects
from ..catalog.diagnostics import Problem, Problems
from ..catalog.scenario_subject import Subject
from ..catalog.scenarios import Scenario
from ..core.model import state_machine
from ..core.model.policy import Policy
from . import assertions, scenario_runner
from .assertions import ScenarioResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario after its run."""

    form: Scenario
    location: str
    result: ScenarioResult
    failures: tuple[tuple[str, str], ...]  # (file:line:col, sentence)


def load(path: Path, warnings: list[Problem] | None = None) -> Subject:
    """Load a pack or a file of tests; warnings about its scenarios are appended to `warnings`.

    Raises:
        PolicyErrors: it, or something that it names, is wrong.
        InputError: it cannot be read.
    """
    problems = Problems()
    root = subjects.read(path, problems)
    if root is None:
        problems.stop()
    assert root is not None
    build = subjects.of_tests if subjects.sort_of(root) == subjects.TESTS else subjects.of_pack
    subject = build(root, path, problems)
    if warnings is not None:
        warnings += problems.warnings
    return subject


def run(subject: Subject) -> list[Outcome]:
    """Run all scenarios of a file."""
    outcomes = []
    for form, node in subject.scenarios:
        result = scenario_runner.run(subject.policy, form)
        failures = []
        for failure in assertions.failures(form, result, subject.names):
            location = assertions.node_of(node, failure)
            position = f"{location.source.label}:{location.line}:{location.col}"
            failures.append((position, failure.message))
        position = f"{node.source.label}:{node.line}:{node.col}"
        outcomes.append(Outcome(form, position, result, tuple(failures)))
    return outcomes


# Transitions that need a person, a command, or a second training session: no scenario makes them.
EXCLUDED = ("ask", "given_up", "session_started")


@dataclass(slots=True)
class Coverage:
    """Counts over any number of files.

    Attributes:
        rules: id -> [scenarios in which it fires, in which it could and does not].
        where: id -> file:line:col.
        moves: policy -> (state, event) -> scenarios.
        budgets: policy -> class -> scenarios in which it held an action back.
    """

    rules: dict[str, list[int]] = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    moves: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    budgets: dict[str, dict[str, int]] = field(default_factory=dict)

    def require(self, policy: Policy, *, complete: bool = True) -> None:
        """Add everything that a policy has to what should be covered.

        `whole`: also its transitions and budgets, which a pack alone does not have.
        """
        for rule in policy.rules:
            self.rules.setdefault(rule.id, [0, 0])
            self.locations[rule.id] = rule.location
        if complete:
            moves = self.moves.setdefault(policy.name, {})
            for pair in transitions(policy.machine or state_machine.DEFAULT):
                moves.setdefault(pair, 0)
            budgets = self.budgets.setdefault(policy.name, {})
            for name in policy.budgets:
                budgets.setdefault(name, 0)

    def add(self, subject: Subject, results: Iterable[ScenarioResult]) -> None:
        """Count what the scenarios of a file cover; a pack alone has rules only."""
        policy, results = subject.policy, list(results)
        is_complete = not subject.names.scope
        self.require(policy, complete=is_complete)
        for rule in policy.rules:
            counts = self.rules[rule.id]
            for result in results:
                has_fired = bool(result.changes(rule.id, "fired"))
                counts[0] += has_fired
                counts[1] += not has_fired and rule.id in result.active
        if not is_complete:
            return
        moves, budgets = self.moves[policy.name], self.budgets[policy.name]
        for pair in moves:
            moves[pair] += sum(pair in result.visited for result in results)
        for name in budgets:
            budgets[name] += sum(bool(result.suppressed(f"budget:{name}")) for result in results)

    def missing(self) -> Iterator[str]:
        """Yield what no scenario covers, a sentence each."""
        for rule, (firings, quiet) in self.rules.items():
            if not firings:
                yield f"{self.locations[rule]}: {rule} never fires"
            if not quiet:
                start = f"{self.locations[rule]}: {rule}"
                yield f"{start} never stays quiet while its metrics are present"
        for policy, moves in self.moves.items():
            for (state, event), visits in moves.items():
                if not visits:
                    yield f"{policy}: {event!r} never occurs in {state}"
        for policy, budgets in self.budgets.items():
            for name, hit in budgets.items():
                if not hit:
                    yield f"{policy}: budget {name} is never used up"

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return, per category, how many are covered of how many."""
        fired_count = sum(bool(counts[0]) for counts in self.rules.values())
        quiet = sum(bool(counts[1]) for counts in self.rules.values())
        coverage = {
            "rules fire": (fired_count, len(self.rules)),
            "rules stay quiet": (quiet, len(self.rules)),
            "moves": _covered(self.moves),
            "budgets": _covered(self.budgets),
        }
        return {name: counts for name, counts in coverage.items() if counts[1]}

    def percent(self) -> float:
        """Return the share that is covered, 0 to 100."""
        covered = sum(part[0] for part in self.parts().values())
        total = sum(part[1] for part in self.parts().values())
        return 100.0 * covered / total if total else 100.0


def _covered(table: Mapping[str, Mapping[Any, int]]) -> tuple[int, int]:
    counts = [count for row in table.values() for count in row.values()]
    return sum(map(bool, counts)), len(counts)


def transitions(table: state_machine.Table) -> list[tuple[str, str]]:
    """Return every pair of state and event with a transition that a scenario can make."""
    return [
        (state, event)
        for state in state_machine.STATES
        for event in state_machine.EVENTS
        if event not in EXCLUDED
        and state != state_machine.HALTED
        and state_machine.move(table, state, event) is not None
    ]
