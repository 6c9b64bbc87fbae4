"""Pause, learning rate, clip, stop and the other actions, each by what only it promises."""

from __future__ import annotations

import pytest

from supervise.actions.checkpoint import Checkpoint
from supervise.actions.clip import Clip
from supervise.actions.loss_scale import LossScale
from supervise.actions.lr_scale import LrScale
from supervise.actions.pause import Pause
from supervise.actions.profile import Profile
from supervise.actions.raise_sampling import RaiseSampling
from supervise.actions.resume import Resume
from supervise.actions.skip_step import SkipStep
from supervise.actions.stop import Stop
from supervise.actions.update_clip import UpdateClip
from supervise.actions.verify import Verify
from supervise.core.model.action import EffectCheck
from supervise.errors import ActionError


def test_the_lease_goes_to_the_probe_in_seconds(context, fake_job):
    job = fake_job({"paused_step": 153})
    action = Pause(lease=60.0)

    action.perform(job, action.plan(context()), key="k")

    assert job.calls == [("pause", {"lease_s": 60.0}, "k")]


def test_resume_takes_it_back():
    assert Pause().undo() == Resume()
    assert Resume().undo() is None


@pytest.mark.parametrize("lease", [0.0, -1.0, 9.0, 1e6, float("nan")])
def test_a_lease_must_be_bounded(lease):
    assert [field for field, _ in Pause(lease=lease).check()] == ["lease"]


def test_the_target_is_absolute(context, fake_job):
    """Asked twice for 0.5 it is 0.5."""
    job = fake_job({"lr_scale": 0.5})
    action = LrScale(set=0.5, rewarm=200)

    for key in ("a", "b"):
        action.perform(job, action.plan(context()), key=key)

    assert [args for _, args, _ in job.calls] == [{"value": 0.5, "rewarm_steps": 200}] * 2


@pytest.mark.parametrize("seen", [1.0, 0.25, None, "0.5"])
def test_another_scale_than_asked_for_is_a_failure(seen, context, fake_job):
    action = LrScale(set=0.5)

    with pytest.raises(ActionError, match=r"asked for a learning rate scale of 0.5, the job has"):
        action.perform(fake_job({"lr_scale": seen}), action.plan(context()), key="k")


def test_undo_is_the_jobs_own_rate():
    assert LrScale(set=0.5, rewarm=9).undo() == LrScale(set=1.0)
    assert LrScale(set=1.0).undo() is None


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_it_only_ever_lowers(scale):
    """A watchdog has no business raising a learning rate, nor freezing a run at 0."""
    assert [field for field, _ in LrScale(set=scale).check()] == ["set"]
    assert [field for field, _ in LrScale(set=0.5, rewarm=-1).check()] == ["rewarm"]


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


@pytest.mark.parametrize(("requeue", "code"), [(False, 78), (True, 75)])
def test_stop_tells_the_scheduler_whether_to_run_it_again(requeue, code, context, fake_job):
    """78: a person is needed; 75: running it again is safe."""
    job = fake_job({"how": "term", "returncode": -15, "survivors": []})
    action = Stop(grace=5.0, term=6.0, requeue=requeue)

    action.perform(job, action.plan(context()), key="k")

    assert job.calls == [("stop", 5.0, 6.0, code)]


def test_a_process_that_outlives_kill_is_a_failure(context, fake_job):
    job = fake_job({"how": "kill", "returncode": -9, "survivors": [77]})

    with pytest.raises(ActionError, match="still alive after KILL"):
        Stop().perform(job, Stop().plan(context()), key="k")


def test_the_longest_stop_fits_into_its_deadline():
    """What `check` allows, the performer waits for."""
    longest = Stop(grace=300.0, term=300.0)

    assert longest.check() == []
    assert longest.grace + longest.term + 30 <= longest.deadline_s
    assert [field for field, _ in Stop(grace=301.0, term=-1.0).check()] == ["grace", "term"]


def test_skip_counts_are_bounded(context, fake_job):
    assert [SkipStep(count=count).check() == [] for count in (0, 1, 3, 4)] == [
        False,
        True,
        True,
        False,
    ]
    assert SkipStep(count=300, most=300).check() == []
    assert [field for field, _ in SkipStep(count=1001, most=1001).check()] == ["most"]
    with pytest.raises(ActionError, match="asked to skip 2 steps"):
        SkipStep(count=2).perform(fake_job({"will_skip": 1}), {"count": 2}, key="k")


def test_a_checkpoint_is_ordered_where_the_job_keeps_its_own(context, fake_job):
    """On any number of ranks: the state is not changed. An answer without a step is no order."""
    job = fake_job({"path": "/o/ckpt.supervise-154.pt", "step": 154, "how": "on-demand"})
    action = Checkpoint()
    args = action.plan(context(world_size=8))

    assert action.perform(job, args, key="k")["step"] == 154
    assert job.calls == [("checkpoint", {"path": None}, "k")]
    assert not action.destructive and action.touches_job and action.budget is None
    with pytest.raises(ActionError, match="scheduled no checkpoint"):
        action.perform(fake_job({"path": "x"}), args, key="k")


def test_verify_must_be_able_to_come_true():
    """20 clear steps do not fit into 10."""
    assert [field for field, _ in Verify(within=10, clear_for=20).check()] == ["within"]
    assert [field for field, _ in Verify(clear_for=0).check()] == ["clear_for"]


@pytest.mark.parametrize("works", [{"cpu_s": 5.0, "bytes": 0}, {"cpu_s": 0.0, "bytes": 10**8}])
def test_a_job_that_works_is_not_stopped(works, context, fake_job):
    """No steps, but CPU or data moves: an upload after the last step. Refused before any harm."""
    stop = Stop(if_idle=10.0)
    job = fake_job(works=works)

    with pytest.raises(ActionError, match="makes no steps but works"):
        stop.perform(job, stop.plan(context()), key="k")
    assert job.calls == [("work", 10.0)]


def test_a_job_that_waits_is_stopped(context, fake_job):
    stop = Stop(if_idle=10.0)
    job = fake_job({"how": "term", "returncode": -15, "survivors": []})

    stop.perform(job, stop.plan(context()), key="k")
    assert [call[0] for call in job.calls] == ["work", "stop"]
