"""Channels that fail, refuse, hang or ask for patience, and who hears of it."""

import threading
import time

import pytest

from supervise.core.model import NotifyError
from supervise.notifiers import Outbox, Result
from tests.support.waiting import wait_until

from .senders import FakeSender, Gate, message


def test_refusal_is_final_and_a_bug_is_one_failure(outbox):
    """Neither stops the channel; a bug's text may contain an address."""
    sender = FakeSender(NotifyError("400", retry_after_s=None), ValueError("https://secret"))
    box = outbox(sender)
    for key in "abc":
        box.post(message(key), key=key)
    box.close()

    assert [(r.ok, r.detail) for r in box.results] == [
        (False, "400"),
        (False, "ValueError in the notifier"),
        (True, "delivered"),
    ]


def test_retry_after_applies_to_sev0(outbox):
    sender = FakeSender(NotifyError("429", retry_after_s=0.4))
    box = outbox(sender, backoff_s=1e-6)
    box.post(message("a"), key="a")
    wait_until(lambda: sender.tried)
    began = time.monotonic()
    box.post(message("b", "SEV0"), key="b")

    wait_until(lambda: len(sender.sent) >= 2)
    assert time.monotonic() - began > 0.3
    assert sender.tried == ["a", "b", "a"]


def test_backoff_does_not_delay_sev0(outbox):
    sender = FakeSender(NotifyError("500", retry_after_s=0.0))
    box = outbox(sender, backoff_s=1e6)
    box.post(message("a"), key="a")
    wait_until(lambda: sender.tried)
    box.post(message("b", "SEV0"), key="b")

    wait_until(lambda: sender.sent)
    assert sender.titles[0] == "b"


def test_tried_message_is_never_changed(outbox):
    """The receiver may have it under its key; later news is a message of its own."""
    gate = Gate()

    def lost_answer():
        gate()
        raise NotifyError("no answer", retry_after_s=0.0)

    sender = FakeSender(lost_answer)
    box = outbox(sender, backoff_s=0.001)
    box.post(message("opened", "SEV1", "inc-1"), key="a")
    gate.entered.wait()
    box.post(message("closed", "INFO", "inc-1"), key="b")
    gate.go.set()
    box.close()

    assert [(key, m.title) for key, m in sender.sent] == [("a", "opened"), ("b", "closed")]


def failing(tries=99):
    return [NotifyError("500", retry_after_s=0.0)] * tries


def test_failure_and_recovery_are_reported_once(outbox):
    """On the other channels, also on a console that takes no such severity."""
    now = [0.0]
    pager = FakeSender(*failing(2), name="pager")
    console = FakeSender(name="console", min_sev="SEV0")
    slack = FakeSender(name="slack")
    box = outbox(pager, console, slack, monotonic=lambda: now[0], backoff_s=1000.0)
    box.post(message("a", "SEV1", "inc-1"), key="run:a")
    wait_until(lambda: len(pager.tried) >= 1)
    assert box.check_channels() == []  # a moment is no news

    now[0] = 20.0
    [trouble] = box.check_channels()
    assert (trouble.channel, trouble.since_s, trouble.undelivered) == ("pager", 0.0, 1)
    assert trouble.error == "500"
    assert box.check_channels() == [trouble]
    wait_until(lambda: console.sent and len(slack.sent) == 2)

    for _, report in (console.sent[0], slack.sent[1]):
        assert (report.severity, report.incident, report.step) == ("SEV2", None, 7)
        assert report.title == "pager: 1 message was not delivered"
        assert report.verdict == "no message was delivered for 20 s; last error: 500"
    box.post(message("b", "SEV0"), key="run:b")  # SEV0 is tried at once
    wait_until(lambda: len(pager.tried) >= 2)
    box.post(message("c", "SEV0"), key="run:c")
    wait_until(lambda: pager.sent)
    wait_until(lambda: not box.check_channels())
    box.close()

    failed, recovered = "pager: 1 message was not delivered", "pager works again"
    assert sorted(console.titles) == ["b", "c", recovered, failed]
    [verdict] = [m.verdict for _, m in slack.sent if m.title == "pager works again"]
    assert verdict == "the waiting messages are being delivered"


def test_lost_messages_are_told_to_the_channel_that_lost_them(outbox):
    refused = [NotifyError("400", retry_after_s=None)] * 2
    pager, console = FakeSender(*refused, name="pager"), FakeSender(name="console")
    box = outbox(pager, console)
    for key in ("run:a", "run:b"):
        box.post(message(key), key=key)
    wait_until(lambda: len([r for r in box.results if not r.ok]) == 2)
    assert [trouble.lost for trouble in box.check_channels()] == [2]
    box.post(message("c"), key="run:c")
    wait_until(lambda: not box.check_channels())
    box.close()

    verdicts = {m.title: m.verdict for sender in (pager, console) for _, m in sender.sent}
    assert verdicts["pager: 2 messages were not delivered"] == "last error: 400"
    assert verdicts["pager works again"] == "2 messages were lost"
    assert "pager works again" in pager.titles


def test_hanging_channel_is_reported(outbox):
    """Its thread is inside the sender, so another one must check."""
    now = [0.0]
    gate = Gate()
    hanging, console = FakeSender(gate, name="pager"), FakeSender(name="console")
    box = outbox(hanging, console, monotonic=lambda: now[0])
    box.post(message("a"), key="run:a")
    gate.entered.wait()
    now[0] = 20.0

    [trouble] = box.check_channels()

    assert trouble.error == "no answer yet"
    gate.go.set()


def test_given_up_messages_are_reported_at_once_and_at_the_end(outbox):
    """The console is closed last, to report the failures of the others."""
    pager = FakeSender(*failing(), name="pager", min_sev="SEV1")
    console = FakeSender(name="console")
    refused = FakeSender(NotifyError("410 Gone", retry_after_s=None), name="hook", min_sev="SEV0")
    box = outbox(pager, console, refused)
    box.post(message("a", "SEV0"), key="run:a")
    wait_until(lambda: refused.tried or not pager.tried)
    wait_until(lambda: [t.channel for t in box.check_channels()] == ["hook"])

    box.close(0.5)

    assert console.titles == [
        "a",
        "hook: 1 message was not delivered",
        "pager: 1 message was not delivered",
    ]
    assert [(t.channel, t.undelivered, t.error) for t in box.check_channels()] == [
        ("hook", 1, "410 Gone"),
        ("pager", 1, "not delivered before the supervisor ended; last try: 500"),
    ]
    keys = [(result.channel, key) for result in box.results for key in result.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("answer", "name", "owed"),
    [
        (NotifyError("503", retry_after_s=3600.0), "pager", [("pager", ("k",), 1, "503")]),
        (NotifyError("400", retry_after_s=None), "pager", []),
        (None, "pager", []),
        (NotifyError("closed", retry_after_s=3600.0), "console", []),
    ],
    ids=["unreachable", "refused", "delivered", "console"],
)
def test_undelivered_messages_are_returned_once(outbox, answer, name, owed):
    sender = FakeSender(answer, name=name)
    box = outbox(sender)
    box.post(message("a", "SEV1"), key="k")
    wait_until(lambda: sender.tried)
    box.close()

    assert [(u.channel, u.keys, u.tries, u.error) for u in box.undelivered()] == owed
    assert box.undelivered() == []


@pytest.mark.parametrize("is_known", [False, True])
def test_undelivered_messages_are_in_order_and_know_what_was_delivered_before(outbox, is_known):
    """The one that was tried last was put back behind those that came after it."""
    closed = NotifyError("503", retry_after_s=3600.0)
    sender = FakeSender(*[None] * is_known, closed, closed, closed, min_sev="SEV1")
    box = outbox(sender)
    if is_known:
        box.post(message("opened", "SEV1", "inc-1"), key="0")
        wait_until(lambda: sender.sent)
    box.post(message("worse", "SEV1", "inc-1"), key="1")
    wait_until(lambda: len(sender.tried) == 1 + is_known)
    box.post(message("closed", "INFO", "inc-1", kind="closed"), key="2")
    box.close()

    rest = [(item.keys, item.is_follow_up) for item in box.undelivered()]
    assert rest == [(("1",), is_known), (("2",), is_known)]


def test_message_fails_without_a_thread(no_threads):
    """The next message tries to start it again; the failure is reported as any other."""
    results = []
    sender = FakeSender()
    box = Outbox([sender], results.append)
    box.post(message("a"), key="a")

    assert results == [Result("fake", ("a",), False, "no thread could be started", 0)]
    assert [trouble.channel for trouble in box.check_channels()] == ["fake"]

    threading.stack_size(0)
    box.post(message("b"), key="b")
    box.close()
    assert sender.tried == ["b"]


def test_failing_listener_does_not_stop_the_channel():
    sender = FakeSender()

    def listener(result):
        raise OSError("disk full")

    box = Outbox([sender], listener)
    for key in "ab":
        box.post(message(key), key=key)
    box.close()

    assert sender.titles == ["a", "b"]
