"""The whole way: outbox, sender, a real server."""

import time

import pytest

from supervise.notifiers.slack import SlackSender
from supervise.notifiers.webhook import WebhookSender
from supervise.outputs.outbox import Outbox


@pytest.fixture
def deliver(hook, message):
    """Post one message through a real sender, and return the results after the outbox is closed."""

    def run(sender, *, until: int, deadline_s=5.0):
        results = []
        box = Outbox([sender], results.append, backoff_s=0.01)
        box.post(message(severity="SEV0"), key="k1")
        while len(hook.requests) < until:
            time.sleep(0.005)
        box.close(deadline_s)
        return results

    return run


def test_a_busy_receiver_gets_the_same_message_later(hook, deliver):
    """429 with Retry-After, then 500, then it works: one message, one id, three tries."""
    hook.answers = [(429, {"Retry-After": "1"}, b""), (500, {}, b""), (200, {}, b"")]
    began = time.monotonic()

    (result,) = deliver(WebhookSender(hook.url, [bytes(24)]), until=3)

    assert (result.ok, result.tries) == (True, 3)
    assert time.monotonic() - began > 0.9
    assert len({headers["webhook-id"] for _, headers, _ in hook.requests}) == 1


@pytest.mark.parametrize("status", [302, 404])
def test_a_receiver_that_refuses_is_asked_once(hook, deliver, status):
    """And the audit log gets to know why, without the address."""
    hook.answers = [(status, {"Location": hook.url}, b"no_service")]

    (result,) = deliver(SlackSender(hook.url), until=1)

    assert (result.ok, result.tries) == (False, 1)
    assert result.detail.startswith(str(status))
    assert "SECRET" not in result.detail


def test_a_receiver_that_hangs_does_not_hold_the_exit(hook, deliver):
    """The drain has a deadline shorter than the network's."""
    hook.answers = [(0, {}, b"")]
    began = time.monotonic()

    (result,) = deliver(SlackSender(hook.url, timeout_s=60.0), until=1, deadline_s=0.2)

    assert time.monotonic() - began < 20
    assert (result.ok, result.detail) == (False, "no answer before the supervisor ended")
