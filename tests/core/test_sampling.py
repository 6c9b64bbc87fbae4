"""When the probes are asked for denser samples."""

from __future__ import annotations

import pytest

from supervise.core.incidents import sampling_rate

from .conftest import Above, rule_on

NAMES = ("train_loss_raw", "probe_overhead_frac")


@pytest.fixture
def story(tell):
    """A run with one rule on the loss and one on what the probe costs, neither of which acts."""
    detectors = {"high": Above(NAMES[0], 5.0), "costly": Above(NAMES[1], 0.02)}
    rules = tuple(rule_on(detectors, name, "SEV2") for name in detectors)
    return tell(detectors=detectors, rules=rules, names=NAMES)


def test_denser_while_an_incident_is_open(story):
    story.frames(2.0, times=30, grad=0.01)
    assert not sampling_rate.needs_dense_sampling(story.policy, story.state)
    story.frames(6.0, grad=0.01)
    assert story.state.machine == "suspect"
    assert sampling_rate.needs_dense_sampling(story.policy, story.state)


def test_not_for_what_the_watching_itself_costs(story):
    story.frames(2.0, times=30, grad=0.01)
    story.frames(2.0, grad=0.03)
    assert story.state.machine == "suspect"
    assert not sampling_rate.needs_dense_sampling(story.policy, story.state)
    story.frames(6.0, grad=0.03)
    assert sampling_rate.needs_dense_sampling(story.policy, story.state)
