"""Work of the main thread beside the loop: signals, job control, and an end in time.

The disk may hang: a file system that is frozen, a server that does not answer. A thread that waits
for it cannot be interrupted, so the main thread never touches it. Python runs the handlers of
signals here, and so a signal reaches the job whatever the disk does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..notifiers.outbox import Outbox
from ..report.receipt import count_noun, run_operand, run_path
from ..store import files
from ..system import Thread
from .loop import App
from .process import Process
from .signals import SignalForwarder

CHECK_S = 0.5  # between two looks at the job; signals and the changes of a child come at once
TERMINAL_S = 0.05  # the same where the job has a terminal: nothing announces a change of its group
PATIENCE_S = 6.0  # with a loop that does nothing, or waits for the disk; messages take up to 5
RELAUNCH_S = 60.0  # the same where the job is to be started again; project default
DELIVER_S, LEAVE_S = 1.0, 3.2  # then for what can still be delivered, or kept for later
NO_ANSWER = "does not answer"
LONGEST_S = 1.0  # from one look to the next that counts; longer, and we were stopped
VERIFY_NOW_S = 1.0  # for messages, after a signal that comes once the job has ended


class WorkEnd(NamedTuple):
    """How work on a thread ended: its exit code, and whether all of it was done."""

    exit_code: int
    is_complete: bool


class Foreground:
    """Serves one run from the main thread.

    Args:
        process: the first of the job.
    """

    def __init__(
        self, app: App, process: Process, outbox: Outbox, forwarder: SignalForwarder
    ) -> None:
        self._app = app
        self._first = process
        self._outbox = outbox
        self._forwarder = forwarder
        self._now_s = 0.0  # while this process was stopped, no time passes for anybody in it
        self._checked_s = time.monotonic()
        self._progress = 0, 0.0  # the newest move of the loop, and when it was seen
        self._hanging = False  # as people were told
        self._ended: tuple[Process, float, int] | None = None  # who, when, signals until then
        self._disk_s = 0.0  # that the loop had waited for the disk when the job ended
        self._cut_short_s: float | None = None

    def run_in_thread(self, work: Callable[[], int]) -> WorkEnd:
        """Do `work` on a thread of its own; return the exit code, and whether it was all done.

        When the job has ended and the work hangs, it is left behind, and people are told what is
        lost. The process must then end without waiting for any thread.
        """
        codes: list[int] = []
        errors: list[BaseException] = []
        wakeup = self._forwarder.wakeup

        def run() -> None:
            try:
                codes.append(work())
            except BaseException as error:  # no memory even to report one
                errors.append(error)
            finally:
                wakeup.set()

        thread = Thread(target=run, name="loop", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # at the limit of threads: signals wait for the disk, as they may
            return WorkEnd(work(), True)
        self._forwarder.allow_holding()
        while True:
            process = self._app.process(self._first)
            pause_s = TERMINAL_S if process.has_terminal else CHECK_S
            woken = wakeup.wait(min(pause_s, self._forwarder.overdue_in_s()), process)
            self._forwarder.forward_overdue()
            process = self._app.control_job(self._first)
            if woken:
                self._app.wakeup.set()
            if codes:
                return WorkEnd(codes[0], True)
            if errors:
                raise errors[0]
            stalled_s = self._stalled_s()
            if process.returncode is None:
                self._ended = self._cut_short_s = None
                self._report_hanging(stalled_s > PATIENCE_S)
            else:
                since_end_s = self._since_end_s(process, files.disk_wait_s(thread.ident))
                disk_s = files.disk_wait_s(thread.ident) - self._disk_s
                if min(since_end_s, max(stalled_s, disk_s)) > self._patience_s():
                    answers = disk_s > stalled_s
                    code = self._abandon(process, "is too slow" if answers else NO_ANSWER)
                    return WorkEnd(code, is_complete=False)

    def _patience_s(self) -> float:
        """Return how long to wait for the loop; longer where it is about to start the job again."""
        back = self._app.processor.performing == "relaunch" and self._forwarder.final is None
        return RELAUNCH_S if back else PATIENCE_S

    def _stalled_s(self) -> float:
        """Return for how long the loop has done nothing."""
        now_s = time.monotonic()
        self._now_s += min(now_s - self._checked_s, LONGEST_S)
        self._checked_s = now_s
        if self._progress[0] != self._app.processor.progress_ns:
            self._progress = self._app.processor.progress_ns, self._now_s
        return self._now_s - self._progress[1]

    def _since_end_s(self, process: Process, disk_s: float) -> float:
        """Return for how long the job has ended; who signals since then does not want to wait."""
        signal_count = self._forwarder.asked
        if self._ended is None or self._ended[0] is not process:
            self._ended, self._disk_s = (process, self._now_s, signal_count), disk_s
        _, since_s, asked_before = self._ended
        if self._cut_short_s is None and signal_count > asked_before:
            self._cut_short_s = self._now_s + VERIFY_NOW_S
        if self._cut_short_s is not None and self._now_s >= self._cut_short_s:
            self._outbox.abort_close()
        return self._now_s - since_s

    def _report_hanging(self, hanging: bool) -> None:
        if hanging == self._hanging:
            return
        self._hanging = hanging
        location = run_path(self._app.settings.run)
        if hanging:
            self._app.settings.print_line(
                f"supervise: the disk of {location} does not answer. The job goes on and gets its "
                "signals; nothing is decided or acted on until the disk answers"
            )
        else:
            self._app.settings.print_line(
                f"supervise: the disk of {location} answers again; recording goes on"
            )

    def _abandon(self, process: Process, trouble: str) -> int:
        """Let out what needs no disk, say what is lost, and return the exit code."""
        app = self._app
        code, location = app.exit_code(process), run_operand(app.settings.run)
        ending = f"supervise: exit code {code}; the disk of {location} {trouble}. "
        if app.closed:
            self._app.settings.print_line(
                f"{ending}The record is complete: supervise audit show {location}"
            )
            return code
        events, decisions = app.count_unrecorded(process)
        _run_within(lambda: app.deliver(self._outbox, DELIVER_S), LEAVE_S)
        self._app.settings.print_line(
            f"{ending}Not recorded: at least {count_noun(events, 'event')} and "
            f"{count_noun(decisions, 'decision')}, and what would follow from them\n"
            f"  once the disk answers, complete the record: supervise adopt {location}"
        )
        return code


def _run_within(call: Callable[[], object], within_s: float) -> None:
    """Call on a thread of its own, and wait for it no longer than that."""
    thread = Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the limit of threads
        return
    thread.join(within_s)
