"""Savepoints beyond the budget go to disk, and come back as they were or not at all."""

import pytest

from .test_savepoint_refusals import PREAMBLE, WHILE
from .test_savepoints import back, refused, restored

pytestmark = pytest.mark.slow


def taken(events):
    return [event["taken"] for event in events if "taken" in event]


@pytest.mark.parametrize(("before", "step"), [(9, 5), (24, 20)])
def test_memory_stays_within_the_budget_and_going_back_is_exact(jobs, tmp_path, before, step):
    """Memory for one and a half: all but the newest are on disk, in files without a name."""
    whole = taken(jobs.run("module_loop.py", "adamw", every=5)[1])[-1]["bytes"]
    plan = {"every": 5, "keep": 6, "max_bytes": whole * 3 // 2, "spill": str(tmp_path)}
    result, events = jobs.run("module_loop.py", "adamw", **plan, rollbacks=[back(27, before)])
    (outcome,) = restored(events)
    assert outcome["step"] == step and outcome["not_restored"] == []
    assert result == jobs.untouched("module_loop.py", "adamw")
    assert max(event["held"] for event in taken(events)) <= whole * 3 // 2
    assert max(event["allocated"] for event in taken(events)) <= whole * 3 // 2
    assert events[-1]["end"] == [*range(0, step + 1, 5), *range(step + 5, 30, 5)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("times", "steps"), [(3, [15, 20, 25]), (2, [20, 25]), (0, [25])])
def test_the_disk_has_a_budget_too(jobs, tmp_path, times, steps):
    """The oldest give way, and what fits nowhere is given up."""
    whole = taken(jobs.run("module_loop.py", "adamw", every=5)[1])[-1]["bytes"]
    plan = {"every": 5, "keep": 4, "max_bytes": whole * 3 // 2, "spill": str(tmp_path)}
    plan |= {"max_disk_bytes": whole * times + 1}
    result, events = jobs.run("module_loop.py", "adamw", **plan)

    assert events[-1]["end"] == steps
    assert result == jobs.untouched("module_loop.py", "adamw")


def test_a_disk_that_fails_costs_the_savepoint_and_is_told(jobs, tmp_path):
    """The job goes on, with as many savepoints as fit into memory."""
    code = PREAMBLE + WHILE + "print(json.dumps(0))\n"
    plan = {"every": 2, "max_bytes": 88, "spill": str(tmp_path / "gone")}
    events = jobs.run(code, **plan)[1]
    errors = [each for event in events for each in event.get("disk_errors", ())]
    assert "the savepoint of step 0 could not be written to" in errors[0]
    assert "No such file or directory" in errors[0]
    assert events[-1] == {"end": [8, 10]} and refused(events) == []


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
    """The hash tells; nothing of the job is changed, and it goes on."""
    code = PREAMBLE + DAMAGE % tmp_path.name
    plan = {"every": 3, "max_bytes": 44, "spill": str(tmp_path)}
    result, events = jobs.run(code, **plan, rollbacks=[back(8, 5)])
    (refusal,) = refused(events)
    assert refusal == (
        "the savepoint of step 3 cannot be read back: the content read back differs from what was "
        "written"
    )
    assert result == jobs.untouched(code)
