"""The directory in shared memory that holds the segments of one run.

The supervisor makes and removes it; the probes only make files in it. A supervisor that was killed
leaves it behind, since its job may still be writing: the next one sweeps away those of dead runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from supervise_probe import wire

from ..store import files
from .proc_stat import STATE, start_ticks, stat_fields

DEFAULT = Path("/dev/shm")  # noqa: S108 - the kernel's tmpfs; the segments in it are private
LEAST_SLOTS = 256
SLOT_BYTES = 600  # a frame of 64 metrics, and its share of the rest
OWNER = "owner"  # locked by the supervisor while it lives
JOB = "job."  # before the pid of the job's first process
TRIES, WAIT_S = 4, 0.05  # to get the lock
LEAST_AGE_S = 3600.0  # younger directories are left alone, whatever they look like
SEGMENT = ".seg"
_USER = re.compile(r"(?:rank-\d+|job)\.(\d+)(?:\.\d+)?(?:\.seg)?")


def base(environ: Mapping[str, str]) -> Path:
    """Return where shared memory is: `SUPERVISE_SHM`, else /dev/shm."""
    return Path(environ.get("SUPERVISE_SHM") or DEFAULT)


def make(root: Path, run_id: str) -> Path:
    """Make the directory of a run, mode 0700, ours while this process lives. Raises OSError."""
    path = of(root, run_id)
    files.make_directory(path, exist_ok=False)
    own(path)
    return path


def of(root: Path, run_id: str) -> Path:
    """Return where the directory of a run is."""
    return root / f"supervise-{os.getuid()}-{run_id}"


def own(path: Path) -> None:
    """Mark a run's directory as ours while this process lives; another user's is left alone."""
    try:
        if not files.is_own_directory(path):
            return
        fd = files.open_file(path / OWNER, os.O_CREAT | os.O_WRONLY)
    except OSError:
        return  # a full /dev/shm: without the mark the directory is swept once it is old
    for _ in range(TRIES):  # `sweep` in another process holds a shared lock for a moment
        try:
            # It goes with the process, and is seen from other containers.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(WAIT_S)
        except OSError:
            return  # no locks on this file system


def lend(path: Path, pid: int) -> None:
    """Say whose directory it is: the job's, which may have no segment for long after its start."""
    with suppress(OSError):
        os.close(files.create(path / f"{JOB}{pid}"))


def slots(path: Path, wanted: int) -> int:
    """Return how many frames a rank's segment may hold: `wanted`, fewer where memory is scarce.

    A container's /dev/shm of 64 MB belongs to the data workers first: a segment takes at most a
    32nd of what is free, and holds at least 256 frames.
    """
    try:
        free = os.statvfs(path)
    except OSError:
        return wanted
    return max(LEAST_SLOTS, min(wanted, free.f_bavail * free.f_frsize // 32 // SLOT_BYTES))


def remove(path: Path) -> None:
    """Remove a run's directory: ours by name, owner and mark; what cannot be removed is left.

    While a process that writes there lives, all of it is: `sweep` removes it later.
    """
    with suppress(OSError):
        ours = path.name.startswith(f"supervise-{os.getuid()}-") and files.is_own_directory(path)
        if ours and (path / OWNER).is_file():
            _clear(path)


def _clear(path: Path) -> None:
    if not any(map(_in_use, path.iterdir())):
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> list[Path]:
    """Remove directories of ours whose supervisor and jobs are all dead; return them."""
    removed = []
    for path in root.glob(f"supervise-{os.getuid()}-*"):
        try:
            if not files.is_own_directory(path):
                continue  # anybody may put anything into shared memory, a FIFO for instance
            pids = _users(path)
            old = time.time() - path.stat().st_mtime > LEAST_AGE_S
            if not old or _owned(path) or any(stat_fields(pid) for pid in pids):
                continue
            _clear(path)
        except OSError:  # no directory, not ours to look into, or just being removed
            continue
        removed.append(path)
    return removed


def _users(path: Path) -> list[int]:
    """Return the processes that made the files of a directory, by the names of the files."""
    return [int(found[1]) for file in path.iterdir() if (found := _USER.fullmatch(file.name))]


def _in_use(file: Path) -> bool:
    """Whether the process that a file is named after lives and, of a segment, may have written it.

    Anything can be planted under such a name, and pids are reused.
    """
    found = _USER.fullmatch(file.name)
    if found is None:
        return False
    pid = int(found[1])
    stat = stat_fields(pid) if pid > 1 else None
    lives = stat is not None and stat[STATE] not in (b"Z", b"X")
    return lives and (file.suffix != SEGMENT or _may_be_of(file, pid))


def _may_be_of(segment: Path, pid: int) -> bool:
    """Whether a segment is that of process `pid`; one that cannot be read may be."""
    try:
        if not stat.S_ISREG(segment.lstat().st_mode):
            return False
        fd = files.open_file(segment)
        try:
            header = wire.unpack_header(os.read(fd, wire.FIXED_SIZE))
        finally:
            os.close(fd)
    except wire.VersionError:  # of the probe of another release
        return True
    except wire.WireError:
        return False
    except OSError:
        return True
    return header.pid == pid and header.start_ticks in (0, start_ticks(pid))


def _owned(path: Path) -> bool:
    try:
        fd = files.open_file(path / OWNER)
    except OSError:  # none, or nothing that can be locked
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
