"""FIFOs where files of the run should be, planted by the job's own user: nobody waits for them."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.supervised_run import tiny

pytestmark = pytest.mark.slow

PLANTER = Path(__file__).parent / "jobs" / "planter.py"
RECORDS = (
    "control/1.json",
    "state.json",
    "launch.json",
    "quarantine.json",
    "checkpoints.json",
    "probe/boot.PID",
    "probe/armed.PID",
    "probe/stacks.PID.txt",
    "probe/off.1",
    "probe/tape.0.json",
    "probe/learning-rate.json",
    "incidents/inc-1/snapshot-1/manifest.json",
)
CONFIG = ("probe.json", "probe/off.PID")


def planted(supervise, names: tuple[str, ...]):
    job = [sys.executable, str(PLANTER), ",".join(names), *tiny("--steps", 150, "--exit", 3)]
    run = supervise.run("--policy", "nano", "--drill", "nan_grad@100", job=job)
    assert run.returncode == 3, run.stderr
    return run


def test_the_run_goes_on_beside_fifos(supervise):
    run = planted(supervise, RECORDS)

    assert run.state["tier"] == "T1" and run.state["step"] == 149
    assert run.kinds("note", "safeguard")
    run.prove()


def test_a_probe_that_cannot_be_told_anything_leaves_the_job_alone(supervise):
    """The import of torch does not wait for probe.json."""
    assert "finite" in planted(supervise, CONFIG).stdout


def test_commands_answer_beside_fifos(supervise, keep_run):
    run = keep_run([], ended=False)
    for name in ("state.json", "launch.json", "quarantine.json", "checkpoints.json", "run.json"):
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
        for command in (["status"], ["checkpoints"], ["adopt"], ["why"], ["audit", "verify"]):
            done = supervise(*command, "run")
            assert "Traceback" not in done.stderr, done.stderr


def test_a_run_is_for_its_owner_alone(supervise, tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text(EVIDENCE)
    before = os.umask(0)
    try:
        job = tiny("--sleep", 0.01)  # long enough for the evidence on a busy machine
        run = supervise.run("--policy", policy, "--drill", "lr_spike@60", job=job)
        supervise("pause", "run")  # too late for an answer; its word lies in control/
    finally:
        os.umask(before)

    paths = [run.directory, *run.directory.rglob("*")]
    wrong = [
        f"{path.relative_to(tmp_path)} {mode:o}"
        for path in paths
        if (mode := stat.S_IMODE(path.stat().st_mode)) != (0o700 if path.is_dir() else 0o600)
    ]
    assert wrong == []
    (manifest,) = (path for path in paths if path.name == "manifest.json")
    assert json.loads(manifest.read_text())["missing"] == []


EVIDENCE = """\
version: supervise/v1
policy: evidence
mode: enforce
detectors: {high: {kind: threshold, metric: learning_rate, gt: 0.1}}
rules: [{id: high, when: high, sev: SEV1, run: look}]
runbooks: {look: [snapshot, {lr_scale: {set: 0.5, rewarm: 10}}, {verify: {within: 30}}]}
savepoints: {every: 25, keep: 2}
budgets: {all: {max: 8, per: 1000}, lr_scale: {max: 2, per: 1000}}
warmup: 10
probation: 20
"""
