"""Receivers on the loopback, messages, and an outbox."""

from __future__ import annotations

import pytest

from supervise.core.model import Advice, Message, Step
from supervise.notifiers import Outbox, Result
from tests.support.receivers import http_server, mail_server


@pytest.fixture
def hook(monkeypatch):
    """A real HTTP server; its address ends in a secret."""
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http_server() as served:
        yield served


@pytest.fixture
def server():
    """A mail server."""
    with mail_server() as served:
        yield served


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
                "next": Advice(None, (Step("rollback to step 125"),)),
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
