"""Files that survive a power cut, and that no other user and no pipe can lead astray.

Written whole, or not at all. A new name is only safe after an fsync of its directory; the bytes
only after an fsync of the file.

Whatever is opened here is a regular file: a FIFO under the name of a file would block the
supervisor for ever, so nothing waits (O_NONBLOCK), no link is followed, and what the name stands
for is looked at before it is used. What we make is ours alone (0600, directories 0700) whatever the
umask says, and under a name that nobody can guess until it is complete.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE, FOLDER = 0o600, 0o700
_SAFE = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 64
MAX_JSON = 16 << 20  # bytes of a document of ours; the largest takes some hundred kB


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def gone(path: Path, known: os.stat_result) -> str | None:
    """Say that `path` is not the file any more that was opened; None: it is, or nobody can tell."""
    try:
        if os.path.samestat(path.stat(), known):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return None
    return f"{path} is gone: it was removed, moved or replaced"


def read_json(path: Path, limit: int = MAX_JSON, *, foreign: bool = False) -> Any:
    """Return the JSON document in a file, whatever the file holds; `foreign` as of `open_file`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `limit` bytes, no JSON, or nested too deep.
    """
    try:
        found = json.loads(read(path, foreign=foreign, limit=limit))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not shallow(found):
        raise ValueError("it is nested too deep")
    return found


def shallow(value: Any) -> bool:
    """Return whether JSON is not nested deeper than what reads it can follow."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return True
        level = inner
    return False


def open_file(path: Path, flags: int = os.O_RDONLY, *, foreign: bool = False) -> int:
    """Open a regular file that is there, and return its descriptor. Never waits.

    Args:
        flags: how to open it; O_CREAT makes it, ours alone.
        foreign: it may be anybody's and be reached by a link, as a checkpoint may. Else it is ours,
            root's, or of whoever owns its directory: root may look into the run of another user,
            and some file systems show all that we own as somebody else's.

    Raises:
        OSError: there is none, or it is a FIFO, a device, a directory, or another user's.
    """
    safe = _SAFE & ~os.O_NOFOLLOW if foreign else _SAFE
    fd = os.open(path, flags | safe, FILE)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not foreign and not _is_ours(found.st_uid, path):
            raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))
        if flags & os.O_CREAT:
            os.fchmod(fd, FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path, *, foreign: bool = False, limit: int | None = None) -> bytes:
    """Return the bytes of a file; arguments and errors as those of `open_file`.

    Raises:
        ValueError: it has more than `limit` bytes; none of them stays in memory.
    """
    with os.fdopen(open_file(path, foreign=foreign), "rb") as file:
        raw: bytes = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(raw) > limit:
        raise ValueError(f"it is larger than {limit >> 10} KiB")
    return raw


def create(path: Path, *, shared: bool = False) -> int:
    """Make a file that is not there yet, and return its descriptor for writing.

    Args:
        shared: for whom the umask says, else ours alone.

    Raises:
        OSError: it cannot be made, or something has that name.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666 if shared else FILE)
    if not shared:
        os.fchmod(fd, FILE)
    return fd


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory that is ours alone; its parents too, as the umask says.

    Raises:
        OSError: it cannot be made, or what has that name is no directory, or another user's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=FOLDER)
    except FileExistsError:
        if not exist_ok or not is_own_directory(path):
            raise
    path.chmod(FOLDER)


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory, not reached by a link, that belongs to us. Raises OSError.

    To us belongs what has the owner of a file that we make in it: on some file systems that is
    another number than our own.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return False
    if found.st_uid == os.geteuid():
        return True
    try:
        mine = unpredictable(path / "owner")
        fd = create(mine)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == found.st_uid
    finally:
        os.close(fd)
        mine.unlink()


def unpredictable(path: Path) -> Path:
    """Return a hidden name beside `path` that nobody can have taken."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextmanager
def replacing(path: Path, mode: str = "wb", *, shared: bool = False, **how: Any) -> Iterator[Any]:
    """Yield a file that takes the place of `path` when the block ends without an exception.

    Args:
        shared: see `create`. mode, how: see `open`.
    """
    fresh = unpredictable(path)
    try:
        with os.fdopen(create(fresh, shared=shared), mode, **how) as file:
            yield file
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def replace(path: Path, data: bytes, *, durable: bool) -> None:
    """Write `path` atomically: a reader sees the old bytes or the new ones, never a mixture.

    Args:
        durable: also survive a power cut (two fsyncs, milliseconds); else only a killed process.

    Raises:
        OSError: nothing was changed.
    """
    with replacing(path) as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_directory(path.parent)


def _is_ours(uid: int, path: Path) -> bool:
    return uid in (0, os.geteuid()) or uid == path.parent.stat().st_uid
