"""Files of savepoints: whole or not there, whatever the disk or the end of the process does."""

import hashlib
from pathlib import Path

import pytest

from supervise_probe.savepoints import files

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

DOCUMENT = {"what": "a savepoint", "model": torch.arange(1 << 19)}  # 4 MiB: several pieces


def test_what_is_written_is_read_back_and_its_hash_is_that_of_the_file(tmp_path):
    path = files.path_of(str(tmp_path / "new"), 7)
    files.write(torch.save, DOCUMENT, path, lambda: False)
    told = (tmp_path / "new" / "savepoint-000000007.pt.sha256").read_text().split()
    found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert told == [found, "savepoint-000000007.pt"]
    assert torch.equal(files.read(torch.load, path)["model"], DOCUMENT["model"])


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 5, 6, 8])
def test_what_is_called_off_leaves_what_was_there(tmp_path, pieces):
    """At any piece, in the middle of a tensor too; the thread is out of torch at once."""
    path = tmp_path / "savepoint-000000007.pt"
    path.write_text("of before")
    looks = iter([False] * pieces)
    with pytest.raises(files.Stopped):
        files.write(torch.save, DOCUMENT, str(path), lambda: next(looks, True))
    assert [each.read_text() for each in tmp_path.iterdir()] == ["of before"]


def test_those_behind_a_step_are_removed(tmp_path):
    for step in (5, 10, 15):
        for end in ("", files.HASH):
            (tmp_path / f"savepoint-{step:09d}.pt{end}").touch()
    (tmp_path / "z").touch()
    files.remove_after(str(tmp_path), 10)
    files.remove_after(str(tmp_path / "not-there"), 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"savepoint-{step:09d}.pt{end}" for step in (5, 10) for end in ("", files.HASH)),
        "z",
    ]
