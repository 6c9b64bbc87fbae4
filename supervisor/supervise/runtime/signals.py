"""Signals to the supervisor, which are meant for the job.

Schedulers, shells and people signal the process that they started, which is the supervisor. Each
signal is passed on to the job's first process only: training scripts save a checkpoint on TERM or
USR1, and a TERM to their data workers at the same time would break that. Signals of job control go
to the job's whole group, as a terminal sends them.

Where the policy asks for a checkpoint before the end, TERM, USR1 and USR2 may wait for it if the
job does not handle them itself: see `core.model.preemption`. No other signal ever waits.

A second INT or TERM is passed on again, the third kills the whole tree. A signal that was ignored
at the start (`nohup`, a background job of a script) stays ignored, for the job as well. The
supervisor uses neither USR1 nor USR2 itself.

`Wakeup` ends a sleep early for a call from another thread, a signal, or the end of the job, without
polling.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from ..core.model.events import Notice
from ..core.model.payload import Json, Payload
from ..core.model.preemption import HOLDABLE, Preemption, Settled
from .process import Process
from .process_tree import Terminal, is_handled

BLIND_S = 0.02  # longest sleep where the kernel gives no pidfd; project default
_DRAIN_BYTES = 4096


class Wakeup:
    """Wakes one thread, which is the only one that may call `wait` and `close`.

    Attributes:
        fd: the non-blocking end that is written to; `signal.set_wakeup_fd` takes it.
    """

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._process: Process | None = None
        self._pidfd: int | None = None

    def set(self) -> None:
        """Wake the thread, or let its next `wait` return at once. Any thread; never blocks."""
        with suppress(OSError):  # a full pipe wakes as well
            os.write(self.fd, b"\0")

    def wait(self, timeout_s: float, process: Process | None = None) -> bool:
        """Sleep for at most `timeout_s`; return whether something happened.

        Args:
            process: its end wakes the thread, once.
        """
        if process is not self._process:
            self._watch(process)
        if process is not None and self._pidfd is None and process.returncode is None:
            timeout_s = min(timeout_s, BLIND_S)
        ready = {fd for fd, _ in self._poll.poll(math.ceil(max(0.0, timeout_s) * 1e3))}
        if self._read in ready:
            with suppress(OSError):
                os.read(self._read, _DRAIN_BYTES)
        if self._pidfd in ready:
            self._release()
        return bool(ready)

    def close(self) -> None:
        """Close the descriptors."""
        self._release()
        os.close(self._read)
        os.close(self.fd)

    def _watch(self, process: Process | None) -> None:
        self._release()
        self._process = process
        if process is None or process.returncode is not None:
            return
        with suppress(OSError):  # gone already, or pidfds are forbidden here
            self._pidfd = os.pidfd_open(process.pid)
            self._poll.register(self._pidfd, select.POLLIN)

    def _release(self) -> None:
        if self._pidfd is not None:
            self._poll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


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
KILL_S = 0.5  # so long a kill looks for survivors, and so long after it no other one starts
_SILENT = (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)  # of the terminal: no news


def ctrl_c_notice(at_ns: int) -> Notice:
    """Return the notice of a Ctrl-C that went from the terminal straight to the job."""
    data: dict[str, Json] = {"signal": "SIGINT", "final": True, "killed": False, "typed": True}
    return Notice(at_ns, "signal", "SIGINT was typed at the terminal", data=Payload(data))


class SignalForwarder:
    """Passes signals on to the job from `install` until `restore`, which are for the main thread.

    Python runs signal handlers in the main thread only, between two of its bytecodes. So that
    forwarding never waits for a disk, the main thread does nothing else that may block.

    Install it before the job is started, so that none is lost: what comes earlier is kept until
    `attach`.

    Attributes:
        final: the name of the first signal that asked for the end of the job, None before that.
        asked: how many signals asked for it.
        wakeup: wakes the main thread for every signal, and for every change of a child.
        keep: lets the probe keep what comes to the job itself until then, in CLOCK_MONOTONIC ns.
    """

    def __init__(self) -> None:
        self.final: str | None = None
        self.asked = 0
        self.wakeup = Wakeup()
        self._lock = threading.RLock()  # a handler may come while its own thread holds it
        self._preemption = Preemption()
        self._may_hold = self._is_asked = False  # in time; whether a handler of the job counts
        self._process: Process | None = None
        self._terminal: Terminal | None = None
        self._early: list[tuple[int, bool]] = []
        self._arrived: deque[int] = deque()  # not dealt with yet
        self._dealing = False
        self._ending = 0
        self._kill_again_ns = 0  # each kill looks at all processes of the host
        self._before: dict[int, Any] = {}
        self._notices: deque[Notice] = deque()
        self._children_before: Any = None
        self._fd_before = -1
        self.keep: Callable[[int], None] = lambda until_ns: None
        self._own: frozenset[str] = frozenset()  # signals that the probe takes in the job
        self._has_passed = False  # one that ends the process was passed on to it

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
            self._own, self._has_passed, self._kill_again_ns = frozenset(), False, 0
            held_signals = self._preemption.reset_and_release_signals(time.monotonic())
            self._early += [(signal.Signals[name], False) for name in held_signals]

    # ── signals that wait for a checkpoint ────────────────────────────────────────────────────────

    def allow_holding(self) -> None:
        """The main thread calls `forward_overdue` in time from now on."""
        self._may_hold = True

    def hold_signals_for(
        self, grace_s: float, for_s: float, own_handlers: Collection[str] = ()
    ) -> None:
        """Hold what comes within the next `for_s` seconds, each for at most `grace_s`.

        Args:
            own_handlers: names of signals that the probe has taken in the job's first process.
                Another one is left alone: its launcher may be ending it.
        """
        with self._lock:
            self._is_asked, self._own = True, frozenset(own_handlers)
            if self._may_hold:
                self._preemption.hold_signals_until(grace_s, time.monotonic() + for_s)
                may_keep = self._own and not (self._has_passed or self._preemption.is_over)
                self.keep(time.monotonic_ns() + int(for_s * 1e9) if may_keep else 0)

    def withdraw(self) -> None:
        """Hold no further signal."""
        with self._lock:
            self._is_asked = True
            self._preemption.withdraw()
            self.keep(0)

    def on_signal_kept_by_probe(self, name: str) -> None:
        """The probe kept a signal that came to the job itself; perhaps to nobody else."""
        signum = next((candidate for candidate in FORWARDED if candidate.name == name), None)
        with self._lock:
            is_known = self._has_passed or name in self._preemption.names
            if name in HOLDABLE and signum is not None and not is_known:
                self._deal_with(signum)

    def request_checkpoint(self, cause: str, within_s: float) -> bool:
        """Let a checkpoint be awaited without a signal; False: it is awaited, or was, already."""
        with self._lock:
            now_s = time.monotonic()
            return self._preemption.request_checkpoint(cause, now_s, now_s + within_s)

    @property
    def pid(self) -> int | None:
        """Of the process that signals are passed on to."""
        process = self._process
        return None if process is None else process.pid

    @property
    def request(self) -> tuple[str, float, bool] | None:
        """The cause of the request that waits, its deadline, and whether it holds a signal."""
        with self._lock:
            request = self._preemption.request
            held_signals = self._preemption.holds_signal
            return None if request is None else (request.cause, request.deadline_s, held_signals)

    def settle_request(self, refusal: str = "") -> None:
        """Pass on what waits: the checkpoint is there, or will not be, because of `refusal`."""
        with self._lock:  # not while it is passed on: that waits for other locks
            held_signals, process = (
                self._preemption.settle_and_release_signals(time.monotonic(), refusal),
                self._process,
            )
        self._pass_on(process, held_signals)

    def forward_overdue(self) -> None:
        """Pass on what has waited for its whole grace."""
        with self._lock:
            held_signals, process = self._preemption.expire(time.monotonic()), self._process
        self._pass_on(process, held_signals)

    def overdue_in_s(self) -> float:
        """Return for how long nothing is overdue."""
        request = self.request
        return math.inf if request is None else max(0.0, request[1] - time.monotonic())

    def take_settled_requests(self) -> list[Settled]:
        """Return the requests that ended since the last call, oldest first."""
        with self._lock:
            settled = list(self._preemption.settled)
            self._preemption.settled.clear()
        return settled

    def _pass_on(self, process: Process | None, held_signals: list[str]) -> None:
        if process is not None:
            for name in held_signals:
                self._forward(process, signal.Signals[name], kill=False)

    # ──────────────────────────────────────────────────────────────────────────────────────────────

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
            previous_handler = self._children_before
            # Inherited from a careless parent; with it the kernel throws exit codes away.
            signal.signal(
                signal.SIGCHLD,
                signal.SIG_DFL if previous_handler == signal.SIG_IGN else previous_handler,
            )
            signal.set_wakeup_fd(self._fd_before)
            self._children_before = None
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def take_notices(self) -> list[Notice]:
        """Return the signals that came since the last call, oldest first.

        Their data: `signal`, the name; `final`, it asks for the end of the job; `killed`, it was
        not passed on but every process was killed for it; `typed`, it is a Ctrl-C that came to us;
        `held`, it waits for a checkpoint; `handled`, whether the job handles it, where that counts.
        """
        return [self._notices.popleft() for _ in range(len(self._notices))]

    @property
    def notices_waiting(self) -> int:
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
            if self._preemption.is_echo(signal.Signals(signum).name, time.monotonic()):
                return
            self._ending += signum in _ENDING
            kill = signum in _ENDING and self._ending >= PATIENCE
            handled, passed = self._judge(signum, kill=kill)
            if signum not in _SILENT:
                notice = self._notice(signum, kill=kill, handled=handled, is_held=not passed)
                self._notices.append(notice)
            self.asked += signum in FINAL
            if self.final is None and signum in FINAL:
                self.final = signal.Signals(signum).name
            for passed_signal in passed:
                if self._process is None:
                    self._early.append((passed_signal, kill))
                else:
                    self._forward(self._process, passed_signal, kill=kill)

    def _judge(self, signum: int, *, kill: bool) -> tuple[bool | None, list[int]]:
        """Return whether the job handles it (None: not asked), and what is passed on now."""
        process, name = self._process, signal.Signals(signum).name
        if kill or process is None or process.returncode is not None:
            return None, [signum]
        handled = None
        if self._is_asked and name in HOLDABLE:
            handled = name not in self._own and is_handled(process.pid, signum)
        now_s, waits_not = time.monotonic(), handled is not False
        passed = self._preemption.on_signal(name, now_s, handled=waits_not)
        return handled, [signal.Signals[number] for number in passed]

    def _notice(self, signum: int, *, kill: bool, handled: bool | None, is_held: bool) -> Notice:
        name = signal.Signals(signum).name
        here = (
            signum == signal.SIGINT
            and self._terminal is not None
            and self._terminal.is_foreground()
        )
        data: dict[str, Json] = {
            "signal": name,
            "final": signum in FINAL,
            "killed": kill,
            "typed": here,
        }
        outcome = f"was passed on{' from the terminal' if here else ''}"
        if handled is not None:
            data["handled"] = handled
            outcome += ", since the job handles it itself" if handled else ""
        if self._process is not None and self._process.returncode is not None:
            outcome = "came after the end of the job"
        elif kill:
            outcome = f"came as number {self._ending} of INT and TERM: all of the job was killed"
        elif is_held:
            data["held"] = True
            outcome = "waits for a checkpoint of the job"
        return Notice(time.monotonic_ns(), "signal", f"{name} {outcome}", data=Payload(data))

    def _forward(self, process: Process, signum: int, *, kill: bool) -> None:
        if signum == signal.SIGCONT:
            process.on_continued()
            return
        if kill:
            if time.monotonic_ns() >= self._kill_again_ns:
                process.tree.end(signal.SIGKILL, within_s=KILL_S)
                self._kill_again_ns = time.monotonic_ns() + int(KILL_S * 1e9)
            return
        if signal.Signals(signum).name in HOLDABLE and not self._has_passed:
            self._has_passed = True
            self.keep(0)
        process.signal(signum, group=signum in _TO_GROUP)


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing."""
