"""Every shipped pack proves itself by its own scenarios, and every shipped test file its policy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from supervise.catalog import PolicyErrors, scenario_subject
from supervise.catalog.document.diagnostics import Problems
from supervise.catalog.inventory import shipped
from supervise.catalog.scenario_subject import Subject
from supervise.policytest import assertions, scenario_runner, suite

PACKS = shipped.folder("policies/packs")
FILES = [*sorted(PACKS.glob("*.yaml")), *sorted(shipped.folder("policies/tests").glob("*.yaml"))]


@cache
def subject(path: Path) -> Subject:
    return suite.load(path)


def names(path: Path) -> list[str]:
    """Return the names of a file's scenarios, also of one that does not load yet."""
    try:
        return [form.name for form, _ in subject(path).scenarios]
    except PolicyErrors:
        return ["it loads"]


SCENARIOS = [
    pytest.param(path, i, id=f"{path.parent.name}/{path.stem}: {name}")
    for path in FILES
    for i, name in enumerate(names(path))
]


@pytest.mark.parametrize(("path", "index"), SCENARIOS)
def test_a_scenario_comes_out_as_it_says(path: Path, index: int) -> None:
    """What a file promises about a series is what the engine does with it."""
    found = subject(path)
    form, _ = found.scenarios[index]

    failures = assertions.failures(form, scenario_runner.run(found.policy, form), found.names)

    assert [failure.message for failure in failures] == []


@pytest.mark.parametrize("name", shipped.names("policies/packs"))
def test_a_pack_shows_both_trouble_and_quiet(name: str) -> None:
    """A pack has scenarios in which a rule fires, and says where its numbers come from."""
    problems = Problems()
    root = scenario_subject.read(PACKS / f"{name}.yaml", problems)
    assert root is not None
    expected = [e for form, _ in subject(PACKS / f"{name}.yaml").scenarios for e in form.expect]

    assert any(e.rule is not None for e in expected)
    for key in ("source", "false_alarms"):
        assert root.get(key) is not None
