"""A heartbeat for a monitor outside of this machine: the dead man's switch of the supervisor.

The monitor expects a ping every so often and alarms when none comes: the machine, its network or
the supervisor is dead then. POST to the URL is a ping; to URL/start the run begins, to URL/fail it
is in trouble or has failed. Healthchecks and compatible services take all three; where a service
has no URL/start, its refusal changes nothing.

Source: https://healthchecks.io/docs/http_api/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from ..core.model.interfaces import NotifyError
from ..core.model.values import Seconds
from ..system import Thread
from ._channel_settings import Poster, Settings, required_url

PING, START, FAIL = "ping", "start", "fail"
EVERY_S = 60.0
# Healthchecks refuses more than 5 pings a minute; a dead run should cost less than an hour.
SHORTEST_S, LONGEST_S = 15.0, 3600.0
_BEHIND = {PING: "", START: "/start", FAIL: "/fail"}  # the path of the monitor's address
_PLAIN = {"content-type": "text/plain; charset=utf-8"}
LOOK_S = 1.0  # between two looks at the run; a SEV0 is reported within it
STALLED_S = 10.0  # of a loop that makes a round each second; project default
AGAIN_S = 15.0  # at most, until a ping that was not accepted is repeated; project default
REQUEUE = 75  # exit code of a run that goes on elsewhere, see the README
GOOD_CODES = (0, REQUEUE)


class Health(Struct, frozen=True):
    """State of the pings. accepted_s: seconds ago, None: never. withheld: why none is sent."""

    every_s: float
    accepted_s: float | None = None
    error: str = ""
    withheld: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Settings):
    """Pings while the run is watched and healthy; a service outside alarms when they stop.

    Attributes:
        url_env: the environment variable that holds the URL.
        every: time between two pings; the service needs a longer one, with a grace.
        allow_http: accept a plain http URL of another machine.
    """

    url_env: str
    every: Seconds = EVERY_S
    allow_http: bool = False

    def open(self, env: Mapping[str, str]) -> HeartbeatSender:
        """Return the sender. Raises UnsetError."""
        return HeartbeatSender(
            required_url(env, self.url_env, allow_http=self.allow_http), self.every
        )

    def find_errors(self) -> list[tuple[str, str]]:
        return [] if self.every > 0.0 else [("every", f"must be above zero, not {self.every:g}")]

    def warning(self) -> str | None:
        """Return why `every` is hardly what is meant, None if it is fine."""
        if self.every < SHORTEST_S:
            return f"a ping every {self.every:g} s: services refuse more than 5 a minute"
        if self.every > LONGEST_S:
            return f"a ping every {self.every:g} s: a dead run is noticed only after that"
        return None


class HeartbeatSender:
    """Pings one address, from one thread.

    Attributes:
        every_s: seconds between two pings.
    """

    def __init__(self, url: str, every_s: float) -> None:
        self.every_s = every_s
        self._posters = {kind: Poster(append_path(url, end)) for kind, end in _BEHIND.items()}

    def send(self, kind: str, text: str) -> None:
        """Send a ping (`PING`, `START` or `FAIL`). Raises NotifyError."""
        self._posters[kind].post(text.encode("utf-8", "replace"), _PLAIN)


def append_path(url: str, end: str) -> str:
    """Return the address with `end` behind its path, before a query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + end)) if end else url


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
        sender: HeartbeatSender,
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

    def health(self) -> Health:
        """Return what became of the newest pings."""
        accepted = self._accepted_s
        age_s = None if accepted is None else round(self._now() - accepted, 1)
        return Health(self._sender.every_s, age_s, self._error, self._withheld)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._starts:
            self._send(START, self._vitals().text, counts=False)
        while not self._over.is_set():
            self.ping_if_due()
            self._over.wait(self._look_s)
        kind = PING if self._exit_code in GOOD_CODES else FAIL
        self._send(kind, f"{self._vitals().text}; exit code {self._exit_code}")

    def ping_if_due(self) -> None:
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
