"""HTTP POST to one address, and whether a failure may be retried.

The address is a secret: no message, log line or exception contains it, nor a token in a header.
Redirects are not followed (a 3xx is a failure), and of an answer only what is asked for is read, of
a failure 64 bytes. httpx is imported at the first
post, since most runs send none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from ..core.model.interfaces import NotifyError

if TYPE_CHECKING:
    import httpx

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
        """Post these bytes as JSON and return the first `most` bytes of the answer.

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
            return NotifyError(
                "410 Gone: channel switched off",
                retry_after_s=None,
            )
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
