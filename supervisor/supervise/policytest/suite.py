"""The scenarios of a pack or a file of tests: load them, run them, report what failed and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..catalog import scenario_subject as subjects
from ..catalog.diagnostics import Problem, Problems
from ..catalog.scenario_subject import Subject
from ..catalog.scenarios import Scenario
from . import assertions, scenario_runner
from .assertions import ScenarioResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario after its run."""

    form: Scenario
    where: str
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
    found = []
    for form, node in subject.scenarios:
        result = scenario_runner.run(subject.policy, form)
        failures = []
        for failure in assertions.failures(form, result, subject.names):
            place = assertions.node_of(node, failure)
            where = f"{place.source.label}:{place.line}:{place.col}"
            failures.append((where, failure.message))
        where = f"{node.source.label}:{node.line}:{node.col}"
        found.append(Outcome(form, where, result, tuple(failures)))
    return found
