"""Rollback."""

from __future__ import annotations

import pytest

from supervise.actions.rollback import Around, Rollback
from supervise.core.model.action import Refused
from supervise.errors import ActionError


def test_it_aims_before_the_cause_not_before_the_alarm(context):
    """First breach at 150, seen at 153, 10 steps of margin: a savepoint before 140."""
    assert Rollback().plan(context()) == {
        "before_step": 140,
        "rng": "restore",
        "rewarm": {"start": 0.1, "steps": 50},
    }


def test_without_rewarm_the_learning_rate_is_left_alone(context):
    """`rewarm: 0` is none, not one that ends at once."""
    assert Rollback(rewarm=0, rng="keep").plan(context())["rewarm"] is None


def test_when_nothing_can_be_old_enough_it_is_refused(context):
    """Trouble at step 10 with a margin of 10: there is no step before step 0."""
    with pytest.raises(Refused, match="started at step 10, so no savepoint can be 10 steps older"):
        Rollback().plan(context(breach_step=10))

    assert Rollback().plan(context(breach_step=11))["before_step"] == 1


def test_the_offending_batches_are_absolute_steps(context):
    """Five before the first breach, two behind it, and that one; never before the first step."""
    action = Rollback(skip=Around(before=5, after=2), moments="zero")

    assert action.plan(context())["skip"] == [145, 152]
    assert action.plan(context())["moments"] == "zero"
    assert Rollback(at_least=0, skip=Around()).plan(context(breach_step=3))["skip"] == [0, 3]


@pytest.mark.parametrize("step", [140, 153, None])
def test_a_job_that_is_not_back_far_enough_is_a_failure(step, context, fake_job):
    action = Rollback()
    job = fake_job({"step": step, "attempt": 1})

    with pytest.raises(ActionError, match=f"at step {step} after a rollback to before step 140"):
        action.perform(job, action.plan(context()), key="k")


def test_values_that_cannot_work_are_named():
    wrong = Rollback(at_least=-1, start=0.0, rewarm=-5)

    assert [field for field, _ in wrong.check()] == ["at_least", "start", "rewarm"]

    unskippable = Rollback(rng="keep", skip=Around(before=-1))
    assert [field for field, _ in unskippable.check()] == ["skip", "skip"]
