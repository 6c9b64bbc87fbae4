import pytest

from supervise import notifiers
from supervise.core.model import NotifyError

TO = {"sender": "supervise@example.org", "to": ("a@example.org", "b@example.org")}


def sender(server, **more):
    keys = {"host": "127.0.0.1", "port": server.port, "tls": "none", **TO, **more}
    (found,), _ = notifiers.build_senders({"email": keys}, {})
    return found


def test_an_incident_is_one_thread(server, message):
    """The later messages refer to the first one and keep its subject; nothing else is in it."""
    box = sender(server)
    box.send(message(title="inc-1: loss spike\r\nBcc: evil@example.org"), key="run:1")
    box.send(message(title="inc-1: over", kind="closed", card=[("Did", "paused 1 s")]), key="run:2")
    box.send(message(title="probe off", kind="watcher", incident=None), key="run:3")
    sender(server).send(message(kind="action"), key="run:4")  # another supervisor goes on with it

    first, second, other, later = server.taken
    assert first["subject"] == "[SEV1] inc-1: loss spike  Bcc: evil@example.org"
    assert second["subject"] == f"Re: {first['subject']}"
    assert first["references"] is None and first["bcc"] is None
    assert second["references"] == second["in-reply-to"] == first["message-id"]
    assert later["references"] == first["message-id"]
    assert other["subject"] == "[SEV1] probe off" and other["references"] is None
    assert len({mail["message-id"] for mail in server.taken}) == 4
    text = second.get_content().replace("\r\n", "\n")
    assert "inc-1: over\n" in text and "Did    paused 1 s\n" in text
    assert "host gpu-07 · job python train.py · policy nano (enforce)" in text
    assert first["to"] == "a@example.org, b@example.org"


def test_one_address_of_two_is_refused(server, message):
    """The other one has the message: a further try would double it."""
    server.refused = {"b@example.org"}
    assert sender(server).send(message(), key="k") == "delivered to 1 of its addresses, 1 refused"

    server.refused = {"a@example.org", "b@example.org"}
    with pytest.raises(NotifyError, match=r"^550 from the mail server$"):
        sender(server).send(message(), key="k")


def test_a_server_without_starttls_gets_nothing(server, message):
    with pytest.raises(NotifyError, match="no STARTTLS"):
        sender(server, tls="starttls").send(message(), key="k")
    assert server.taken == []


@pytest.mark.parametrize(
    ("keys", "flaw"),
    [
        ({"to": ()}, "to must be an e-mail address"),
        ({"sender": "me"}, "sender must be an e-mail address, not 'me'"),
        ({"port": 0}, "port must be between"),
        ({"user": "u"}, "user belongs together with password_env"),
        ({"user": "u", "password_env": "P", "tls": "none"}, "tls must not be none"),
        ({}, ""),
    ],
)
def test_settings_that_cannot_work_are_named(keys, flaw):
    found = notifiers.KINDS["email"](**{"host": "h", **TO, **keys}).find_errors()

    said = " ".join(found[0]) if found else ""
    assert said.startswith(flaw) and bool(said) == bool(flaw)
