"""Channels against a receiver that limits, fails, hangs, resets, or is away for a while.

Those that differ most: by mail, with answers to read, and with alerts; the others post as these do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from supervise import notifiers
from supervise.core.model import NotifyError
from supervise.notifiers import EmailSender, Outbox, PagerDutySender, SlackBotSender
from tests.support.waiting import wait_until

TIMEOUT_S = 0.3
OK = (200, {}, b'{"ok": true, "channel": "C1", "ts": "17.5"}')
NAMES = ["slack-bot", "pagerduty", "email"]


@dataclass
class Channel:
    """A way to make a sender, what came of it, and how the receiver answers.

    Attributes:
        seen: returns a text and the identity of each accepted message, oldest first.
        answer: lets the receiver answer the next tries with these codes, 0: never, -1: a reset.
        busy, gone: codes for "later" and for "never".
    """

    open: Callable[[], object]
    seen: Callable[[], list[tuple[str, str]]]
    answer: Callable[..., None]
    busy: tuple[int, int] = (429, 500)
    gone: int = 400


@pytest.fixture(params=NAMES)
def channel(request, hook, server):
    if request.param == "email":
        keys = {"host": "127.0.0.1", "port": server.port, "sender": "a@b.c", "to": ("d@e.f",)}
        settings = notifiers.KINDS["email"](**keys, tls="none")
        return Channel(
            lambda: EmailSender(settings, "", timeout_s=TIMEOUT_S),
            lambda: [(m.get_content(), m["message-id"]) for m in server.taken],
            lambda *codes: server.answers.__setitem__(slice(None), codes),
            (451, 421),
            554,
        )
    identity = {
        "slack-bot": lambda event: event.get("metadata", event)["event_payload"]["key"],
        "pagerduty": lambda event: f"{event['event_action']} {event['dedup_key']}",
    }[request.param]
    codes: list[int] = []
    seen: list[tuple[str, str]] = []

    def before():
        path, _, content = hook.requests[-1]
        code = codes.pop(0) if codes and "update" not in path else 200
        hook.answers = [OK] if code == 200 else [(code, {}, b"")]
        if code == 200 and "update" not in path:
            seen.append((content.decode(), identity(json.loads(content))))

    hook.before = before
    senders = {
        "slack-bot": lambda: SlackBotSender("xoxb", "C1", hook.url, timeout_s=TIMEOUT_S),
        "pagerduty": lambda: PagerDutySender("key", hook.url, timeout_s=TIMEOUT_S),
    }
    return Channel(
        senders[request.param],
        lambda: list(seen),
        lambda *given: codes.__setitem__(slice(None), given),
    )


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(channel, message):
    """A limit, a failure, silence, a reset; then the message arrives, once."""
    sender = channel.open()
    for code in (*channel.busy, 0, -1):
        channel.answer(code)
        with pytest.raises(NotifyError) as caught:
            sender.send(message(), key="k")
        assert caught.value.retry_after_s == 0.0
    sender.send(message(), key="k")
    assert len(channel.seen()) == 1

    channel.answer(channel.gone)
    with pytest.raises(NotifyError) as caught:
        sender.send(message(), key="k2")
    assert caught.value.retry_after_s is None


STORY = {"opened": "spike", "approval": "approve?", "closed": "recovered"}


def test_an_outage_loses_and_doubles_nothing(channel, message):
    """All of it arrives soon after, in order."""
    results = []
    sender = channel.open()
    sender.group_s = sender.gap_s = 0.0  # type: ignore[attr-defined]
    box = Outbox([sender], results.append, backoff_s=0.002)
    channel.answer(*[channel.busy[1]] * 7)
    for kind, title in STORY.items():
        text = message(kind=kind, title=title, verdict=title, severity="SEV0")
        box.post(text, key=f"run:{kind}")
    wait_until(lambda: len(results) == len(STORY))
    box.close()

    assert all(result.ok for result in results), results
    assert [result.keys for result in results] == [(f"run:{kind}",) for kind in STORY]
    assert sum(result.tries for result in results) >= len(STORY) + 7
    seen = channel.seen()
    if "resolve" in seen[-1][1]:  # which has no text, and ends an alert of each severity
        assert len(seen) == len(STORY) - 1 + 3
    else:
        assert len(seen) == len(STORY)
        assert all(title in text for (text, _), title in zip(seen, STORY.values(), strict=True))
    assert box.undelivered() == []


def test_a_crash_before_the_sending_or_after_it(channel, message):
    """The next supervisor sends what has no result, under the identity that it had."""
    opened = message(kind="opened", title="spike")
    channel.open().send(opened, key="run:3")  # and the supervisor died before the result
    results = []
    sender = channel.open()
    sender.group_s = sender.gap_s = 0.0  # type: ignore[attr-defined]
    box = Outbox([sender], results.append)
    closed = message(kind="closed", title="over")
    owed = [(opened, "run:3", 0.0), (closed, "run:5", 1.0)]
    assert box.resume(owed, {sender.name: set()}) == 2  # type: ignore[attr-defined]
    box.close()

    first, again, *last = (identity for _, identity in channel.seen())
    assert first == again and last and first not in last
    assert all(result.ok for result in results)
