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


def test_what_is_shown_is_the_policy_and_where_every_part_is_from(supervise, mine, tmp_path):
    """It loads, to the same digest. Definition, override, baseline, metrics and who reports them,
    mutes."""
    code, out, err = supervise("policy", "show", mine)
    (tmp_path / "whole.yaml").write_text(out, "utf-8")

    assert (code, err) == (0, "")
    assert load_policy(tmp_path / "whole.yaml").digest == load_policy(mine).digest
    assert out.splitlines()[0] == f"# {load_policy(mine).digest}"
    assert "  # mine.yaml:8:8; window and min from the policy's baseline\n  odd:" in out
    assert "window: 100" in out and "throughput.yaml" in out
    assert "; gt overridden in mine.yaml:5:36\n  throughput.slower:" in out
    block = out[out.index("  # mine.yaml:10:9\n") : out.index("when: odd and high")]
    assert "  # reads odd, high\n" in block
    assert "  # measured by the probe: train_loss_raw\n" in block
    assert "  # to be reported by the job: my_score\n" in block
    assert "  # muted by acting\n" in block


def test_a_section_says_which_file_it_is_from(supervise, tmp_path, monkeypatch):
    """Of a policy that extends another one, with the keys that are still those of the base."""
    monkeypatch.chdir(tmp_path)
    text = "version: supervise/v1\nextends: nano\nsavepoints: {keep: 2}\nprobation: 50\n"
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    _, out, _ = supervise("policy", "show", "mine.yaml")
    lines = out.splitlines()
    above = {line.partition(":")[0]: lines[i - 1] for i, line in enumerate(lines) if i}

    assert above["probation"] == "# mine.yaml:4:1"
    assert above["savepoints"].startswith("# mine.yaml:3:1; every from ")
    assert above["savepoints"].endswith("nano.yaml")
    assert "nano.yaml:" in above["budgets"]


def test_json_holds_the_same(supervise, mine):
    _, out, _ = supervise("policy", "show", mine, "--json")
    found = json.loads(out)
    (rule,) = [rule for rule in found["rules"] if rule["id"] == "r"]

    assert rule["metrics"] == ["my_score", "train_loss_raw"]
    assert rule["to_report"] == ["my_score"]
    assert rule["defined"] == "mine.yaml:10:9"
    assert found["detectors"]["throughput.slower"]["about"]["overridden"] == {
        "gt": "mine.yaml:5:36"
    }
    assert found["metrics"]["my_score"] == {"measured_by": "job"}
    assert found["metrics"]["train_loss_raw"]["measured_by"] == "probe"
    _, out, _ = supervise("policy", "show", mine, "--json", "--rule", "r")
    assert list(json.loads(out)["detectors"]) == ["odd", "high"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("show mine.yaml --rule throughput.drft", 64, "did you mean 'throughput.drift'?"),
        ("show nanoo", 65, "did you mean 'nano'?"),
        ("show nano --runbook nam", 64, "no runbook 'nam'"),
        ("schema pakc", 64, "pakc"),
    ],
)
def test_a_wrong_name_is_refused_with_a_hint(supervise, mine, line, code, said):
    """Of a rule, a policy, a runbook and a sort of files."""
    refused, out, err = supervise("policy", *line.split())
    assert (refused, out, said in err) == (code, "", True), err


def test_a_runbook_is_printed_as_messages_name_it(supervise, tmp_path):
    """From the resolved policy in a run directory, also one that only people read."""
    (tmp_path / "policy.yaml").write_text(load_policy("nano").resolved, "utf-8")
    code, out, err = supervise("policy", "show", tmp_path / "policy.yaml", "--runbook", "nan")

    assert (code, err) == (0, "")
    assert "Is it one rank only?" in out and "pack" not in out
    assert supervise("policy", "schema")[1] == supervise("policy", "schema", "policy")[1]
