"""Checkpoints that the job's own rotation takes away before they are verified."""

from __future__ import annotations

import os

import pytest

from .desk import slowly

pytestmark = pytest.mark.slow  # it waits for files to be still


def held(desk):
    return sorted(path.name for path in desk.run.glob("checkpoints/.held-*"))


def test_what_is_deleted_before_it_is_verified_is_verified(desk):
    """From the moment in which it is found; the link is the pin, and costs no copy."""
    path = desk.write("a.pt", "good 1", step=9)
    inode = path.stat().st_ino
    desk.guard.look()
    assert held(desk) == [".held-ckpt-1"]
    path.unlink()

    assert desk.turn() == [("ckpt-1", 9, True)]
    entry, pin = desk.entry("ckpt-1"), desk.run / "checkpoints/ckpt-1/data/a.pt"
    assert (entry["state"], entry["pinned"], entry["there"]) == ("verified", True, False)
    assert pin.read_text() == "good 1" and pin.stat().st_ino == inode and held(desk) == []


def test_what_is_deleted_or_replaced_while_it_is_verified(desk):
    """A rename over it makes another checkpoint; that one is verified next."""
    path = desk.write("a.pt", "slow good 1", step=9)
    desk.guard.look()
    with slowly(desk, desk.guard.work):
        desk.write("a.partial", "good 2").rename(path)
        desk.tell(path, 19)
        desk.guard.look()
        assert held(desk) == [".held-ckpt-1", ".held-ckpt-2"]

    assert desk.turn() == [("ckpt-1", 9, True), ("ckpt-2", 19, True)]
    assert desk.pinned() == ["ckpt-1", "ckpt-2"] and held(desk) == []


def test_few_are_held(desk):
    """The newest; the others are gone, and said to be."""
    for number in range(1, 6):
        path = desk.write(f"{number}.pt", f"good {number}", step=number)
        desk.guard.look()
        path.unlink()
        desk.guard.look()
        assert len(held(desk)) <= 2

    assert desk.turn()[0] == ("ckpt-5", 5, True)
    assert desk.states("vanished") == ["ckpt-1", "ckpt-2", "ckpt-3"]


@pytest.mark.parametrize("crash", [True, False])
def test_nothing_is_held_after_the_end(desk, crash):
    """Nor by a supervisor that died; what nobody has any more is not called found."""
    desk.write("a.pt", "good 1", step=9)
    desk.guard.look()
    (desk.out / "a.pt").unlink()
    desk.guard.look()
    if crash:
        desk.open()
        desk.guard.look()
    desk.guard.close()

    assert held(desk) == [] and desk.states("vanished") == ["ckpt-1"]


@pytest.mark.parametrize("seen", [True, False])
def test_another_file_that_has_the_inode_by_now_is_no_checkpoint(desk, seen):
    """The job deleted the one it told of, and the file system gave its inode away."""
    first = desk.write("a.partial", "good 1", step=9)
    inode = first.stat().st_ino
    if seen:
        desk.guard.look()
    told_ns = first.stat().st_mtime_ns
    other = first.rename(desk.out / "best.pt")  # as if it were a new one: later, and larger
    other.write_text("good, but of a later step")
    os.utime(other, ns=(told_ns + 600_000_000, told_ns + 600_000_000))
    assert other.stat().st_ino == inode

    assert desk.turn() == [] and desk.turn() == []
    assert desk.states("vanished") == ["ckpt-1"]
    assert [e["path"] for e in desk.entries()] == [str(first)]
