"""A reload of a real run: a new rule fires, a broken file is refused, the job notices nothing."""

from __future__ import annotations

import pytest

from tests.support.supervised_run import tiny

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: mine
mode: shadow
runbooks: {lower: [lr_scale: {set: 0.5}, verify]}
budgets: {all: {max: 2}, lr_scale: {max: 2}}
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 1000.0}
rules:
  - {id: high, when: high, sev: SEV2}
"""
RULE = "  - {id: seen, when: seen, sev: SEV2, run: lower}\n"


def test_an_edit_of_the_policy_file_takes_effect_by_itself(supervise, tmp_path):
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY)
    job = tiny("--steps", 120, "--sleep", 0.02)
    words = ("--policy", "mine.yaml", "--watch-policy", "--run-dir", "run", "--", *job)
    watcher = supervise.start(*words)
    assert watcher.stdout.readline().startswith("step 50")

    detector = "  seen: {kind: threshold, metric: train_loss_raw, gt: 0.0}\nrules:"
    policy.write_text(POLICY.replace("rules:", detector).replace("shadow", "enforce") + RULE)
    _, errors = watcher.communicate(timeout=120)

    assert watcher.returncode == 0, errors
    shown = supervise("audit", "show", "run").stdout
    assert "detectors +seen; rules +seen" in shown and "watch-policy" in shown
    assert '"mode": "enforce"' not in shown
