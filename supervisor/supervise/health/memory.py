"""Memory available to a job: the machine's, or what its container is allowed.

Source: memory.max, memory.current and memory.stat (Documentation/admin-guide/cgroup-v2.rst),
memory.limit_in_bytes and memory.usage_in_bytes (cgroup-v1/memory.rst). Files that nobody has used
lately (`inactive_file`) are given up when memory is wanted.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from ..inputs.oom_counters import group_file

LIMITS = (  # of a cgroup: most, in use, and the row of memory.stat that can be given up
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(group: Path | None = None) -> int | None:
    """Return what can be had without swapping, None where the system does not say.

    Args:
        group: folder of the cgroup; default: ours.
    """
    counters = group_file()
    if group is None and counters is not None:
        group = counters.parent
    found = [] if group is None else _allowed(group)
    with suppress(OSError, RuntimeError):
        found.append(int(psutil.virtual_memory().available))
    return min(found, default=None)


def _allowed(group: Path) -> list[int]:
    """Return what the limit of a cgroup leaves, nothing where it has none."""
    for most, in_use, unused in LIMITS:
        with suppress(OSError, ValueError):
            limit = int((group / most).read_text())  # "max" is no number: there is no limit
            rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            idle = next((int(row[1]) for row in rows if row[:1] == [unused]), 0)
            return [limit - int((group / in_use).read_text()) + idle]
    return []
