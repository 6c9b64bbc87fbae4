"""Does a job that makes no steps still work? Asked before it is ended for that and started again.

A long evaluation, a compilation or an upload makes no steps either. Each uses CPU, a device or the
disk, goes from one line to another, or at least wakes again and again, such as for each answer over
the network, which no counter of bytes shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import psutil

from ..core.model.action import busy, usage
from .process import Process

WINDOWS = 2  # of which none may show anything; project default
WAKES = 1.0  # a second, of a main thread; torch's loader wakes each 5 s to wait on; project default
STACKS_S = 20.0  # for those of all ranks


class Looks(NamedTuple):
    """What is read of the job from outside.

    Attributes:
        stack: returns where the main thread of a process is, "" where that cannot be read.
        device: returns the share of the time that the most used device of the job is in use.
    """

    stack: Callable[[int], str] = lambda pid: ""
    device: Callable[[], float] = lambda: 0.0


class Idle(Protocol):
    """What this needs of the job."""

    process: Process
    looks: Looks

    def work(self, within_s: float) -> dict[str, float]: ...
    def pids(self) -> Mapping[int, int]: ...


def movement(job: Idle, within_s: float) -> str:
    """Watch the job for `within_s` seconds, in `WINDOWS` windows; say why it cannot count as idle.

    Returns:
        "" where nothing moved: no CPU time, bytes or device in any window, and each rank's main
        thread slept where it was.
    """
    pids, window_s = job.pids(), within_s / WINDOWS
    before = _stacks(job, pids)
    if not before or not all(before.values()):
        return "where its main threads are cannot be read"
    for _ in range(WINDOWS):
        woke = {pid: _wakes(pid) for pid in pids.values()}
        used = job.work(window_s)
        if busy(used, window_s):
            return usage(used, window_s)
        for rank, pid in pids.items():
            if (wakes := _wakes(pid) - woke[pid]) > 1 + WAKES * window_s:
                return f"the main thread of rank {rank} woke {wakes} times in {window_s:.0f} s"
        for rank, stack in _stacks(job, pids).items():
            if stack != before[rank]:
                return f"the main thread of rank {rank} went from one line to another"
    return ""


def _stacks(job: Idle, pids: Mapping[int, int]) -> dict[int, str]:
    until_s = time.monotonic() + STACKS_S
    return {
        rank: job.looks.stack(pid) if time.monotonic() < until_s else ""
        for rank, pid in pids.items()
    }


def _wakes(pid: int) -> int:
    """Return how often the main thread has gone to sleep so far."""
    try:
        return int(psutil.Process(pid).num_ctx_switches().voluntary)
    except psutil.Error:
        return 0
