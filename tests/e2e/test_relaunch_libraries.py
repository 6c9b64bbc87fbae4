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
# The loss begins near 3.5; what the drill does to the rate takes it far beyond.
HIT, DEATH = "lr_spike:factor=3000,steps=8@70", "crash@135"
POLICY = """\
version: supervise/v1
policy: library
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 8.0}}
rules: [{id: blown, when: high, sev: SEV1, run: back, for: 2, cooldown: 100}]
job: {on_crash: again, relaunch: {resume: library}}
savepoints: {every: 10, keep: 4}
budgets:
  all: {max: 9, per: 10000}
  rollback: {max: 2, per: 10000}
  restart: {max: 3, per: 10000}
escalate: {ladder: [back, relaunch-and-rewarm, hold], reset_after: 5000}
runbooks:
  back:
    steps: [snapshot, rollback: {at_least: 10, start: 0.1, rewarm: 5}]
    verify: {within: 60, clear_for: 10}
    if_refused: relaunch-and-rewarm
  relaunch-and-rewarm:
    steps: [snapshot, relaunch: {at_least: 10, start: 0.1, rewarm: 5}]
    verify: {within: 60, clear_for: 10}
  again: [snapshot, relaunch: {at_least: 0, rewarm: 0}, verify: {within: 60, clear_for: 10}]
warmup: 10
probation: 10
"""


@pytest.mark.chaos
def test_trainer_goes_on_with_the_weights_of_before_and_from_its_checkpoint(supervise, tmp_path):
    """After a damage without a relaunch: its loop and its count go on. After a death from its own
    checkpoint, exactly."""
    policy = tmp_path / "library.yaml"
    policy.write_text(POLICY)
    job = [sys.executable, str(JOBS / "trainer.py"), str(tmp_path / "out")]
    job.append(str(tmp_path / "run" / "audit.log"))
    run = supervise.run("--policy", str(policy), "--drill", HIT, "--drill", DEATH, job=job)

    assert run.returncode == 0, run.stderr
    assert f"done at {STEPS}\n" in run.stdout
    ended = run.kinds("incident", "closed")
    assert ["recovered" in r["reason"] for r in ended] == [True, True], ended
    assert run.actions == ["rollback", "relaunch"]
    (back,) = (r["data"]["result"] for r in run.kinds("commit") if "rollback" in r["reason"])
    assert "supervise: rollback: yes" in run.stderr
    assert "relaunch: not yet (no checkpoint" in run.stderr or "relaunch: yes, from" in run.stderr
    to = f"with the weights of step {back['step']}"
    assert any(to in str(r["data"]["message"]) for r in run.kinds("notify_intent"))
    result = _relaunched(supervise, run, run.kinds("incident", "opened")[1])
    assert (result["attempt"], result["how"]) == (2, "ended")
    assert run.kinds("note", "resumed")[0]["data"]["details"]["inexact"] == ""


def _relaunched(supervise, run, opened):
    """Return the result of the relaunch: to a verified checkpoint before the trouble, from which
    the library and its count went on."""
    (commit,) = (r for r in run.kinds("commit") if "pid" in r["data"]["result"])
    result = commit["data"]["result"]
    assert (result["step"] + 1) % SAVED_EVERY == 0
    assert result["step"] < opened["data"].get("breach_step", opened["step"])
    told = [r for r in run.records if r["seq"] < commit["seq"] and _verified(r, result)]
    assert told, "the checkpoint was not verified before it was gone back to"
    rows = supervise.rows("run")
    begun = {int(row["attempt"]): int(row["step"]) for row in reversed(rows)}
    assert begun[result["attempt"]] == result["step"] + 1
    for attempt, start in sorted(begun.items()):
        steps = [int(row["step"]) for row in rows if row["attempt"] == str(attempt)]
        assert steps == list(range(start, steps[-1] + 1))
    assert steps[-1] == STEPS - 1
    said = [r["data"]["details"] for r in run.kinds("note", "resumed")]
    assert [data["step"] for data in said] == [result["step"] + 1]
    run.prove()
    return result


def _verified(record, result):
    data = record["data"]
    found = data["details"] if data.get("what") == "checkpoint" else {}
    return found.get("ok") and found["id"] == result["checkpoint"]
