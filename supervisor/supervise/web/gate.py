"""The gate in front of the page: who may ask, under which name, and how the browser must treat it.

Pure ASGI, so that nothing answers without it. In order: the Host is one of ours, or 421; a request
that changes something comes from a page of this Host, as JSON with `X-Supervise: 1`, or 403; the
token is in the cookie, in `Authorization: Bearer` or, once, in the query, or 401. Cookies ignore
ports, so the name of ours has it. Under which prefix a proxy shows us, only the browser knows: a
token in the query is taken to the root by a relative reference (303), where a cookie without a path
is for all of our pages and for nothing beside them, and from there back to the page (303).
"""

from __future__ import annotations

import hmac
import html
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
HOSTS = ("localhost", "127.0.0.1", "[::1]")
READING = ("GET", "HEAD")
MAX_BODY = 16 << 10  # bytes
_PORT = re.compile(r":\d+$")
_COOKIE = re.compile(r"(?:^|; *)([^=; ]+)=([^;]*)")


@dataclass(frozen=True)
class Gate:
    """Lets a request through to the page, or answers it.

    Attributes:
        token: of a reader; "" for a unix socket, which only its owner can open.
        hosts: names that the browser may have in its address bar.
        cookie: its name.
        door: the page that asks for the token.
    """

    page: Application
    token: str
    hosts: Collection[str] = HOSTS
    cookie: str = "supervise"
    door: bytes = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.page(scope, receive, send)
            return
        headers = {
            name.decode().lower(): value.decode("latin1") for name, value in scope["headers"]
        }
        refusal = self._refuse(scope, headers)
        if refusal is None:
            await self.page(scope, _limited(receive), _guarded(send))
            return
        status, extra, body = refusal
        start = {"type": "http.response.start", "status": status, "headers": _encode(extra)}
        guarded = _guarded(send)
        await guarded(start)
        await guarded({"type": "http.response.body", "body": body})

    def _refuse(
        self, scope: Scope, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes] | None:
        """Return status, headers and body of an answer, None to let the request through."""
        host = headers.get("host", "").lower()
        name = _PORT.sub("", host)
        if name not in self.hosts:
            text = f"this page is not served under the name {name!r}"
            return _problem(421, text, f"supervise web --allow-host {name}")
        if scope["method"] not in READING and (problem := _cross_site(host, headers)):
            return _problem(403, problem, None)
        if int(headers.get("content-length") or 0) > MAX_BODY:
            return _problem(413, f"a body has at most {MAX_BODY >> 10} kB", None)
        is_open = not self.token or scope["path"].startswith("/static/")
        return None if is_open else self._ask_token(scope, headers)

    def _ask_token(
        self, scope: Scope, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes] | None:
        query = parse_qsl(scope["query_string"].decode("latin1"), keep_blank_values=True)
        offered = next((value for name, value in query if name == "token"), None)
        if offered is not None and scope["method"] in READING and self._is_token(offered):
            path = quote(scope["path"].lstrip("/"))
            if path:
                rest = urlencode([*query, ("page", path)])
                return 303, {"location": f"./{'../' * path.count('/')}?{rest}"}, b""
            page = next((value for name, value in reversed(query) if name == "page"), "")
            rest = urlencode([pair for pair in query if pair[0] not in ("token", "page")])
            target = f"./{quote(page, safe='/%')}{'?' if rest else ''}{rest}"
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Lax"
            return 303, {"location": target, "set-cookie": cookie}, b""
        stored = dict(_COOKIE.findall(headers.get("cookie", ""))).get(self.cookie, "")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(stored) or self._is_token(bearer):
            return None
        if scope["path"].startswith("/api/"):
            return _problem(401, "the token is missing, or of an earlier start", "supervise web")
        fields = "".join(
            f'<input type="hidden" name="{html.escape(name)}" value="{html.escape(value)}">'
            for name, value in query
            if name != "token"
        )
        door = self.door.replace(b"<form>", b"<form>" + fields.encode())
        return 401, {"content-type": "text/html; charset=utf-8"}, door

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


def _cross_site(host: str, headers: dict[str, str]) -> str:
    """Return why a request that changes something is not of a page of ours, "" if it is."""
    origin = headers.get("origin", "").lower()
    if origin not in (f"http://{host}", f"https://{host}"):
        return f"the request comes from {origin or 'no page'}, and not from this one"
    if headers.get("x-supervise") != "1":
        return "the header X-Supervise: 1 is missing"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return "the body is not application/json"
    return ""


def _problem(status: int, text: str, hint: str | None) -> tuple[int, dict[str, str], bytes]:
    body = json.dumps({"error": text, "hint": hint}).encode()
    return status, {"content-type": "application/json"}, body


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin1"), value.encode("latin1")) for name, value in headers.items()]


def _guarded(send: Send) -> Send:
    """Add the headers that every answer has, where it does not set one itself."""

    async def send_guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names: Iterable[bytes] = {name.lower() for name, _ in headers}
            headers += [pair for pair in _encode(HEADERS) if pair[0] not in names]
            message = {**message, "headers": headers}
        await send(message)

    return send_guarded


def _limited(receive: Receive) -> Receive:
    """End a body that is longer than it may be: its length was not announced."""
    count = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        return {"type": "http.disconnect"} if count > MAX_BODY else message

    return receive_limited
