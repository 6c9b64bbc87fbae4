"""The interface of a notifier's file: settings, senders, HTTP POST, and text that fits a channel.

The address of a channel is a secret: no message, log line or exception contains it, nor a token in
a header. Redirects are not followed (a 3xx is a failure). httpx is imported at the first post,
since most runs send none.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from ..core.model.interfaces import Kind, Message, NotifyError, Severity

if TYPE_CHECKING:
    import httpx

DAY_MINUTES = 24 * 60
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHARES = (1.0, 0.5, 0.25, 0.12, 0.06)  # of the limits of each field


@dataclass(frozen=True, slots=True)
class Route:
    """Which messages go to a channel, beside those below its least severity.

    Attributes:
        kinds: of messages; none: all.
        rules: patterns such as `loss_spike.*`, of which one must match a rule of the incident;
            none: all, also messages without a rule.
        quiet: `(first, last, zone)`: minutes of the day between which what is below SEV1 waits.
    """

    kinds: Sequence[str] = ()
    rules: Sequence[str] = ()
    quiet: tuple[int, int, str] | None = None

    def accepts(self, message: Message) -> bool:
        """Return whether the message goes to the channel."""
        if self.kinds and message.kind not in self.kinds:
            return False
        return not self.rules or any(
            fnmatchcase(rule, pattern) for rule in message.rules for pattern in self.rules
        )

    def quiet_left_s(self, now: datetime) -> float:
        """Return how long it stays quiet, 0 while it is not. `now`: with its zone."""
        if self.quiet is None:
            return 0.0
        from zoneinfo import ZoneInfo  # as late as httpx: most runs have no quiet hours

        start_minute, end_minute, zone = self.quiet
        local = now.astimezone(ZoneInfo(zone))
        minute = local.hour * 60 + local.minute
        inside = (
            start_minute <= minute < end_minute
            if start_minute < end_minute
            else not end_minute <= minute < start_minute
        )
        minutes_left = (end_minute - minute) % DAY_MINUTES
        return max(0.0, minutes_left * 60.0 - local.second) if inside else 0.0


class UnsetError(Exception):
    """A variable is unset or unusable. The sentence has its name, never its value."""


class Sender(Protocol):
    """A channel. It may be slow and may fail: it is called on a thread of its own.

    Attributes:
        min_sev: least severity it takes.
        group_s: time for which the first message on an incident waits for others to merge.
        gap_s: shortest time between two messages.
        per_hour: messages per hour before the rest becomes one digest; None: no limit.
    """

    name: str
    min_sev: Severity
    group_s: float
    gap_s: float
    per_hour: int | None

    def send(self, message: Message, *, key: str) -> str:
        """Deliver and return one line for the audit log. `key` is constant over retries.

        Raises:
            NotifyError: not delivered; `retry_after_s` is None when it never will be.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Settings(ABC):
    """The YAML keys of one notifier: a channel, or the heartbeat."""

    @abstractmethod
    def open(self, env: Mapping[str, str]) -> Any:
        """Return what sends. Raises UnsetError."""


@dataclass(frozen=True, kw_only=True)
class ChannelSettings(Settings):
    """The YAML keys of a channel, which takes messages.

    Attributes:
        min_sev: least severity.
        kinds: of messages; none: all.
        rules: patterns such as `loss_spike.*`: only incidents in which such a rule fired.
        quiet: hours in which SEV2 and INFO wait: `22:00-07:00`, or with a zone other than UTC:
            `22:00-07:00 Europe/Berlin`.
    """

    min_sev: Severity = "SEV2"
    kinds: tuple[Kind, ...] = ()
    rules: tuple[str, ...] = ()
    quiet: str | None = None

    @abstractmethod
    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError."""

    def find_errors(self) -> list[tuple[str, str]]:
        try:
            self.route()
        except ValueError as error:
            return [("quiet", str(error))]
        return []

    def route(self) -> Route:
        """Return which messages it takes. Raises ValueError for quiet hours that are none."""
        quiet = None if self.quiet is None else _quiet(self.quiet)
        return Route(tuple(self.kinds), tuple(self.rules), quiet)


def _quiet(text: str) -> tuple[int, int, str]:
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)(?: (\S+))?", text)
    if match is None:
        raise ValueError(f"must be hours such as 22:00-07:00 Europe/Berlin, not {text!r}")
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    zone = match[5] or "UTC"
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"has no known time zone: {zone!r}") from None
    start_minute, end_minute = (
        int(match[1]) * 60 + int(match[2]),
        int(match[3]) * 60 + int(match[4]),
    )
    if start_minute == end_minute:
        raise ValueError(f"must end at another time than it begins, not {text!r}")
    return start_minute, end_minute, zone


def required_variable(env: Mapping[str, str], name: str) -> str:
    """Return the environment variable `name`, stripped. Raises UnsetError when it is empty."""
    value = env.get(name, "").strip()
    if not value:
        raise UnsetError(f"the environment variable {name} is not set")
    return value


def required_url(env: Mapping[str, str], name: str, *, allow_http: bool) -> str:
    """Return the URL in the environment variable `name`.

    Raises:
        UnsetError: it is not set, no URL, or plain http to another machine without `allow_http`.
    """
    url = required_variable(env, name)
    scheme, host = _parts(url)
    if scheme not in ("http", "https") or not host:
        raise UnsetError(f"the environment variable {name} does not hold a URL")
    if not allow_http and not is_private(url):
        raise UnsetError(f"{name} holds an http URL; use https, or set `allow_http: true`")
    return url


def is_private(url: str) -> bool:
    """Return whether nobody between can read what goes to a URL: https, or this machine."""
    scheme, host = _parts(url)
    return bool(host) and (scheme == "https" or (scheme == "http" and host in _LOOPBACK))


def _parts(url: str) -> tuple[str, str | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname
    except ValueError:
        return "", None


def message_sentences(message: Message) -> list[tuple[str, str]]:
    """Return the `(head, text)` of a message in the order in which people read them."""
    parts = (("What", message.verdict), ("Why", message.why), *message.card)
    parts = (*parts, ("Next", message.next.text))
    return [(head, text) for head, text in parts if text]


def message_footer(message: Message) -> list[str]:
    """Return when and where a message is from, for people: run, directory, step, host and so on.

    Of the head of the audit log twelve digits are shown; the webhook has all of them.
    """
    size, _, head = message.audit_head.partition(" ")
    policy = f"{message.policy} ({message.mode})" if message.mode else message.policy
    parts = (
        ("", f"{message.at[:10]} {message.at[11:19]} UTC" if message.at else ""),
        ("run", message.run),
        ("step", str(message.step) if message.step >= 0 else ""),
        ("", message.incident or ""),
        ("host", message.host),
        ("job", clip_text(message.job, 80)),
        ("policy", policy),
        ("directory", clip_text(message.directory, 200)),
        ("audit", f"{size} {head[:12]}".strip()),
    )
    return [f"{name} {text}".strip() for name, text in parts if text]


def clip_text(text: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if any were cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def fit_payload(payload: Callable[[float], Any], max_bytes: int) -> bytes:
    """Return the JSON of `payload(share)` for the largest share of its limits that fits.

    A lone surrogate becomes its JSON escape.
    """
    for share in _SHARES:
        text = json.dumps(payload(share), ensure_ascii=False)
        content = text.encode("utf-8", "backslashreplace")
        if len(content) <= max_bytes:
            break
    return content


TIMEOUT_S = 15.0
MAX_RETRY_AFTER_S = 3600.0

_ERROR_CODE = re.compile(rb"[a-z_]{3,40}")  # such as `invalid_payload`
_RETRYABLE = (408, 425, 429)


class Poster:
    """Posts to one address, from one thread."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: httpx.Client | None = None
        self._is_disabled = False

    def post(self, content: bytes, headers: Mapping[str, str]) -> str:
        """Post these bytes as JSON and return a line about it.

        Raises:
            NotifyError: no answer, or one other than 2xx. After a 410 nothing more is sent.
        """
        if self._is_disabled:
            raise NotifyError("switched off after 410 Gone", retry_after_s=None)
        self.exchange(content, headers, 0)
        return f"delivered, {len(content)} bytes"

    def exchange(self, content: bytes, headers: Mapping[str, str], limit: int) -> bytes:
        """Post these bytes as JSON and return the first `limit` bytes of the answer.

        Raises:
            NotifyError: no answer, or one other than 2xx.
        """
        answer = self._send(content, {"content-type": "application/json", **headers}, limit)
        if isinstance(answer, NotifyError):
            raise answer
        return answer

    def _send(self, content: bytes, headers: Mapping[str, str], limit: int) -> NotifyError | bytes:
        # Failures are returned, and raised outside of the `except`: an httpx error in `__context__`
        # would contain the request and so the address.
        import httpx

        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)  # at INFO they log the address
        try:
            if self._client is None:
                timeout = httpx.Timeout(self._timeout_s, connect=min(5.0, self._timeout_s))
                self._client = httpx.Client(timeout=timeout, follow_redirects=False)
            with self._client.stream(
                "POST", self._url, content=content, headers=headers
            ) as response:
                failure = self._failure(response)
                if failure is not None or not limit:
                    return failure or b""
                return _start(response, limit)
        except httpx.TimeoutException:
            return NotifyError(f"no answer within {self._timeout_s:g} s", retry_after_s=0.0)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            return NotifyError("the URL is not usable", retry_after_s=None)
        except (httpx.HTTPError, OSError, ValueError) as error:
            return NotifyError(f"no connection ({type(error).__name__})", retry_after_s=0.0)

    def _failure(self, response: httpx.Response) -> NotifyError | None:
        status = response.status_code
        if 200 <= status < 300:
            return None
        if status == 410:
            self._is_disabled = True
            return NotifyError("410 Gone: channel switched off", retry_after_s=None)
        if 300 <= status < 400:
            return NotifyError(f"{status}: redirects are not followed", retry_after_s=None)
        text = f"{status}{_error_code(response)}"
        if status in _RETRYABLE or status >= 500:
            return NotifyError(text, retry_after_s=_retry_after_s(response))
        return NotifyError(text, retry_after_s=None)


def _start(response: httpx.Response, limit: int) -> bytes:
    """Return the first bytes of an answer."""
    content_start = b""
    for part in response.iter_bytes():
        content_start += part
        if len(content_start) >= limit:
            break
    return content_start[:limit]


def _error_code(response: httpx.Response) -> str:
    import httpx

    try:
        start = next(response.iter_raw(64), b"").strip()
    except httpx.HTTPError:
        return ""
    return f" {start.decode()}" if _ERROR_CODE.fullmatch(start) else ""


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header, 0 without one (both forms of RFC 9110 10.2.3)."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdecimal():
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
