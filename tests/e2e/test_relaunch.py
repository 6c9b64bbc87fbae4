"""A job that is hit comes back from its own checkpoint, in a process of its own, for real."""

from __future__ import annotations

import csv
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from supervise.store import audit

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "jobs" / "resuming.py"
HIT = "lr_spike:factor=3000,steps=8@210"
# The loss begins near 0.4; what the drill does to the rate takes it beyond 5 within a few steps.
POLICY = """\
version: supervise/v1
policy: comes-back
summary: Starts the job again from its own checkpoint.
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0}
rules:
  - {id: blown, when: high, sev: SEV1, run: relaunch-and-rewarm, for: 2, cooldown: 100}
job:
  on_crash: restart
  relaunch: {args: ["--init_from=resume"]}
budgets:
  all: {max: 4, per: 10000}
  restart: {max: 2, per: 10000}
escalate: {ladder: [relaunch-and-rewarm, hold], reset_after: 5000}
runbooks:
  relaunch-and-rewarm:
    steps:
      - snapshot
      - relaunch: {at_least: 10, start: 0.1, rewarm: 20}
    verify: {within: 100, clear_for: 20}
warmup: 10
probation: 20
"""


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "comes-back.yaml"
    path.write_text(POLICY)
    return str(path)


@pytest.fixture
def job(tmp_path):
    """A job that goes on to where the drill comes once its first checkpoint was verified."""
    words = {"out_dir": tmp_path / "out", "pause_s": 0.005, "max_iters": 250}
    words |= {"wait_file": tmp_path / "run" / "audit.log"}
    return [sys.executable, str(JOB), *(f"--{key}={value}" for key, value in words.items())]


def test_a_job_that_was_hit_comes_back_from_its_own_checkpoint(supervise, policy, job):
    """Steps go on behind the checkpoint in a new attempt; it ends well, and so do the records.

    In its second life it crashes, and is started once more, from what was saved just before: that
    is verified before anybody chooses.
    """
    run = supervise.run("--policy", policy, "--drill", HIT, "--drill", "crash@240", job=job)

    assert run.returncode == 0, run.stderr
    assert run.actions == ["relaunch", "relaunch"]
    done = [r["data"]["result"] for r in run.kinds("commit") if "pid" in r["data"]["result"]]
    hit, crashed = done
    assert (hit["step"], hit["attempt"], hit["how"]) == (99, 1, "interrupt")
    assert len(hit["moved"]) == 1  # the one of step 199, which stood in its place
    assert (crashed["attempt"], crashed["how"], crashed["step"]) == (2, "ended", 199)
    assert "resumed at 100\n" in run.stdout
    assert float(re.search(r"done at 250 loss ([\d.]+)", run.stdout)[1]) < 0.5
    assert run.kinds("verify", "passed")

    exported = supervise("export", str(run.directory), "--csv")
    rows = list(csv.DictReader(exported.stdout.splitlines()))
    steps = {a: [int(r["step"]) for r in rows if r["attempt"] == a] for a in ("0", "1", "2")}
    assert steps["0"] == list(range(steps["0"][-1] + 1))
    assert steps["1"] == list(range(100, steps["1"][-1] + 1))
    assert steps["2"] == list(range(crashed["step"] + 1, 250))
    rewarmed = [float(r["learning_rate"]) for r in rows if r["attempt"] == "1"]
    assert rewarmed[0] == pytest.approx(1e-4)
    assert rewarmed[25] == pytest.approx(1e-3)

    marks = [json.loads(path.read_text()) for path in (run.directory / "relaunch").iterdir()]
    assert sorted(mark["attempt"] for mark in marks) == [1, 2]
    for command in (["audit", "verify"], ["replay"]):
        done = supervise(*command, str(run.directory))
        assert done.returncode == 0, done.stdout


def test_who_ends_the_run_ends_it_for_good(supervise, policy, job):
    """TERM when the job is to be started again: it ends, and nothing is launched after that."""
    watcher = supervise.start(
        "--policy", policy, "--run-dir", "run", "--drill", HIT, "--", *job, "--max_iters=9999"
    )
    log = supervise.home / "run" / "audit.log"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and watcher.poll() is None:
        if log.exists() and '"verb":"relaunch"' in log.read_text():
            break
        time.sleep(0.002)
    watcher.send_signal(signal.SIGTERM)
    _, stderr = watcher.communicate(timeout=60)
    told = [r["data"].get("what") for r in audit.read(log) if r["kind"] == "note"]

    assert watcher.returncode != 0, stderr
    assert "launched" not in told[told.index("signal") :]
    assert supervise("audit", "verify", "run").returncode == 0
