"""The policy of trials reaches nobody and starts nothing again; its rules are the real ones."""

from __future__ import annotations

from supervise.catalog import load_isolated_policy, load_policy

OWN = """\
version: supervise/v1
policy: own
extends: nano
notify: {webhook: {url_env: HOOK}}
approvals: {rollback: {timeout: 60s}}
job: {relaunch: {args: ["--resume"]}, on_crash: restart}
"""


def test_channels_approvals_and_starts_are_left_out(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN)

    found = load_isolated_policy(str(path))

    assert found.left_out == ("notify", "approvals", "job.relaunch", "job.on_crash")
    trial = tmp_path / "trial.yaml"
    trial.write_text(found.text)
    policy = load_policy(trial)
    assert set(policy.notify) == {"console"} and not policy.approvals
    assert not policy.job.relaunch and not policy.job.on_crash
    digests = [[p.digest_of(rule) for rule in p.rules] for p in (found.policy, policy)]
    assert digests[0] == digests[1]


def test_a_policy_without_channels_loses_nothing(tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text("version: supervise/v1\npolicy: bare\nuse: [throughput]\n")

    assert load_isolated_policy(str(path)).left_out == ()
    assert load_isolated_policy("nano").left_out == ()
