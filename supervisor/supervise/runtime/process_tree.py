"""Processes of the job as /proc has them, its process tree, and its terminal.

torchrun gives each worker a session of its own, so a signal to the job's process group does not
reach them. Parentage does: the job's first process, its descendants, and the orphans that came to
the supervisor as their subreaper. Processes are known by pid and start time, never by pid or name
alone. Helpers of the supervisor stay in its own process group, which keeps them apart. Nothing is
remembered between calls, so every method may be called from any thread and from a signal handler.

The job has a process group of its own and is lent the terminal, so that Ctrl-C, Ctrl-Z and window
changes reach it once and directly. Ctrl-Z then stops the job but not the supervisor, which takes
the terminal back and stops its own group: that is what the shell waits for. When the shell
continues it, the terminal goes back to the job and the job is continued. Standard library only.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import psutil

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


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP, Ctrl-Z); one traced is not."""
    stat = stat_fields(pid)
    return stat is not None and stat[STATE] == b"T"


def explain_halted(pid: int) -> str:
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


_PAUSE_S = 0.02  # between two looks at processes that are about to end


class Tree:
    """The process tree of the job whose first process is `leader`.

    Args:
        leader: pid of the first process.
        earlier_children: pid and start of those that we had before the job; they are not its own.
    """

    def __init__(
        self, leader: int, earlier_children: Set[tuple[int, int | None]] = frozenset()
    ) -> None:
        self._leader = leader
        self._before = earlier_children
        self._reaped_at = 0.0

    def members(self) -> list[psutil.Process]:
        """Return the living processes of the job, parents before their children."""
        members: list[psutil.Process] = []
        for child in self._children():
            members.append(child)
            try:
                members += child.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return [process for process in members if is_alive(process)]

    def signal(self, signum: int, *, group: int | None = None) -> int:
        """Send `signum` to every process of the job; return how many it was sent to.

        Args:
            group: only to those in this process group.
        """
        members = [p for p in self.members() if group is None or process_group(p.pid) == group]
        return sum(_send(process, signum) for process in members)

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
                process_group(child.pid) not in (None, ours)
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


def process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def is_alive(process: psutil.Process) -> bool:
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


class Terminal:
    """The controlling terminal of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def find(cls) -> Terminal | None:
        """Return the controlling terminal, or None when there is none (a service, CI, a pipe)."""
        try:
            return cls(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return None

    def foreground(self) -> int:
        """Return the process group in the foreground, 0 when the terminal is gone."""
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:
            return 0

    def is_foreground(self) -> bool:
        """Return whether our own group is in the foreground: what is typed comes to us."""
        return self.foreground() == os.getpgrp()

    def lend(self, group: int) -> bool:
        """Put `group` in the foreground if it is ours to give; return whether it is there now."""
        if self.foreground() not in (os.getpgrp(), group):
            return False
        return self._put(group)

    def take_back(self, group: int) -> None:
        """Put our own group in the foreground if `group` is there, or a group that is no more."""
        front = self.foreground()
        if front == group or (front not in (0, os.getpgrp()) and not _exists(front)):
            self._put(os.getpgrp())

    def follow(self, group: int, to: int) -> None:
        """The job left `group` for `to`: that takes its place, or we do if it left the session."""
        if self.foreground() == group:
            self._put(to) or self._put(os.getpgrp())

    def close(self) -> None:
        """Close our descriptor; the terminal itself stays."""
        os.close(self._fd)

    def _put(self, group: int) -> bool:
        with _unstoppable():
            try:
                os.tcsetpgrp(self._fd, group)
            except OSError:  # the group has just ended, or the terminal hung up
                return False
        return True


def suspend_process_group(signum: int) -> None:
    """Stop our whole process group as the terminal would have; returns when it is continued.

    In an orphaned process group, where no shell could continue us, the kernel discards the signal
    and this returns at once.
    """
    handler = signal.signal(signum, signal.SIG_DFL)
    try:
        os.kill(0, signum)
    finally:
        signal.signal(signum, handler)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _unstoppable() -> Iterator[None]:
    """Changing the foreground from the background would stop us (SIGTTOU)."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
