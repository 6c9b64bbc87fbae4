"""People speak to a real run: a rate, a request that is allowed, a pause, and the end."""

from __future__ import annotations

import json
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
        "lr_scale", "pause", "resume", "stop",
    ]  # fmt: skip
    (yes,) = [r for r in records if r["kind"] == "approval" and r["data"]["what"] == "approved"]
    assert yes["data"]["operator"] == "anna"
    supervise.prove("runs/r1")
