"""Activity of a silent job: idle, in a phase, or in one stack.

Asked before a job that makes no steps is ended and started again. A long evaluation, a compilation
or an upload makes no steps either; each uses CPU, a device or the disk, moves from one line to
another, or at least wakes again and again, such as for each answer over the network, which no
counter of bytes shows.

The phase is stopped by a signal, starting, working, or dead. Silence in the phase `suspended` or
`loading` is no standstill (see `detectors.absence`). A rank whose process died is `dead` while
others train, or where nothing of the job works: an upload after the training works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import psutil

from ..core.model.action import describe_usage, is_busy
from ..core.model.events import DEAD, LOADING, SUSPENDED, Beat, Notice
from ..core.model.payload import Payload
from .process import Process
from .process_tree import is_suspended

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


def explain_movement(job: Idle, within_s: float) -> str:
    """Watch the job for `within_s` seconds, in `WINDOWS` windows; say why it cannot count as idle.

    Returns:
        "" where nothing moved: no CPU time, bytes or device in any window, and each rank's main
        thread slept where it was.
    """
    pids, window_s = job.pids(), within_s / WINDOWS
    earlier_stacks = _stacks(job, pids)
    if not earlier_stacks or not all(earlier_stacks.values()):
        return "where its main threads are cannot be read"
    for _ in range(WINDOWS):
        woke = {pid: _wakes(pid) for pid in pids.values()}
        used = job.work(window_s)
        if is_busy(used, window_s):
            return describe_usage(used, window_s)
        for rank, pid in pids.items():
            if (wakes := _wakes(pid) - woke[pid]) > 1 + WAKES * window_s:
                return f"the main thread of rank {rank} woke {wakes} times in {window_s:.0f} s"
        for rank, stack in _stacks(job, pids).items():
            if stack != earlier_stacks[rank]:
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


STARTUP = "startup"
DEVICE_S = 1.0  # between two looks at the devices of a job that is watched
LOOK_S = 10.0  # as the idle watch of the shipped runbooks
LONG_S = 900.0  # a start-up that works is reported after it, and each time it has doubled


class Phases:
    """Replaces the phase of beats where more is known than the probe tells.

    Args:
        members: returns the processes of the job.
        device: returns the share of the time that the most used device of the job is in use.
        look_s: over which a start-up is asked for work.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[psutil.Process]],
        device: Callable[[], float] = lambda: 0.0,
        look_s: float = LOOK_S,
    ) -> None:
        self._members, self._device, self._look_s = members, device, look_s
        self._looked_s = float("-inf")
        self._before: dict[int, tuple[float, int]] = {}
        self._works = False
        self._since_ns: int | None = None  # of the start-up under way
        self._report_s = LONG_S
        self._stopped: frozenset[int] = frozenset()

    def adjust_beats(
        self, ranks: Sequence[tuple[int, Beat]], now_ns: int, dead: Collection[int] = ()
    ) -> tuple[tuple[Beat, ...], list[Notice]]:
        """Return the beats as they are to be judged, and what people should know.

        Args:
            ranks: pid and beat of each rank.
            dead: ranks whose process died otherwise than at its own end.
        """
        stopped = frozenset(beat.rank for pid, beat in ranks if is_suspended(pid))
        notices = [
            Notice(0, "stopped", _stopped(beat.rank, pid), rank=beat.rank)
            for pid, beat in ranks
            if beat.rank in stopped - self._stopped
        ]
        self._stopped = stopped
        starts = any(beat.phase == STARTUP and beat.rank not in dead for _, beat in ranks)
        alone = bool(dead) and all(beat.rank in dead for _, beat in ranks)
        works = self.is_using_resources() if starts or alone else False
        if not starts:
            self._since_ns, self._report_s = None, LONG_S
        else:
            self._since_ns = now_ns if self._since_ns is None else self._since_ns
            notices += self._slow(now_ns - self._since_ns) if works else []
        beats = tuple(
            replace(beat, phase=DEAD)
            if beat.rank in dead and not (alone and works)
            else replace(beat, phase=SUSPENDED)
            if stopped  # the others wait for the one that is
            else replace(beat, phase=LOADING)
            if works and beat.phase == STARTUP
            else beat
            for _, beat in ranks
        )
        return beats, [replace(notice, at_ns=now_ns) for notice in notices]

    def is_using_resources(self) -> bool:
        """Return whether the job used CPU, files or a device between the newest two looks at it."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._look_s:
            usage, within_s = usage_counters(self._members()), now_s - self._looked_s
            used = {**usage_difference(self._before, usage), "device": self._device()}
            self._works = within_s < 3.0 * self._look_s and is_busy(
                used, within_s
            )  # else: the first look
            self._looked_s, self._before = now_s, usage
        return self._works

    def _slow(self, took_ns: int) -> list[Notice]:
        took_s = took_ns / 1e9
        if took_s < self._report_s:
            return []
        self._report_s = 2.0 * took_s
        text = f"no step after {took_s / 60.0:.0f} min of start-up; the job reads or computes"
        return [Notice(0, "slow-start", text, data=Payload({"seconds": round(took_s)}))]


def _stopped(rank: int, pid: int) -> str:
    return (
        f"rank {rank} is stopped by a signal: its silence is not judged; "
        f"`kill -CONT {pid}` lets it go on"
    )


def measure_work(
    process: Process, within_s: float, device: Callable[[], float] = lambda: 0.0
) -> dict[str, float]:
    """Watch the job for `within_s` seconds; return what `core.model.action.Job.work` says.

    Args:
        device: returns the share of the time that the most used device of the job is in use.
    """
    start_usage, until_s, highest = (
        usage_counters(process.tree.members()),
        time.monotonic() + within_s,
        0.0,
    )
    while process.returncode is None and (left_s := until_s - time.monotonic()) > 0.0:
        highest = max(highest, device())
        process.wait(min(left_s, DEVICE_S))
    return {
        **usage_difference(start_usage, usage_counters(process.tree.members())),
        "device": highest,
    }


def usage_difference(
    start_usage: dict[int, tuple[float, int]], end_usage: dict[int, tuple[float, int]]
) -> dict[str, float]:
    return {
        "cpu_s": sum(
            cpu - start_usage.get(pid, (0.0, 0))[0] for pid, (cpu, _) in end_usage.items()
        ),
        "bytes": sum(
            moved - start_usage.get(pid, (0.0, 0))[1] for pid, (_, moved) in end_usage.items()
        ),
    }


def usage_counters(members: Iterable[psutil.Process]) -> dict[int, tuple[float, int]]:
    """Return per pid its CPU seconds, and the bytes that it moved by calls or page faults."""
    usage = {}
    for member in members:
        try:
            times, io = member.cpu_times(), member.io_counters()
            moved = max(io.read_chars + io.write_chars, io.read_bytes + io.write_bytes)
            usage[member.pid] = (times.user + times.system, moved)
        except (psutil.Error, OSError):
            continue
    return usage
