"""The directory of pages that outlived their run: private, bounded, one sender a page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from supervise.core.model.interfaces import Message
from supervise.errors import StoreError
from supervise.store.late_page_spool import Page, Spool

WALL = "2026-01-05T10:11:12.345Z"
TO = {"kind": "slack", "keys": {"url_env": "URL"}, "env": {"URL": "https://hooks/SECRET"}}


def page(number: int = 1, severity: str = "SEV1", due: str = WALL, title: str = "spike") -> Page:
    message = Message("run-1", "inc-1", severity, title, "", "", "", 7, "", (("a", "b"),))
    return Page("slack", message, (f"run-1:{number}", "run-1:x"), due, TO, 3, "503")


@contextmanager
def opened(path: Path, *, make: bool = True) -> Iterator[Spool]:
    with Spool.open(path, lambda: WALL, make=make) as spool:
        assert spool is not None
        yield spool


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "supervise" / "outbox"


def log(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "delivered.log").read_text().splitlines()]


def test_a_page_is_kept_whole_and_private(path):
    """Nobody else can read its destination, whatever the umask; kept twice, it is there once."""
    before = os.umask(0)
    try:
        with opened(path) as spool:
            spool.put(page())
            spool.put(page())
            [name] = spool.names()
            assert spool.read(name) == page()
            with spool.claim(name) as claimed:
                assert claimed == page()
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / name).stat().st_mode & 0o777 == 0o600
    assert "SECRET" not in repr(page())
    with Spool.open(path.parent / "elsewhere", lambda: WALL) as nothing:
        assert nothing is None


def test_a_page_has_one_owner_at_a_time(path):
    """Neither claimed twice nor after it was settled; an older look at a rewritten file is none."""
    with opened(path) as one, opened(path) as other:
        one.put(page())
        [name] = one.names()
        with one.claim(name) as mine:
            assert mine is not None
            with other.claim(name) as theirs:
                assert theirs is None
            one.record_failure(mine, "500")
        with other.claim(name) as again:
            assert again == replace(page(), attempts=4, error="500")
            other.settle(again, "delivered", "ok", "run-2")
        with one.claim(name) as gone:
            assert gone is None
        assert one.names() == []

    [record] = log(path)
    assert (record["what"], record["by"], record["attempts"]) == ("delivered", "run-2", 4)
    assert "SECRET" not in json.dumps(record)
    assert (path / "delivered.log").stat().st_mode & 0o777 == 0o600


def test_the_worst_and_the_oldest_come_first_and_go_last(path):
    """Beyond its bound the oldest SEV1 is dropped, on record; SEV0 only when no SEV1 is left."""
    with opened(path) as spool:
        for number, severity, hour in (
            (1, "SEV1", 9),
            (2, "SEV0", 8),
            (3, "SEV1", 7),
            (4, "SEV0", 6),
        ):
            spool.put(page(number, severity, f"2026-01-05T{hour:02}:00:00.000Z"))
        order = [spool.read(name).keys[0] for name in spool.names()]
        assert order == ["run-1:4", "run-1:2", "run-1:3", "run-1:1"]
        assert spool.trim("run-2") == 0
        assert spool.trim("run-2", max_pages=2) == 2
        assert [spool.read(name).keys[0] for name in spool.names()] == ["run-1:4", "run-1:2"]

        size_bytes = (path / spool.names()[0]).stat().st_size
        assert spool.trim("run-2", max_bytes=size_bytes) == 1

    assert [record["keys"][0] for record in log(path)] == ["run-1:3", "run-1:1", "run-1:4"]
    assert {record["what"] for record in log(path)} == {"dropped"}


NAME = page().name
WHOLE = {"version": 1, **json.loads(json.dumps(asdict(page())))}


def symlink(at: Path) -> None:
    at.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (NAME, b""),
        (NAME, b"[" * 100_000),
        (NAME, b"x" * 300_000),
        (NAME, {**WHOLE, "version": 2}),
        (NAME, {**WHOLE, "due": "yesterday"}),
        (NAME, {**WHOLE, "message": {**WHOLE["message"], "title": None}}),
        (NAME, {**WHOLE, "channel": "webhook"}),  # of another name
        (NAME, symlink),
        (NAME, os.mkfifo),
        (NAME, Path.mkdir),
        ("notes.txt", b"mine"),
    ],
)
def test_what_is_no_page_is_set_aside_by_name(path, name, content):
    """It neither ends the round nor keeps the pages beside it from being sent."""
    with opened(path) as spool:
        spool.put(page(2))
        at = path / name
        if callable(content):
            content(at)
        else:
            at.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

        claimed = []
        for each in spool.names():
            with spool.claim(each) as found:
                claimed += [found] if found is not None else []

        assert claimed == [page(2)]
        assert set(spool.aside) == {name}
        assert spool.names_aside() == [f"{name}.aside"]
        assert spool.names() == [page(2).name]
    assert [(each["what"], each["name"]) for each in log(path)] == [("set aside", name)]


def test_a_file_of_somebody_else_is_not_read(path, tmp_path):
    """Nor is a directory that is theirs, or a link to another one."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    with opened(path) as spool:
        spool.put(page())
        os.chown(path / NAME, 12345, -1)
        [name] = spool.names()
        assert spool.read(name) is None
        assert spool.aside == {NAME: "belongs to user 12345"}
    link = tmp_path / "link"
    link.symlink_to(path)
    os.chown(path, 12345, -1)
    for where in (path, link):
        with pytest.raises(StoreError, match=r"cannot use|belongs to user 12345"), opened(where):
            pass
