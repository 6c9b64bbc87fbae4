"""Restoring checkpoints to the path where the job saved them."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from supervise.checkpoints import RestoredCheckpoint
from supervise.errors import StoreError

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_restore(driver):
    old = driver.save("ckpt_1.pt", "good 1", step=9)
    driver.write("ckpt_2.pt", "good 2", step=19)
    driver.save("ckpt_0.pt", "bad", step=8)
    driver.write("ckpt_3.pt", "not verified yet", step=29)
    old.unlink()

    done = driver.guard.restore("ckpt-1")

    assert done.path == str(old) and old.read_text() == "good 1"
    assert sorted(p.name for p in driver.out.iterdir()) == ["ckpt_1.pt"]
    aside = driver.run / "checkpoints/aside"
    assert sorted(done.moved) == [
        str(aside / name) for name in ("ckpt-2-ckpt_2.pt", "ckpt-3-ckpt_0.pt", "ckpt-4-ckpt_3.pt")
    ]
    assert driver.guard.restore("ckpt-1") == RestoredCheckpoint(str(old), [])
    assert driver.run_once() == [] and driver.pinned() == ["ckpt-1", "ckpt-2"]


def test_restore_directory(driver):
    folder = driver.out / "checkpoint-10"
    driver.write("checkpoint-10/model.bin", "good 1")
    driver.write("checkpoint-10/z.txt", "more")
    driver.report(folder, 9)
    assert driver.run_once() == [("ckpt-1", 9, True)]
    (folder / "model.bin").write_text("torn")

    done = driver.guard.restore("ckpt-1")

    assert (folder / "model.bin").read_text() == "good 1" and (folder / "z.txt").exists()
    (moved,) = done.moved
    assert (Path(moved) / "model.bin").read_text() == "torn"
    assert driver.guard.restore("ckpt-1").moved == []


def test_prepared_restore_reads_nothing_twice_and_replaces_what_was_saved_since(driver):
    """Neither the intact file at the path nor the copy is read again."""
    path = driver.save("a.pt", "good 1", step=9)
    pinned = driver.run / "checkpoints/ckpt-1/data/a.pt"
    driver.guard.prepare_restore("ckpt-1")
    pinned.write_text("rotten")
    assert driver.guard.restore("ckpt-1") == RestoredCheckpoint(str(path), [])

    pinned.write_text("good 1")
    path.unlink()
    driver.guard.prepare_restore("ckpt-1")
    pinned.write_text("rotten")
    assert list(driver.out.iterdir()) == [driver.out / ".a.pt.ckpt-1"]
    driver.guard.restore("ckpt-1")
    assert path.read_text() == "good 1" and list(driver.out.iterdir()) == [path]

    pinned.write_text("good 1")
    driver.guard.prepare_restore("ckpt-1")
    path.write_text("saved by the job while it was stopped")
    (moved,) = driver.guard.restore("ckpt-1").moved
    assert path.read_text() == "good 1" and Path(moved).read_text().startswith("saved by the job")


def test_prepare_detects_an_impossible_restore(driver):
    path = driver.save("a.pt", "good 1", step=9)
    path.unlink()
    driver.guard.prepare_restore("ckpt-1")
    driver.guard.close()
    assert list(driver.out.iterdir()) == []

    driver.open()
    (driver.run / "checkpoints/ckpt-1/data/a.pt").write_text("rotten")
    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        driver.guard.prepare_restore("ckpt-1")
    with pytest.raises(StoreError, match="ckpt-7 is not known"):
        driver.guard.prepare_restore("ckpt-7")
    assert list(driver.out.iterdir()) == []


@pytest.fixture
def sealed(driver):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=32", "tmpfs", str(driver.out)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield lambda: subprocess.run(["mount", "-o", "remount,ro", str(driver.out)], check=True)
    driver.guard.close()
    subprocess.run(["umount", "--lazy", str(driver.out)], check=True)


def test_prepare_detects_that_newer_files_cannot_be_moved(driver, sealed):
    path = driver.save("a.pt", "good 1", step=9)
    newer = driver.save("b.pt", "good 2", step=19)
    sealed()

    with pytest.raises(StoreError, match=r"ckpt-1 cannot be restored: .*Read-only"):
        driver.guard.prepare_restore("ckpt-1")
    driver.guard.prepare_restore("ckpt-2")
    assert driver.guard.restore("ckpt-2") == RestoredCheckpoint(str(newer), [])
    assert sorted(driver.out.iterdir()) == [path, newer]


def test_newer_files_can_be_moved_on_a_full_disk(driver, sealed):
    """A move needs no space; the trial file is removed."""
    path = driver.save("a.pt", "good 1", step=9)
    driver.save("b.pt", "good 2", step=19)
    full = driver.out / "full"
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass
    with suppress(OSError):
        while True:
            (driver.out / f"inode-{len(list(driver.out.iterdir()))}").touch()

    driver.guard.prepare_restore("ckpt-1")
    (moved,) = driver.guard.restore("ckpt-1").moved
    assert Path(moved).read_text() == "good 2" and path.exists()
    assert not list(driver.out.glob(".supervise*"))


def test_counters_are_kept_for_a_supervisor_that_takes_over(driver):
    path = driver.write("a.pt", "good 1")
    counters = {"all": {"steps_seen": 10.0, "tokens_seen": 80.0}}
    driver.report(path, 9, counters=counters)
    driver.run_once()
    driver.guard.close()
    driver.open()

    assert driver.guard.restore("ckpt-1").counters == counters
