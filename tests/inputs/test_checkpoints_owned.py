"""Whose the checkpoints are that a pattern finds: other jobs write beside this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from supervise.errors import StoreError

from .desk import Desk

pytestmark = pytest.mark.slow  # it verifies what nobody told of with this interpreter

WIDE = ("../out*/*.pt",)


@pytest.fixture
def beside(desk):
    """Another supervised job, which saves beside the first one."""
    other = Desk(desk.out.parent, "out-b", "run-b")
    yield other
    other.guard.close()


def notes(desk):
    return [e.message for e in desk.told if e.kind == "note"]


def listed(desk):
    """Return state and problems of each, by the last part of its path."""
    return {Path(e["path"]).name: (e["state"], *e["problems"]) for e in desk.entries()}


def test_what_lies_elsewhere_than_the_job_saves_is_not_its_own(desk):
    """Not verified, held or moved, whatever its step; listed, and said once."""
    desk.open(glob=WIDE, verify=())
    desk.write("a.pt", "good 1", step=9)
    theirs = [desk.write(f"../out-b/{name}.pt", f"good {name}") for name in ("x", "y")]

    assert desk.turn() == [("ckpt-1", 9, True)]
    own = desk.write("b.pt", "good 2", step=19)
    theirs.append(desk.write("../out-b/z.pt", "good z"))
    assert [(step, ok) for _, step, ok in desk.turn()] == [(19, True)]

    desk.guard.prepare("ckpt-1")
    (moved,) = desk.guard.put_back("ckpt-1")["moved"]
    assert moved.endswith("b.pt") and not own.exists() and all(path.exists() for path in theirs)
    (said,) = notes(desk)
    assert "out-b" in said and "another job" in said
    state, why = listed(desk)["x.pt"]
    assert state == "unverified" and "this one saves elsewhere" in why
    assert not list(desk.run.glob("checkpoints/.held-*"))


def test_what_another_job_removes_or_writes_again_is_listed_as_it_is(desk):
    """Its rotation fills no register."""
    desk.open(glob=WIDE, verify=())
    desk.write("a.pt", "good 1", step=9)
    for number in range(5):
        path = desk.write("../out-b/x.pt", f"good {number}, and longer" + "." * number)
        desk.turn()
    assert [e["path"] for e in desk.entries()] == [str(desk.out / "a.pt"), str(path)]

    path.unlink()
    desk.turn()
    assert list(listed(desk)) == ["a.pt"]


@pytest.mark.parametrize("patterns", [WIDE, ("../out/*.pt", "../out-b/*.pt")])
def test_before_the_job_told_of_a_save_a_pattern_must_name_one_directory(desk, patterns):
    """Else a neighbour's would be gone back to. What is told of late is its own all the same."""
    desk.open(glob=patterns, verify=())
    desk.write("../out-b/x.pt", "good x")
    mine = desk.write("a.pt", "good 1")
    assert desk.turn() == []
    assert all("does not name one directory" in why for _, why in listed(desk).values())

    desk.tell(mine, 9)

    ((_, step, ok),) = desk.turn()
    assert (step, ok) == (9, True) and listed(desk)["x.pt"][0] == "unverified"


def test_a_job_that_nobody_hears_has_what_its_pattern_names(desk):
    """And what is newer is set aside, as long as no other run has it."""
    desk.open(glob=("../out/*.pt",), verify=())
    desk.write("a.pt", "good 1")
    desk.turn()
    desk.write("b.pt", "good 2")
    desk.turn()

    (moved,) = desk.guard.put_back("ckpt-1")["moved"]

    assert moved.endswith("b.pt") and notes(desk) == []


def test_copies_beside_what_was_told_of_are_the_jobs_own(desk):
    """In each of its directories: who takes `latest.pt` must not take the newer one."""
    desk.open(glob=("../out*/**/*.pt",), verify=())
    first = desk.write("rank0/a.pt", "good 1", step=9)
    desk.turn()
    second = desk.write("rank1/b.pt", "good 2", step=19)
    latest = desk.out / "rank0" / "latest.pt"
    shutil.copyfile(second, latest)
    desk.turn()

    moved = desk.guard.put_back("ckpt-1")["moved"]

    assert len(moved) == 2 and first.exists() and not latest.exists() and not second.exists()


def test_what_is_renamed_to_another_directory_stays_the_jobs_own(desk):
    """It is what was told of, by its inode; so is what follows it there, also after a takeover."""
    desk.open(glob=WIDE, verify=())
    staged = desk.write("../staging/a.pt", "good 1", step=9)
    staged.rename(desk.out / "a.pt")
    assert [ok for *_, ok in desk.turn()] == [True]
    desk.write("../out-b/x.pt", "good x")
    desk.turn()
    assert listed(desk)["x.pt"][0] == "unverified"


def test_a_directory_by_two_names_is_one(desk):
    """The pattern leads through a link, the job saves where it points."""
    (desk.out.parent / "out-link").symlink_to(desk.out)
    desk.open(glob=("../out-l*/*.pt",), verify=())
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.write("copy.pt", "good 2")
    desk.turn()

    assert listed(desk)["copy.pt"][0] == "verified"


def test_who_takes_over_knows_whose_they_are(desk):
    """By what the register says of those that were told."""
    desk.open(glob=WIDE, verify=())
    desk.write("a.pt", "good 1", step=9)
    desk.write("../out-b/x.pt", "good x")
    desk.turn()
    desk.guard.close()

    desk.open(glob=WIDE, verify=())
    desk.write("copy.pt", "good 2")
    desk.write("../out-b/y.pt", "good y")
    desk.turn()

    states = {name: state for name, (state, *_) in listed(desk).items()}
    assert states == {
        "a.pt": "verified",
        "x.pt": "unverified",
        "copy.pt": "verified",
        "y.pt": "unverified",
    }


def test_what_another_runs_job_told_of_is_not_this_ones(desk, beside):
    """In one directory, also where this job tells nothing."""
    desk.open(glob=("../out-b/*.pt",), verify=())
    theirs = beside.write("x.pt", "good x", step=9)
    beside.turn()

    assert desk.turn() == []
    assert listed(desk)["x.pt"] == ("unverified", "another job wrote it: it is of the run run-b")
    assert theirs.exists() and listed(beside)["x.pt"][0] == "verified"


def test_what_turns_out_to_be_another_runs_is_not_good_any_more(desk, beside):
    """Its guard came later. Nothing goes back to it, and nothing moves it."""
    desk.open(glob=("../out-b/*.pt",), verify=())
    mine = desk.write("../out-b/a.pt", "good 1", step=9)
    desk.turn()
    theirs = desk.write("../out-b/x.pt", "good x")
    assert desk.turn() == [("ckpt-2", -1, True)]
    beside.tell(theirs, 19)
    beside.turn()

    with pytest.raises(StoreError, match="ckpt-2 is unverified"):
        desk.guard.put_back("ckpt-2")
    assert desk.guard.put_back("ckpt-1")["moved"] == []
    assert desk.turn() == [("ckpt-2", -1, False)]
    assert mine.exists() and theirs.exists()


def test_what_two_runs_find_and_nobody_told_of_is_neithers(desk, beside):
    """Their patterns lead to one directory: both say so, and neither goes back to it."""
    for each in (desk, beside):
        each.open(glob=("../out/*.pt",), verify=())
    desk.write("x.pt", "good x")
    desk.turn()
    beside.turn()
    desk.turn()
    beside.turn()

    for each, name in ((desk, "run-b"), (beside, "run")):
        state, why = listed(each)["x.pt"]
        assert state == "unverified" and f"the run {name} found it too" in why
        (said,) = notes(each)
        assert "name a directory of its own" in said


def test_another_runs_file_in_its_place_is_not_replaced(desk, beside):
    """Both jobs save to one path; what this one verified is pinned only."""
    path = desk.write("../out-b/a.pt", "good 1", step=9)
    desk.turn()
    beside.write("a.pt", "good, but of another run", step=19)
    beside.turn()

    for what in (desk.guard.prepare, desk.guard.put_back):
        with pytest.raises(StoreError, match="what lies there by now is of the run run-b"):
            what("ckpt-1")
    assert path.read_text() == "good, but of another run"
