"""A complete fake of a channel behind the outbox; real HTTP is in tests/notifiers."""

from __future__ import annotations

import threading

from supervise.core.model import Advice, Message


class FakeSender:
    """Remembers what it was sent; `script` holds what to do with the next tries."""

    def __init__(self, *script, name="fake", min_sev="INFO", group_s=0.0, gap_s=0.0, per_hour=None):
        self.name, self.min_sev = name, min_sev
        self.group_s, self.gap_s, self.per_hour = group_s, gap_s, per_hour
        self.script = list(script)
        self.sent: list[tuple[str, Message]] = []
        self.tried: list[str] = []

    def send(self, message: Message, *, key: str) -> str:
        self.tried.append(key)
        act = self.script.pop(0) if self.script else None
        if callable(act):
            act()
        elif act is not None:
            raise act
        self.sent.append((key, message))
        return "delivered"

    @property
    def titles(self) -> list[str]:
        return [message.title for _, message in self.sent]


def message(title, severity="SEV2", incident=None, **fields) -> Message:
    given = {"verdict": "", "why": "", "next": Advice(), "kind": "updated", **fields}
    return Message("run-1", incident, severity, title, step=7, **given)


def outcome(box) -> dict[str, bool]:
    """What came of each message, by key; each must have exactly one result."""
    found = [(key, result.ok) for result in box.results for key in result.keys]
    assert len(found) == len({key for key, _ in found})
    return dict(found)


class Gate:
    """Holds a sender inside `send` until it is opened."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.go.wait(30)
