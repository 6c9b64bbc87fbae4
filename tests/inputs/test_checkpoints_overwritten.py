"""Checkpoints that the job writes again faster than they are verified."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from .desk import Overwriter, copies, overtake, slowly

pytestmark = pytest.mark.slow  # it waits for files to be still


@pytest.mark.parametrize(("pin", "rename"), [("copy", False), ("copy", True), ("link", True)])
def test_a_file_that_is_overwritten_faster_than_verified_is_judged(desk, pin, rename):
    """A copy is, one at a time; each is pinned with the step and the bytes of its own save."""
    desk.open(pin=pin)
    desk.guard.start()
    with Overwriter(desk, rename=rename) as job:
        found = job.run_until(told=3)

    assert [event.data["ok"] for event in found] == [True] * 3
    steps = [event.data["step"] for event in found]
    assert steps == sorted(set(steps))
    assert job.largest == 1
    for event in found[-2:]:
        copy = desk.run / "checkpoints" / event.data["id"] / "data/ckpt.pt"
        assert copy.read_text() == f"slow good {event.data['step']}"


def test_what_was_copied_half_written_is_no_bad_checkpoint(desk):
    """While the job goes on writing it, nobody can tell; the last one is bad when it stays."""
    desk.open()
    desk.guard.start()
    with Overwriter(desk, word="torn") as job:
        time.sleep(4.0)
        assert job.run_until(told=0) == [] and desk.guard.poll() == []
    (last,) = job.run_until(told=1)

    assert (last.data["step"], last.data["ok"]) == (job.step, False)
    assert desk.pinned() == [] and not list(desk.run.glob("checkpoints/.ckpt-*"))


def test_a_copy_that_nobody_verifies_any_more_is_let_go(desk):
    """Its supervisor died; what lies there now is looked at anew."""
    desk.open()
    desk.guard.start()
    with Overwriter(desk) as job:
        until = time.monotonic() + 60
        while time.monotonic() < until and not desk.states("copied"):
            time.sleep(0.01)
            desk.guard.look()
        kept = (desk.run / "checkpoints.json").read_bytes()
    desk.guard.close()
    (desk.run / "checkpoints.json").write_bytes(kept)
    (name,) = (e["id"] for e in desk.entries() if e["state"] == "copied")
    (desk.run / f"checkpoints/.{name}/data").mkdir(parents=True, exist_ok=True)
    desk.open()

    assert not list(desk.run.glob("checkpoints/.ckpt-*"))
    desk.tell(desk.out / "ckpt.pt", job.step)
    assert [told[1:] for told in desk.turn()] == [(job.step, True)]


@pytest.mark.parametrize("first", ["copied", "verified"])
def test_a_copy_never_mixes_two_saves(desk, first):
    """The job saves again in the middle of it; that save is a checkpoint of its own."""
    folder = desk.out / "last"
    folder.mkdir()

    def save(step, word="good"):
        for number in range(300):
            (folder / f"{number:03}").write_text(f"{word} {step}")
        desk.tell(folder, step)

    def save_again():
        until = time.monotonic() + 60
        while time.monotonic() < until and not list(desk.run.glob("checkpoints/.ckpt-*/*/*/000")):
            time.sleep(0.001)
        save(19)
        desk.guard.look(closely=True)
        desk.guard.look(closely=True)

    save(9, "slow good")
    if first == "copied":
        overtake(desk, lambda: save(9))
    desk.guard.look()
    desk.guard.look()
    job = threading.Thread(target=save_again)
    job.start()
    desk.guard.work()
    job.join()
    told = desk.turn() + desk.turn()

    assert told[-1][1:] == (19, True) and all(ok for *_, ok in told)
    kept = {path.name for path in desk.run.glob("checkpoints/ckpt-*")}
    assert kept == {name for name, *_ in told} == set(desk.pinned())
    for name, step, _ in told:
        files = (desk.run / "checkpoints" / name / "data/last").iterdir()
        assert {file.read_text().split()[-1] for file in files} == {str(step)}


def test_a_copy_first_is_for_what_is_overtaken_while_the_job_runs(desk):
    """Nobody overwrites what a dead job left; and once there was time enough, there will be."""
    path = desk.write("ckpt.pt", "slow good 1", step=9)
    overtake(desk, lambda: desk.write("ckpt.pt", "slow good 2", step=19))
    with slowly(desk, desk.verify_now):
        assert desk.guard.is_verifying_now and copies(desk) == []

    def verify(step):
        desk.write("ckpt.pt", f"slow good {step}", step=step)
        seen = []
        overtake(desk, lambda: seen.extend(copies(desk)))
        return len(seen)

    overtake(desk, lambda: None)
    assert verify(29) == 0
    desk.write("ckpt.pt", "slow good 39", step=39)
    overtake(desk, lambda: desk.write("ckpt.pt", "slow good 49", step=49))
    assert [verify(59), verify(69)] == [1, 0]
    assert path.read_text() == "slow good 69" and desk.entries()[-1]["state"] == "verified"


def test_a_late_word_tells_all_of_it(desk):
    """Found by its name, and copied, before the job said what it is."""
    desk.open(glob=("*.pt",))
    path = desk.write("ckpt.pt", "slow good 1", step=9)
    overtake(desk, lambda: desk.write("ckpt.pt", "slow good 2", step=19))
    batch = {"path": "batch", "value": 1.5}

    overtake(desk, lambda: (desk.tell(path, 29, probe_batch=batch), desk.guard.look()))

    entry = desk.entries()[-1]
    assert (entry["state"], entry["step"], entry["probe_batch"]) == ("verified", 29, batch)


def test_what_is_never_judged_is_told(desk):
    """There is no room for a copy, and verified in its place it is overtaken each time."""
    folder = desk.out / "last"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        file.truncate(shutil.disk_usage(desk.run).total)

    def save():
        (folder / "a").write_text("slow crash")
        desk.tell(folder, 9)

    save()
    for _ in range(6):
        overtake(desk, save)

    told = [event.message for event in desk.guard.poll()]
    assert len(told) == 2 and "are free" in told[0]
    assert "was written again 5 times in a row before it was verified" in told[1]


def test_what_nothing_is_left_of_is_not_called_good(desk):
    """The copy was verified and cannot be kept; the job has written the next one meanwhile."""
    path = desk.write("ckpt.pt", "slow good 1", step=9)
    overtake(desk, lambda: desk.write("ckpt.pt", "slow good 2", step=19))
    (desk.run / "checkpoints").mkdir(exist_ok=True)
    (desk.run / "checkpoints/ckpt-1").write_text("in the way")
    overtake(desk, lambda: desk.write("ckpt.pt", "good 3", step=29))

    news = desk.guard.poll()
    assert [event.kind for event in news] == ["note"] and "cannot be pinned" in news[0].message
    assert [told[1:] for told in desk.turn()] == [(29, True)]
    assert path.read_text() == "good 3"


def test_what_a_dead_supervisor_did_not_finish_is_removed(desk):
    """Whatever its id, and also when nobody knows it."""
    (desk.run / "checkpoints/.ckpt-7/data").mkdir(parents=True)
    (desk.run / "checkpoints/.ckpt-7/data/a.pt").write_text("half")
    (desk.run / "checkpoints/.ckpt-8").write_text("half")

    desk.open()

    assert copies(desk) == []
