"""What the first frame after an action must show."""

from __future__ import annotations

import pytest

from supervise.actions.lr_scale import LrScale
from supervise.actions.relaunch import Relaunch
from supervise.actions.rollback import Rollback
from supervise.core.model.effect_check import EffectCheck

ARGS = {"value": 0.5, "rewarm_steps": 0}


def shows(used: float | None, asked: float | None, args: dict = ARGS) -> str | None:
    frame = {"learning_rate": used, "learning_rate_scheduled": asked}
    return LrScale(set=0.5).effect(EffectCheck(args, {}, frame, 10, 0))


def test_a_rate_that_is_really_lower_is_believed():
    """Used over asked is the scale, whatever the schedule did meanwhile."""
    assert shows(0.5e-3, 1e-3) is None
    assert shows(0.4e-3, 0.8e-3) is None


def test_a_rate_that_is_not_lower_is_named():
    assert shows(1e-3, 1e-3) == "the learning rate is 1 of the job's own, not 0.5"


@pytest.mark.parametrize(("used", "seen"), [(0.5, True), (0.52, True), (0.7, False)])
def test_a_rewarm_may_have_begun(used, seen):
    """A few steps up its ramp it is still the action's effect; far up it is not."""
    assert (shows(used, 1.0, {"value": 0.5, "rewarm_steps": 100}) is None) == seen


def test_a_job_without_a_rate_is_not_judged():
    assert shows(None, None) is None


def test_a_rollback_shows_in_attempt_step_and_rate():
    """The frame is of the new attempt, behind the savepoint, at the start of the re-warm."""
    action = Rollback()
    args = {"before_step": 140, "rng": "keep", "rewarm": {"start": 0.1, "steps": 50}}
    result = {"step": 125, "attempt": 1}
    frame = {"learning_rate": 0.1, "learning_rate_scheduled": 1.0}

    assert action.effect(EffectCheck(args, result, frame, 126, 1)) is None
    assert "attempt 0" in action.effect(EffectCheck(args, result, frame, 153, 0))
    assert "not 0.1" in action.effect(
        EffectCheck(args, result, {**frame, "learning_rate": 1.0}, 126, 1)
    )


BACK = {"before_step": 140, "step": 125, "rng": "keep", "rewarm": {"start": 0.1, "steps": 50}}


def during(used: float, held: float, rewarm: float | None = None) -> dict[str, float | None]:
    """A frame whose rate is `used` of the job's own; what the probe says of it."""
    told = {} if rewarm is None else {"lr_rewarm": rewarm}
    scale = held * (1.0 if rewarm is None else rewarm)
    return {"learning_rate": used, "learning_rate_scheduled": 1.0, "lr_scale": scale, **told}


def goes_back(frame: dict[str, float | None]) -> set[str | None]:
    done = {"step": 125, "attempt": 1}
    return {
        Rollback().effect(EffectCheck(BACK, done, frame, 126, 1)),
        Relaunch().effect(EffectCheck(BACK, done, frame, 126, 1)),
    }


def test_a_scale_during_a_rewarm_is_judged_without_it():
    """Half of what the ramp leaves is half; all of what it leaves is not."""
    action = LrScale(set=0.5)

    assert action.effect(EffectCheck(ARGS, {}, during(0.122, 0.5, 0.244), 10, 0)) is None
    said = "the learning rate is 0.244 of the job's own, not 0.5 times 0.244"
    assert action.effect(EffectCheck(ARGS, {}, during(0.244, 1.0, 0.244), 10, 0)) == said
    assert action.effect(EffectCheck(ARGS, {}, during(0.06, 0.5, 0.244), 10, 0)) is not None


def test_a_rewarm_under_a_rate_that_is_held_is_judged_without_that():
    """A tenth of a quarter is a tenth; the quarter alone is no re-warm."""
    assert goes_back(during(0.025, 0.25, 0.1)) == {None}
    said = {"the learning rate is 0.25 of the job's own, not 0.1 times 0.25"}
    assert goes_back(during(0.25, 0.25)) == said
    assert goes_back(during(0.25, 0.25, 0.1)) == said
