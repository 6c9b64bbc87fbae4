"""Checkpoints that are pinned, and those that are let go."""

from __future__ import annotations

import pytest

from supervise.checkpoints.save_report import RunPosition

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_rotation_by_the_job(desk):
    """What the job deletes stays pinned, and stays good."""
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    (desk.out / "a.pt").unlink()

    assert desk.turn() == []
    entry = desk.entry("ckpt-1")
    assert (entry["state"], entry["pinned"], entry["there"]) == ("verified", True, False)


def test_only_the_newest_good_ones_stay(desk):
    """A suspect one never replaces a good one; what is dropped is told if it is gone for good."""
    for number in range(1, 5):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 3:
            desk.moment = RunPosition(suspects=frozenset({"ckpt-3"}))
        desk.turn()
        desk.turn()

    assert desk.pinned() == ["ckpt-2", "ckpt-4"]
    gone = [e.data["id"] for e in desk.told if e.data.get("ok") is False]
    assert gone == ["ckpt-3", "ckpt-1"]
    assert sorted(p.name for p in (desk.run / "checkpoints").iterdir()) == ["ckpt-2", "ckpt-4"]


def test_what_is_on_trial_neither_goes_nor_stands_for_a_good_one(desk):
    """Until it is known what it is."""
    for number in range(1, 6):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 2:
            desk.moment = RunPosition(on_trial=frozenset({"ckpt-3", "ckpt-4", "ckpt-5"}))
        desk.turn()
        desk.turn()
    assert desk.pinned() == [f"ckpt-{number}" for number in range(1, 6)]
    desk.moment = RunPosition(suspects=frozenset({"ckpt-3", "ckpt-4"}))
    desk.turn()
    desk.turn()

    assert desk.pinned() == ["ckpt-2", "ckpt-5"]


def test_written_again_in_place(desk):
    """The new bytes are another checkpoint; the copy of the old one is still what was verified."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.write_text("torn")
    desk.tell(path, 19)

    assert desk.turn() == [("ckpt-2", 19, False)]
    assert desk.guard.put_back("ckpt-1")["path"] == str(path)
    assert path.read_text() == "good 1"


def test_links_are_lost_when_the_file_is_written_again(desk):
    """They cost nothing; a rename saves them, a write into the file does not."""
    desk.open(pin="link")
    first, second = desk.write("a.pt", "good 1", step=9), desk.write("b.pt", "good 2", step=19)
    desk.turn()
    copy = desk.run / "checkpoints/ckpt-1/data/a.pt"
    assert copy.stat().st_ino == first.stat().st_ino
    first.unlink()
    second.write_text("torn")

    assert desk.turn() == [("ckpt-2", 19, False)]
    assert desk.pinned() == ["ckpt-1"] and copy.read_text() == "good 1"
    assert desk.entry("ckpt-2")["state"] == "vanished"


def test_a_pinned_copy_is_tested_again(desk):
    """One that has rotted is bad from then on."""
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.guard.close()
    desk.open(restore_test=1e-9)
    copy = desk.run / "checkpoints/ckpt-1/data/a.pt"
    copy.write_text("good 2")

    assert desk.guard.work()

    (event,) = desk.guard.poll()
    assert event.data["ok"] is False and "not those that were verified" in event.message
    assert desk.entry("ckpt-1")["state"] == "bad"
