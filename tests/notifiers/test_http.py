import logging
import socket
import subprocess
import sys
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from supervise.core.model import NotifyError
from supervise.notifiers import SlackSender

SECRET = "SECRETSECRET"


def send(hook, message, *, timeout_s=5.0):
    return SlackSender(hook.url, timeout_s=timeout_s).send(message(), key="k")


def refused(hook, message, **more) -> NotifyError:
    with pytest.raises(NotifyError) as caught:
        send(hook, message, **more)
    return caught.value


def test_429_waits_as_long_as_the_receiver_asks(hook, message):
    """Seconds or a date (RFC 9110); nonsense counts as no wish, and an hour is the most."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=120), usegmt=True)
    for value, least, most in (
        ("7", 7, 7),
        (date, 100, 120),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("999999", 3600, 3600),
        ("nan", 0, 3600),
    ):
        hook.answers = [(429, {"Retry-After": value}, b"")]

        error = refused(hook, message)

        assert least <= error.retry_after_s <= most, value


@pytest.mark.parametrize(
    ("answer", "text", "retry_after_s"),
    [
        ((408, {}, b"invalid_payload"), "408 invalid_payload", 0.0),
        ((500, {}, b"invalid_payload"), "500 invalid_payload", 0.0),
        ((500, {}, b"x" * 50_000_000), "500", 0.0),  # of which 64 bytes are looked at
        ((400, {}, b"invalid_payload"), "400 invalid_payload", None),
        ((302, {"Location": "/elsewhere"}, b""), "302: redirects are not followed", None),
        ((0, {}, b""), "no answer within 0.2 s", 0.0),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_failure_is_retried_or_final(hook, message, answer, text, retry_after_s):
    """At our own pace when the receiver names none; Slack's error code says what to do."""
    hook.answers = [answer]
    error = refused(hook, message, timeout_s=0.2 if answer[0] == 0 else 5.0)

    assert (str(error), error.retry_after_s) == (text, retry_after_s)
    assert len(hook.requests) == 1


def test_gone_switches_the_address_off(hook, message):
    """After a 410 the receiver is not asked again."""
    hook.answers = [(410, {}, b""), (200, {}, b"")]
    sender = SlackSender(hook.url)
    for text in ("410 Gone", "switched off"):
        with pytest.raises(NotifyError, match=text) as caught:
            sender.send(message(), key="k")
        assert caught.value.retry_after_s is None

    assert len(hook.requests) == 1


def test_nobody_listening_and_no_such_name_are_tried_again(message):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/{SECRET}", f"http://nothing.invalid/{SECRET}"):
        with pytest.raises(NotifyError) as caught:
            SlackSender(url).send(message(), key="k")
        assert str(caught.value) == "no connection (ConnectError)"
        assert caught.value.retry_after_s == 0.0


@pytest.mark.parametrize("status", [200, 302, 0, -1])
def test_the_address_appears_nowhere(hook, message, caplog, status):
    """Not in errors, their context, representations, or log lines at the lowest level."""
    caplog.set_level(logging.DEBUG)
    hook.answers = [(status, {"Location": hook.url}, hook.url.encode())]
    url = hook.url if status >= 0 else f"http://127.0.0.1:99999/{SECRET}"
    sender = SlackSender(url, timeout_s=0.2)

    texts = [repr(sender), str(vars(sender))]
    try:
        texts.append(sender.send(message(), key="k"))
    except NotifyError as error:
        texts += [repr(error), "".join(traceback.format_exception(error))]
        assert error.__context__ is None and error.__cause__ is None

    texts += [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if SECRET in text]


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_the_first_message():
    """The supervisor starts fast; most runs never send a message."""
    code = """
import sys
from supervise import notifiers
env = {"S": "https://a.b/c", "W": "https://a.b/c"}
notify = {"console": {}, "slack": {"url_env": "S"}, "webhook": {"url_env": "W"}}
built, warnings = notifiers.build_senders(notify, env)
assert [sender.name for sender in built] == ["console", "slack", "webhook"], warnings
assert not {"httpx", "ssl", "httpcore", "anyio"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
