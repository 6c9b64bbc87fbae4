"""What the kernel tells of a process in `/proc/<pid>/stat`. Standard library only."""

from __future__ import annotations

from pathlib import Path

STATE, STARTED, EXIT = 0, 19, 49  # places in `stat_fields`


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` was started, in clock ticks since boot; None when it is gone."""
    stat = stat_fields(pid)
    return None if stat is None else int(stat[STARTED])


def stat_fields(pid: int) -> list[bytes] | None:
    """Return what `/proc/<pid>/stat` has behind the name; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP, Ctrl-Z); one traced is not."""
    stat = stat_fields(pid)
    return stat is not None and stat[STATE] == b"T"
