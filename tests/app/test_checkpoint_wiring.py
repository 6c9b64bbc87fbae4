"""What the guard is told of the run."""

from operator import attrgetter
from types import SimpleNamespace

import pytest

from supervise.core import HELD, start_engine
from supervise.core.model import Frame, JobSettings, Notice, Policy
from supervise.runtime import forward_save, may_come_back


@pytest.mark.parametrize(
    ("code", "mode", "on_crash", "change", "comes_back"),
    [
        (-9, "enforce", "restart", {}, True),
        (1, "approve", "restart", {}, True),
        (0, "enforce", "restart", {}, False),
        (143, "enforce", "restart", {}, False),
        (75, "enforce", "restart", {}, False),
        (1, "observe", "restart", {}, False),
        (1, "enforce", None, {}, False),
        (1, "enforce", "restart", {"job.stopping": True}, False),
        (1, "enforce", "restart", {"job.end_requested": True}, False),
        (1, "enforce", "restart", {"step": 7, "job.restarts.crashes": [7]}, False),
        (1, "enforce", "restart", {"job.unavailable": {"relaunch": "nobody said how"}}, False),
        (1, "enforce", "restart", {"incident": SimpleNamespace(phase=HELD)}, False),
    ],
)
def test_nobody_waits_at_the_end_of_a_job_that_stays_ended(
    code, mode, on_crash, change, comes_back
):
    policy = Policy("p", "sha256:0", mode, {}, (), job=JobSettings(on_crash=on_crash))
    state = start_engine(policy)
    state.job.unavailable.clear()
    for path, value in change.items():
        part, _, name = path.rpartition(".")
        setattr(attrgetter(part)(state) if part else state, name, value)

    assert may_come_back(policy, state, code) is comes_back


def test_each_rank_counts_on_from_its_own_counters():
    """Rank 0 saves; rank 1 is in the next step already, 2 pads more, and 3 is read a step late."""
    names = ("step_time", "tokens_seen", "steps_seen")
    frames = [(1, 8, 90.0, 9.0), (2, 8, 88.0, 9.0), (1, 9, 100.0, 10.0), (2, 9, 98.0, 10.0)]
    frames += [(1, 10, 110.0, 11.0), (3, 8, 80.0, 9.0), (0, 8, 90.0, 9.0), (0, 9, 100.0, 10.0)]
    window = [(names, Frame(0, rank, 0, step, (0.1, *values))) for rank, step, *values in frames]
    own = {"tokens_seen": 100.0, "steps_seen": 10.0}
    notice = Notice(0, "checkpoint-saved", "", 0, 10, {"path": "/a.pt", "counters": own})
    saved = []

    forward_save(
        SimpleNamespace(on_save=saved.append),
        notice,
        Policy("p", "sha256:0", "enforce", {}, ()),
        window,
    )

    two, three = ({**own, "tokens_seen": count} for count in (98.0, 90.0))
    assert saved[0].data["counters"] == {"all": own, "2": two, "3": three}
    assert saved[0].data["values"] == {"step_time": 0.1, **own}
