"""People speak to a real run: a rate, a request that is allowed, a pause, and the end."""

from __future__ import annotations

import csv
import json
import sys
import time

import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: approve
probation: 20
detectors:
  always: {kind: threshold, metric: train_loss_raw, gt: 0.0, for: 20}
rules:
  - {id: always, when: always, sev: SEV1, run: slow, keep: 100000}
runbooks:
  slow: [snapshot, {lr_scale: {set: 0.5}}, verify]
budgets: {all: {max: 9}, lr_scale: {max: 9}}
"""


def waiting(run, seconds=60.0):
    """The request that waits, as `status` shows it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = json.loads((run / "state.json").read_text())
        except (OSError, ValueError):
            state = {}
        if state.get("approvals"):
            return state["approvals"][0]
        time.sleep(0.2)
    raise AssertionError("nothing was asked")


def test_people_speak_and_are_answered(supervise, tiny_job, tmp_path):
    """Each word is done once, on record under its speaker; replay and the chain agree."""
    (tmp_path / "mine.yaml").write_text(POLICY)
    job = tiny_job("--steps", 100000, "--sleep", 0.01)
    run = tmp_path / "runs" / "r1"
    watcher = supervise.start("--policy", "mine.yaml", "--run-dir", "runs/r1", "--", *job)
    request = waiting(run)
    assert request["steps"] == [{"verb": "lr_scale", "args": {"value": 0.5, "rewarm_steps": 0}}]
    allowed = supervise("approve", "ask-1", "--sha", request["args_sha256"], "--by", "anna")
    assert allowed.returncode == 0, allowed.stderr
    for line, code, said in (
        (("lr", "0.25"), 0, "lr_scale=0.25"),
        (("pause", "runs/r1"), 0, "paused_step"),
        (("resume",), 0, "resumed=True"),
        (("stop",), 0, "stop"),
    ):
        answer = supervise(*line, "--by", "bo")
        assert answer.returncode == code, (line, answer.stderr)
        assert said in answer.stderr, (line, answer.stderr)
    watcher.communicate(timeout=60)

    assert watcher.returncode == 78
    records = [json.loads(line[65:]) for line in (run / "audit.log").read_text().splitlines()]
    verbs = [r["data"]["action"]["verb"] for r in records if r["kind"] == "intent"]
    assert verbs[:3] == ["snapshot", "snapshot", "lr_scale"]
    assert [verb for verb in verbs[3:] if verb != "snapshot"][-4:] == [
        "lr_scale",
        "pause",
        "resume",
        "stop",
    ]
    (yes,) = [r for r in records if r["kind"] == "approval" and r["data"]["what"] == "approved"]
    assert yes["data"]["operator"] == "anna"
    supervise.prove("runs/r1")


# Where the test says so, it reports a trouble once, and dies once.
OBEYING = """\
import sys
import time
from pathlib import Path

import torch
import supervise_probe

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
while step < 100000:
    trouble = Path("trouble").exists()
    if trouble:
        Path("trouble").unlink()
    if Path("die").exists():
        Path("die").unlink()
        sys.exit(1)
    supervise_probe.report(knob=float(trouble))
    loss = model(torch.randn(32, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    step += 1
"""
GENTLER = """\
version: supervise/v1
policy: gentler
mode: enforce
detectors:
  knob: {kind: threshold, metric: knob, gt: 0.5}
rules:
  - {id: turned, when: knob, sev: SEV1, run: back}
job: {on_crash: restart, relaunch: {resume: savepoint}}
savepoints: {every: 5, keep: 4}
runbooks:
  back: [snapshot, {rollback: {at_least: 2, rewarm: 2000}}, {verify: {clear_for: 5}}]
  restart: [snapshot, {relaunch: {at_least: 0, rewarm: 0}}, {verify: {clear_for: 5}}]
budgets: {all: {max: 9}, rollback: {max: 9}, restart: {max: 9}, lr_scale: {max: 9}}
warmup: 5
probation: 5
"""


def verdicts(records, many, seconds=60.0):
    """What was said of each runbook that was verified, as soon as there are so many."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ends = [r for r in records() if r["kind"] == "verify" and r["data"]["what"] != "started"]
        if len(ends) >= many:
            return [(r["data"]["what"], r["reason"]) for r in ends]
        time.sleep(0.1)
    raise AssertionError("nothing was verified")


def test_a_rate_that_a_person_set_composes_with_what_the_policy_does(supervise):
    """Set before a rollback, within its re-warm, and before the job dies: it is done, and stays."""
    (supervise.home / "gentler.yaml").write_text(GENTLER)
    (supervise.home / "train.py").write_text(OBEYING)
    job = (sys.executable, "train.py")
    watcher = supervise.start("--policy", "gentler.yaml", "--run-dir", "runs/r1", "--", *job)
    log = supervise.home / "runs" / "r1" / "audit.log"
    until = time.monotonic() + 60
    while not (log.exists() and "savepoint of step" in log.read_text()):
        assert time.monotonic() < until and watcher.poll() is None
        time.sleep(0.1)

    def say(value):
        said = supervise("lr", value, "--by", "anna")
        assert said.returncode == 0 and f"lr_scale={value}" in said.stderr, said.stderr

    def records():
        return supervise.records("runs/r1")

    say("0.25")
    (supervise.home / "trouble").touch()
    assert [what for what, _ in verdicts(records, 1)] == ["passed"], verdicts(records, 1)
    say("1")
    say("0.5")
    (supervise.home / "die").touch()
    assert [what for what, _ in verdicts(records, 2)] == ["passed"] * 2, verdicts(records, 2)
    assert supervise("stop", "--by", "anna").returncode == 0
    watcher.communicate(timeout=60)

    supervise.prove("runs/r1")
    exported = supervise("export", "runs/r1", "--csv", "--metrics", "lr_scale,lr_rewarm")
    rows = list(csv.DictReader(exported.stdout.splitlines()))
    held = {
        a: [float(r["lr_scale"]) / float(r["lr_rewarm"] or 1.0) for r in rows if r["attempt"] == a]
        for a in ("0", "1", "2")
    }
    assert held["0"][-1] == held["1"][0] == pytest.approx(0.25)
    assert held["1"][-1] == pytest.approx(0.5)
    assert set(held["2"]) == {0.5}
    assert any("still multiplied by 0.5, as asked before" in r["reason"] for r in records())
