"""Bounds what a file can take of us: memory, and time in which nothing comes of it.

Both are kept by the kernel, since a file may hold us in code that is not Python.
"""

import errno
import os
import resource
import signal
import stat
from typing import BinaryIO

IDLE_S = 120.0  # longer than an NFS server takes to come back; project default
SLOWEST = 20_000_000  # bytes per second of the slowest disk, as the supervisor assumes
SHARE, MARGIN = 4, 1 << 30  # times the bytes of the files, and bytes beyond that; project defaults
_armed = False


def start_stall_alarm() -> None:
    """From now on end this process by SIGALRM once `progress` was not called for `IDLE_S`."""
    global _armed
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _armed = True
    report_progress()


def report_progress(next_bytes: int = 0) -> None:
    """Say that something was read, and how many bytes the next part has."""
    if _armed:
        signal.setitimer(signal.ITIMER_REAL, IDLE_S + next_bytes / SLOWEST)


def limit_memory(size: int) -> None:
    """Let this process take some times the `size` of what it reads, besides what it has."""
    with open("/proc/self/status", encoding="ascii") as file:
        has = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = has + SHARE * size + MARGIN
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def open_file(path: str) -> BinaryIO:
    """Open a regular file, without waiting. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(fd, "rb")
