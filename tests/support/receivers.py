"""Servers on the loopback that answer as a test tells them to: HTTP, and mail without TLS."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET_PATH = "/services/T0/SECRETSECRET"
OK: tuple[int, dict[str, str], bytes] = (200, {}, b"ok")


@dataclass
class Hook:
    """Attributes: `answers` are (status, headers, body) in turn, the last one for ever after.

    `received` are paths and bodies, decoded.
    """

    url: str = ""
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    received: list[tuple[str, Any]] = field(default_factory=list)
    hang: threading.Event = field(default_factory=threading.Event)
    before: Callable[[], None] = lambda: None


@contextmanager
def http_server() -> Iterator[Hook]:
    """Yield a server that runs; its address ends in a secret."""
    state = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            state.requests.append((self.path, headers, body))
            is_json = headers.get("content-type") == "application/json"
            state.received.append((self.path, json.loads(body) if is_json else body.decode()))
            state.before()
            status, more, text = (
                state.answers.pop(0) if len(state.answers) > 1 else (state.answers or [OK])[0]
            )
            if status <= 0:  # no answer, or a reset at once
                state.hang.wait(30 if status == 0 else 0)
                return
            self.send_response(status)
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client need not read it all
                self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}{SECRET_PATH}"
        with _served(server):
            yield state
            state.hang.set()


@contextmanager
def _served(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class MailServer(socketserver.ThreadingTCPServer):
    """RFC 5321; `answers` are codes behind DATA in turn, 0: none, -1: a reset; then 250."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.answers: list[int] = []
        self.refused: set[str] = set()  # addresses
        self.taken: list[EmailMessage] = []
        self.hang = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Session(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._say(220)
        while line := self.rfile.readline().decode().strip():
            word = line.upper()
            if word == "DATA":
                self._say(354)
                if not self._take():
                    return
            elif word.startswith("RCPT"):
                self._say(550 if line[9:-1] in self.server.refused else 250)
            else:
                self._say(221 if word == "QUIT" else 250)

    def _take(self) -> bool:
        """Take a message; return whether the session goes on."""
        content = b""
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            content += line[1:] if line.startswith(b"..") else line
        code = self.server.answers.pop(0) if self.server.answers else 250
        if code in (0, -1):
            self.server.hang.wait(30 if code == 0 else 0)
            return False
        if code < 300:
            self.server.taken.append(message_from_bytes(content, policy=policy.default))  # type: ignore[arg-type]
        self._say(code)
        return True

    def _say(self, code: int) -> None:
        self.wfile.write(f"{code} so\r\n".encode())


@contextmanager
def mail_server() -> Iterator[MailServer]:
    """Yield a server that runs."""
    with MailServer() as server, _served(server):
        yield server
        server.hang.set()
