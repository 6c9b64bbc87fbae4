import base64
import hashlib
import hmac
import json
from pathlib import Path

import jsonschema
import pytest

from supervise.core.model import NotifyError
from supervise.notifiers import WebhookSender

SCHEMA = Path(__file__).parents[2] / "docs" / "message.schema.json"
KEYS = [bytes(range(24)), bytes(range(32, 64))]


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
    jsonschema.validate(payload, json.loads(SCHEMA.read_text()))
    assert payload["data"]["title"] == "Verlust über 9 漢"


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
