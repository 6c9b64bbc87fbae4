"""Whether the limits of this process leave room to watch a job.

Half of a supervisor is worse than none: it fails in the middle, where the job relies on it.
"""

from __future__ import annotations

import os
import resource

FILES = 12  # that must be left to open: log, journal, pipes, evidence; project default
MEMORY_BYTES = 256 << 20  # of address space, where it is limited: 130 MiB may be too few


def shortage() -> str | None:
    """Return which limit is too small and how to raise it, None where none is."""
    files, memory = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    )
    if files != resource.RLIM_INFINITY:
        used = sum(map(_is_open, range(min(files, FILES))))
        if files - used < FILES:
            return f"only {files} files may be open, {used} are (ulimit -n 1024 allows more)"
    if memory not in (resource.RLIM_INFINITY, -1) and memory < MEMORY_BYTES:
        return (
            f"only {memory >> 20} MiB of address space are allowed, and watching takes "
            f"{MEMORY_BYTES >> 20} (ulimit -v unlimited allows more)"
        )
    return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
