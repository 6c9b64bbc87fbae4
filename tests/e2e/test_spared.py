"""A person answers later than savepoints reach: the rollback finds the one that it was about."""

from __future__ import annotations

import json
import sys
import time

import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: approve
warmup: 10
probation: 20
savepoints: {every: 10, keep: 4}
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 100.0}
rules:
  - {id: blown, when: high, sev: SEV1, run: back}
runbooks:
  back:
    steps: [snapshot, {rollback: {at_least: 10, rng: keep, rewarm: 0}}]
    verify: {within: 100, clear_for: 20}
budgets: {all: {max: 4}, rollback: {max: 2}}
"""
BLOWN_AT = 60  # steps, and once: after going back it learns on
JOB = """\
import os, time, torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
while step < 50000 and not os.path.exists("enough"):
    x = torch.randn(32, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 60 and not os.path.exists("blown"):
        open("blown", "w").close()
        with torch.no_grad():
            model.weight.add_(100.0)
    time.sleep(0.01)
"""


def until(what, seconds=120.0):
    """Wait for something; returns what it comes to."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError("it never came")


def test_a_late_yes_still_finds_its_savepoint(supervise, tmp_path):
    """By the time of the answer, four savepoints reach no further back than 40 steps."""
    (tmp_path / "mine.yaml").write_text(POLICY)
    (tmp_path / "train.py").write_text(JOB)
    watcher = supervise.start(
        "--policy", "mine.yaml", "--run-dir", "run", "--", sys.executable, "train.py"
    )

    def state():
        path = tmp_path / "run" / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    (request,) = until(lambda: state().get("approvals"))
    (rollback,) = (one["args"] for one in request["steps"] if one["verb"] == "rollback")
    before = BLOWN_AT - 10
    assert rollback["before_step"] == before
    until(lambda: state()["step"] > BLOWN_AT + 60)
    allowed = supervise("approve", "run", "ask-1", "--by", "anna")
    assert allowed.returncode == 0, allowed.stderr

    def kinds(kind):
        return [record for record in supervise.records("run") if record["kind"] == kind]

    until(lambda: [r for r in kinds("verify") if r["data"]["what"] == "passed"] or kinds("abort"))
    (tmp_path / "enough").touch()
    watcher.communicate(timeout=60)

    assert kinds("abort") == []
    (done,) = (r for r in kinds("commit") if "rollback" in r["reason"])
    assert done["data"]["result"]["step"] == before - 10
    assert done["data"]["result"]["from_step"] > BLOWN_AT + 60
    supervise.prove("run")
