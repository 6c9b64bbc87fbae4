"""Relaunch."""

from __future__ import annotations

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.core.model.action import Refused
from supervise.core.model.effect_check import EffectCheck
from supervise.errors import ActionError

ANSWER = {"pid": 9, "attempt": 1, "checkpoint": "ckpt-2", "how": "term", "moved": []}


def test_it_aims_at_the_newest_good_checkpoint_before_the_cause(context):
    """First breach at 150 with a margin of 10: the one of step 119, in the next attempt."""
    assert Relaunch().plan(context()) == {
        "checkpoint": "ckpt-2",
        "path": "/c/119.pt",
        "step": 119,
        "bytes": 8_000_000_000,
        "attempt": 1,
        "rewarm": {"start": 0.1, "steps": 50},
        "skip": None,
    }
    assert Relaunch(at_least=40).plan(context())["checkpoint"] == "ckpt-1"
    assert Relaunch(rewarm=0).plan(context(attempt=4))["rewarm"] is None
    assert Relaunch().plan(context(attempt=4))["attempt"] == 5


def test_a_large_checkpoint_gets_its_time(context, fake_job):
    """8 GB at 20 MB a second, beside what a start takes."""
    action, job = Relaunch(), fake_job(ANSWER)
    args = action.plan(context())

    action.perform(job, args, key="k")

    assert action.limit_s(args) == 600.0 + 400.0
    assert job.calls[-1][-1] == 1000.0


@pytest.mark.parametrize(("skip", "steps"), [(5, [146, 150]), (1, [150, 150]), (900, [120, 150])])
def test_what_is_skipped_ends_with_the_first_breach(skip, steps, context):
    assert Relaunch(skip=skip).plan(context())["skip"] == [steps]


def test_without_a_checkpoint_that_is_old_enough_it_is_refused(context):
    said = "started at step 80, and no good checkpoint is 10 steps older \\(2 good in all\\)"
    with pytest.raises(Refused, match=said):
        Relaunch().plan(context(breach_step=80))


def test_a_job_that_cannot_write_savepoints_for_another_process_says_why(context):
    """Then that is why there is nothing to go back to; what was written before still counts."""
    why = "the loop is a `for`"
    with pytest.raises(Refused, match="2 good in all\\); the loop is a `for`"):
        Relaunch().plan(context(breach_step=80, unavailable={"portable": why}))
    assert Relaunch().plan(context(unavailable={"portable": why}))["checkpoint"] == "ckpt-2"


def test_without_words_in_the_policy_it_is_refused(context):
    with pytest.raises(Refused, match="does not say how"):
        Relaunch().plan(context(unavailable={"relaunch": "the policy does not say how"}))


def test_another_attempt_than_the_one_asked_for_is_a_failure(context, fake_job):
    action = Relaunch()

    with pytest.raises(ActionError, match="was not restarted"):
        action.perform(fake_job({**ANSWER, "attempt": 2}), action.plan(context()), key="k")


@pytest.mark.parametrize(
    ("step", "attempt", "ratio", "missing"),
    [
        (120, 1, 0.1, None),
        (121, 1, 0.118, None),
        (120, 0, 0.1, "the job is at step 120 of attempt 0, not at step 120"),
        (0, 1, 0.1, "the job is at step 0 of attempt 1, not at step 120"),
        (125, 1, 0.1, "the job is at step 125 of attempt 1, not at step 120"),
        (120, 1, 1.0, "the learning rate is 1 of the job's own, not 0.1"),
    ],
)
def test_its_effect_is_the_first_frame_of_the_new_attempt(step, attempt, ratio, missing, context):
    action = Relaunch()
    frame = {"learning_rate": 1e-3 * ratio, "learning_rate_scheduled": 1e-3}

    check = EffectCheck(action.plan(context()), ANSWER, frame, step, attempt)
    assert action.effect(check) == missing


def test_values_that_cannot_work_are_named():
    wrong = Relaunch(at_least=-1, start=1.5, rewarm=-5, skip=-1)

    assert [field for field, _ in wrong.check()] == ["at_least", "rewarm", "skip", "start"]
