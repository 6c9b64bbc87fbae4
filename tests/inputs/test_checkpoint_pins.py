"""Copies of checkpoints on a disk that is full, on another disk, and in a hurry."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import pytest

from supervise.checkpoints.pin_store import PinStore
from supervise.checkpoints.registry import Entry
from supervise.errors import StoreError

BYTES = bytes(range(256)) * 300_000  # several pieces


@pytest.fixture
def entry(tmp_path):
    """A verified checkpoint of one file."""
    path = tmp_path / "out" / "a.pt"
    path.parent.mkdir()
    path.write_bytes(BYTES)
    about = {"size": len(BYTES), "sha256": hashlib.sha256(BYTES).hexdigest()}
    return Entry("ckpt-1", str(path), bytes=len(BYTES), files={"a.pt": about})


@pytest.fixture
def elsewhere(tmp_path):
    """A directory on another file system."""
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_reserve_of_the_disk_stays_free(tmp_path):
    """Links take nothing."""
    assert "are needed, and" in PinStore(tmp_path, link=False, over=bool).no_room(1 << 60)
    assert PinStore(tmp_path, link=False, over=bool).no_room(0) == ""
    assert PinStore(tmp_path, link=True, over=bool).no_room(1 << 60) == ""


def test_on_another_disk(entry, elsewhere):
    """Copies arrive whole; what is moved aside stays on its own disk, hidden from the job."""
    pins, path = PinStore(elsewhere, link=False, over=bool), Path(entry.path)
    pins.pin(entry)
    assert pins.data(entry).read_bytes() == BYTES
    path.write_bytes(b"torn")

    moved = pins.place(entry, pins.stage(entry))

    assert path.read_bytes() == BYTES
    assert moved == path.with_name(".aside-before-ckpt-1-a.pt") and moved.read_bytes() == b"torn"
    with pytest.raises(OSError, match="cross-device"):
        PinStore(elsewhere, link=True, over=bool).pin(entry)


def test_a_copy_that_is_given_up_leaves_nothing(entry, tmp_path):
    """Nor one of a file that has changed since."""
    with pytest.raises(InterruptedError):
        PinStore(tmp_path / "run", link=False, over=lambda: True).pin(entry)
    Path(entry.path).write_bytes(b"another")
    with pytest.raises(StoreError, match="has changed since it was verified"):
        PinStore(tmp_path / "run", link=False, over=bool).pin(entry)

    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
