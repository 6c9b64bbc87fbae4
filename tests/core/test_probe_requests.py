"""What the engine asks of the probes: savepoints to keep, and denser samples."""

from __future__ import annotations

import pytest

from supervise.actions import Rollback
from supervise.core import needs_dense_sampling, retain_before
from supervise.core.model import Approval, Budget, Exited, Notice

from .conftest import Verify, above, rule_on, runbook_of

BREACH = 50


@pytest.fixture
def spared(tell, make_policy):
    """Start a run that goes back on its second level; `spared(story)` is what is spared by now."""

    def begin(**changes):
        books = {
            **make_policy().runbooks,
            "back": runbook_of("back", Rollback(at_least=10), Verify()),
        }
        budgets = {"all": Budget(9), "rollback": Budget(9), "touch": Budget(9)}
        story = tell(**({"runbooks": books, "budgets": budgets} | changes))
        story.frames(2.0, times=BREACH)
        return story

    begin.now = lambda story: retain_before(story.policy, story.state)
    return begin


def test_while_a_request_waits_and_until_it_is_over(spared):
    story = spared(mode="approve", approvals={"all": Approval(900.0)})
    assert spared.now(story) == 0
    story.frames(60.0)
    assert story.kinds("approval_requested")[0].data["args"][0]["args"]["before_step"] == 40
    assert spared.now(story) == 40
    story.frames(60.0, times=200)
    assert spared.now(story) == 40
    story.say("deny", id="ask-1")
    assert (story.state.machine, spared.now(story)) == ("holding", 40)
    story.say("release")
    assert (story.state.incident, spared.now(story)) == (None, 0)


def test_while_a_milder_rung_is_verified_and_on_probation(spared):
    story = spared()
    story.frames(8.0)
    assert story.actions() == ["inc-1/1/0-reach"]
    assert spared.now(story) == 40
    story.frames(2.0, times=6)
    assert (story.state.machine, spared.now(story)) == ("probation", 40)
    story.frames(2.0, times=60)
    assert (story.state.machine, spared.now(story)) == ("nominal", 0)


@pytest.mark.parametrize(
    "event",
    [
        Notice(60, "rollback-unavailable", "no rollback is possible: a `for` loop"),
        Exited(60, 1),
    ],
)
def test_where_nothing_can_go_back_nothing_is_spared(spared, event):
    story = spared(mode="approve")
    story.frames(60.0)
    assert spared.now(story) == 40
    story.send(event)
    assert spared.now(story) == 0


def test_only_for_what_may_act(spared):
    story = spared()
    story.frames(2.0, grad=20.0)
    assert story.state.incident is not None
    assert spared.now(story) == 0
    story.frames(8.0, grad=20.0)
    assert spared.now(story) == story.step - 10

    story = spared(mode="shadow")
    story.frames(8.0)
    assert story.state.incident is not None
    assert spared.now(story) == 0


SAMPLED = ("train_loss_raw", "probe_overhead_frac", "step_time")


@pytest.fixture
def story(tell):
    """A run with rules on the loss, the cost of the probe and the step time; none of them acts."""
    detectors = {
        "high": above(SAMPLED[0], 5.0),
        "costly": above(SAMPLED[1], 0.02),
        "slow": above(SAMPLED[2], 1.0),
    }
    rules = tuple(rule_on(detectors, name, "SEV2") for name in detectors)
    return tell(detectors=detectors, rules=rules, names=SAMPLED)


def test_denser_while_an_incident_is_open(story):
    story.frames(2.0, times=30, grad=0.01)
    assert not needs_dense_sampling(story.policy, story.state)
    story.frames(6.0, grad=0.01)
    assert story.state.machine == "suspect"
    assert needs_dense_sampling(story.policy, story.state)


@pytest.mark.parametrize("metric", SAMPLED[1:])
def test_not_for_what_denser_samples_make_worse(story, metric):
    usual = {"train_loss_raw": 2.0, "probe_overhead_frac": 0.01, "step_time": 0.5}
    story.rows(*[usual] * 30)
    story.rows(*[usual | {metric: 2.0}] * 4)  # as long as slow steps must last
    assert story.state.machine == "suspect"
    assert not needs_dense_sampling(story.policy, story.state)
    story.rows(usual | {metric: 2.0, "train_loss_raw": 6.0})
    assert needs_dense_sampling(story.policy, story.state)
