"""Files of the run inside the job: opened without a wait or a link, written beside the training.

A FIFO under the name of a file would block the job for ever. What is made here only the job's own
user can read, whatever its umask, and under a name that nobody can guess until it is complete. The
supervisor's side is `supervise/store/files.py`.

`Background` is one thread of the lowest priority, there only while there is work.
Rule 1: a task reads what the training no longer changes, and takes no step's time but the
interpreter's lock for moments.
Rule 2: at the exit of the process the thread is waited for: one that is inside torch while Python
goes away would take the job's exit code with it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

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


def read_file(path: str, foreign: bool = False) -> bytes:
    """Return the bytes of a file. Raises OSError as `open_file`."""
    with os.fdopen(open_file(path, foreign=foreign), "rb") as file:
        return file.read()


def create_file(path: str, shared: bool = False) -> int:
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


def require_own_directory(path: str) -> None:
    """Raise OSError unless `path` is a directory of ours, not reached by a link."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", path)


def make_directory(path: str) -> None:
    """Make a directory that is ours alone, unless it is there. Raises OSError."""
    os.makedirs(path, mode=FOLDER, exist_ok=True)


def random_token() -> str:
    """Return letters that nobody can guess; not by `random`, whose state is the job's."""
    return os.urandom(8).hex()


@contextmanager
def replacing_file(path: str, shared: bool = False, sync: bool = False) -> Iterator[Any]:
    """Yield a binary file that takes the place of `path` when all of it was written.

    Args:
        shared: see `create_file`. sync: wait until the bytes are on the disk.
    """
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, f".{name}.{random_token()}")
    try:
        with os.fdopen(create_file(fresh, shared), "wb") as file:
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


def replace_file(path: str, data: bytes) -> None:
    """Write a file: a reader sees the old bytes or the new ones. Raises OSError."""
    with replacing_file(path) as file:
        file.write(data)


LOWEST = 19  # nice value; on Linux it is the thread's own


class Background:
    """Tasks in order of arrival.

    Attributes:
        failures: what tasks raised, as sentences; whoever reports them empties it.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._tasks: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._thread: Optional[threading.Thread] = None

    @property
    def busy(self) -> bool:
        """Whether a task is running or waiting."""
        return self._thread is not None

    def do(self, task: Callable[..., Any], *args: Any) -> None:
        """Call `task(*args)` soon, in the thread."""
        with self._lock:
            self._tasks.append((task, args))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="supervise-background", daemon=True
                )
                self._thread.start()

    def close(self, wait_s: float, *, drain: bool = False) -> bool:
        """Wait for what runs, with `drain` also for what waits, and forget the rest.

        Returns:
            Whether it has ended.
        """
        with self._lock:
            if not drain:
                self._tasks.clear()
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)
        with self._lock:
            self._tasks.clear()
        return not self.busy

    def _work(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        except (OSError, AttributeError):  # then it runs as the others do
            pass
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task, args = self._tasks.popleft()
            try:
                task(*args)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            del task, args  # what it held must not wait for the next task
