"""What the first frame after an action must show."""

from __future__ import annotations

import pytest

from supervise.actions.lr_scale import LrScale
from supervise.actions.rollback import Rollback

ARGS = {"value": 0.5, "rewarm_steps": 0}


def shows(used: float | None, asked: float | None, args: dict = ARGS) -> str | None:
    frame = {"learning_rate": used, "learning_rate_scheduled": asked}
    return LrScale(set=0.5).effect(args, {}, frame, 10, 0)


def test_a_rate_that_is_really_lower_is_believed():
    """Used over asked is the scale, whatever the schedule did meanwhile."""
    assert shows(0.5e-3, 1e-3) is None
    assert shows(0.4e-3, 0.8e-3) is None


def test_a_rate_that_is_not_lower_is_named():
    """The sentence has both numbers."""
    assert shows(1e-3, 1e-3) == "the learning rate is 1 of the job's own, not 0.5"


@pytest.mark.parametrize(("used", "seen"), [(0.5, True), (0.52, True), (0.7, False)])
def test_a_rewarm_may_have_begun(used, seen):
    """A few steps up its ramp it is still the action's effect; far up it is not."""
    assert (shows(used, 1.0, {"value": 0.5, "rewarm_steps": 100}) is None) == seen


def test_a_job_without_a_rate_is_not_judged():
    """Absent is not a contradiction."""
    assert shows(None, None) is None


def test_a_rollback_shows_in_attempt_step_and_rate():
    """The frame is of the new attempt, behind the savepoint, at the start of the re-warm."""
    action = Rollback()
    args = {"before_step": 140, "rng": "keep", "rewarm": {"start": 0.1, "steps": 50}}
    result = {"step": 125, "attempt": 1}
    frame = {"learning_rate": 0.1, "learning_rate_scheduled": 1.0}

    assert action.effect(args, result, frame, 126, 1) is None
    assert "attempt 0" in action.effect(args, result, frame, 153, 0)
    assert "not 0.1" in action.effect(args, result, {**frame, "learning_rate": 1.0}, 126, 1)
