"""One supervisor per run: `flock` on its audit log, which the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ..errors import StoreError
from . import files

_TRIES = 4  # `locked` in another process takes a shared lock briefly
_WAIT_S = 0.05


def take(fd: int, path: Path) -> None:
    """Lock the open file `fd` for this process.

    Raises:
        StoreError: another process has it.
    """
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_WAIT_S)
    pid = holder(fd)
    raise StoreError(
        f"{path.parent} is watched by {'another process' if pid is None else f'process {pid}'}",
        hint="one run has one supervisor: wait for it to end, or choose another --run-dir",
    )


def holder(fd: int) -> int | None:
    """Return the pid of the process that has the lock, None if unknown."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        kind, pid, inode = columns[1], int(columns[4]), columns[5]
        if kind == "FLOCK" and inode == f"{device}:{found.st_ino}" and pid > 0:
            return pid
    return None


def locked(path: Path) -> bool:
    """Return whether a running supervisor has the audit log `path` open."""
    try:
        fd = files.open_file(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # this file system has no locks
    finally:
        os.close(fd)
    return False
