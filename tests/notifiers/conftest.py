"""A real HTTP server on the loopback that answers as a test tells it to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from supervise.core.model import Message
from supervise.notifiers import Outbox, Result


@dataclass
class Hook:
    """Attributes: `answers` are (status, headers, body) in turn, the last one for ever after."""

    url: str = ""
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    hang: threading.Event = field(default_factory=threading.Event)
    before: Callable[[], None] = lambda: None


@pytest.fixture
def hook(monkeypatch):
    """The server; its address ends in a secret."""
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            state.requests.append((self.path, headers, body))
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

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/services/T0/SECRETSECRET"
    yield state
    state.hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


OK: tuple[int, dict[str, str], bytes] = (200, {}, b"ok")


@pytest.fixture
def message():
    """A function that makes a message; all fields have a default."""

    def make(**fields) -> Message:
        return Message(
            **{
                "run": "run-1",
                "incident": "inc-1",
                "severity": "SEV1",
                "title": "loss spike",
                "verdict": "train_loss_raw 9.7 is 8.2 sigma above 2.6",
                "why": "spike: loss_z > 5",
                "next": "rollback to step 125",
                "step": 152,
                "audit_head": f"412 {'9c' * 32}",
                "kind": "opened",
                "host": "gpu-07",
                "job": "python train.py",
                "policy": "nano",
                "mode": "enforce",
                "rules": ("spike",),
                "at": "2026-01-05T10:11:12.345Z",
                **fields,
            }
        )

    return make


@pytest.fixture
def outbox():
    """A function that opens an outbox; `results` are its results."""
    opened = []

    def open_(*senders, **more):
        results: list[Result] = []
        box = Outbox(senders, results.append, **more)
        box.results = results
        opened.append(box)
        return box

    yield open_
    for box in opened:
        box.close(0.0)
