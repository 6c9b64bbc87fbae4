"""Whether a job that makes no steps works all the same: what its processes use up."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from .process import STATE, Process, stat_fields


def work(process: Process, within_s: float) -> dict[str, float]:
    """Watch the job for `within_s` seconds; return `cpu_s` used and `bytes` moved by it."""
    before = counters(process.tree.members())
    process.wait(within_s)
    return difference(before, counters(process.tree.members()))


def suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP, Ctrl-Z); one traced is not."""
    stat = stat_fields(pid)
    return stat is not None and stat[STATE] == b"T"


def difference(
    before: dict[int, tuple[float, int]], after: dict[int, tuple[float, int]]
) -> dict[str, float]:
    return {
        "cpu_s": sum(cpu - before.get(pid, (0.0, 0))[0] for pid, (cpu, _) in after.items()),
        "bytes": sum(moved - before.get(pid, (0.0, 0))[1] for pid, (_, moved) in after.items()),
    }


def counters(members: Iterable[psutil.Process]) -> dict[int, tuple[float, int]]:
    """Return per pid its CPU seconds, and the bytes that it moved by calls or page faults."""
    found = {}
    for member in members:
        try:
            times, io = member.cpu_times(), member.io_counters()
            moved = max(io.read_chars + io.write_chars, io.read_bytes + io.write_bytes)
            found[member.pid] = (times.user + times.system, moved)
        except (psutil.Error, OSError):
            continue
    return found
