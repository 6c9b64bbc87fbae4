"""The kernel's data on a process in `/proc/<pid>`. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

STATE, STARTED, EXIT = 0, 19, 49  # places in `stat_fields`
EXITED = "has exited"


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


def halted(pid: int) -> str:
    """Return why a process cannot run, as the end of a sentence; "" where it can."""
    stat = stat_fields(pid)
    if stat is None or stat[STATE] in (b"Z", b"X"):
        return EXITED
    return "is stopped by a signal" if stat[STATE] == b"T" else ""


def is_handled(pid: int, signum: int) -> bool:
    """Return True unless the signal would have its default action right now.

    Caught, ignored, or blocked by the main thread, as before `sigwait`: then it is the job's own
    business. Also where nothing is known.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = re.findall(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)", status, re.MULTILINE)
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)
