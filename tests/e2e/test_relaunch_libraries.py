"""A script of a library, which cannot resume by itself, comes back from the library's checkpoints.

Nothing in it knows of supervise: the probe hears the library save, and gives its `train` or `fit`
the checkpoint when the job was started again.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.supervised_run import JOBS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def whole_torch(supervise):
    """The libraries import torch's compiler."""
    del supervise.env["PYTHONPATH"]


STEPS = 160
SAVED_EVERY = 40
POLICY = """\
version: supervise/v1
policy: library
mode: enforce
job: {on_crash: again, relaunch: {resume: library}}
budgets: {all: {max: 9, per: 10000}, restart: {max: 3, per: 10000}}
runbooks:
  again: [snapshot, relaunch: {at_least: 0, rewarm: 0}, verify: {within: 60, clear_for: 10}]
warmup: 10
probation: 10
"""


@pytest.mark.chaos
def test_trainer_that_crashed_goes_on_exactly_from_its_verified_checkpoint(supervise, tmp_path):
    policy = tmp_path / "library.yaml"
    policy.write_text(POLICY)
    job = [sys.executable, str(JOBS / "trainer.py"), str(tmp_path / "out")]
    job.append(str(tmp_path / "run" / "audit.log"))
    run = supervise.run("--policy", str(policy), "--drill", "crash@95", job=job)

    assert run.returncode == 0, run.stderr
    assert f"done at {STEPS}\n" in run.stdout and run.actions == ["relaunch"]
    (commit,) = (r for r in run.kinds("commit") if "pid" in r["data"]["result"])
    result = commit["data"]["result"]
    assert (result["attempt"], result["how"]) == (1, "ended")
    assert result["step"] < 95 and (result["step"] + 1) % SAVED_EVERY == 0
    looks = [r for r in run.kinds("note", "checkpoint") if r["seq"] < commit["seq"]]
    assert {"id": result["checkpoint"], "ok": True}.items() <= looks[-1]["data"]["details"].items()
    steps = [int(row["step"]) for row in supervise.rows("run") if row["attempt"] == "1"]
    assert steps == list(range(result["step"] + 1, STEPS))
    (resumed,) = (r["data"]["details"] for r in run.kinds("note", "resumed"))
    assert (resumed["step"], resumed["inexact"]) == (result["step"] + 1, "")
    run.prove()
