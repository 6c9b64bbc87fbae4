"""Stop, skip_step, checkpoint, verify."""

from __future__ import annotations

import pytest

from supervise.actions.checkpoint import Checkpoint
from supervise.actions.skip_step import SkipStep
from supervise.actions.stop import Stop
from supervise.actions.verify import Verify
from supervise.errors import ActionError


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
