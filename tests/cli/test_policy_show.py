"""`supervise policy show` and `supervise policy schema`."""

from __future__ import annotations

import json

import pytest

from supervise.catalog import load_policy

MINE = """\
version: supervise/v1
policy: mine
mode: enforce
use: [throughput]
override: {throughput.slower: {gt: 1.5}}
baseline: {window: 100, min: 50}
detectors:
  odd: {kind: robust_z, metric: my_score, freeze: 32}
  high: {kind: threshold, metric: train_loss_raw, gt: 5}
rules: [{id: r, when: odd and high, sev: SEV1, run: calm}]
inhibit: [{by_state: [acting], mute: [r]}]
runbooks: {calm: [snapshot, {lr_scale: {set: 0.5}}, verify]}
budgets: {all: {max: 3}, lr_scale: {max: 2}}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE, "utf-8")
    return "mine.yaml"


def test_the_policy_that_is_shown_loads_to_the_same_digest(supervise, mine, tmp_path):
    code, out, err = supervise("policy", "show", mine)
    (tmp_path / "whole.yaml").write_text(out, "utf-8")

    assert (code, err) == (0, "")
    assert load_policy(tmp_path / "whole.yaml").digest == load_policy(mine).digest
    assert out.splitlines()[0] == f"# {load_policy(mine).digest}"
    assert "window: 100" in out


def test_a_rule_is_shown_with_all_that_it_uses(supervise, mine):
    shown = json.loads(supervise("policy", "show", mine, "--json")[1])
    one = json.loads(supervise("policy", "show", mine, "--json", "--rule", "r")[1])

    assert shown["detectors"]["throughput.slower"]["gt"] == 1.5
    assert "r" in [rule["id"] for rule in shown["rules"]]
    assert list(one) == ["detectors", "rules", "inhibit", "runbooks"]
    assert list(one["detectors"]) == ["odd", "high"] and list(one["runbooks"]) == ["calm"]


def test_a_wrong_name_is_refused_with_a_hint(supervise, mine):
    code, out, err = supervise("policy", "show", mine, "--rule", "throughput.drft")

    assert (code, out) == (64, "") and "did you mean 'throughput.drift'?" in err
    assert supervise("policy", "schema", "pakc")[0] == 64


def test_a_runbook_is_printed_as_messages_name_it(supervise, tmp_path):
    (tmp_path / "policy.yaml").write_text(load_policy("nano").resolved, "utf-8")
    code, out, err = supervise("runbook", "nan", "--policy", tmp_path / "policy.yaml")

    assert (code, err) == (0, "")
    assert "Is it one rank only?" in out and "step 1" in out
    assert supervise("policy", "schema")[1] == supervise("policy", "schema", "policy")[1]
