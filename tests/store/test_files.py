"""Files are opened and made, on both sides: nothing waits, nothing of another user is taken."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from supervise.store import make_directory, open_file, read_file, replace_file, replacing_file
from supervise_probe.runtime import files as probe_files

NOBODY = 65534
SIDES = {
    "supervisor": (read_file, open_file, lambda p, d: replace_file(p, d, durable=True)),
    "probe": (
        lambda p: probe_files.read_file(str(p)),
        lambda p, flags: probe_files.open_file(str(p), flags),
        lambda p, d: probe_files.replace_file(str(p), d),
    ),
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture(params=SIDES)
def side(request):
    return SIDES[request.param]


@pytest.fixture(autouse=True)
def never_blocked():
    """A test that waits for a FIFO fails instead of standing still."""
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def plant(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.with_name("target").write_bytes(b"theirs")
        path.symlink_to(path.with_name("target"))
    else:
        path.write_bytes(b"theirs")
        os.chown(path, NOBODY, NOBODY)


KINDS = ["fifo", "directory", "link", pytest.param("foreign", marks=as_root)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_ours_is_refused_at_once(side, tmp_path, kind):
    """For reading, for writing and for appending alike; the name is free for a file of ours."""
    read, open_at, replace = side
    path = tmp_path / "state.json"
    plant(path, kind)

    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on the kind
            open_at(path, flags)
    with pytest.raises(OSError):  # noqa: PT011
        read(path)
    if kind != "directory":
        replace(path, b"ours")
        assert read(path) == b"ours"


@as_root
def test_root_reads_the_run_of_another_user(side, tmp_path):
    read, _, _ = side
    plant(tmp_path / "run.json", "foreign")
    os.chown(tmp_path, NOBODY, NOBODY)

    assert read(tmp_path / "run.json") == b"theirs"


def test_what_is_made_is_for_its_owner_alone(side, tmp_path, open_umask):
    _, open_at, replace = side
    replace(tmp_path / "a", b"x")
    os.close(open_at(tmp_path / "b", os.O_WRONLY | os.O_CREAT))
    make_directory(tmp_path / "c" / "d")

    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {"a": 0o600, "b": 0o600, "c": 0o777}  # the parent is the user's affair
    assert stat.S_IMODE((tmp_path / "c" / "d").stat().st_mode) == 0o700


def test_what_fails_half_way_leaves_nothing(tmp_path):
    (tmp_path / "a").write_text("old")

    with pytest.raises(RuntimeError), replacing_file(tmp_path / "a") as file:  # noqa: PT012
        file.write(b"new")
        raise RuntimeError

    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"
