"""The kinds whose keys are more than numbers, as people write them."""

from __future__ import annotations

import pytest

from supervise.catalog import load_policy
from supervise.detectors.equal import Equal

POLICY = """version: supervise/v1
policy: kinds
mode: observe
detectors:
  finite: {kind: equal, metric: opt_state_finite, to: 1}
  schedule: {kind: equal, metric: learning_rate, with: learning_rate_scheduled, tolerance: 1e-6}
  counter: {kind: equal, metric: tokens_seen, to: previous, law: nondecreasing}
  drift: {kind: cusum, metric: train_loss_raw, k: 1.0, clear: 2}
  curve: {kind: band, metric: train_loss_raw, knots: [[0, 5, 0.1], [100, 3, 0.1]], for: 3}
  probe: {kind: paired, metric: val_loss, key: eval_artifact_hash, gt: 0.02, rel_gt: 0.01}
  shared: {kind: collapse, metric: train_loss_raw, total_steps: 900, knots: [[0, 3, 0], [1, 1, 0]]}
rules:
  - {id: off, when: finite or schedule or counter or drift or curve or probe or shared, sev: SEV2}
"""


@pytest.fixture
def load(tmp_path):
    """A function that loads a policy from text."""

    def _load(text):
        path = tmp_path / "kinds.yaml"
        path.write_text(text)
        return load_policy(path)

    return _load


def test_what_is_written_is_what_runs(load):
    """And the resolved policy, curves included, is the same policy."""
    policy = load(POLICY)

    assert policy.detectors["finite"].to == 1.0
    assert policy.detectors["counter"] == Equal("tokens_seen", to="previous", law="nondecreasing")
    assert policy.detectors["schedule"].with_ == "learning_rate_scheduled"
    assert policy.detectors["curve"].knots == ((0.0, 5.0, 0.1), (100.0, 3.0, 0.1))
    again = load(policy.resolved)
    assert (again.detectors, again.digest) == (policy.detectors, policy.digest)
