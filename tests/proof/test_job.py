"""The job that is not there answers as a healthy one would."""

from __future__ import annotations

import pytest

from supervise.catalog import action_classes
from supervise.core.model import Checkpoint, PlanContext, Savepoints
from supervise.errors import ActionError
from supervise.lab import FakeJob

GOOD = Checkpoint("ckpt-1", 40, 0, "/c/40.pt", True)
AIM = PlanContext(
    "inc-1",
    step=60,
    breach_step=58,
    attempt=0,
    world_size=1,
    severity="SEV0",
    good=(GOOD,),
    suspects=("a.tar",),
    shards=100,
)
NEEDS = {"lr_scale": {"set": 0.5}, "clip": {"factor": 0.3}}  # actions with keys that must be given


@pytest.fixture
def job() -> FakeJob:
    found = FakeJob(Savepoints(every=10, keep=3), 1)
    for _ in range(61):
        found.finish_step()
    return found


@pytest.mark.parametrize("verb", [v for v, a in action_classes().items() if not a.engine_step])
def test_every_action_is_content_with_it(verb: str, job: FakeJob) -> None:
    """Their own `perform` judges the answer; a new action must be known here."""
    action = action_classes()[verb](**NEEDS.get(verb, {}))

    assert action.perform(job, action.plan(AIM), key="k")


def test_a_rollback_goes_to_the_newest_savepoint_that_is_old_enough(job: FakeJob) -> None:
    assert list(job.kept) == [40, 50, 60]
    args = {"before_step": 55, "rewarm": {"start": 0.1, "steps": 10}}

    assert job.command("rollback", args, key="k", deadline_s=1)["step"] == 50
    assert (job.next_step, job.attempt, list(job.kept)) == (61, 1, [40, 50])
    assert job.lr_factor() == pytest.approx(0.1)
    for _ in range(5):
        job.finish_step()
    assert job.lr_factor() == pytest.approx(0.55)
    for _ in range(5):
        job.finish_step()
    assert job.lr_factor() == 1.0
    with pytest.raises(ActionError, match="no savepoint before step 40"):
        job.command("rollback", {"before_step": 40}, key="k", deadline_s=1)


def test_a_pause_has_a_lease_and_a_skip_has_an_end(job: FakeJob) -> None:
    job.now_ns = 7
    job.command("pause", {"lease_s": 2.0}, key="k", deadline_s=1)
    assert job.paused_until == 2_000_000_007
    job.command("resume", {}, key="k", deadline_s=1)
    assert job.paused_until is None

    job.command("skip_step", {"count": 2}, key="k", deadline_s=1)
    left = []
    for _ in range(3):
        left.append(job.skipping)
        job.finish_step()
    assert left == [2, 1, 0]
