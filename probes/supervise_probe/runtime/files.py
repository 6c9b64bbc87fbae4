"""Opens the files of the run inside the job: nothing here waits, and no link is followed.

A FIFO under the name of a file would block the job for ever. What is made here only the job's own
user can read, whatever its umask, and under a name that nobody can guess until it is complete. The
supervisor's side is `supervise/store/files.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import Any, Iterator

FILE, FOLDER = 0o600, 0o700
_SAFE = os.O_NONBLOCK | os.O_NOFOLLOW


def open_file(path: str, flags: int = os.O_RDONLY, foreign: bool = False) -> int:
    """Open a regular file and return its descriptor; O_CREAT in `flags` makes it.

    Args:
        foreign: it is the job's, which may be anybody's and be reached by a link. Else it is ours,
            root's, or of whoever owns its directory.

    Raises:
        OSError: there is none, or it is a FIFO, a device, a directory, or another user's.
    """
    fd = os.open(path, flags | (os.O_NONBLOCK if foreign else _SAFE), FILE)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        trusted = foreign or status.st_uid in (0, os.geteuid())
        if not trusted and status.st_uid != os.stat(os.path.dirname(path) or ".").st_uid:
            raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", path)
        if flags & os.O_CREAT:
            os.fchmod(fd, FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: str, foreign: bool = False) -> bytes:
    """Return the bytes of a file. Raises OSError as `open_file`."""
    with os.fdopen(open_file(path, foreign=foreign), "rb") as file:
        return file.read()


def create(path: str, shared: bool = False) -> int:
    """Make a file that is not there yet and return its descriptor, for reading and writing.

    Args:
        shared: for whom the umask says, else ours alone.

    Raises:
        OSError: it cannot be made, or something has that name.
    """
    mode = 0o666 if shared else FILE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode)
    if not shared:
        os.fchmod(fd, FILE)
    return fd


def own_directory(path: str) -> None:
    """Raise OSError unless `path` is a directory of ours, not reached by a link."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", path)


def make_directory(path: str) -> None:
    """Make a directory that is ours alone, unless it is there. Raises OSError."""
    os.makedirs(path, mode=FOLDER, exist_ok=True)


def token() -> str:
    """Return letters that nobody can guess; not by `random`, whose state is the job's."""
    return os.urandom(8).hex()


@contextmanager
def replacing(path: str, shared: bool = False, sync: bool = False) -> Iterator[Any]:
    """Yield a binary file that takes the place of `path` when all of it was written.

    Args:
        shared: see `create`. sync: wait until the bytes are on the disk.
    """
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, f".{name}.{token()}")
    try:
        with os.fdopen(create(fresh, shared), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        try:
            os.unlink(fresh)
        except OSError:
            pass
        raise


def replace(path: str, data: bytes) -> None:
    """Write a file: a reader sees the old bytes or the new ones. Raises OSError."""
    with replacing(path) as file:
        file.write(data)
