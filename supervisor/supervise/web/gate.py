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
import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


@dataclass(frozen=True)
class Gate:
    """Lets a request through to the page, or answers it.

    Attributes:
        token: of a reader; "" for a unix socket, which only its owner can open.
        hosts: names that the browser may have in its address bar.
        cookie: its name.
        door: the page that asks for the token.
    """

    page: ASGIApp
    token: str
    hosts: Collection[str] = HOSTS
    cookie: str = "supervise"
    door: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.page(scope, receive, send)
            return
        answer = self._refusal(Request(scope)) or self.page
        await answer(scope, receive, _guarded(send))

    def _refusal(self, request: Request) -> Response | None:
        """Return why a request is not answered by the page, None to let it through."""
        host = request.headers.get("host", "").lower()
        name = _PORT.sub("", host)
        if name not in self.hosts:
            text = f"this page is not served under the name {name!r}"
            return problem_answer(421, text, f"supervise web --allow-host {name}")
        is_changing = request.method not in READING
        if is_changing and (problem := _cross_site(host, request)):
            return problem_answer(403, problem)
        length = request.headers.get("content-length", "" if is_changing else "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return problem_answer(413, f"a body has at most {MAX_BODY >> 10} kB, and says so")
        is_open = not self.token or request.scope["path"].startswith("/static/")
        return None if is_open else self._ask_token(request)

    def _ask_token(self, request: Request) -> Response | None:
        scope, query = request.scope, request.query_params.multi_items()
        offered = request.query_params.get("token")
        if offered is not None and request.method in READING and self._is_token(offered):
            path = quote(scope["path"].lstrip("/"))
            if path:
                rest = urlencode([*query, ("page", path)])
                return RedirectResponse(f"./{'../' * path.count('/')}?{rest}", 303)
            page = quote(request.query_params.get("page", ""), safe="/%")
            rest = urlencode([pair for pair in query if pair[0] not in ("token", "page")])
            answer = RedirectResponse(f"./{page}{'?' if rest else ''}{rest}", 303)
            answer.set_cookie(self.cookie, self.token, path=None, httponly=True, samesite="lax")
            return answer
        stored = request.cookies.get(self.cookie, "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(stored) or self._is_token(bearer):
            return None
        if scope["path"].startswith("/api/"):
            return problem_answer(
                401, "the token is missing, or of an earlier start", "supervise web"
            )
        fields = "".join(
            f'<input type="hidden" name="{html.escape(name)}" value="{html.escape(value)}">'
            for name, value in query
            if name != "token"
        )
        return HTMLResponse(self.door.replace("<form>", f"<form>{fields}"), 401)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


def _cross_site(host: str, request: Request) -> str:
    """Return why a request that changes something is not of a page of ours, "" if it is."""
    headers = request.headers
    origin = headers.get("origin", "").lower()
    if origin not in (f"http://{host}", f"https://{host}"):
        return f"the request comes from {origin or 'no page'}, and not from this one"
    if headers.get("x-supervise") != "1":
        return "the header X-Supervise: 1 is missing"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return "the body is not application/json"
    return ""


def problem_answer(status: int, text: str, hint: str | None = None) -> Response:
    """Return an error as JSON."""
    return JSONResponse({"error": text, "hint": hint}, status)


def _guarded(send: Send) -> Send:
    """Add the headers that every answer has, where it does not set one itself."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_guarded
