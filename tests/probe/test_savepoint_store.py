"""Storage of savepoints: in memory and on disk within their budgets, one of them retained."""

import hashlib
from pathlib import Path

import pytest

from supervise_probe.savepoints import weights_check
from tests.support.savepoint_jobs import of_kind, rollback

from .savepoint_scripts import PREAMBLE, STATES

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

JOB = STATES.replace("AdamW", "torch.optim.AdamW(model.parameters(), lr=0.01)")  # 30 steps
FOR = """
for n in range(12):
    train_step()
"""


def size(jobs):
    """Bytes of one savepoint of that job."""
    return of_kind(jobs.run(JOB, every=5)[1], "taken")[-1]["bytes"]


@pytest.mark.parametrize(("before", "step"), [(9, 5), (24, 20)])
def test_memory_stays_within_the_budget_and_going_back_is_exact(jobs, tmp_path, before, step):
    """Memory for one and a half: all but the newest are on disk, in files without a name."""
    one = size(jobs)
    plan = {"every": 5, "keep": 6, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    result, events = jobs.run(JOB, **plan, rollbacks=[rollback(27, before)])
    (outcome,) = of_kind(events, "restored")
    assert outcome["step"] == step and outcome["not_restored"] == []
    assert result["states"][27] == result["states"][step]
    assert max(event["held"] for event in of_kind(events, "taken")) <= one * 3 // 2
    assert max(event["allocated"] for event in of_kind(events, "taken")) <= one * 3 // 2
    assert events[-1]["end"] == [*range(0, step + 1, 5)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("times", "steps"), [(3, [15, 20, 25]), (2, [20, 25]), (0, [25])])
def test_the_disk_has_a_budget_too(jobs, tmp_path, times, steps):
    one = size(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    plan |= {"max_disk_bytes": one * times + 1}
    assert jobs.run(JOB, **plan)[1][-1]["end"] == steps


def test_a_disk_that_fails_costs_the_savepoint_and_is_told(jobs, tmp_path):
    code = PREAMBLE + FOR + "print(json.dumps(0))\n"
    plan = {"every": 2, "max_bytes": 2 * ONE, "spill": str(tmp_path / "gone")}
    events = jobs.run(code, **plan)[1]
    errors = [each for event in events for each in event.get("disk_errors", ())]
    assert "the savepoint of step 0 could not be written to" in errors[0]
    assert "No such file or directory" in errors[0]
    assert events[-1] == {"end": [8, 10]} and of_kind(events, "refused") == []


ONE = 68  # bytes: 5 parameters, two moments each, two counts of steps

DAMAGE = """
def damage():
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.lexists(link) and "%s" in os.readlink(link):
            os.pwrite(os.open(link, os.O_WRONLY), b"x", 5)

weights = []
for n in range(12):
    if n == 7:
        damage()
    train_step()
    weights.append(model.weight.tolist())
print(json.dumps(weights))
"""


def test_what_comes_back_otherwise_than_it_went_is_refused(jobs, tmp_path):
    code = PREAMBLE + DAMAGE % tmp_path.name
    plan = {"every": 3, "max_bytes": ONE, "spill": str(tmp_path)}
    weights, events = jobs.run(code, **plan, rollbacks=[rollback(8, 5)])
    (refusal,) = of_kind(events, "refused")
    assert refusal == (
        "the savepoint of step 3 cannot be read back: the content read back differs from what was "
        "written"
    )
    assert weights == jobs.run(code)[0]


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_the_newest_before_the_step_outlives_newer_ones(jobs, limit):
    """Room for three. A rollback goes to it at the end, and that is exact; without it there is
    nothing so old any more."""
    one = size(jobs)
    room = {"keep": {"keep": 3}, "max_bytes": {"keep": 9, "max_bytes": 3 * one}}[limit]
    plan = {"every": 5, **room, "rollbacks": [rollback(28, 9)]}
    result, events = jobs.run(JOB, **plan, spare={"7": 9})

    assert [r["step"] for r in of_kind(events, "restored")] == [5]
    assert result["states"][28] == result["states"][5]
    assert max(event["held"] for event in of_kind(events, "taken")) == 3 * one
    assert of_kind(events, "busy") == []
    assert events[-1]["end"] == [5]
    assert of_kind(jobs.run(JOB, **plan)[1], "restored") == []


@pytest.mark.parametrize("limit", ["keep", "max_bytes"])
def test_where_only_one_fits_the_spared_one_stays_and_no_other_is_taken(jobs, limit):
    one = size(jobs)
    room = {"keep": {"keep": 1}, "max_bytes": {"keep": 9, "max_bytes": 2 * one - 1}}[limit]
    plan = {"every": 5, **room}
    result, events = jobs.run(JOB, **plan, spare={"7": 9}, rollbacks=[rollback(28, 9)])
    sentence = (
        "the savepoint of step 5 is kept for a possible rollback, and there is no room for "
        "another beside it"
    )
    assert [r["step"] for r in of_kind(events, "restored")] == [5]
    assert result["states"][28] == result["states"][5]
    assert of_kind(events, "busy") == [sentence] * 4
    assert max(event["held"] for event in of_kind(events, "taken")) == one

    assert jobs.run(JOB, **plan, spare={"7": 9, "18": 0})[1][-1]["end"] == [25]


def test_a_disk_without_room_leaves_the_spared_one_in_memory(jobs, tmp_path):
    one = size(jobs)
    plan = {"every": 5, "keep": 4, "max_bytes": one * 3 // 2, "spill": str(tmp_path)}
    events = jobs.run(JOB, **plan, max_disk_bytes=one // 2, spare={"7": 9})[1]
    assert events[-1]["end"] == [5]
    assert len(of_kind(events, "busy")) == 4


def test_the_budget_keeps_fewer_and_refuses_when_not_even_one_fits(jobs):
    code = PREAMBLE + FOR + "print(json.dumps(0))\n"
    assert jobs.run(code, every=2, keep=4)[1][-1] == {"end": [4, 6, 8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=2 * ONE)[1][-1] == {"end": [8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=2 * ONE - 1)[1][-1] == {"end": [10]}
    events = jobs.run(code, every=2, keep=4, max_bytes=ONE - 1)[1]
    assert set(of_kind(events, "refused")) == {
        f"one savepoint takes {ONE} bytes, more than the {ONE - 1} that are allowed for all of them"
    }
    assert events[-1] == {"end": []}


def test_the_file_of_a_probe_batch_has_its_hash_beside_it(tmp_path):
    document = {"what": "a probe batch", "model": torch.arange(1 << 19)}  # 4 MiB
    path = tmp_path / "new" / "batch.pt"
    weights_check.write_rows(torch.save, document, str(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert Path(f"{path}.sha256").read_text().split() == [digest, "batch.pt"]
    assert torch.equal(weights_check.read_rows(torch.load, str(path))["model"], document["model"])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its hash differs"):
        weights_check.read_rows(torch.load, str(path))
