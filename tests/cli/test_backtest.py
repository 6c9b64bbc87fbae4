"""`supervise backtest`: one series in every format, reports, comparisons, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from supervise.catalog import load_policy
from supervise.lab import SCORE_CAVEAT
from supervise.recordings import COLUMN_NAMES

PEERS = sorted((Path(__file__).parents[2] / "policies" / "peers").glob("*.yaml"))
POLICY = """
version: supervise/v1
policy: mine
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5}
rules: [{id: high, when: high, sev: SEV1, run: end}]
runbooks: {end: [snapshot, notify, stop]}
"""
LOSSES = [2.0] * 100 + [6.0] + [2.0] * 30


@pytest.fixture
def policy(tmp_path):
    """A policy that would stop at a loss above 5."""
    path = tmp_path / "mine.yaml"
    path.write_text(POLICY)
    return path


def _csv(folder, name="a.csv", losses=LOSSES, column="loss"):
    text = f"step,{column}\n" + "".join(f"{i},{loss}\n" for i, loss in enumerate(losses))
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return path


def test_a_recording_and_a_run_give_their_incidents(tmp_path, policy, recorded, supervise):
    """One line of JSON each, with the steps of its incidents; the run has a NaN at step 100."""
    run = recorded()
    for path, chosen, expected in (
        (_csv(tmp_path, "a.csv.gz"), policy, ("a", 131, "SEV1")),
        (run.path, "nano", (run.path.name, 120, "SEV0")),
    ):
        code, out, err = supervise("backtest", "--policy", chosen, "--json", path)
        line = json.loads(out)
        incident = line["incidents"][0]

        assert (code, err) == (0, "")
        assert (incident["incident"], incident["step"], line["no_heartbeat"]) == ("inc-1", 100, [])
        assert (line["run"], line["rows"], incident["severity"]) == expected


def test_the_report_says_what_would_have_been_run_and_what_it_is_worth(tmp_path, policy, supervise):
    labels = tmp_path / "labels.csv"
    labels.write_text("run,step_start,step_end,kind\na,100,100,divergence\n")
    code, out, _ = supervise("backtest", "--policy", policy, "--labels", labels, _csv(tmp_path))

    assert code == 0
    assert out.startswith("mine on 1 run, 131 rows, in shadow\n")
    assert "  a inc-1: SEV1 high at 100; would have run end\n" in out
    assert "| mine   | 1/1        | 0 / 0 " in out
    assert "  highest budget use in one run: none\n" in out
    assert out.endswith(f"{SCORE_CAVEAT}\n")


@pytest.mark.parametrize(
    ("what", "label", "says"),
    [
        (["SEV2"], None, ["SEV2: 1 messages, the first by high at step 100 of a"]),
        (["SEV0"], None, []),
        (["SEV0", "action"], None, ["action: 1 actions on the job"]),
        (["SEV1", "action", "missed"], 100, []),
        (["missed"], 30, ["missed: 1 labels are missed"]),
        (["SEV11"], None, "did you mean 'SEV1'?"),
        (["xyz"], None, "known: 'SEV0', 'SEV1', 'SEV2', 'action', 'missed'"),
        (["missed"], None, "give --labels"),
    ],
)
def test_fail_on_gives_an_exit_code(tmp_path, policy, supervise, what, label, says):
    labels = tmp_path / "labels.csv"
    labels.write_text(f"run,step_start,step_end,kind\na,{label},{label},divergence\n")
    asked = [part for one in what for part in ("--fail-on", one)]
    asked += ["--labels", labels] if label else []
    code, out, err = supervise("backtest", "--policy", policy, *asked, _csv(tmp_path))

    if isinstance(says, str):
        assert (code, out) == (64, "") and f"--fail-on {what[0]!r}" in err and says in err
    else:
        assert out.startswith("mine on 1 run, 131 rows, in shadow\n")
        assert code == (1 if says else 0)
        assert err.splitlines() == [f"supervise: --fail-on {one}" for one in says]


SPARSE = """
version: supervise/v1
policy: mine
mode: observe
detectors:
  growth: {kind: ratio, metric: max_attn_logit, fast: 16, ref: 512, gt: 2.0, min: 64, unit: steps}
  twice: {kind: sequence, steps: [high, high], within: 1, same_step: false}
  high: {kind: threshold, metric: max_attn_logit, gt: 50}
  usual: {kind: robust_z, metric: max_attn_logit}
  climb: {kind: trend, metric: max_attn_logit, window: 400, slope_per_1k_gt: 9, unit: steps}
  new: {kind: record, metric: max_attn_logit}
  pair: {kind: paired, metric: max_attn_logit, gt: 50, settle: 12}
rules:
  - {id: growth, when: growth, sev: SEV2, unknown: ignore}
  - {id: twice, when: twice, sev: SEV2}
  - {id: usual, when: usual, sev: SEV2}
  - {id: climb, when: climb and not new, sev: SEV2}
  - {id: pair, when: pair, sev: SEV2, unknown: ignore}
  - {id: either, when: high or usual, sev: SEV2}
"""


def test_what_cannot_be_judged_at_the_spacing_of_a_recording_is_said(tmp_path, supervise):
    (tmp_path / "mine.yaml").write_text(SPARSE)
    for name, every in (("few", 50), ("many", 1)):
        rows = [f"{i},{10 + i % 7}" for i in range(0, 500, every)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,max_attn_logit", *rows]))
    run = ["backtest", "--policy", tmp_path / "mine.yaml"]
    _, out, _ = supervise(*run, "--json", tmp_path / "few.csv", tmp_path / "many.csv")
    few, many = (json.loads(line)["unjudged"] for line in out.splitlines())

    assert few == {
        "growth": "10 samples of max_attn_logit, needs 13",
        "twice": "rows are 50 steps apart, 2 of them never within 1",
        "usual": "10 samples of max_attn_logit, needs 65",
        "climb": "9 blocks of max_attn_logit, needs 16; 10 samples of max_attn_logit, needs 65",
        "pair": "10 evaluations of max_attn_logit, needs 14",
    }
    assert many == {}
    _, alone, _ = supervise(*run, tmp_path / "few.csv")
    _, both, _ = supervise(*run, tmp_path / "few.csv", tmp_path / "many.csv")
    assert "\n  not judged, rows are too few or too far apart:\n" in alone
    assert "\n    twice: rows are 50 steps apart, 2 of them never within 1\n" in alone
    assert "too far apart" not in both


def test_policies_side_by_side(tmp_path, policy, supervise):
    other = tmp_path / "other.yaml"
    other.write_text(POLICY.replace("gt: 5", "gt: 50").replace("mine", "other"))
    path = _csv(tmp_path)
    asked = ("backtest", "--policy", policy, "--against", other, "--against", PEERS[-1], path)
    code, out, _ = supervise(*asked)
    lines = [json.loads(line) for line in supervise(*asked, "--json")[1].splitlines()]

    assert code == 0
    names = [line.split()[1] for line in out.splitlines() if line.startswith("| ")]
    assert names[2:] == ["mine", "other", load_policy(PEERS[-1]).name]
    assert "mine and other differ:\n  a 100 SEV1 high: mine only\n" in out
    _, same, _ = supervise("backtest", "--policy", policy, "--against", policy, path)
    assert "mine and mine raise the same alarms\n" in same
    assert "differ" not in same
    assert len(lines) == 1
    assert [i["step"] for i in lines[0]["against"]["other"]["not_here"]] == [100]


def test_a_metric_that_nobody_reads_and_a_run_that_is_not_there_are_told(
    tmp_path, policy, supervise
):
    """A slip of the pen must not look like a quiet run, or like a false alarm."""
    path = _csv(tmp_path, column="nll")
    labels = tmp_path / "labels.csv"
    labels.write_text("run,step_start,step_end,kind\nnann,100,100,divergence\n")
    asked = ("backtest", "--policy", policy, path)
    wrong = supervise(*asked, "--alias", "nll=train_los_raw", "--labels", labels)
    labels.write_text("run,step_start,step_end,kind\na,100,100,divergence\n")
    right = supervise(*asked, "--alias", "nll=train_loss_raw", "--labels", labels)

    assert wrong[0] == right[0] == 0
    assert wrong[2].splitlines() == [
        "supervise: warning: --alias nll=train_los_raw: no policy reads a metric 'train_los_raw'; "
        "did you mean 'train_loss_raw'?",
        "supervise: warning: labels name 1 run that is not among these: 'nann'",
    ]
    assert right[2] == ""


def test_a_column_may_be_named(tmp_path, policy, supervise):
    path = _csv(tmp_path, column="Negative Log Likelihood")
    refused = supervise("backtest", "--policy", policy, path)
    asked = ("--alias", "Negative Log Likelihood=train_loss_raw")
    code, out, _ = supervise("backtest", "--policy", policy, "--json", path, *asked)

    assert refused[0] == 65
    assert "--alias 'Negative Log Likelihood=train_loss_raw'" in refused[2]
    assert (code, len(json.loads(out)["incidents"])) == (0, 1)


LABELS = b"run,step_start,step_end,kind\na,1,2.0,nan\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"step,loss\n1,high\n", "a.csv:2: loss 'high' is not a number"),
        ("a.parquet", b"PAR1....PAR1", "is no Parquet file"),
        ("run.json", b"{", "does not describe a run"),
        ("labels", LABELS + b"a,a,9,nan\n", "labels:3: step_start 'a' is not a whole number"),
        ("labels", LABELS + b"a,9,1,nan\n", "labels:3: ends before it starts: step_start 9, step"),
    ],
)
def test_a_broken_recording_is_one_message(tmp_path, policy, supervise, name, content, says):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    asked = [folder if name == "run.json" else folder / name]
    if name == "labels":
        asked = ["--labels", folder / name, _csv(tmp_path)]
    code, out, err = supervise("backtest", "--policy", policy, *asked)

    assert (code, out) == (65, "")
    assert says in err
    assert err.startswith("supervise: ")
    assert len([line for line in err.splitlines() if not line.startswith("    try: ")]) == 1


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_a_policy_of_peers_loads_without_a_warning(path):
    warnings: list = []
    policy = load_policy(path, warnings=warnings)

    assert (warnings, policy.name) == ([], path.stem)
    assert policy.mode in ("shadow", "observe")
    assert {m for d in policy.detectors.values() for m in d.metrics} <= set(COLUMN_NAMES)
