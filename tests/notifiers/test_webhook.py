import base64
import hashlib
import hmac
import json

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervise.core.model import Message, NotifyError
from supervise.notifiers import WEBHOOK_MAX_BYTES, WebhookSender, webhook_body, webhook_schema

KEYS = [bytes(range(24)), bytes(range(32, 64))]
WIDE = st.text(alphabet=st.sampled_from('a"\\\n\u0000漢🔥\ud800'), max_size=20000)


def signature(key: bytes, headers: dict[str, str], sent: bytes) -> str:
    """As the receiver computes it, from the specification."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + sent
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def test_the_receiver_can_check_the_bytes_that_it_got(hook, message):
    """One signature per secret, over id, time and the body as sent; several during a rotation."""
    sender = WebhookSender(hook.url, KEYS, now=lambda: 1700000000.9)

    sender.send(message(title="Verlust über 9 漢"), key="k1")

    (_, headers, sent) = hook.requests[0]
    assert headers["webhook-timestamp"] == "1700000000"
    assert headers["webhook-signature"].split(" ") == [signature(k, headers, sent) for k in KEYS]
    payload = json.loads(sent)
    assert payload["type"] == "supervise.incident.opened"
    assert payload["timestamp"] == "2026-01-05T10:11:12.345Z"
    jsonschema.validate(payload, webhook_schema())
    assert payload["data"]["title"] == "Verlust über 9 漢"
    assert payload["data"]["severity"] == "SEV1"
    assert payload["data"]["audit_head"] == f"412 {'9c' * 32}"


def test_the_published_test_vector_of_standard_webhooks():
    """Secret, id, time and payload of the reference libraries give their signature."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = {"webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "webhook-timestamp": "1614265330"}

    found = signature(key, headers, b'{"test": 2432232314}')

    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_id_stays_over_retries_and_differs_between_messages(hook, message):
    """So the receiver can drop a repetition; the body stays the same, the time is the try's."""
    hook.answers = [(500, {}, b""), (200, {}, b"")]
    times = iter([1.0, 2.0, 3.0])
    sender = WebhookSender(hook.url, KEYS, now=lambda: next(times))
    with pytest.raises(NotifyError):
        sender.send(message(), key="inc-1/1")
    sender.send(message(), key="inc-1/1")
    sender.send(message(), key="inc-1/2")

    ids = [headers["webhook-id"] for _, headers, _ in hook.requests]
    assert ids[0] == ids[1] != ids[2]
    assert hook.requests[0][2] == hook.requests[1][2]
    assert [h["webhook-timestamp"] for _, h, _ in hook.requests] == ["1", "2", "3"]


def test_without_a_secret_nothing_is_signed(hook, message):
    WebhookSender(hook.url, []).send(message(incident=None), key="k")

    (_, headers, sent) = hook.requests[0]
    assert "webhook-signature" not in headers
    assert json.loads(sent)["type"] == "supervise.run.opened"


@example(title="\0" * 9999, verdict="\0" * 9999, facts=[("\0" * 999, "\0" * 999)] * 20)
@given(title=WIDE, verdict=WIDE, facts=st.lists(st.tuples(WIDE, WIDE), max_size=20))
def test_no_message_is_too_large(title, verdict, facts):
    """Under 20 kB whatever a job puts in, and valid JSON."""
    sent = webhook_body(
        Message("r", None, "SEV0", title, verdict, verdict, verdict, 7, facts=facts)
    )

    assert len(sent) <= WEBHOOK_MAX_BYTES
    assert json.loads(sent)["data"]["step"] == 7
