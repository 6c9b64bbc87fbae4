"""The directory in shared memory that holds the segments of one run.

The supervisor makes and removes it; the probes only make files in it. A supervisor that was killed
leaves it behind, since its job may still be writing: the next one sweeps away those of dead runs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

DEFAULT = Path("/dev/shm")
LEAST_SLOTS = 256
SLOT_BYTES = 600  # a frame of 64 metrics, and its share of the rest
OWNER = "owner"  # file with the supervisor's pid and start time
_SEGMENT = re.compile(r"rank-\d+\.(\d+)\.seg")


def base(environ: Mapping[str, str]) -> Path:
    """Return where shared memory is: `SUPERVISE_SHM`, else /dev/shm."""
    return Path(environ.get("SUPERVISE_SHM") or DEFAULT)


def make(root: Path, run_id: str) -> Path:
    """Make the directory of a run, mode 0700. Raises OSError."""
    path = root / f"supervise-{os.getuid()}-{run_id}"
    path.mkdir(mode=0o700)
    me = psutil.Process()
    try:
        (path / OWNER).write_text(f"{me.pid} {me.create_time()}\n")
    except OSError:
        pass  # a full /dev/shm: without the mark the directory is swept once its jobs are gone
    return path


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
    """Remove a run's directory; what cannot be removed is left."""
    shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> list[Path]:
    """Remove directories of ours whose supervisor and jobs are all dead; return them."""
    gone = []
    for path in root.glob(f"supervise-{os.getuid()}-*"):
        pids = [int(found[1]) for file in path.iterdir() if (found := _SEGMENT.match(file.name))]
        if not _owner_lives(path) and not any(psutil.pid_exists(pid) for pid in pids):
            remove(path)
            gone.append(path)
    return gone


def _owner_lives(path: Path) -> bool:
    try:
        pid, created = (path / OWNER).read_text().split()
        return psutil.Process(int(pid)).create_time() == float(created)
    except (OSError, ValueError, psutil.Error):
        return False
