"""When the probes are asked for denser samples."""

from __future__ import annotations

import pytest

from supervise.core.incidents import sampling_rate

from .conftest import Above, rule_on

NAMES = ("train_loss_raw", "probe_overhead_frac", "step_time")


@pytest.fixture
def story(tell):
    """A run with rules on the loss, the cost of the probe and the step time; none of them acts."""
    detectors = {
        "high": Above(NAMES[0], 5.0),
        "costly": Above(NAMES[1], 0.02),
        "slow": Above(NAMES[2], 1.0),
    }
    rules = tuple(rule_on(detectors, name, "SEV2") for name in detectors)
    return tell(detectors=detectors, rules=rules, names=NAMES)


def test_denser_while_an_incident_is_open(story):
    story.frames(2.0, times=30, grad=0.01)
    assert not sampling_rate.needs_dense_sampling(story.policy, story.state)
    story.frames(6.0, grad=0.01)
    assert story.state.machine == "suspect"
    assert sampling_rate.needs_dense_sampling(story.policy, story.state)


@pytest.mark.parametrize("metric", NAMES[1:])
def test_not_for_what_denser_samples_make_worse(story, metric):
    usual = {"train_loss_raw": 2.0, "probe_overhead_frac": 0.01, "step_time": 0.5}
    story.rows(*[usual] * 30)
    story.rows(usual | {metric: 2.0})
    assert story.state.machine == "suspect"
    assert not sampling_rate.needs_dense_sampling(story.policy, story.state)
    story.rows(usual | {metric: 2.0, "train_loss_raw": 6.0})
    assert sampling_rate.needs_dense_sampling(story.policy, story.state)
