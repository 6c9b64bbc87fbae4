"""From a shard that spoils one step after another to a run that does without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "jobs" / "shards.py"
POLICY = """
version: supervise/v1
policy: shards
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 20.0}}
rules: [{id: high, when: high, sev: SEV1, run: set-aside}]
runbooks:
  set-aside:
    steps: [snapshot, {quarantine: {shards: suspects}}]
    verify: {within: 60, clear_for: 10}
    if_refused: tell
  tell: [notify]
budgets: {all: {max: 20, per: 10000}, quarantine: {max: 2, per: 10000}}
warmup: 8
probation: 20
"""


@pytest.mark.chaos  # takes long, and others look at each part
def test_a_rotten_shard_is_found_and_left_out(supervise, tmp_path):
    policy = tmp_path / "shards.yaml"
    policy.write_text(POLICY)
    job = [sys.executable, str(JOB), "4", "shards"]
    done = supervise.run("--policy", str(policy), job=job, name="shards")

    assert done.returncode == 0, done.stderr
    held = json.loads((done.directory / "quarantine.json").read_text())
    assert [(entry["kind"], entry["name"]) for entry in held["entries"]] == [
        ("shard", "data/070.tar")
    ]
    assert held["entries"][0]["incident"] == "inc-3" and held["generation"] == 1
    assert done.actions == ["quarantine"]
    assert len(done.kinds("abort", "refused")) == 2
    assert done.stdout.split() == ["steps", str(4 * 300 - 2)]
    (blame,) = done.kinds("note", "shard-suspects")
    assert blame["data"]["suspects"]["data/070.tar"]["blamed"] == 3
    supervise.prove(done.directory)
    assert "data/070.tar" in supervise("why", str(done.directory), "inc-3").stdout
