"""Files that survive a power cut, safe against other users, links and pipes.

Files are written completely or not at all. A new name is durable after an fsync of its directory,
the content after an fsync of the file.

Only regular files are opened: a FIFO would block the supervisor, so opening never waits
(O_NONBLOCK), follows no link, and checks the type before use. Created files are private (0600,
directories 0700) whatever the umask, and have an unpredictable name until they are complete.

A directory that is `held` is the one that it was then: nothing is created below its name once that
names another. Whose word is acted on says `foreign`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import json
import os
import pwd
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import StoreError

FILE, FOLDER = 0o600, 0o700
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_SAFE = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 64
MAX_LINKS = 40  # followed, as by Linux
MAX_JSON = 16 << 20  # bytes; our largest document has some hundred kB
_SEARCH = stat.S_IXGRP | stat.S_IXOTH
_held: dict[Path, tuple[int, int]] = {}  # directory -> device and inode


class _Wait:
    """One thread's waiting for disks: the time of what is over, and since when it waits now."""

    __slots__ = ("began_s", "depth", "total_s")

    def __init__(self) -> None:
        self.total_s = self.began_s = 0.0
        self.depth = 0

    def __enter__(self) -> None:
        if not self.depth:
            self.began_s = time.monotonic()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.total_s += time.monotonic() - self.began_s


_waits: dict[int, _Wait] = {}


def waiting_for_disk() -> _Wait:
    """Return a context in which this thread waits for a disk."""
    return _waits.setdefault(threading.get_ident(), _Wait())


def disk_wait_s(thread: int | None) -> float:
    """Return how long a thread has waited for disks, up to now. Any thread."""
    wait = None if thread is None else _waits.get(thread)
    if wait is None:
        return 0.0
    return wait.total_s + (time.monotonic() - wait.began_s if wait.depth else 0.0)


def sync_file(fd: int) -> None:
    """Sync the content of a file to disk. Raises OSError."""
    with waiting_for_disk():
        os.fdatasync(fd)


def sync_directory(path: Path) -> None:
    """Sync the names in the directory `path` to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with waiting_for_disk():
            os.fsync(fd)
    finally:
        os.close(fd)


def explain_missing(path: Path, opened: os.stat_result) -> str | None:
    """Return a sentence if `path` is not the opened file any more; None if it is, or unknown."""
    try:
        if os.path.samestat(path.stat(), opened):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return None
    return f"{path} is missing: it was removed, moved or replaced"


def read_json(path: Path, limit: int = MAX_JSON, *, foreign: bool = False) -> Any:
    """Return the JSON document in a file; `foreign` as in `open_file`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `limit` bytes, not JSON, or nested too deep.
    """
    try:
        document = json.loads(read_file(path, foreign=foreign, limit=limit))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not is_shallow(document):
        raise ValueError("it is nested too deep")
    return document


def is_shallow(value: Any) -> bool:
    """Return whether JSON is nested at most `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return True
        level = inner
    return False


def open_file(path: Path, flags: int = os.O_RDONLY, *, foreign: bool = False) -> int:
    """Open an existing regular file and return its descriptor. Never blocks.

    Args:
        flags: of `os.open`; O_CREAT creates a private file.
        foreign: any owner, and links are followed, as for a checkpoint. Else it must belong to us,
            to root, or to the owner of its directory: root may read the run of another user, and
            some file systems report another owner for all our files.

    Raises:
        OSError: it does not exist, or it is a FIFO, a device, a directory, or another user's.
    """
    safe = _SAFE & ~os.O_NOFOLLOW if foreign else _SAFE
    if flags & os.O_CREAT:
        refuse_exchanged(path)
    fd = os.open(path, flags | safe, FILE)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not foreign and not _is_ours(status.st_uid, path):
            raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))
        if flags & os.O_CREAT:
            os.fchmod(fd, FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(path: Path, *, foreign: bool = False, limit: int | None = None) -> bytes:
    """Return the bytes of a file; arguments and errors as in `open_file`.

    Raises:
        ValueError: it has more than `limit` bytes.
    """
    with os.fdopen(open_file(path, foreign=foreign), "rb") as file:
        # `read(n)` takes memory for n bytes, however many there are.
        size = os.fstat(file.fileno()).st_size
        raw: bytes = file.read() if limit is None else file.read(min(limit, size) + 1)
    if limit is not None and len(raw) > limit:
        raise ValueError(f"it is larger than {limit >> 10} KiB")
    return raw


def create_file(path: Path, *, shared: bool = False) -> int:
    """Create a file and return its descriptor for writing.

    Args:
        shared: permissions by the umask, else private.

    Raises:
        OSError: it cannot be created, or the name exists.
    """
    refuse_exchanged(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666 if shared else FILE)
    if not shared:
        os.fchmod(fd, FILE)
    return fd


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Create a private directory, and its parents by the umask.

    Raises:
        OSError: it cannot be created, or the name is not a directory, or another user's.
    """
    refuse_exchanged(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=FOLDER)
    except FileExistsError:
        if not exist_ok or not is_own_directory(path):
            raise
    path.chmod(FOLDER)


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it; what cannot be removed is left, and so is a file."""
    with suppress(OSError):
        refuse_exchanged(path)
        shutil.rmtree(path, ignore_errors=True)


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory of ours and not a link. Raises OSError.

    It is ours if a file that we create in it has the same owner: some file systems report another
    user id than ours.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    if status.st_uid == os.geteuid():
        return True
    try:
        trial = hidden_name(path / "owner")
        fd = create_file(trial)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == status.st_uid
    finally:
        os.close(fd)
        trial.unlink()


def hidden_name(path: Path) -> Path:
    """Return an unused hidden name in the directory of `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def descriptor_of(path: Path) -> int | None:
    """Return the number of our own descriptor that `path` names, as /dev/stdout does.

    Its file opened again is written from its begin, over what the descriptor wrote.
    """
    own = os.path.realpath("/proc/self/fd")
    for _ in range(MAX_LINKS):
        folder = os.path.realpath(path.parent)
        if folder == own and path.name.isdecimal():
            return int(path.name)
        try:
            path = Path(folder, path.readlink())
        except OSError:
            return None
    return None


def is_stream(path: Path) -> bool:
    """Return whether data passes through `path`: a device, a FIFO, a link as /dev/stdout.

    Whoever replaces /dev/null takes it from all programs of the machine.
    """
    if descriptor_of(path) is not None:
        return True
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    linked = path.is_symlink() and path.absolute().parts[1] in ("dev", "proc")
    return linked or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def require_writable(path: Path) -> None:
    """Create the folder of a file that is written later, and try a file there.

    Raises:
        OSError: it could not be written.
    """
    if (fd := descriptor_of(path)) is not None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    trial = hidden_name(path)
    os.close(create_file(trial))
    trial.unlink()


@contextmanager
def replacing_file(
    path: Path, mode: str = "wb", *, shared: bool = False, **options: Any
) -> Iterator[Any]:
    """Yield a file that replaces `path` if the block ends without an exception.

    Args:
        shared: see `create_file`; a user named it, and a stream is written to, see `is_stream`.
        mode, options: see `open`.
    """
    if shared and is_stream(path):
        fd = descriptor_of(path)
        with open(path if fd is None else os.dup(fd), mode, **options) as stream:  # noqa: PTH123 - or a number
            yield stream
        return
    fresh = hidden_name(path)
    try:
        with os.fdopen(create_file(fresh, shared=shared), mode, **options) as file:
            yield file
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Write `path` atomically: a reader sees the old content or the new one.

    Args:
        durable: also survive a power cut (two fsyncs, milliseconds); else only a killed process.

    Raises:
        OSError: the old file is unchanged.
    """
    with waiting_for_disk():
        with replacing_file(path) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            sync_directory(path.parent)


def write_all(fd: int, data: bytes) -> tuple[int, OSError | None]:
    """Write `data` in as many parts as the file system takes it.

    Returns:
        Number of bytes written, and why the others were not, None if all were.
    """
    count = 0
    try:
        with waiting_for_disk():
            while count < len(data):
                if not (size := os.write(fd, data[count:] if count else data)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                count += size
    except OSError as error:
        return count, error
    return count, None


def allocate_bytes(fd: int, start: int, size_bytes: int) -> None:
    """Give a file these bytes on disk, also beyond its end, which stays where it is.

    What is written there later needs no more space, whoever has taken the rest meanwhile.

    Raises:
        OSError: the disk is full, or its file system cannot do that (EOPNOTSUPP).
    """
    length, offset = ctypes.c_long(size_bytes), ctypes.c_long(start)
    if _libc.fallocate(fd, _KEEP_SIZE, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _is_ours(uid: int, path: Path) -> bool:
    return uid in (0, os.geteuid()) or uid == path.parent.stat().st_uid


def remember_directory(path: Path) -> None:
    """Take down which directory `path` is, for all that this process will write below it."""
    status = path.lstat()
    _held[path] = status.st_dev, status.st_ino


def refuse_exchanged(path: Path) -> None:
    """Raise OSError if a held directory above `path` is another one now."""
    for parent in path.parents:
        if parent in _held:
            status = parent.lstat()
            if (status.st_dev, status.st_ino) != _held[parent]:
                raise OSError(errno.ESTALE, "the directory was moved or replaced", str(parent))


def find_foreign_writer(path: Path) -> tuple[str, str]:
    """Return who else may have written what lies in the directory `path`, and what to do about it.

    Two empty strings: the directory, those above it, its files and those one level below belong to
    us or root, and nobody else may write or rename them. A directory above with the sticky bit may
    be open to all. Raises OSError.
    """
    path = path.absolute()
    real = path.resolve()
    if not is_own_directory(real):
        name = _user(real.stat().st_uid)
        return f"{real} belongs to user {name}", f"as {name}: sudo -u {name} supervise …"
    ours = {0, os.geteuid(), real.stat().st_uid}  # some file systems report another user id
    closed = False
    for chain in dict.fromkeys((path, real)):
        for folder in reversed(chain.parents):
            status = folder.stat()
            if status.st_uid not in ours | _unmapped():
                reason = (
                    f"{folder} belongs to user {_user(status.st_uid)}, who may rename what is in it"
                )
                return reason, "start the next run below a directory of yours: --run-dir DIR"
            if _open_to_others(status) and not status.st_mode & stat.S_ISVTX:
                return f"{folder} may be written by other users", f"chmod go-w {folder}"
            if closed := not status.st_mode & _SEARCH:
                break  # nobody else gets below
    closed = closed or not real.stat().st_mode & _SEARCH
    for child in (real, *real.iterdir(), *real.glob("*/*")):
        status = child.lstat()
        if status.st_uid not in ours:
            return f"{child} belongs to user {_user(status.st_uid)}", f"look at it: ls -l {child}"
        if not closed and _open_to_others(status) and not stat.S_ISLNK(status.st_mode):
            return f"{child} may be written by other users", f"chmod -R go-w {path}"
    return "", ""


def run_as_owner_prefix(program: str) -> list[str]:
    """Return how root starts a program that the job names: what goes before its command line.

    As the user who may put another one in its place; as root where only root may, and whoever is
    not root as before. Raises PermissionError: several may; OSError: it is not there.
    """
    if os.geteuid() != 0 or program == sys.executable:
        return []
    users, path = set[int](), Path(program)
    for chain in (path.absolute(), path.resolve()):
        for part in (chain, *chain.parents):
            status = part.lstat()
            users.add(status.st_uid)
            is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
            if is_open and not stat.S_ISLNK(status.st_mode):
                users.add(-1)
    users -= {0, *_unmapped()}
    if len(users) > 1 or -1 in users:
        text = f"{program}: several users may put another program in its place"
        raise PermissionError(errno.EPERM, text)
    if not users:
        return []
    group = uid = users.pop()
    with suppress(KeyError):
        group = pwd.getpwuid(uid).pw_gid
    return ["setpriv", f"--reuid={uid}", f"--regid={group}", "--clear-groups"]


def _open_to_others(status: os.stat_result) -> bool:
    """Whether others than the owner may write; the group of one user is that user."""
    if not status.st_mode & stat.S_IWGRP or status.st_mode & stat.S_IWOTH:
        return bool(status.st_mode & stat.S_IWOTH)
    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:
        return True
    alone = owner.pw_gid == status.st_gid and group.gr_name == owner.pw_name
    return not alone or bool(set(group.gr_mem) - {owner.pw_name})


def _unmapped() -> set[int]:
    """Return who owns what is of users that this user namespace does not have, such as its root."""
    try:
        is_initial = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return set() if is_initial else {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_TRIES = 4  # `locked` in another process takes a shared lock briefly
_WAIT_S = 0.05


def lock_file(fd: int, path: Path) -> None:
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
    pid = lock_holder(fd)
    raise StoreError(
        f"{path.parent} is watched by {'another process' if pid is None else f'process {pid}'}",
        hint="one run has one supervisor: wait for it to end, or choose another --run-dir",
    )


def lock_holder(fd: int) -> int | None:
    """Return the pid of the process that has the lock, None if unknown."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        if "->" in columns:  # somebody waits for a lock
            continue
        kind, pid, inode = columns[1], int(columns[4]), columns[5]
        if kind == "FLOCK" and inode == f"{device}:{status.st_ino}" and pid > 0:
            return pid
    return None


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on the file; a supervisor does on its audit log."""
    try:
        fd = open_file(path)
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
