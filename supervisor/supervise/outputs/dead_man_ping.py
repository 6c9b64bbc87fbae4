"""Pings a monitor outside while the run is watched and healthy; it alarms when they stop.

A thread of its own: nothing here makes the loop wait. No ping is sent while the loop makes no
progress, since the silence is the alarm. A SEV0 that is not contained is reported once as a
failure, then in silence until it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.model.interfaces import FAIL, PING, START, NotifyError, PingSender
from ..system import Thread

LOOK_S = 1.0  # between two looks at the run; a SEV0 is reported within it
STALLED_S = 10.0  # of a loop that makes a round each second; project default
AGAIN_S = 15.0  # at most, until a ping that was not accepted is repeated; project default
REQUEUE = 75  # exit code of a run that goes on elsewhere, see the README
GOOD_CODES = (0, REQUEUE)


@dataclass(frozen=True, slots=True)
class Vitals:
    """How the run is.

    Attributes:
        text: one line for the monitor: run, step, state.
        progress_ns: when the loop last did anything, CLOCK_MONOTONIC.
        trouble: the SEV0 that is not contained, "" without one.
    """

    text: str
    progress_ns: int
    trouble: str = ""


class DeadManPing:
    """Pings for one run.

    Args:
        vitals: for the thread of the pings; must not wait.
        report: prints a line.
    """

    def __init__(
        self,
        sender: PingSender,
        vitals: Callable[[], Vitals],
        report: Callable[[str], None],
        *,
        look_s: float = LOOK_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._vitals, self._report = sender, vitals, report
        self._look_s, self._now = look_s, monotonic
        self._over = threading.Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)
        self._starts = False
        self._exit_code = 0
        self._kind, self._due_s = PING, float("-inf")  # of the next ping
        self._is_reported = False  # the trouble is, so that nothing follows until it is over
        self._accepted_s: float | None = None
        self._error = self._withheld = ""

    def start(self, *, begins: bool) -> None:
        """Begin to ping; `begins`: the run does, it is not taken over."""
        self._starts = begins
        try:
            self._thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            self._error = f"no thread: {error}"

    def end(self, exit_code: int, within_s: float) -> None:
        """Report the end of the run, and wait no longer than that for it."""
        self._exit_code = exit_code
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def health(self) -> dict[str, Any]:
        """Return `every_s`, `accepted_s` (seconds ago, None: never), `error` and `withheld`."""
        accepted = self._accepted_s
        return {
            "every_s": self._sender.every_s,
            "accepted_s": None if accepted is None else round(self._now() - accepted, 1),
            "error": self._error,
            "withheld": self._withheld,
        }

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._starts:
            self._send(START, self._vitals().text, counts=False)
        while not self._over.is_set():
            self.look()
            self._over.wait(self._look_s)
        kind = PING if self._exit_code in GOOD_CODES else FAIL
        self._send(kind, f"{self._vitals().text}; exit code {self._exit_code}")

    def look(self) -> None:
        """Send what is due now."""
        vitals = self._vitals()
        stalled_s = self._now() - vitals.progress_ns / 1e9
        if stalled_s > STALLED_S:
            self._withheld = f"the supervisor has made no progress for {stalled_s:.0f} s"
            return
        self._withheld = vitals.trouble
        kind = FAIL if vitals.trouble else PING
        if kind != self._kind:
            self._kind, self._due_s, self._is_reported = kind, float("-inf"), False
        if self._now() < self._due_s or self._is_reported:
            return
        accepted = self._send(kind, f"{vitals.text}; {vitals.trouble}".rstrip("; "))
        self._is_reported = accepted and kind == FAIL
        every_s = self._sender.every_s
        self._due_s = self._now() + (every_s if accepted else min(every_s, AGAIN_S))

    def _send(self, kind: str, text: str, *, counts: bool = True) -> bool:
        """Return whether it was accepted; `counts`: a refusal is a failure of the channel."""
        try:
            self._sender.send(kind, text)
        except NotifyError as error:
            if counts:
                if not self._error:
                    self._report(
                        f"supervise: heartbeat not accepted: {error}; its monitor will alarm, the "
                        "run itself goes on"
                    )
                self._error = str(error)
            return False
        if counts:
            self._accepted_s, self._error = self._now(), ""
        return True
