"""`supervise policy test`: scenarios, coverage, mutants, and what each exit code says."""

from __future__ import annotations

import json

import pytest

POLICY = """\
version: supervise/v1
policy: p
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 5.0}}
rules: [{id: spike, when: high, sev: SEV1, run: calm}]
runbooks: {calm: [snapshot, {lr_scale: {set: 0.5}}, {verify: {within: 30, clear_for: 5}}]}
budgets: {all: {max: 3}, lr_scale: {max: 2}}
warmup: 10
probation: 20
"""
TESTS = """\
version: supervise/v1
policy: ../p.yaml
tests:
  - name: a spike is softened once
    series: {train_loss_raw: "2x30 6x3 2x60"}
    expect:
      - {at: 30, rule: spike}
      - {by: 30, actions: [snapshot, lr_scale], count: 1}
      - {end: true, state: nominal}
  - name: a quiet run is left alone
    series: {train_loss_raw: "2x40"}
    expect: [{never: [spike, acting]}]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "p.yaml").write_text(POLICY, "utf-8")
    (tmp_path / "tests" / "p.yaml").write_text(TESTS, "utf-8")
    return tmp_path


def test_scenarios_that_pass_are_exit_0(supervise, files):
    for name in ("tests/p.yaml", "p.yaml"):
        passed = (0, "tests/p.yaml: 2 of 2 scenarios pass\n", "")
        assert supervise("policy", "test", name) == passed


def test_a_scenario_that_fails_is_exit_1_at_its_line(supervise, files):
    (files / "tests" / "p.yaml").write_text(TESTS.replace("at: 30, rule", "at: 31, rule"), "utf-8")
    code, out, _ = supervise("policy", "test", "p.yaml")

    assert code == 1
    assert "tests/p.yaml: 1 of 2 scenarios pass\n" in out
    assert "  FAILED a spike is softened once\n" in out
    assert "    tests/p.yaml:7:9: spike fired at 30; expected at 31\n" in out

    code, out, _ = supervise("policy", "test", "p.yaml", "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    bad, good = found["files"][0]["scenarios"]
    assert bad["failures"][0]["where"] == "tests/p.yaml:7:9"
    assert (good["ok"], good["frames"]) == (True, 40)


def test_coverage_is_told_and_can_be_demanded(supervise, files):
    code, out, _ = supervise("policy", "test", "p.yaml", "--coverage")

    assert code == 0
    assert "rules fire 1/1, rules stay quiet 1/1, moves 5/28, budgets 0/2" in out
    assert "  p: budget lr_scale is never used up\n" in out
    assert supervise("policy", "test", "p.yaml", "--coverage", "--min", "20")[0] == 0
    assert supervise("policy", "test", "p.yaml", "--coverage", "--min", "90")[0] == 1
    assert supervise("policy", "test", "p.yaml", "--min", "90")[0] == 64
    _, out, _ = supervise("policy", "test", "p.yaml", "--coverage", "--json")
    assert json.loads(out)["coverage"]["parts"]["budgets"] == {"shown": 0, "of": 2}


def test_a_test_that_shows_nothing_is_told(supervise, files):
    text = TESTS.replace('train_loss_raw: "2x40"', 'train_los_raw: "2x40"')
    (files / "tests" / "p.yaml").write_text(text, "utf-8")
    code, out, _ = supervise("policy", "test", "p.yaml")

    assert (code, "2 of 2 scenarios pass\n" in out) == (0, True)
    assert "p.yaml:11:14: warning: no detector reads the series 'train_los_raw' (did you" in out
    assert supervise("policy", "test", "p.yaml", "--strict")[0] == 1
    assert supervise("policy", "check", "tests/p.yaml", "--strict")[0] == 65
    code, out, _ = supervise("policy", "test", "p.yaml", "--strict", "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["warnings"][0]["line"]) == (1, False, 11)


def test_a_policy_is_tested_with_its_packs(supervise, files):
    (files / "q.yaml").write_text("version: supervise/v1\nuse: [hang]\n", "utf-8")
    code, out, _ = supervise("policy", "test", "q.yaml", "p.yaml", "hang")

    assert code == 0
    assert len(out.splitlines()) == 3
    assert "hang.yaml: " in out
    assert out.splitlines()[-1].startswith("all: ")
