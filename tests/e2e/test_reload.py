"""A reload of a real run: a new rule fires, a broken file is refused, the job notices nothing."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 1000.0}
rules:
  - {id: high, when: high, sev: SEV2}
"""
RULE = "  - {id: seen, when: seen, sev: SEV2}\n"


def sha(stdout: str) -> str:
    found = re.search(r"sha ([0-9a-f]+)", stdout)
    assert found, stdout
    return found[1]


def test_a_run_goes_on_under_a_changed_policy(supervise, tiny_job, tmp_path):
    """The rule that was added fires; the broken file after it changes nothing; replay agrees."""
    job = tiny_job("--steps", 300, "--sleep", 0.02)
    alone = subprocess.run(tiny_job("--steps", 300), capture_output=True, text=True, check=False)
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY)
    watcher = supervise.start("--policy", "mine.yaml", "--run-dir", "run", "--", *job)
    assert watcher.stdout is not None
    line = watcher.stdout.readline()
    assert line.startswith("step 50")

    policy.write_text(
        POLICY.replace(
            "rules:", "  seen: {kind: threshold, metric: train_loss_raw, gt: 0.0}\nrules:"
        )
        + RULE
    )
    done = supervise("reload", "run", "--by", "anna")
    assert done.returncode == 0, done.stderr
    assert "detectors +seen; rules +seen" in done.stderr
    policy.write_text("version: supervise/v1\npolicy: [")
    refused = supervise("reload", "run")
    assert refused.returncode == 65, refused.stderr
    assert "mine.yaml:2:" in refused.stderr
    rest, errors = watcher.communicate(timeout=120)

    assert watcher.returncode == 0, errors
    assert sha(line + rest) == sha(alone.stdout)
    assert "the policy was not reloaded" in errors
    why = supervise("why", "run")
    assert "seen (SEV2)" in why.stdout
    assert "policies/" in why.stdout
    supervise.prove("run")
    asked = supervise("why-not", "run", "--rule", "high", "--step", "299")
    assert "needs > 1000" in asked.stdout


def test_a_run_that_may_not_act_is_not_reloaded_into_acting(supervise, tiny_job, tmp_path):
    """Started in shadow: the refusal is in the record, and the run ends as it was."""
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY.replace("enforce", "shadow"))
    job = tiny_job("--steps", 200, "--sleep", 0.02)
    watcher = supervise.start("--policy", "mine.yaml", "--run-dir", "run", "--", *job)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    policy.write_text(POLICY)
    refused = supervise("reload", "run")
    until = time.monotonic() + 60
    watcher.communicate(timeout=60)

    assert time.monotonic() < until
    assert refused.returncode == 65
    assert "mode enforce needs a restart" in refused.stderr
    supervise.prove("run")
