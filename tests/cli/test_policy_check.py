"""`supervise policy check`: every mistake of every file at once, in four forms."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.catalog import load_policy

WRONG = """\
version: supervise/v1
moed: enforce
detectors: {a: {kind: treshold, metric: train_loss_raw, gt: 12}}
rules: [{id: r, when: a, sev: SEV3}]
"""
ODD = """\
version: supervise/v1
detectors: {a: {kind: threshold, metric: my_own, gt: 12}}
rules: [{id: r, when: a, sev: SEV2}]
"""
PACK = """\
version: supervise/v1
pack: mine
summary: Mine.
status: experimental
source: [project default]
false_alarms: [none known]
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 5}}
rules: [{id: up, when: high, sev: SEV2, run: softn}]
scenarios:
  - name: one
    series: {train_loss_raw: "2x9 6y3", grad_global_norm: "1x8"}
    expect: [{by: 9, rule: upp}, {at: 1, by: 2, rule: up}]
"""
RUNBOOK = """\
version: supervise/v1
runbook: mine
meaning: m
impact: i
steps: [{rollback: {at_least: 10}}, verfy]
diagnose: [why]
"""
TESTS = """\
version: supervise/v1
policy: nano
tests:
  - name: one
    series: {train_loss_raw: "2x9", grad_global_norm: "1x8"}
    expect: [{by: 3, rule: loss_spike.coupld}, {by: 3, actions: [rolback]}, {never: [SEV9]}]
    inject: [{at: 3, fail_action: paus}]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """One wrong file of every sort."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "wrong.yaml": WRONG,
        "odd.yaml": ODD,
        "packs/mine.yaml": PACK,
        "runbooks/mine.yaml": RUNBOOK,
        "tests/nano.yaml": TESTS,
        "good.yaml": "version: supervise/v1\nuse: [hang]\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path


def places(out: str) -> list[tuple[str, int, int]]:
    return [(e["file"], e["line"], e["col"]) for e in json.loads(out)["errors"]]


def test_a_file_is_good_or_all_its_mistakes_are_told_at_once_with_a_hint(supervise, files):
    good = supervise("policy", "check", "good.yaml", "nano", "hang")
    assert (good[0], good[2]) == (0, "") and good[1].startswith("3 files: good\n")
    code, out, _ = supervise("policy", "check", "wrong.yaml")

    assert code == 65
    assert "wrong.yaml:2:1: the file has no key 'moed' (did you mean 'mode'?)" in out
    assert "wrong.yaml:3:23: a.kind: no kind of detector 'treshold' (did you mean" in out
    assert "    moed: enforce\n    ^\n" in out
    assert out.endswith("1 file: 3 errors\n")


def test_nothing_stops_at_the_first_file(supervise, files):
    names = ["wrong.yaml", "tests/nano.yaml", "runbooks/mine.yaml", "nowhere", "packs/mine.yaml"]
    code, out, err = supervise("policy", "check", "--json", *names)
    found = json.loads(out)

    assert (code, err) == (65, "")
    sorts = [each["sort"] for each in found["files"]]
    assert sorts == ["policy", "tests", "runbook", "policy", "pack"]
    assert places(out) == sorted(places(out))
    assert {file for file, _, _ in places(out)} == set(names)
    said = {(e["file"], e["line"]): e for e in found["errors"]}
    assert said["nowhere", 1]["message"] == "no policy 'nowhere'"
    assert "'verfy'" in said["runbooks/mine.yaml", 5]["message"]
    assert said["runbooks/mine.yaml", 5]["hint"] == "did you mean 'verify'?"


UNMEASURED = """\
version: supervise/v1
use: [evaluation]
remove: [evaluation.val_loss]
job: {probe_batch: false}
detectors:
  a: {kind: threshold, metric: curvature_trace_est, gt: 9}
  b: {kind: threshold, metric: my_own, gt: 9}
rules:
  - {id: sharp, when: a, sev: SEV2}
  - {id: either, when: a or b, sev: SEV2}
"""


def test_a_rule_whose_inputs_nothing_measures_is_a_mistake_and_a_start_allows_it(supervise, files):
    """What a job may report counts as measured; so does one of two ways to fire."""
    (files / "dead.yaml").write_text(UNMEASURED, "utf-8")

    code, out, _ = supervise("policy", "check", "--json", "dead.yaml")

    batch, sharp = json.loads(out)["errors"]
    assert (code, batch["line"], sharp["line"]) == (65, 2, 9)
    assert "output_kl_to_prev: add savepoints: {every: 25, keep: 4}" in batch["hint"]
    evaluate = "add job: {evaluate: {every: checkpoint}}; or remove: [sharp]"
    assert sharp["hint"] == f"curvature_trace_est: {evaluate}"
    assert load_policy(str(files / "dead.yaml")).rules


def test_what_is_measured_and_judged_nowhere_is_named_once(supervise, files):
    _, out, _ = supervise("policy", "check", "good.yaml", "observe")

    note, other = [line for line in out.splitlines() if "judged by no rule" in line]
    assert note.startswith("good.yaml: note: measured and judged by no rule: ")
    assert "rule: router_token_entropy_max; " in other, "observe does without the pack mechanisms"
    assert " more; the packs that judge one: supervise metrics show " in note
    assert "train_ppl" not in note


def test_warnings_are_allowed_unless_strict(supervise, files):
    code, out, _ = supervise("policy", "check", "odd.yaml")

    assert (code, "\n1 file: 1 warning\n" in out) == (0, True)
    assert "odd.yaml:2:42: warning: a: no collector measures 'my_own'" in out
    assert supervise("policy", "check", "odd.yaml", "--strict")[0] == 65


def test_workflow_commands_mark_the_place(supervise, files):
    code, out, _ = supervise("policy", "check", "--format", "github", "wrong.yaml", "odd.yaml")
    lines = out.splitlines()

    assert code == 65
    assert lines[0].startswith("::error file=wrong.yaml,line=2,col=1::the file has no key 'moed' (")
    assert lines[-1].startswith("::warning file=odd.yaml,line=2,col=42::a: no collector")
    (files / "a,b: 100%.yaml").write_text("- x\n", "utf-8")
    _, out, _ = supervise("policy", "check", "--format", "github", "a,b: 100%.yaml")
    assert out.startswith("::error file=a%2Cb%3A 100%25.yaml,line=1,col=1::a file must be")


def test_standard_input_is_a_file_too(supervise, files, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PACK.encode())))
    code, out, _ = supervise("policy", "check", "-")

    assert (code, "<stdin>:11:35: " in out) == (65, True)


@pytest.mark.slow
def test_help_loads_nothing_heavy(files):
    code = (
        "import sys\nfrom supervise.cli import invoke\ninvoke(['policy', '--help'])\n"
        "assert not {'yaml', 'supervise.catalog', 'supervise.core.engine'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


HOSTILE = "x\x1b[31m\u202e\U000e0041[red]y"  # colour, direction, a tag beyond U+FFFF, markup


@pytest.mark.parametrize(
    "command",
    [
        "policy check {file}",
        "policy check --format github {file}",
        "policy diff --json {file} nano",
        "policy test {pack}",
        "backtest --policy {file} --alias loss={file} {rows}",
        "backtest --policy {file} --json {rows}",
        "init -o {file}.new -- {file}",
        "why {file}",
    ],
)
def test_a_name_of_others_neither_controls_the_terminal_nor_breaks_json(
    supervise, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    names = {"file": f"{HOSTILE}.yaml", "pack": f"{HOSTILE}-pack.yaml", "rows": f"{HOSTILE}.csv"}
    Path(names["file"]).write_text(ODD)
    Path(names["pack"]).write_text(PACK.replace(", run: softn", "").replace("upp", "up"))
    Path(names["rows"]).write_text("step,loss\n" + "".join(f"{n},2.5\n" for n in range(9)))
    _, out, err = supervise(*(word.format_map(names) for word in command.split(" ")))

    shown = out + err
    assert "[red]y" in shown and all(c.isprintable() or c == "\n" for c in shown)
    if "json" in command:
        assert json.dumps(HOSTILE)[1:-1] in json.dumps(json.loads(out))
