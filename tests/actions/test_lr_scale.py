"""Learning-rate scale."""

from __future__ import annotations

import pytest

from supervise.actions.lr_scale import LrScale
from supervise.errors import ActionError


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
