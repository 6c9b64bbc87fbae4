"""Checkpoints that are held and pinned against the job's own rotation and overwrites."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from supervise.checkpoints import RunPosition
from tests.support.waiting import wait_until

from .guard_driver import GuardDriver, Overwriter, overwrite_during_verification, slow_verification

pytestmark = pytest.mark.slow  # it waits for files to be still


def held(driver):
    return sorted(path.name for path in driver.run.glob("checkpoints/.held-*"))


def test_file_deleted_before_verification_is_held_and_the_hold_becomes_the_pin(driver):
    path = driver.write("a.pt", "good 1", step=9)
    inode = path.stat().st_ino
    driver.guard.scan()
    assert held(driver) == [".held-ckpt-1"]
    path.unlink()

    assert driver.run_once() == [("ckpt-1", 9, True)]
    entry, pin = driver.entry("ckpt-1"), driver.run / "checkpoints/ckpt-1/data/a.pt"
    assert (entry["state"], entry["pinned"], entry["present"]) == ("verified", True, False)
    assert pin.read_text() == "good 1" and pin.stat().st_ino == inode and held(driver) == []


def test_file_replaced_during_verification(driver):
    path = driver.write("a.pt", "slow good 1", step=9)
    driver.guard.scan()
    with slow_verification(driver, driver.guard.verify_next):
        driver.write("a.partial", "good 2").rename(path)
        driver.report(path, 19)
        driver.guard.scan()
        assert held(driver) == [".held-ckpt-1", ".held-ckpt-2"]

    assert driver.run_once() == [("ckpt-1", 9, True), ("ckpt-2", 19, True)]
    assert driver.pinned() == ["ckpt-1", "ckpt-2"] and held(driver) == []


def test_few_are_held(driver):
    for number in range(1, 6):
        path = driver.write(f"{number}.pt", f"good {number}", step=number)
        driver.guard.scan()
        path.unlink()
        driver.guard.scan()
        assert len(held(driver)) <= 2

    assert driver.run_once()[0] == ("ckpt-5", 5, True)
    assert driver.states("vanished") == ["ckpt-1", "ckpt-2", "ckpt-3"]


@pytest.mark.parametrize("crash", [True, False])
def test_nothing_is_held_after_the_run(driver, crash):
    """Nor after a crash of the supervisor; a deleted file is listed as vanished."""
    path = driver.write("a.pt", "good 1", step=9)
    driver.guard.scan()
    path.unlink()
    if crash:
        driver.open()
    driver.guard.scan()
    driver.guard.close()

    assert held(driver) == [] and driver.states("vanished") == ["ckpt-1"]


def save_each(driver, count, after=None, **position):
    """Save one file so often, verify each; `position` is that of the run from save `after` on."""
    for number in range(1, count + 1):
        driver.save("a.pt", f"good {number}", step=number * 10)
        if number == after:
            driver.position = RunPosition(**position)
        driver.run_once()
        driver.run_once()


def test_only_the_newest_good_ones_stay_pinned(driver):
    """A suspect one never replaces a good one; removed copies are reported."""
    save_each(driver, 4, after=3, suspects=frozenset({"ckpt-3"}))

    assert driver.pinned() == ["ckpt-2", "ckpt-4"]
    removed = [e.data["id"] for e in driver.events if e.data.get("ok") is False]
    assert removed == ["ckpt-3", "ckpt-1"]
    assert sorted(p.name for p in (driver.run / "checkpoints").iterdir()) == ["ckpt-2", "ckpt-4"]


def test_checkpoint_on_trial_is_neither_removed_nor_counted(driver):
    save_each(driver, 5, after=2, on_trial=frozenset({"ckpt-3", "ckpt-4", "ckpt-5"}))
    assert driver.pinned() == [f"ckpt-{number}" for number in range(1, 6)]

    driver.position = RunPosition(suspects=frozenset({"ckpt-3", "ckpt-4"}))
    driver.run_once()
    driver.run_once()

    assert driver.pinned() == ["ckpt-2", "ckpt-5"]


def test_overwritten_links_are_dropped(driver):
    """A rename keeps the linked copy, a write in place does not."""
    driver.open(pin="link")
    first = driver.save("a.pt", "good 1", step=9)
    second = driver.save("b.pt", "good 2", step=19)
    copy = driver.run / "checkpoints/ckpt-1/data/a.pt"
    assert copy.stat().st_ino == first.stat().st_ino
    first.unlink()
    second.write_text("torn")

    assert driver.run_once() == [("ckpt-2", 19, False)]
    assert driver.pinned() == ["ckpt-1"] and copy.read_text() == "good 1"
    assert driver.entry("ckpt-2")["state"] == "vanished"


def test_damaged_pinned_copy_is_found(driver):
    driver.save("a.pt", "good 1", step=9)
    driver.guard.close()
    driver.open(restore_test=1e-9)
    copy = driver.run / "checkpoints/ckpt-1/data/a.pt"
    copy.write_text("good 2")

    assert driver.guard.verify_next()

    (event,) = driver.guard.poll()
    assert event.data["ok"] is False and "not those that were verified" in event.message
    assert driver.entry("ckpt-1")["state"] == "bad"


@pytest.mark.parametrize(("pin", "rename"), [("copy", False), ("link", True)])
def test_fast_overwrites_are_verified_as_copies(driver, pin, rename):
    """One copy at a time; each is pinned with the step and content of its own save."""
    driver.open(pin=pin)
    driver.guard.start()
    with Overwriter(driver, rename=rename) as job:
        events = job.run_until(events=2)

    assert [event.data["ok"] for event in events] == [True] * 2
    assert events[0].data["step"] < events[1].data["step"]
    assert job.largest <= 1
    for event in events:
        copy = driver.run / "checkpoints" / event.data["id"] / "data/ckpt.pt"
        assert copy.read_text() == f"slow good {event.data['step']}"


def test_half_written_copy_is_not_bad(driver):
    driver.guard.start()
    with Overwriter(driver, word="torn") as job:
        time.sleep(1.0)
        assert job.run_until(events=0) == [] and driver.guard.poll() == []
    (last,) = job.run_until(events=1)

    assert (last.data["step"], last.data["ok"]) == (job.step, False)
    assert driver.pinned() == []
    wait_until(lambda: not list(driver.run.glob("checkpoints/.ckpt-*")), "the end of its copy")


def test_copy_never_mixes_two_saves(driver):
    folder = driver.out / "last"
    folder.mkdir()

    def save(step, word="good"):
        for number in range(300):
            (folder / f"{number:03}").write_text(f"{word} {step}")
        driver.report(folder, step)

    def save_again():
        started = lambda: list(driver.run.glob("checkpoints/.ckpt-*/*/*/000"))  # noqa: E731
        wait_until(started, "the copy", every_s=0.001)
        save(19)
        driver.guard.scan(closely=True)
        driver.guard.scan(closely=True)

    save(9, "slow good")
    overwrite_during_verification(driver, lambda: save(9))
    driver.guard.scan()
    driver.guard.scan()
    job = threading.Thread(target=save_again)
    job.start()
    driver.guard.verify_next()
    job.join()
    events = driver.run_once() + driver.run_once()

    assert events[-1][1:] == (19, True) and all(ok for *_, ok in events)
    kept = {path.name for path in driver.run.glob("checkpoints/ckpt-*")}
    assert kept == {name for name, *_ in events} == set(driver.pinned())
    for name, step, _ in events:
        files = (driver.run / "checkpoints" / name / "data/last").iterdir()
        assert {file.read_text().split()[-1] for file in files} == {str(step)}


def test_file_that_is_never_verified_is_reported(driver):
    folder = driver.out / "last"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        file.truncate(shutil.disk_usage(driver.run).total)

    def save():
        (folder / "a").write_text("slow crash")
        driver.report(folder, 9)

    save()
    for _ in range(6):
        overwrite_during_verification(driver, save)

    notes = [event.message for event in driver.guard.poll()]
    assert len(notes) == 2 and "are free" in notes[0]
    assert "was overwritten 5 times in a row before it could be verified" in notes[1]


def test_lost_copy_is_not_called_good(driver):
    path = driver.write("ckpt.pt", "slow good 1", step=9)
    overwrite_during_verification(driver, lambda: driver.write("ckpt.pt", "slow good 2", step=19))
    (driver.run / "checkpoints").mkdir(exist_ok=True)
    (driver.run / "checkpoints/ckpt-1").write_text("in the way")
    overwrite_during_verification(driver, lambda: driver.write("ckpt.pt", "good 3", step=29))

    events = driver.guard.poll()
    assert [event.kind for event in events] == ["note"] and "cannot be pinned" in events[0].message
    assert [event[1:] for event in driver.run_once()] == [(29, True)]
    assert path.read_text() == "good 3"


@pytest.fixture
def elsewhere(tmp_path):
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_pin_on_another_disk(tmp_path, elsewhere):
    """Copies are complete; moved files stay on their disk; a link is impossible, and reported."""
    driver = GuardDriver(tmp_path, run=elsewhere / "run")
    content = "good " + "x" * 20_000_000  # several pieces
    path = driver.save("a.pt", content, step=9)
    assert driver.pinned() == ["ckpt-1"]
    path.write_text("torn")

    (moved,) = map(Path, driver.guard.restore("ckpt-1").moved)

    assert path.read_text() == content
    assert moved == path.with_name(".aside-before-ckpt-1-a.pt") and moved.read_text() == "torn"
    driver.open(pin="link")
    driver.save("b.pt", "good 2", step=19)
    assert driver.pinned() == ["ckpt-1"]
    assert "cross-device" in " ".join(event.message for event in driver.events)
    driver.guard.close()


def test_weights_alone_do_not_replace_what_the_job_resumes_from(driver):
    """The newest one with an optimizer's state stays pinned; a set of files may be one."""
    for number, word in enumerate(("good", "good", "weights", "weights"), 1):
        driver.save(f"{number}.pt", f"{word} {number}", step=number)
    for _ in range(2):  # the run has had time to suspect the last
        driver.run_once()

    assert driver.pinned() == ["ckpt-2", "ckpt-4"]
    assert driver.entry("ckpt-4")["resumable"] == "weights only"
    assert ["weights only" in e.message for e in driver.events] == [False, False, True, True]
    assert driver.events[-1].data["resumable"] == "weights only"

    (driver.out / "optim_5_rank0.pt").touch()
    driver.save("model_5.pt", "weights 5", step=5)
    assert driver.entry("ckpt-5")["resumable"] == "unknown"
