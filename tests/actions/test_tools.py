"""The milder tools: clip, update_clip, loss_scale, raise_sampling, profile."""

from __future__ import annotations

import pytest

from supervise.actions.clip import Clip
from supervise.actions.loss_scale import LossScale
from supervise.actions.profile import Profile
from supervise.actions.raise_sampling import RaiseSampling
from supervise.actions.update_clip import UpdateClip
from supervise.core.model.effect_check import EffectCheck
from supervise.errors import ActionError


def wrong(action) -> list[str]:
    return [field for field, _ in action.check()]


def test_a_clip_is_one_of_three_things():
    assert wrong(Clip()) == wrong(Clip(max_norm=1.0, factor=0.3)) == ["max_norm"]
    assert wrong(Clip(max_norm=1.0, lift=True)) == ["max_norm"]
    assert wrong(Clip(max_norm=0.0, for_=-1)) == ["max_norm", "for"]
    assert wrong(Clip(factor=1.5)) == ["factor"]
    assert wrong(Clip(max_norm=0.5)) == wrong(Clip(factor=0.3, for_=0)) == wrong(Clip(lift=True))


@pytest.mark.parametrize("seen", [0.6, None, "0.5", float("inf")])
def test_another_bound_than_asked_for_is_a_failure(seen, context, fake_job):
    action = Clip(max_norm=0.5)

    with pytest.raises(ActionError):
        action.perform(fake_job({"clip_bound": seen}), action.plan(context()), key="k")


def test_a_factor_is_resolved_by_the_job_and_seen_in_the_frame(context, fake_job):
    """The supervisor does not know the job's own clip; the answer is the absolute bound."""
    action = Clip(factor=0.3)
    args = action.plan(context())
    seen = action.perform(fake_job({"clip_bound": 0.15}), args, key="k")

    assert args == {"max_norm": None, "factor": 0.3, "steps": 500}
    assert action.effect(EffectCheck(args, seen, {"clip_bound": 0.15}, 9, 0)) is None
    assert action.effect(EffectCheck(args, seen, {}, 9, 0)) is None
    assert action.effect(EffectCheck(args, seen, {"clip_bound": 0.5}, 9, 0)) == (
        "the gradient norm is clipped to 0.5, not 0.15"
    )


def test_a_lift_must_have_lifted(context, fake_job):
    action = Clip(lift=True)
    args = action.plan(context())

    with pytest.raises(ActionError, match="to be lifted, and the job has"):
        action.perform(fake_job({"clip_bound": 0.5}), args, key="k")
    seen = action.perform(fake_job({"clip_bound": None}), args, key="k")
    assert action.effect(EffectCheck(args, seen, {"clip_bound": None}, 9, 0)) is None
    assert "not left alone" in action.effect(EffectCheck(args, seen, {"clip_bound": 0.5}, 9, 0))


@pytest.mark.parametrize("action", [Clip(factor=0.3), UpdateClip(), RaiseSampling()])
def test_undo_lifts_it_and_that_is_the_end_of_it(action, context):
    lifted = action.undo()

    assert lifted == type(action)(lift=True) and lifted.check() == []
    assert lifted.plan(context()) == {"lift": True}
    assert lifted.undo() is None


def test_what_ends_by_itself_has_no_undo():
    assert LossScale().undo() is None
    assert Profile().undo() is None


def test_an_update_clip_answers_with_its_rule(context, fake_job):
    """Another rule than asked for is a failure, and so is one that was not lifted."""
    action, rule = UpdateClip(sigma=3.0), {"window": 128, "sigma": 3.0}

    assert action.perform(fake_job({"update_clip": rule}), action.plan(context()), key="k")
    for answer in ({"update_clip": None}, {"update_clip": {**rule, "sigma": 2.0}}):
        with pytest.raises(ActionError, match="asked for an update clip of"):
            action.perform(fake_job(answer), action.plan(context()), key="k")
    with pytest.raises(ActionError):
        UpdateClip(lift=True).perform(fake_job({"update_clip": rule}), {"lift": True}, key="k")
    bad = UpdateClip(sigma=-1.0, window=1, for_=-1, max_gb=0.0)
    assert wrong(bad) == ["sigma", "window", "for", "max_gb"]


def test_the_scale_may_have_been_halved_once(context, fake_job):
    """The step before the reset may have overflowed, and the scaler looks at it afterwards."""
    action = LossScale(set=1024.0)
    args = action.plan(context())
    seen = action.perform(fake_job({"loss_scale": 1024.0, "backoff": 0.5}), args, key="k")

    shows = [
        action.effect(EffectCheck(args, seen, {"loss_scale": x}, 9, 0))
        for x in (1024.0, 512.0, 65536.0)
    ]
    assert shows == [None, None, "the loss scale is 65536, not 1024"]
    assert LossScale().plan(context()) == {"scale": None}
    assert wrong(LossScale(set=0.0)) == wrong(LossScale(set=1e9)) == ["set"]
    with pytest.raises(ActionError, match="asked for a loss scale of 1024"):
        action.perform(fake_job({"loss_scale": 64.0}), args, key="k")


def test_looking_more_closely_is_bounded(context):
    assert RaiseSampling(sets=("weights",)).plan(context()) == {
        "every": 5,
        "steps": 200,
        "sets": ["weights"],
    }
    assert wrong(RaiseSampling(every=0, for_=0)) == ["every", "for"]
    assert Profile(steps=3).plan(context()) == {"incident": "inc-1", "steps": 3}
    assert wrong(Profile(steps=0)) == wrong(Profile(steps=21)) == ["steps"]
