"""Pause and resume."""

from __future__ import annotations

import pytest

from supervise.actions.pause import Pause
from supervise.actions.resume import Resume


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
