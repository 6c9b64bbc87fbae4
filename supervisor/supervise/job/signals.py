"""Signals that are sent to us are meant for the job.

Schedulers, shells and people signal the process that they started, which is the supervisor. Each
signal is passed on as if it had been sent to the job's first process: training scripts save a
checkpoint on TERM or USR1, and a TERM to their data workers in the same breath would break that.
Signals of job control go to the job's whole group, as a terminal sends them.

A second INT or TERM is passed on again, the third kills the whole tree. A signal that was ignored
when we were started (`nohup`, a background job of a script) stays ignored, for the job as well.
USR1 and USR2 are never used for ourselves.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

from ..core.model.events import Notice
from .process import Process
from .terminal import Terminal
from .wakeup import Wakeup

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
    signal.SIGTSTP,
)
_TO_GROUP = (signal.SIGWINCH, signal.SIGTSTP)
_ENDING = (signal.SIGINT, signal.SIGTERM)
FINAL = (*_ENDING, signal.SIGHUP, signal.SIGQUIT)  # after one of these nothing is started again
PATIENCE = 3  # this many INT or TERM kill the tree
_SILENT = (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)  # of the terminal: no news


def typed(at_ns: int) -> Notice:
    """Return the notice of a Ctrl-C that went from the terminal straight to the job."""
    data = {"signal": "SIGINT", "final": True, "killed": False, "typed": True}
    return Notice(at_ns, "signal", "SIGINT was typed at the terminal", data=data)


class Forwarder:
    """Passes signals on to the job from `install` until `restore`, which are for the main thread.

    Python runs signal handlers in the main thread only, between two of its bytecodes. So that
    forwarding never waits for a disk, the main thread does nothing else that may block.

    Install it before the job is started, so that none is lost: what comes earlier is kept until
    `attach`.

    Attributes:
        final: the name of the first signal that asked for the end of the job, None before that.
        asked: how many signals asked for it.
        wakeup: wakes the main thread for every signal, and for every change of a child.
    """

    def __init__(self) -> None:
        self.final: str | None = None
        self.asked = 0
        self.wakeup = Wakeup()
        self._lock = threading.RLock()  # a handler may come while its own thread holds it
        self._process: Process | None = None
        self._terminal: Terminal | None = None
        self._early: list[tuple[int, bool]] = []
        self._arrived: deque[int] = deque()  # not dealt with yet
        self._dealing = False
        self._ending = 0
        self._before: dict[int, Any] = {}
        self._notices: deque[Notice] = deque()
        self._children_before: Any = None
        self._fd_before = -1

    def install(self) -> None:
        """Take over the forwarded signals, except those that are ignored."""
        self._terminal = Terminal.find()
        # The handler does nothing: what counts is the byte that it writes to `wakeup`.
        self._children_before = signal.signal(signal.SIGCHLD, _ignore)
        self._fd_before = signal.set_wakeup_fd(self.wakeup.fd, warn_on_full_buffer=False)
        for signum in FORWARDED:
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)

    def attach(self, process: Process) -> None:
        """Pass everything on to `process` from now on, first of all what came before it."""
        with self._lock:
            self._process = process
            early, self._early = self._early, []
            for signum, kill in early:
                self._forward(process, signum, kill=kill)

    def detach(self) -> None:
        """The job has ended and is started again: keep what comes until the next `attach`."""
        with self._lock:
            self._process = None

    def ignore(self) -> None:
        """Ignore from now on what would end us: the exit code is settled and must be told."""
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the signal handlers back as they were."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()
        if self._children_before is not None:
            before = self._children_before
            # Inherited from a careless parent; with it the kernel throws exit codes away.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before == signal.SIG_IGN else before)
            signal.set_wakeup_fd(self._fd_before)
            self._children_before = None
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def notices(self) -> list[Notice]:
        """Return the signals that came since the last call, oldest first.

        Their data: `signal`, the name; `final`, it asks for the end of the job; `killed`, it was
        not passed on but every process was killed for it; `typed`, it is a Ctrl-C that came to us.
        """
        return [self._notices.popleft() for _ in range(len(self._notices))]

    @property
    def waiting(self) -> int:
        """How many signals `notices` would return."""
        return len(self._notices)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        """Deal with a signal; one that interrupts this is dealt with next.

        Handlers that nest would end in a RecursionError where signals come faster than the
        processes of a job can be found.
        """
        self._arrived.append(signum)
        while self._arrived and not self._dealing:  # asked again, for what came at the very end
            self._dealing = True
            try:
                while self._arrived:
                    self._deal_with(self._arrived.popleft())
            finally:
                self._dealing = False

    def _deal_with(self, signum: int) -> None:
        with self._lock:
            self._ending += signum in _ENDING
            kill = signum in _ENDING and self._ending >= PATIENCE
            if signum not in _SILENT:
                self._notices.append(self._notice(signum, kill=kill))
            self.asked += signum in FINAL
            if self.final is None and signum in FINAL:
                self.final = signal.Signals(signum).name
            if self._process is None:
                self._early.append((signum, kill))
            else:
                self._forward(self._process, signum, kill=kill)

    def _notice(self, signum: int, *, kill: bool) -> Notice:
        name = signal.Signals(signum).name
        here = signum == signal.SIGINT and self._terminal is not None and self._terminal.ours()
        data = {"signal": name, "final": signum in FINAL, "killed": kill, "typed": here}
        how = f"was passed on{' from the terminal' if here else ''}"
        if self._process is not None and self._process.returncode is not None:
            how = "came after the end of the job"
        elif kill:
            how = f"came as number {self._ending} of INT and TERM: all of the job was killed"
        return Notice(time.monotonic_ns(), "signal", f"{name} {how}", data=data)

    def _forward(self, process: Process, signum: int, *, kill: bool) -> None:
        if signum == signal.SIGCONT:
            process.continued()
            return
        if kill:
            process.tree.end(signal.SIGKILL, within_s=0.5)
            return
        process.signal(signum, group=signum in _TO_GROUP)


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing."""
