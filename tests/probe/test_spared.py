"""One savepoint is spared: all others give way before it, within the same memory and disk."""

import pytest

from .test_savepoints import back, restored
from .test_spill import taken

pytestmark = pytest.mark.slow

JOB = ("module_loop.py", "adamw")  # 30 steps


def whole(jobs):
    """Bytes of one savepoint of that job."""
    return taken(jobs.run(*JOB, every=5)[1])[-1]["bytes"]


def busy(events):
    return [event["busy"] for event in events if "busy" in event]


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_the_newest_before_the_step_outlives_newer_ones(jobs, limit):
    """Room for three. A rollback goes to it at the end, and that is exact; without it there is
    nothing so old any more."""
    one = whole(jobs)
    room = {"keep": {"keep": 3}, "max_bytes": {"keep": 9, "max_bytes": 3 * one}}[limit]
    plan = {"every": 5, **room, "rollbacks": [back(28, 9)]}
    result, events = jobs.run(*JOB, **plan, spare={"7": 9})

    assert [r["step"] for r in restored(events)] == [5]
    assert result == jobs.untouched(*JOB)
    assert max(event["held"] for event in taken(events)) == 3 * one
    assert busy(events) == []
    assert events[-1]["end"] == [5, 20, 25]
    assert restored(jobs.run(*JOB, **plan)[1]) == []


def test_what_is_no_longer_spared_gives_way_as_the_others_do(jobs):
    """The wish ended at step 18; the next savepoint takes the room of the oldest."""
    events = jobs.run(*JOB, every=5, keep=3, spare={"7": 9, "18": 0})[1]
    assert events[-1]["end"] == [15, 20, 25]


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_where_only_one_fits_the_spared_one_stays_and_no_other_is_taken(jobs, limit):
    """It is said why; when nothing is spared any more, they are taken again."""
    one = whole(jobs)
    room = {"keep": {"keep": 1}, "max_bytes": {"keep": 9, "max_bytes": 2 * one - 1}}[limit]
    plan = {"every": 5, **room}
    result, events = jobs.run(*JOB, **plan, spare={"7": 9}, rollbacks=[back(28, 9)])
    sentence = (
        "the savepoint of step 5 is kept for a possible rollback, and there is no room for "
        "another beside it"
    )
    assert [r["step"] for r in restored(events)] == [5]
    assert result == jobs.untouched(*JOB)
    # Once more behind the rollback.
    assert busy(events) == [sentence] * 8
    assert max(event["held"] for event in taken(events)) == one

    assert jobs.run(*JOB, **plan, spare={"7": 9, "18": 0})[1][-1]["end"] == [25]


@pytest.mark.parametrize("times", [None, 2])
def test_on_disk_it_outlives_newer_ones_too(jobs, tmp_path, times):
    """Memory for one and a half; the rest is on disk, at most two there."""
    one = whole(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    plan |= {} if times is None else {"max_disk_bytes": one * times + 1}
    result, events = jobs.run(*JOB, **plan, spare={"7": 9}, rollbacks=[back(28, 9)])

    assert [r["step"] for r in restored(events)] == [5]
    assert result == jobs.untouched(*JOB)
    assert max(event["allocated"] for event in taken(events)) <= one * 3 // 2
    assert busy(events) == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_leaves_the_spared_one_in_memory(jobs, tmp_path):
    """It cannot be written, so it is not given up: no other one is taken."""
    one = whole(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    events = jobs.run(*JOB, **plan, max_disk_bytes=one // 2, spare={"7": 9})[1]
    assert events[-1]["end"] == [5]
    assert len(busy(events)) == 4
