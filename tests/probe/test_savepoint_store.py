"""Where savepoints are kept: in memory and on disk within their budgets, one of them retained; and
files of savepoints: whole or not there, whatever the disk or the end of the process does."""

import hashlib
from pathlib import Path

import pytest

from supervise_probe.savepoints import files
from tests.support.savepoint_jobs import back, of_kind

from .test_savepoint_refusals import PREAMBLE, WHILE

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

JOB = ("module_loop.py", "adamw")  # 30 steps


def whole(jobs):
    """Bytes of one savepoint of that job."""
    return of_kind(jobs.run(*JOB, every=5)[1], "taken")[-1]["bytes"]


@pytest.mark.parametrize(("before", "step"), [(9, 5), (24, 20)])
def test_memory_stays_within_the_budget_and_going_back_is_exact(jobs, tmp_path, before, step):
    """Memory for one and a half: all but the newest are on disk, in files without a name."""
    one = whole(jobs)
    plan = {"every": 5, "keep": 6, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    result, events = jobs.run(*JOB, **plan, rollbacks=[back(27, before)])
    (outcome,) = of_kind(events, "restored")
    assert outcome["step"] == step and outcome["not_restored"] == []
    assert result == jobs.untouched(*JOB)
    assert max(event["held"] for event in of_kind(events, "taken")) <= one * 3 // 2
    assert max(event["allocated"] for event in of_kind(events, "taken")) <= one * 3 // 2
    assert events[-1]["end"] == [*range(0, step + 1, 5), *range(step + 5, 30, 5)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("times", "steps"), [(3, [15, 20, 25]), (2, [20, 25]), (0, [25])])
def test_the_disk_has_a_budget_too(jobs, tmp_path, times, steps):
    one = whole(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    plan |= {"max_disk_bytes": one * times + 1}
    result, events = jobs.run(*JOB, **plan)

    assert events[-1]["end"] == steps
    assert result == jobs.untouched(*JOB)


def test_a_disk_that_fails_costs_the_savepoint_and_is_told(jobs, tmp_path):
    code = PREAMBLE + WHILE + "print(json.dumps(0))\n"
    plan = {"every": 2, "max_bytes": 88, "spill": str(tmp_path / "gone")}
    events = jobs.run(code, **plan)[1]
    errors = [each for event in events for each in event.get("disk_errors", ())]
    assert "the savepoint of step 0 could not be written to" in errors[0]
    assert "No such file or directory" in errors[0]
    assert events[-1] == {"end": [8, 10]} and of_kind(events, "refused") == []


DAMAGE = """
import os

def damage():
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.lexists(link) and "%s" in os.readlink(link):
            os.pwrite(os.open(link, os.O_WRONLY), b"x", 5)

n = 0
while n < 12:
    if n == 7:
        damage()
    train_step()
    n += 1
print(json.dumps([n, model.weight.tolist()]))
"""


def test_what_comes_back_otherwise_than_it_went_is_refused(jobs, tmp_path):
    code = PREAMBLE + DAMAGE % tmp_path.name
    plan = {"every": 3, "max_bytes": 44, "spill": str(tmp_path)}
    result, events = jobs.run(code, **plan, rollbacks=[back(8, 5)])
    (refusal,) = of_kind(events, "refused")
    assert refusal == (
        "the savepoint of step 3 cannot be read back: the content read back differs from what was "
        "written"
    )
    assert result == jobs.untouched(code)


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_the_newest_before_the_step_outlives_newer_ones(jobs, limit):
    """Room for three. A rollback goes to it at the end, and that is exact; without it there is
    nothing so old any more."""
    one = whole(jobs)
    room = {"keep": {"keep": 3}, "max_bytes": {"keep": 9, "max_bytes": 3 * one}}[limit]
    plan = {"every": 5, **room, "rollbacks": [back(28, 9)]}
    result, events = jobs.run(*JOB, **plan, spare={"7": 9})

    assert [r["step"] for r in of_kind(events, "restored")] == [5]
    assert result == jobs.untouched(*JOB)
    assert max(event["held"] for event in of_kind(events, "taken")) == 3 * one
    assert of_kind(events, "busy") == []
    assert events[-1]["end"] == [5, 20, 25]
    assert of_kind(jobs.run(*JOB, **plan)[1], "restored") == []


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_where_only_one_fits_the_spared_one_stays_and_no_other_is_taken(jobs, limit):
    one = whole(jobs)
    room = {"keep": {"keep": 1}, "max_bytes": {"keep": 9, "max_bytes": 2 * one - 1}}[limit]
    plan = {"every": 5, **room}
    result, events = jobs.run(*JOB, **plan, spare={"7": 9}, rollbacks=[back(28, 9)])
    sentence = (
        "the savepoint of step 5 is kept for a possible rollback, and there is no room for "
        "another beside it"
    )
    assert [r["step"] for r in of_kind(events, "restored")] == [5]
    assert result == jobs.untouched(*JOB)
    # Once more behind the rollback.
    assert of_kind(events, "busy") == [sentence] * 8
    assert max(event["held"] for event in of_kind(events, "taken")) == one

    assert jobs.run(*JOB, **plan, spare={"7": 9, "18": 0})[1][-1]["end"] == [25]


def test_a_disk_without_room_leaves_the_spared_one_in_memory(jobs, tmp_path):
    one = whole(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    events = jobs.run(*JOB, **plan, max_disk_bytes=one // 2, spare={"7": 9})[1]
    assert events[-1]["end"] == [5]
    assert len(of_kind(events, "busy")) == 4


DOCUMENT = {"what": "a savepoint", "model": torch.arange(1 << 19)}  # 4 MiB: several pieces


def test_what_is_written_is_read_back_and_its_hash_is_that_of_the_file(tmp_path):
    path = files.path_of(str(tmp_path / "new"), 7)
    files.write(torch.save, DOCUMENT, path, lambda: False)
    told = (tmp_path / "new" / "savepoint-000000007.pt.sha256").read_text().split()
    found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert told == [found, "savepoint-000000007.pt"]
    assert torch.equal(files.read(torch.load, path)["model"], DOCUMENT["model"])


@pytest.mark.parametrize("pieces", [0, 2, 5, 8])
def test_what_is_called_off_leaves_what_was_there(tmp_path, pieces):
    """At any piece, in the middle of a tensor too; the thread is out of torch at once."""
    path = tmp_path / "savepoint-000000007.pt"
    path.write_text("of before")
    looks = iter([False] * pieces)
    with pytest.raises(files.Stopped):
        files.write(torch.save, DOCUMENT, str(path), lambda: next(looks, True))
    assert [each.read_text() for each in tmp_path.iterdir()] == ["of before"]


def test_those_behind_a_step_are_removed(tmp_path):
    for step in (5, 10, 15):
        for end in ("", files.HASH):
            (tmp_path / f"savepoint-{step:09d}.pt{end}").touch()
    (tmp_path / "z").touch()
    files.remove_after(str(tmp_path), 10)
    files.remove_after(str(tmp_path / "not-there"), 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"savepoint-{step:09d}.pt{end}" for step in (5, 10) for end in ("", files.HASH)),
        "z",
    ]
