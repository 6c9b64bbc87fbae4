"""Detection of kills for lack of memory, by the kernel's counters.

A SIGKILL says nothing about its sender. The memory controller counts its kills per cgroup, and the
kernel all of them; what grew since the launch was the sender.

Source: `oom_kill` in memory.events (Documentation/admin-guide/cgroup-v2.rst) and memory.oom_control
(cgroup-v1/memory.rst), `oom_kill` in /proc/vmstat.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CGROUPS, MEMBERSHIP, KERNEL = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
    Path("/proc/vmstat"),
)


class OomCounters:
    """The counters of the cgroup that we and the job are in, and of the kernel.

    Args:
        group: file with the counter of the cgroup; None: it cannot be read here.
        kernel: file with the counter of the kernel.
    """

    def __init__(self, group: Path | None, kernel: Path = KERNEL) -> None:
        self._files = {"this cgroup": group, "this machine": kernel}
        self._before: Mapping[str, int] = self._read()

    @classmethod
    def here(cls) -> OomCounters:
        """Return those of this process."""
        return cls(group_file())

    def start(self) -> None:
        """The job is about to be launched: what was counted until now is not its own."""
        self._before = self._read()

    def killed(self) -> str:
        """Return how many processes were killed since the start, and where; "" for none."""
        now = self._read()
        for where, total in now.items():
            grown = total - self._before.get(where, total)
            if grown > 0:
                count = f"{grown} process" + ("es" if grown > 1 else "")
                return f"the kernel's out of memory killer ended {count} of {where}"
        return ""

    def _read(self) -> dict[str, int]:
        found = {}
        for where, path in self._files.items():
            count = _counter(path)
            if count is not None:
                found[where] = count
        return found


def group_file(membership: Path = MEMBERSHIP, root: Path = CGROUPS) -> Path | None:
    """Return the file with the counter of our cgroup, None where there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        below = group.lstrip("/")
        if number == "0" and not controllers:
            places = [root / below / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            places = [root / "memory" / below / "memory.oom_control"]
        else:
            continue
        # In a container the group's own path may not be visible: its root is the group then.
        for place in places:
            if place.is_file():
                return place
    return None


def _counter(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None
