"""Whether a job that makes no steps works all the same: what its processes use up."""

from __future__ import annotations

import psutil

from .process import Process


def work(process: Process, within_s: float) -> dict[str, float]:
    """Watch the job for `within_s` seconds; return `cpu_s` used and `bytes` moved by it."""
    before = _counters(process)
    process.wait(within_s)
    after = _counters(process)
    return {
        "cpu_s": sum(cpu - before.get(pid, (0.0, 0))[0] for pid, (cpu, _) in after.items()),
        "bytes": sum(moved - before.get(pid, (0.0, 0))[1] for pid, (_, moved) in after.items()),
    }


def _counters(process: Process) -> dict[int, tuple[float, int]]:
    found = {}
    for member in process.tree.members():
        try:
            times, io = member.cpu_times(), member.io_counters()
            found[member.pid] = (times.user + times.system, io.read_chars + io.write_chars)
        except (psutil.Error, OSError):
            continue
    return found
