"""A reload of a real run: a new rule fires, a broken file is refused, the job notices nothing."""

from __future__ import annotations

import pytest

from tests.support.supervised_run import sha, tiny

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


@pytest.mark.chaos
def test_a_run_goes_on_under_a_changed_policy(supervise, tmp_path):
    """The rule that was added fires, and in shadow nothing is done about it; a broken file and a
    mode that may not be entered are refused; the weights are those of the job alone."""
    alone = supervise.bare(tiny())
    policy = tmp_path / "mine.yaml"
    policy.write_text(POLICY)
    job = tiny("--sleep", 0.02)
    watcher = supervise.start("--policy", "mine.yaml", "--run-dir", "run", "--", *job)
    line = watcher.stdout.readline()
    assert line.startswith("step 50")

    detector = "  seen: {kind: threshold, metric: train_loss_raw, gt: 0.0}\nrules:"
    policy.write_text(POLICY.replace("rules:", detector) + RULE)
    done = supervise("reload", "run", "--by", "anna")
    assert done.returncode == 0, done.stderr
    assert "detectors +seen; rules +seen" in done.stderr
    for text, reason in (
        ("version: supervise/v1\npolicy: [", "mine.yaml:2:"),
        (POLICY.replace("shadow", "enforce"), "mode enforce needs a restart"),
    ):
        policy.write_text(text)
        refused = supervise("reload", "run")
        assert refused.returncode == 65 and reason in refused.stderr, refused.stderr
    rest, errors = watcher.communicate(timeout=120)

    assert watcher.returncode == 0, errors
    assert sha(line + rest) == sha(alone.stdout)
    assert "the policy was not reloaded" in errors
    why = supervise("why", "--full", "run").stdout
    assert "seen (SEV2" in why and "policies/" in why
    run = supervise.run_of()
    would = [r for r in run.kinds("suppressed") if r["data"]["suppressed_by"] == "mode:shadow"]
    assert "lr_scale" in [step["verb"] for step in would[0]["data"]["would"]]
    assert run.intents == []
    supervise.prove()
    asked = supervise("why-not", "run", "--rule", "high", "--step", "199")
    assert "needs > 1000" in asked.stdout


def test_an_edit_of_the_policy_file_takes_effect_by_itself(supervise, tmp_path):
    """With --watch-policy; the supervisor notices it without being asked."""
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
