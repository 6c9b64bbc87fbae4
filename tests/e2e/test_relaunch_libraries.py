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


STEPS, SAVED_EVERY = 160, 25
# The losses begin near 3.5 and 0.5; what the drill does to the rate takes them far beyond.
HIT, DEATH = "lr_spike:factor=3000,steps=8@70", "crash@135"
POLICY = """\
version: supervise/v1
policy: library
summary: Goes back in process where it can, else starts the job again as its library can.
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 8.0}
rules:
  - {id: blown, when: high, sev: SEV1, run: back, for: 2, cooldown: 100}
job:
  on_crash: again
  relaunch: {resume: library}
savepoints: {every: 10, keep: 4}
budgets:
  all: {max: 9, per: 10000}
  rollback: {max: 2, per: 10000}
  restart: {max: 3, per: 10000}
escalate: {ladder: [back, relaunch-and-rewarm, hold], reset_after: 5000}
runbooks:
  back:
    steps:
      - snapshot
      - rollback: {loop: rewind, at_least: 10, rng: keep, start: 0.1, rewarm: 5}
    verify: {within: 60, clear_for: 10}
    if_refused: relaunch-and-rewarm
  relaunch-and-rewarm:
    steps:
      - snapshot
      - relaunch: {at_least: 10, start: 0.1, rewarm: 5}
    verify: {within: 60, clear_for: 10}
  again:
    steps:
      - snapshot
      - relaunch: {at_least: 0, rewarm: 0}
    verify: {within: 60, clear_for: 10}
warmup: 10
probation: 10
"""


@pytest.mark.parametrize(
    ("script", "exact", "drills"), [("trainer.py", True, [HIT, DEATH]), ("lit.py", False, [HIT])]
)
def test_a_library_goes_on_from_its_checkpoint(supervise, tmp_path, script, exact, drills):
    """After a damage, where the loop is to go back too, and after a death: the steps and the
    library's own count go on behind the checkpoint, and each trouble ends as recovered. Trainer
    makes the same step again; Lightning begins its epoch anew, which people are told."""
    policy = tmp_path / "library.yaml"
    policy.write_text(POLICY)
    job = [sys.executable, str(JOBS / script), str(tmp_path / "out")]
    job.append(str(tmp_path / "run" / "audit.log"))
    drilled = [word for drill in drills for word in ("--drill", drill)]
    run = supervise.run("--policy", str(policy), *drilled, job=job)

    assert run.returncode == 0, run.stderr
    assert f"done at {STEPS}\n" in run.stdout
    assert run.actions == ["relaunch"] * len(drills)
    (refused,) = run.kinds("abort", "refused")
    assert refused["data"]["substitute"] == "relaunch-and-rewarm"
    commits = [r for r in run.kinds("commit") if "pid" in r["data"]["result"]]
    results = [r["data"]["result"] for r in commits]
    ways = [(1, "interrupt"), (2, "ended")][: len(drills)]
    assert [(result["attempt"], result["how"]) for result in results] == ways
    compared = run.kinds("note", "continuity")[0]
    assert compared["data"]["details"]["ok"] is exact
    told = [r["data"]["message"]["title"] for r in run.kinds("notify_intent")]
    assert (compared["reason"] in told) is not exact

    opened = run.kinds("incident", "opened")
    ended = run.kinds("incident", "closed")
    assert [("recovered" in r["reason"]) for r in ended] == [True] * len(drills), ended
    for record, commit in zip(opened, commits, strict=True):
        result = commit["data"]["result"]
        assert result["step"] % SAVED_EVERY == SAVED_EVERY - 1
        assert result["step"] < record["data"]["breach_step"]
        told = [r for r in run.records if r["seq"] < commit["seq"] and _verified(r, result)]
        assert told, "the checkpoint was not verified before it was gone back to"
    _goes_on(supervise, run, *(result["step"] + 1 for result in results))


def test_a_library_goes_on_with_the_weights_of_before(supervise, tmp_path):
    """Without a relaunch: its loop and its count go on, and the trouble ends as recovered."""
    policy = tmp_path / "library.yaml"
    policy.write_text(POLICY.replace("loop: rewind", "loop: auto"))
    job = [sys.executable, str(JOBS / "trainer.py"), str(tmp_path / "out")]
    job.append(str(tmp_path / "run" / "audit.log"))
    run = supervise.run("--policy", str(policy), "--drill", HIT, job=job)

    assert run.returncode == 0, run.stderr
    assert f"done at {STEPS}\n" in run.stdout
    (commit,) = (r for r in run.kinds("commit") if "rollback" in r["reason"])
    assert commit["data"]["result"]["loop"] == "keep"
    (ended,) = run.kinds("incident", "closed")
    assert "supervise: rollback: yes, weights (trainer.py:" in run.stderr
    assert "relaunch: not yet (no checkpoint" in run.stderr or "relaunch: yes, from" in run.stderr
    assert run.actions == ["rollback"] and "recovered" in ended["reason"]
    to = f"with the weights of step {commit['data']['result']['step']}"
    assert any(to in str(r["data"]["message"]) for r in run.kinds("notify_intent"))


def _verified(record, result):
    data = record["data"]
    found = data["details"] if data.get("what") == "checkpoint" else {}
    return found.get("ok") and found["id"] == result["checkpoint"]


def _goes_on(supervise, run, *starts):
    """The frames begin behind each checkpoint, and the records are whole."""
    rows = supervise.rows("run")
    for attempt, start in enumerate((0, *starts)):
        steps = [int(row["step"]) for row in rows if row["attempt"] == str(attempt)]
        assert steps == list(range(start, steps[-1] + 1))
    assert steps[-1] == STEPS - 1
    said = [r["data"]["details"] for r in run.kinds("note", "resumed")]
    assert [data["step"] for data in said] == list(starts)
    run.prove()
