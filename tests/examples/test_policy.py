"""The example's own policy, and the faults that the recovery benchmark injects into it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from supervise.catalog import load_policy, parse_drill
from supervise.cli import invoke
from tests.support.recorded_run import shipped_policy

ROOT = Path(__file__).parents[2]


def test_it_loads_without_a_word_and_can_start_the_example_again():
    """The argument is the example's own; nano alone would not know it."""
    warnings: list[object] = []
    policy = load_policy(ROOT / "examples" / "nano" / "policy.yaml", warnings=warnings)

    assert warnings == []
    assert policy.job.relaunch.args == ("--resume={checkpoint}",)
    assert "--resume" in (ROOT / "examples" / "nano" / "train.py").read_text()
    assert policy.job.on_crash in policy.runbooks
    below = shipped_policy("nano").ladder.levels[:-1]
    assert policy.ladder.levels == (*below, "relaunch-and-rewarm", "hold")


@pytest.mark.slow
def test_its_scenarios_pass(capsys: pytest.CaptureFixture[str]):
    """A setting that is wrong for good is held with evidence; a short batch is nothing."""
    file = ROOT / "examples" / "nano" / "tests" / "policy.yaml"

    assert invoke(["policy", "test", str(file)]) == 0, capsys.readouterr().out


def test_every_case_of_the_benchmark_names_faults_that_exist(monkeypatch):
    """One healthy case for each number of ranks and steps: the others are measured beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cases = __import__("recovery_cases").CASES
    sys.modules.pop("recovery_cases")

    assert all(parse_drill(drill) for case in cases for drill in case.drills)
    healthy = [(case.ranks, case.steps) for case in cases if not case.drills]
    assert sorted(healthy) == sorted({(case.ranks, case.steps) for case in cases})
    assert len({case.name for case in cases}) == len(cases)
