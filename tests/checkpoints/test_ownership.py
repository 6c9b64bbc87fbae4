"""Ownership of checkpoints that a pattern finds while other jobs write nearby."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from supervise.errors import StoreError

from .guard_driver import GuardDriver

WIDE = ("../out*/*.pt",)


@pytest.fixture
def beside(driver):
    other = GuardDriver(driver.out.parent, "out-b", "run-b")
    yield other
    other.guard.close()


def notes(driver):
    return [e.message for e in driver.events if e.kind == "note"]


def listed(driver):
    """Return state and problems of each, by the last part of its path."""
    return {Path(e["path"]).name: (e["state"], *e["problems"]) for e in driver.entries()}


def test_files_elsewhere_are_foreign(driver):
    """Once the job reported a save: not verified, held or moved; listed, and reported once."""
    driver.open(glob=WIDE, verify=())
    driver.write("a.pt", "good 1", step=9)
    theirs = [driver.write(f"../out-b/{name}.pt", f"good {name}") for name in ("x", "y")]

    assert driver.run_once() == [("ckpt-1", 9, True)]
    own = driver.write("b.pt", "good 2", step=19)
    theirs.append(driver.write("../out-b/z.pt", "good z"))
    assert [(step, ok) for _, step, ok in driver.run_once()] == [(19, True)]

    driver.guard.prepare_restore("ckpt-1")
    (moved,) = driver.guard.restore("ckpt-1").moved
    assert moved.endswith("b.pt") and not own.exists() and all(path.exists() for path in theirs)
    (note,) = notes(driver)
    assert "out-b" in note and "another job" in note
    state, why = listed(driver)["x.pt"]
    assert state == "unverified" and "this one saves elsewhere" in why
    assert not list(driver.run.glob("checkpoints/.held-*"))


def test_unreported_files_need_a_pattern_for_one_directory(driver):
    """Else another job's file could be restored. A late report makes one the job's own."""
    driver.open(glob=WIDE, verify=())
    driver.write("../out-b/x.pt", "good x")
    mine = driver.write("a.pt", "good 1")
    assert driver.run_once() == []
    assert all("does not name one directory" in why for _, why in listed(driver).values())

    driver.report(mine, 9)

    ((_, step, ok),) = driver.run_once()
    assert (step, ok) == (9, True) and listed(driver)["x.pt"][0] == "unverified"


def test_a_job_without_reports_owns_what_its_pattern_matches(driver):
    driver.open(glob=("../out/*.pt",), verify=())
    driver.save("a.pt", "good 1")
    driver.save("b.pt", "good 2")

    (moved,) = driver.guard.restore("ckpt-1").moved

    assert moved.endswith("b.pt") and notes(driver) == []


def test_copies_beside_reported_files_are_own(driver):
    """In each reported directory: a job that loads `latest.pt` must not load the newer one."""
    driver.open(glob=("../out*/**/*.pt",), verify=())
    first = driver.save("rank0/a.pt", "good 1", step=9)
    second = driver.write("rank1/b.pt", "good 2", step=19)
    latest = driver.out / "rank0" / "latest.pt"
    shutil.copyfile(second, latest)
    driver.run_once()

    moved = driver.guard.restore("ckpt-1").moved

    assert len(moved) == 2 and first.exists() and not latest.exists() and not second.exists()


def test_adopting_supervisor_knows_the_owners(driver):
    driver.open(glob=WIDE, verify=())
    driver.write("a.pt", "good 1", step=9)
    driver.save("../out-b/x.pt", "good x")
    driver.guard.close()

    driver.open(glob=WIDE, verify=())
    driver.write("copy.pt", "good 2")
    driver.save("../out-b/y.pt", "good y")

    states = {name: state for name, (state, *_) in listed(driver).items()}
    assert states == {
        "a.pt": "verified",
        "x.pt": "unverified",
        "copy.pt": "verified",
        "y.pt": "unverified",
    }


def test_file_reported_to_another_run_is_foreign(driver, beside):
    """In one directory, also if this job reports nothing."""
    driver.open(glob=("../out-b/*.pt",), verify=())
    theirs = beside.save("x.pt", "good x", step=9)

    assert driver.run_once() == []
    assert listed(driver)["x.pt"] == (
        "unverified",
        "another job wrote it: it belongs to the run run-b",
    )
    assert theirs.exists() and listed(beside)["x.pt"][0] == "verified"


def test_file_reported_to_another_run_later_becomes_foreign(driver, beside):
    driver.open(glob=("../out-b/*.pt",), verify=())
    mine = driver.save("../out-b/a.pt", "good 1", step=9)
    theirs = driver.write("../out-b/x.pt", "good x")
    assert driver.run_once() == [("ckpt-2", -1, True)]
    beside.report(theirs, 19)
    beside.run_once()

    with pytest.raises(StoreError, match="ckpt-2 is unverified"):
        driver.guard.restore("ckpt-2")
    assert driver.guard.restore("ckpt-1").moved == []
    assert driver.run_once() == [("ckpt-2", -1, False)]
    assert mine.exists() and theirs.exists()


def test_unreported_file_found_by_two_runs_is_contested(driver, beside):
    for each in (driver, beside):
        each.open(glob=("../out/*.pt",), verify=())
    driver.save("x.pt", "good x")
    beside.run_once()
    driver.run_once()
    beside.run_once()

    for each, name in ((driver, "run-b"), (beside, "run")):
        state, why = listed(each)["x.pt"]
        assert state == "unverified" and f"the run {name} found it too" in why
        (note,) = notes(each)
        assert "name a directory of its own" in note


def test_restore_does_not_replace_another_runs_file(driver, beside):
    path = driver.save("../out-b/a.pt", "good 1", step=9)
    beside.save("a.pt", "good, but of another run", step=19)

    for call in (driver.guard.prepare_restore, driver.guard.restore):
        with pytest.raises(StoreError, match="the run run-b has written"):
            call("ckpt-1")
    assert path.read_text() == "good, but of another run"
