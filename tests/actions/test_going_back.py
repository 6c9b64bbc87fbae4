"""Rollback and relaunch, and what the first frame after an action must show."""

from __future__ import annotations

import pytest

from supervise.actions import LrScale, Relaunch, Rollback
from supervise.core.model import WEIGHTS_ONLY, Checkpoint, EffectCheck, Payload, Refused
from supervise.errors import ActionError


def check(args, result, *rest):
    return EffectCheck(Payload(args), Payload(result), *rest)


def test_a_rollback_aims_before_the_cause_not_before_the_alarm(context):
    """First breach at 150, seen at 153, 10 steps of margin: a savepoint before 140."""
    assert Rollback().plan(context()) == {"before_step": 140, "rewarm": {"start": 0.1, "steps": 50}}
    assert Rollback(rewarm=0).plan(context())["rewarm"] is None, "none, not one that ends at once"
    assert Rollback(moments="zero").plan(context())["moments"] == "zero"


@pytest.mark.parametrize(
    ("action", "changes", "why"),
    [
        (Rollback(), {"breach_step": 10}, "started at step 10, so no savepoint can be 10"),
        (Relaunch(), {"breach_step": 80}, r"no good checkpoint from before step 70 \(2 good"),
        (Relaunch(), {"unavailable": {"relaunch": "the policy does not say how"}}, "not say how"),
    ],
)
def test_where_nothing_is_old_enough_or_no_way_is_known_it_is_refused(
    context, action, changes, why
):
    with pytest.raises(Refused, match=why):
        action.plan(context(**changes))


def test_weights_from_before_suspect_moments_need_be_older_than_the_first_breach_only(
    context, fake_job
):
    """Where the probe says that it kept such, as at step 149 here; else the margin counts."""
    action = Rollback(moments="suspect")
    args = action.plan(context())
    assert (args["before_step"], args["sign"], "moments" in args) == (140, 150, False)
    assert "sound" not in args
    assert action.plan(context(sound=True))["sound"]
    kept = {"step": 149, "attempt": 1, "older_moments": True}

    assert action.perform(fake_job(kept), args, key="k") == kept
    with pytest.raises(ActionError, match="at step 149 after a rollback to before step 140"):
        action.perform(fake_job({"step": 149, "attempt": 1}), args, key="k")


ANSWER = {"pid": 9, "attempt": 1, "checkpoint": "ckpt-2", "how": "term", "moved": []}


def test_a_relaunch_aims_at_the_newest_good_checkpoint_before_the_cause(context, fake_job):
    """First breach at 150 with a margin of 10: the one of step 119, in the next attempt. Its 8 GB
    get 400 s, at 20 MB a second, beside what a start takes."""
    action, job = Relaunch(), fake_job(ANSWER)
    args = action.plan(context())
    action.perform(job, args, key="k")

    assert args == {
        "checkpoint": "ckpt-2",
        "path": "/c/119.pt",
        "step": 119,
        "bytes": 8_000_000_000,
        "attempt": 1,
        "rewarm": {"start": 0.1, "steps": 50},
        "skip": None,
    }
    assert job.calls == [("relaunch", args, "k", 600.0 + 400.0)]
    older = Relaunch(at_least=40, rewarm=0).plan(context(attempt=4))
    assert (older["checkpoint"], older["rewarm"], older["attempt"]) == ("ckpt-1", None, 5)


@pytest.mark.parametrize(("skip", "steps"), [(5, [146, 150]), (1, [150, 150]), (900, [120, 150])])
def test_what_is_skipped_ends_with_the_first_breach(skip, steps, context):
    assert Relaunch(skip=skip).plan(context())["skip"] == [steps]


def test_weights_alone_are_no_exact_continuation(context):
    """They are taken otherwise, and people are told."""
    weights = Checkpoint("w", 99, 0, "/c/w.pt", ok=True, resumable=WEIGHTS_ONLY)
    with pytest.raises(Refused, match="w holds weights only, so training cannot go on exactly"):
        Relaunch(continuity="exact").plan(context(good=(weights,)))
    assert Relaunch().plan(context(good=(weights,)))["resumable"] == WEIGHTS_ONLY


@pytest.mark.parametrize(
    ("step", "attempt", "ratio", "missing"),
    [
        (121, 1, 0.118, None),
        (120, 0, 0.1, "the job is at step 120 of attempt 0, not at step 120"),
        (0, 1, 0.1, "the job is at step 0 of attempt 1, not at step 120"),
        (125, 1, 0.1, "the job is at step 125 of attempt 1, not at step 120"),
        (120, 1, 1.0, "the learning rate is 1 of the job's own, not 0.1"),
    ],
)
def test_a_relaunch_shows_in_the_first_frame_of_the_new_attempt(
    step, attempt, ratio, missing, context
):
    action = Relaunch()
    frame = {"learning_rate": 1e-3 * ratio, "learning_rate_scheduled": 1e-3}

    effect = check(action.plan(context()), ANSWER, frame, step, attempt)
    assert action.explain_missing_effect(effect) == missing


BACK = {"before_step": 140, "step": 125, "rewarm": {"start": 0.1, "steps": 50}}
DONE = {"step": 125, "attempt": 1}


def test_a_rollback_shows_in_attempt_step_and_rate():
    """The frame is of the new attempt, behind the savepoint, at the start of the re-warm."""
    frame = {"learning_rate": 0.1, "learning_rate_scheduled": 1.0}

    assert Rollback().explain_missing_effect(check(BACK, DONE, frame, 126, 1)) is None
    assert "attempt 0" in Rollback().explain_missing_effect(check(BACK, DONE, frame, 153, 0))
    frame["learning_rate"] = 1.0
    assert "not 0.1" in Rollback().explain_missing_effect(check(BACK, DONE, frame, 126, 1))


def frame_of(used, scheduled=1.0, held=1.0, rewarm=None):
    """A frame with these rates, and what the probe holds and warms up again."""
    warming = {} if rewarm is None else {"lr_rewarm": rewarm}
    scale = held * (1.0 if rewarm is None else rewarm)
    return {
        "learning_rate": used,
        "learning_rate_scheduled": scheduled,
        "lr_scale": scale,
    } | warming


@pytest.mark.parametrize(
    ("frame", "rewarm", "missing"),
    [
        # Used over scheduled is the scale, whatever the schedule did meanwhile.
        (frame_of(0.4e-3, 0.8e-3), 0, None),
        (frame_of(1e-3, 1e-3), 0, "the learning rate is 1 of the job's own, not 0.5"),
        # A few steps up its ramp it is still the action's effect; far up it is not.
        (frame_of(0.52), 100, None),
        (frame_of(0.7), 100, "the learning rate is 0.7 of the job's own, not 0.5"),
        (frame_of(None, None), 0, None),
        # During a re-warm, half of what the ramp leaves is half; all of what it leaves is not.
        (frame_of(0.122, held=0.5, rewarm=0.244), 0, None),
        (
            frame_of(0.244, rewarm=0.244),
            0,
            "the learning rate is 0.244 of the job's own, not 0.5 times 0.244",
        ),
    ],
)
def test_a_scale_shows_in_the_rate_that_is_used(frame, rewarm, missing):
    args = {"value": 0.5, "rewarm_steps": rewarm}
    assert LrScale(set=0.5).explain_missing_effect(check(args, {}, frame, 10, 0)) == missing


@pytest.mark.parametrize("action", [Rollback(), Relaunch()], ids=["rollback", "relaunch"])
def test_a_rewarm_under_a_rate_that_is_held_is_judged_without_that(action):
    def effect(**rates):
        return action.explain_missing_effect(check(BACK, DONE, frame_of(**rates), 126, 1))

    missing = "the learning rate is 0.25 of the job's own, not 0.1 times 0.25"
    assert effect(used=0.025, held=0.25, rewarm=0.1) is None
    assert effect(used=0.25, held=0.25) == missing
    assert effect(used=0.25, held=0.25, rewarm=0.1) == missing
