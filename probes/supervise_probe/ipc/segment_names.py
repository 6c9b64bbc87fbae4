"""The name of a segment's file, and what identifies its process beside the pid."""

from __future__ import annotations

import errno
import os

PROGRAMS = 1000  # segments of one rank and pid


def link(fresh: str, stem: str) -> str:
    """Give the file its name; never that of another one, as a rename would."""
    for number in range(PROGRAMS):
        path = f"{stem}.{number}.seg" if number else f"{stem}.seg"
        try:
            os.link(fresh, path)
            return path
        except FileExistsError:
            pass
    raise OSError(errno.EEXIST, f"{PROGRAMS} programs with one pid are enough", stem)


def start_ticks() -> int:
    """Return when this process began, in clock ticks since boot; 0 where /proc does not say."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
