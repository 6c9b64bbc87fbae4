"""Checkpoints that are put back where the job saved them."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from supervise.errors import StoreError

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_put_back(desk):
    """The old one is in its place, newer and bad ones are out of the way; twice is once."""
    old = desk.write("ckpt_1.pt", "good 1", step=9)
    desk.turn()
    new, bad = desk.write("ckpt_2.pt", "good 2", step=19), desk.write("ckpt_0.pt", "bad", step=8)
    desk.turn()
    last = desk.write("ckpt_3.pt", "not looked at yet", step=29)
    old.unlink()

    done = desk.guard.put_back("ckpt-1")

    assert done["path"] == str(old) and old.read_text() == "good 1"
    assert sorted(p.name for p in desk.out.iterdir()) == ["ckpt_1.pt"]
    aside = desk.run / "checkpoints/aside"
    assert sorted(done["moved"]) == [
        str(aside / name) for name in ("ckpt-2-ckpt_2.pt", "ckpt-3-ckpt_0.pt", "ckpt-4-ckpt_3.pt")
    ]
    assert not new.exists() and not bad.exists() and not last.exists()
    assert desk.guard.put_back("ckpt-1") == {"path": str(old), "moved": []}
    assert desk.turn() == [] and desk.pinned() == ["ckpt-1", "ckpt-2"]


def test_put_back_a_directory(desk):
    """The one that lies there is moved as a whole."""
    folder = desk.out / "checkpoint-10"
    desk.write("checkpoint-10/model.bin", "good 1")
    desk.write("checkpoint-10/z.txt", "more")
    desk.tell(folder, 9)
    assert desk.turn() == [("ckpt-1", 9, True)]
    (folder / "model.bin").write_text("torn")

    done = desk.guard.put_back("ckpt-1")

    assert (folder / "model.bin").read_text() == "good 1" and (folder / "z.txt").exists()
    (moved,) = done["moved"]
    assert (Path(moved) / "model.bin").read_text() == "torn"
    assert desk.guard.put_back("ckpt-1")["moved"] == []


def test_what_was_prepared_is_put_back_at_once(desk):
    """Nothing is read twice: neither what lay unhurt in its place nor the copy."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    pinned = desk.run / "checkpoints/ckpt-1/data/a.pt"
    desk.guard.prepare("ckpt-1")
    pinned.write_text("rotten")
    assert desk.guard.put_back("ckpt-1") == {"path": str(path), "moved": []}

    pinned.write_text("good 1")
    path.unlink()
    desk.guard.prepare("ckpt-1")
    pinned.write_text("rotten")
    assert list(desk.out.iterdir()) == [desk.out / ".a.pt.ckpt-1"]
    desk.guard.put_back("ckpt-1")
    assert path.read_text() == "good 1" and list(desk.out.iterdir()) == [path]


def test_what_the_job_wrote_as_it_was_stopped_does_not_count(desk):
    """It lay unhurt in its place a moment ago; the pinned copy takes its place."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.guard.prepare("ckpt-1")
    path.write_text("saved on the way out")

    (moved,) = desk.guard.put_back("ckpt-1")["moved"]

    assert path.read_text() == "good 1" and Path(moved).read_text() == "saved on the way out"


def test_what_cannot_be_put_back_is_known_beforehand(desk):
    """The job's files are as they were; what was prepared and is not used leaves nothing."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.unlink()
    desk.guard.prepare("ckpt-1")
    desk.guard.close()
    assert list(desk.out.iterdir()) == []

    desk.open()
    (desk.run / "checkpoints/ckpt-1/data/a.pt").write_text("rotten")
    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        desk.guard.prepare("ckpt-1")
    with pytest.raises(StoreError, match="ckpt-7 is not known"):
        desk.guard.prepare("ckpt-7")
    assert list(desk.out.iterdir()) == []


def test_a_prepared_one_stays_pinned(desk):
    """Newer good ones do not drop it meanwhile."""
    for number in range(1, 5):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 2:
            desk.guard.prepare("ckpt-1")
        desk.turn()
        desk.turn()

    assert desk.pinned() == ["ckpt-1", "ckpt-3", "ckpt-4"]


def test_a_disk_that_refuses_is_told_as_such(desk):
    """A directory that became a file lets nobody in."""
    path = desk.write("d/a.pt", "good 1", step=9)
    desk.turn()
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")

    for what in (desk.guard.prepare, desk.guard.put_back):
        with pytest.raises(StoreError, match="ckpt-1 cannot be put back"):
            what("ckpt-1")
    path.parent.unlink()
    desk.guard.prepare("ckpt-1")
    assert desk.guard.put_back("ckpt-1")["path"] == str(path)


@pytest.fixture
def sealed(desk):
    """Return a function: the job's directory can only be read any more, whoever asks."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=32", "tmpfs", str(desk.out)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield lambda: subprocess.run(["mount", "-o", "remount,ro", str(desk.out)], check=True)
    desk.guard.close()
    subprocess.run(["umount", "--lazy", str(desk.out)], check=True)


def test_that_what_is_newer_cannot_be_moved_is_known_beforehand(desk, sealed):
    """The checkpoint itself lies unhurt in its place; where nothing is newer, that is enough."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    newer = desk.write("b.pt", "good 2", step=19)
    desk.turn()
    sealed()

    with pytest.raises(StoreError, match=r"ckpt-1 cannot be put back: .*Read-only"):
        desk.guard.prepare("ckpt-1")
    desk.guard.prepare("ckpt-2")
    assert desk.guard.put_back("ckpt-2") == {"path": str(newer), "moved": []}
    assert sorted(desk.out.iterdir()) == [path, newer]


def test_what_is_newer_may_be_moved_on_a_full_disk(desk, sealed):
    """That takes no room; nothing that looks whether it may be is left."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.write("b.pt", "good 2", step=19)
    desk.turn()
    full = desk.out / "full"
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass
    with suppress(OSError):
        while True:
            (desk.out / f"inode-{len(list(desk.out.iterdir()))}").touch()

    desk.guard.prepare("ckpt-1")
    (moved,) = desk.guard.put_back("ckpt-1")["moved"]
    assert Path(moved).read_text() == "good 2" and path.exists()
    assert not list(desk.out.glob(".supervise*"))


def test_only_what_is_damaged_is_gone(desk):
    """Its last copy is not what was verified; that is told, and nobody chooses it again."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.unlink()
    desk.turn()
    (desk.run / "checkpoints/ckpt-1/data/a.pt").write_text("rotten")

    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        desk.guard.prepare("ckpt-1")

    assert [(e.data["id"], e.data["ok"]) for e in desk.guard.poll()] == [("ckpt-1", False)]
    assert desk.entry("ckpt-1")["state"] == "vanished"


def test_a_register_that_cannot_be_written_is_told(desk):
    """What was put back is in its place all the same."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.unlink()
    (desk.run / "checkpoints.json").unlink()
    (desk.run / "checkpoints.json").mkdir()

    assert desk.guard.put_back("ckpt-1")["path"] == str(path)

    assert path.read_text() == "good 1"
    assert "register of checkpoints cannot be written" in desk.guard.poll()[0].message


def test_a_damaged_copy_is_not_put_back(desk):
    """It says so, and leaves everything as it was; so with what is not known or not good."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.write_text("torn")
    (desk.run / "checkpoints/ckpt-1/data/a.pt").write_text("good 2")

    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        desk.guard.put_back("ckpt-1")
    assert path.read_text() == "torn"
    with pytest.raises(StoreError, match="ckpt-7 is not known"):
        desk.guard.put_back("ckpt-7")
