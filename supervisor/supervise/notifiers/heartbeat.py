"""A heartbeat for a monitor outside of this machine: the dead man's switch of the supervisor.

The monitor expects a ping every so often and alarms when none comes: the machine, its network or
the supervisor is dead then. POST to the URL is a ping; to URL/start the run begins, to URL/fail it
is in trouble or has failed. Healthchecks and compatible services take all three; where a service
has no URL/start, its refusal changes nothing.

Source: https://healthchecks.io/docs/http_api/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from ..core.model.interfaces import FAIL, PING, START, Seconds
from ._http import TIMEOUT_S, Poster
from ._settings import Settings, address

EVERY_S = 60.0
# Healthchecks refuses more than 5 pings a minute; a dead run should cost less than an hour.
SHORTEST_S, LONGEST_S = 15.0, 3600.0
_BEHIND = {PING: "", START: "/start", FAIL: "/fail"}  # the path of the monitor's address
_PLAIN = {"content-type": "text/plain; charset=utf-8"}


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
        return HeartbeatSender(address(env, self.url_env, allow_http=self.allow_http), self.every)

    def check(self) -> list[tuple[str, str]]:
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

    def __init__(self, url: str, every_s: float, *, timeout_s: float = TIMEOUT_S) -> None:
        self.every_s = every_s
        self._posters = {
            kind: Poster(below(url, end), timeout_s=timeout_s) for kind, end in _BEHIND.items()
        }

    def send(self, kind: str, text: str) -> None:
        """Send a ping (`PING`, `START` or `FAIL`). Raises NotifyError."""
        self._posters[kind].post(text.encode("utf-8", "replace"), _PLAIN)


def below(url: str, end: str) -> str:
    """Return the address with `end` behind its path, before a query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + end)) if end else url
