"""A small policy, files of tests about it, and what comes of them."""

from __future__ import annotations

import pytest

from supervise.lab import load_suite, run_suite

POLICY = """\
version: supervise/v1
policy: p
mode: enforce
detectors:
  high: {kind: threshold, metric: train_loss_raw, gt: 5.0, clear: 4.0}
  wild: {kind: threshold, metric: grad_global_norm, gt: 9.0}
  bad: {kind: nonfinite, metrics: [train_loss_raw]}
rules:
  - {id: spike, when: high, sev: SEV1, run: calm}
  - {id: both, when: high and wild, sev: SEV2}
  - {id: grad, when: wild, sev: SEV2, for: 2}
  - {id: dead, when: bad, sev: SEV0, run: back}
inhibit:
  - {by_rule: spike, mute: [grad]}
runbooks:
  calm: [snapshot, {lr_scale: {set: 0.5, rewarm: 10}}, {verify: {within: 30, clear_for: 5}}]
  back: [pause, snapshot, {rollback: {at_least: 5}}, resume, {verify: {within: 40, clear_for: 5}}]
escalate: {ladder: [calm, back, hold]}
budgets: {all: {max: 4}, lr_scale: {max: 1, per: 1000}, rollback: {max: 2}}
savepoints: {every: 5, keep: 4}
warmup: 10
probation: 20
"""


@pytest.fixture
def small():
    return POLICY


@pytest.fixture
def write(tmp_path):
    """Return a function that writes scenarios, the policy beside them, and returns the file."""

    def write(scenarios, policy=POLICY):
        (tmp_path / "p.yaml").write_text(policy, "utf-8")
        path = tmp_path / "p.test.yaml"
        path.write_text(f"version: supervise/v1\npolicy: p.yaml\ntests:\n{scenarios}", "utf-8")
        return path

    return write


@pytest.fixture
def subject(write):
    """Return a function that reads scenarios about the small policy, or about another."""
    return lambda *texts: load_suite(write(*texts))


@pytest.fixture
def outcome(subject):
    """Return a function that plays one scenario: its keys but for the name, and the policy."""

    def outcome(keys, *policy):
        lines = "".join(f"    {line}\n" for line in keys.strip().splitlines())
        (found,) = run_suite(subject(f"  - name: it\n{lines}", *policy))
        return found

    return outcome
