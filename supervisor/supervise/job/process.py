"""The job as a process: started, watched, signalled, stopped.

Two kinds of callers share it. The main thread calls `poll`, which also does job control and
collects orphans. Any other thread may `wait`, `signal` and `stop`. The exit status is looked at
before it is collected, so that no signal can hit a pid that was given away.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .launch import NO_OUTPUTS, spawn
from .proc_stat import start_ticks
from .terminal import Terminal, stop_ourselves

if TYPE_CHECKING:  # psutil takes 20 ms to import, and a job is not kept waiting for it
    from .process_tree import Tree

UNKNOWN = 255  # stands for an exit code that nobody has
_INTERRUPTED = 128 + signal.SIGINT  # what a shell calls the end by SIGINT
_PAUSE_S = 0.01  # between two looks while waiting
_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)  # what a terminal stops a job with


def exit_code(returncode: int) -> int:
    """Return the exit code that passes the job's end on: its own, or 128+n after signal n."""
    return returncode if returncode >= 0 else 128 - returncode


class Process:
    """The job's first process, and through `tree` all the others.

    Attributes:
        pid: of the first process.
        group: the process group it was started in. Another process made it, so it lives only as
            long as it has members: its id is signalled while one is known to be in it.
        returncode: None while it runs, then as in `subprocess` (negative after a signal).
        unknown: it has ended, and nobody can tell how: its returncode is `UNKNOWN`.
        interrupted: it had the terminal's foreground and died of SIGINT: somebody typed Ctrl-C.
        outlived: it has ended, and others of the tree go on: signals are meant for them.
        stopped: True while the first process is stopped by a signal.
        suspended_ns: how long we ourselves were stopped together with the job (Ctrl-Z), in sum.
            Silence of the probe during that time means nothing.
    """

    def __init__(
        self,
        pid: int,
        group: int,
        terminal: Terminal | None = None,
        before: Set[tuple[int, int | None]] = frozenset(),
    ) -> None:
        """Watch a process that runs.

        Args:
            before: pid and start of the children that were there before it: not the job's.
        """
        self.pid = pid
        self.group = group
        self._before = before
        self.returncode: int | None = None
        self.unknown = False
        self.interrupted = False
        self.outlived = False
        self.stopped = False
        self.suspended_ns = 0
        self._terminal = terminal
        self._continues = 0
        self._lock = threading.RLock()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        terminal: Terminal | None = None,
        outputs: Mapping[int, int] = NO_OUTPUTS,
    ) -> Process:
        """Start the command; with a `terminal` it gets the foreground, if that is ours to give.

        `outputs` as in `launch.spawn`.

        Raises:
            LaunchError: it was not found or is not executable.
        """
        before = frozenset((child, start_ticks(child)) for child in _children())
        pid, group = spawn(argv, environ, outputs)
        if terminal is not None:
            terminal.lend(group)
        return cls(pid, group, terminal, before)

    @cached_property
    def tree(self) -> Tree:
        """Every process of the job."""
        from .process_tree import Tree

        return Tree(self.pid, self._before)

    @property
    def has_terminal(self) -> bool:
        """Whether the job may have the foreground of a terminal."""
        return self._terminal is not None

    def poll(self) -> int | None:
        """Return the returncode, None while it runs. Main thread only; serves job control too."""
        if self._collect_exit() is None:
            self._job_control()
        self.tree.reap()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end, at most `timeout_s`; return the returncode or None. Any thread."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._collect_exit() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_PAUSE_S)
        return self.returncode

    def signal(self, signum: int, *, group: bool = False) -> bool:
        """Send `signum` to the first process, or to its whole `group`; False when it has ended.

        Those that go on without it get what is not of job control: we would not stop with them.
        """
        with self._lock:  # nobody collects it in between
            if self.returncode is not None:
                return self.outlived and not group and self.tree.signal(signum) > 0
            try:
                if group:
                    self._signal_group(signum)
                else:
                    os.kill(self.pid, signum)
            except ProcessLookupError:
                return False
            return True

    def now(self) -> tuple[int, int]:
        """Return the time, and `suspended_ns` at that time: no Ctrl-Z comes in between."""
        with self._lock:
            return time.monotonic_ns(), self.suspended_ns

    def _signal_group(self, signum: int) -> None:
        """Signal the group that the first process is in, and those it left behind in its first."""
        now = os.getpgid(self.pid)
        if now in (self.group, self.pid):
            os.killpg(now, signum)
        else:  # it joined a group of others
            os.kill(self.pid, signum)
        if now != self.group:
            self.tree.signal(signum, group=self.group)

    def _foreground_group(self) -> int:
        """Return the group that belongs in the foreground: its own, if it made itself one."""
        try:
            return self.pid if os.getpgid(self.pid) == self.pid else self.group
        except ProcessLookupError:
            return self.group

    def stop(self, *, term_s: float, kill_s: float = 10.0) -> dict[str, Any]:
        """End every process of the job: TERM, after `term_s` KILL. Any thread but the main one.

        Returns:
            `how` it ended (`ended` when nobody was left, else `term` or `kill`), `returncode`, and
            `survivors`, the pids that outlived KILL for `kill_s` (stuck in the kernel).
        """
        how = "ended"
        left = self.tree.members()
        if left:
            how = "term"
            left = self.tree.end(signal.SIGTERM, term_s)
        if left:
            how = "kill"
            left = self.tree.end(signal.SIGKILL, kill_s)
        self.wait(0.0 if left else 1.0)
        survivors = [process.pid for process in left]
        return {"how": how, "returncode": self.returncode, "survivors": survivors}

    def return_terminal(self) -> None:
        """Take the foreground from it: what is typed now, Ctrl-C above all, comes to us."""
        if self._terminal is not None:
            self._terminal.take_back(self._foreground_group())

    def continued(self) -> None:
        """We were continued (`fg` or `bg`): hand the terminal on and continue the job."""
        self._continues += 1
        if self._terminal is not None and self.returncode is None:
            self._terminal.lend(self._foreground_group())
        self.signal(signal.SIGCONT, group=True)

    def _collect_exit(self) -> int | None:
        """Notice the end of the first process and collect it."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            try:
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.returncode, self.unknown = UNKNOWN, True  # somebody else collected it
                return self.returncode
            if info is None:
                return None
            group = self._foreground_group()  # as long as it is not collected
            exited = info.si_code == os.CLD_EXITED
            self.returncode = info.si_status if exited else -info.si_status
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            if self._terminal is not None:
                front = self._terminal.foreground() == group
                self.interrupted = front and exit_code(self.returncode) == _INTERRUPTED
                self._terminal.take_back(group)
            return self.returncode

    def _job_control(self) -> None:
        if self._terminal is not None and (front := self._foreground_group()) != self.group:
            self._terminal.follow(self.group, front)
        try:
            info = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it was collected by a waiting thread a moment ago
            return
        if info is None:
            return
        self.stopped = info.si_code == os.CLD_STOPPED
        if self.stopped and self._terminal is not None and info.si_status in _STOPS:
            self._stop_together(self._terminal, info.si_status)

    def _stop_together(self, terminal: Terminal, signum: int) -> None:
        asked_for_it = signum in (signal.SIGTTIN, signal.SIGTTOU)
        if not (
            asked_for_it and terminal.lend(self._foreground_group())
        ):  # else it was only too quick for us
            terminal.take_back(self._foreground_group())
            with self._lock:
                since, continues = time.monotonic_ns(), self._continues
                stop_ourselves(signum)
                self.suspended_ns += time.monotonic_ns() - since
            if self._continues != continues:
                return  # the handler of SIGCONT did it; once more could undo the next Ctrl-Z
        self.continued()


def _children() -> Iterable[int]:
    """Return the children of this process."""
    try:
        tasks = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has just ended
        tasks = []
    if tasks:
        return [int(pid) for task in tasks for pid in task.split()]
    import psutil  # this kernel does not list them

    return [child.pid for child in psutil.Process().children()]
