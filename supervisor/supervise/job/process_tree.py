"""Every process of the job, wherever it has wandered.

torchrun gives each worker a session of its own, so a signal to the job's process group does not
reach them. What reaches all of them is parentage: the job's first process, its descendants, and the
orphans that came to us as their subreaper. Processes are known by pid and start time, never by pid
or name alone. Helpers of our own stay in our process group, which is how they are signalled apart.

Nothing is remembered between calls, so that every method may be called from any thread and from a
signal handler.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Set

import psutil

from .proc_stat import start_ticks

_PAUSE_S = 0.02  # between two looks at processes that are about to end


class Tree:
    """The process tree of the job whose first process is `leader`.

    Args:
        leader: pid of the first process.
        before: pid and start of the children that we had before the job; they are not the job's.
    """

    def __init__(self, leader: int, before: Set[tuple[int, int | None]] = frozenset()) -> None:
        self._leader = leader
        self._before = before
        self._reaped_at = 0.0

    def members(self) -> list[psutil.Process]:
        """Return the living processes of the job, parents before their children."""
        found: list[psutil.Process] = []
        for child in self._children():
            found.append(child)
            try:
                found += child.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return [process for process in found if alive(process)]

    def signal(self, signum: int, *, group: int | None = None) -> int:
        """Send `signum` to every process of the job; return how many it was sent to.

        Args:
            group: only to those in this process group.
        """
        meant = [p for p in self.members() if group is None or group_of(p.pid) == group]
        return sum(_send(process, signum) for process in meant)

    def end(self, signum: int, within_s: float) -> list[psutil.Process]:
        """Send `signum` and wait up to `within_s` for all to end; return the survivors.

        Processes that appear meanwhile are sent it as well. With SIGKILL it is sent until nobody is
        left, since a process may fork between the look and the blow.
        """
        deadline = time.monotonic() + within_s
        signalled: set[psutil.Process] = set()
        while members := self.members():
            for process in members:
                if signum == signal.SIGKILL or process not in signalled:
                    signalled.add(process)
                    _send(process, signum)
                    if signum != signal.SIGKILL:
                        _send(process, signal.SIGCONT)  # a stopped process hears nothing else
            if time.monotonic() >= deadline:
                return members
            self.reap(every_s=0.0)
            time.sleep(_PAUSE_S)
        self.reap(every_s=0.0)
        return []

    def reap(self, every_s: float = 1.0) -> int:
        """Collect orphans of the job that have ended; return how many. Looks once per `every_s`."""
        now = time.monotonic()
        if now - self._reaped_at < every_s or not _somebody_ended():
            return 0
        self._reaped_at = now
        return sum(_collect(child.pid) for child in self._children() if child.pid != self._leader)

    def _children(self) -> list[psutil.Process]:
        """Our direct children that belong to the job: its leader, and orphans that came to us."""
        ours = os.getpgrp()
        return [
            child
            for child in psutil.Process().children()
            if child.pid == self._leader
            or (
                group_of(child.pid) not in (None, ours)
                and (child.pid, start_ticks(child.pid)) not in self._before
            )
        ]


def _somebody_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _collect(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: int) -> bool:
    try:
        process.send_signal(signum)  # refuses when the pid now belongs to another process
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return True
