import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from supervise import notifiers
from supervise.core.model import Advice, Message, NotifyError, Step
from supervise.notifiers import PagerDutySender, SlackBotSender, SlackSender, WebhookSender

WIDE = st.text(alphabet=st.sampled_from('a&<>"\\\n\u0000é漢🔥\ud800'), max_size=5000)


def test_a_message_has_a_fallback_text_and_blocks_of_the_forms_that_slack_takes(hook, message):
    SlackSender(hook.url).send(message(facts=[("budget", "1 of 3")]), key="k")

    (path, headers, sent) = hook.requests[0]
    assert (path, headers["content-type"]) == ("/services/T0/SECRETSECRET", "application/json")
    payload = json.loads(sent)
    assert payload["text"] == "[SEV1] loss spike (run run-1, step 152)"
    header, section, fields, context = payload["blocks"]
    assert header["text"] == {"type": "plain_text", "text": "[SEV1] loss spike"}
    assert section["text"]["text"].startswith("*What* train_loss_raw 9.7")
    assert fields["fields"][0]["text"] == "*budget*\n1 of 3"
    assert context["elements"][0]["text"].endswith("audit 412 9c9c9c9c9c9c"), "Slack is a witness"


def test_nothing_from_a_job_can_mention_or_link(hook, message):
    """`<!channel>` in a log line must not page the company; a cut never leaves half an escape."""
    for verdict in ("<!channel> <https://evil|click> &amp;", "&" * 5000):
        SlackSender(hook.url).send(message(verdict=verdict), key="k")

    text, cut = (body.decode() for _, _, body in hook.requests)
    assert "<" not in text.replace("\\u003c", "<")
    assert "&lt;!channel&gt;" in text
    what = json.loads(cut)["blocks"][1]["text"]["text"].splitlines()[0]
    assert what.removeprefix("*What* ").replace("&amp;", "") == "…"


@pytest.fixture
def all_senders(hook):
    return SlackSender(hook.url), WebhookSender(hook.url, []), PagerDutySender("k", hook.url)


@example(
    title="🔥" * 9999, verdict='"' * 9999, why="&" * 9999, facts=[("\0" * 999, "漢" * 999)] * 20
)
@given(title=WIDE, verdict=WIDE, why=WIDE, facts=st.lists(st.tuples(WIDE, WIDE), max_size=12))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_message_is_too_large(hook, all_senders, title, verdict, why, facts):
    """Valid JSON within the limits of each service, whatever a job puts in."""
    advice = Advice(None, (Step(verdict, why),) * 20)
    message = Message("r", "inc-1", "SEV0", title, verdict, why, advice, 7, facts=facts)
    hook.requests.clear()
    for sender in all_senders:
        sender.send(message, key="k")

    slack, webhook, pagerduty = (body for _, _, body in hook.requests)
    assert len(slack) <= 8000 and len(webhook) <= 20_000 and len(pagerduty) <= 100_000
    assert json.loads(webhook)["data"]["step"] == 7 and json.loads(pagerduty)["payload"]
    payload = json.loads(slack)
    assert payload["text"]
    for block in payload["blocks"]:
        for text in [block.get("text"), *block.get("fields", []), *block.get("elements", [])]:
            if text is not None:
                limit = {"header": 150, "context": 2000}.get(block["type"], 3000)
                assert 1 <= len(text["text"]) <= limit
        assert len(block.get("fields", [])) <= 10


BOT_OK = (200, {}, b'{"ok": true, "channel": "C1", "ts": "17.5"}')


def test_a_bot_has_one_thread_per_incident(hook, message):
    """Answers go to its first message, which then shows the newest state."""
    hook.answers = [BOT_OK]
    bot = SlackBotSender("xoxb-TOPSECRET", "C1", hook.url)
    for kind, incident in (("opened", "inc-1"), ("closed", "inc-1"), ("watcher", None)):
        bot.send(message(kind=kind, incident=incident, title=kind), key=f"run:{kind}")

    calls = [(path.rpartition("/")[2], json.loads(sent)) for path, _, sent in hook.requests]
    assert [(name, sent.get("thread_ts"), sent.get("ts")) for name, sent in calls] == [
        ("chat.postMessage", None, None),
        ("chat.postMessage", "17.5", None),
        ("chat.update", None, "17.5"),
        ("chat.postMessage", None, None),
    ]
    assert all(sent["channel"] == "C1" for _, sent in calls)
    assert "closed" in calls[2][1]["text"]
    assert {headers["authorization"] for _, headers, _ in hook.requests} == {
        "Bearer xoxb-TOPSECRET"
    }


@pytest.mark.parametrize(
    ("answer", "said", "retry"),
    [
        (b'{"ok": false, "error": "channel_not_found"}', "Slack: channel_not_found", None),
        (b'{"ok": false, "error": "ratelimited"}', "Slack: ratelimited", 0.0),
        (b'{"ok": false, "error": "xoxb-TOPSECRET was wrong"}', "Slack: unknown error", None),
        (b"<html>", "Slack gave no JSON", 0.0),
    ],
)
def test_a_bot_reads_the_answer(hook, message, answer, said, retry):
    """An error comes with 200, too."""
    hook.answers = [(200, {}, answer)]

    with pytest.raises(NotifyError) as caught:
        SlackBotSender("xoxb-TOPSECRET", "C1", hook.url).send(message(), key="k")

    assert (str(caught.value), caught.value.retry_after_s) == (said, retry)


def test_a_first_message_that_cannot_be_updated_is_no_failure(hook, message):
    """The news is in the thread: a further try would tell it twice."""
    hook.answers = [BOT_OK, BOT_OK, (500, {}, b"")]
    bot = SlackBotSender("t", "C1", hook.url)
    bot.send(message(), key="run:1")

    assert bot.send(message(kind="closed"), key="run:2").endswith("was not updated: 500")


@pytest.mark.parametrize(
    ("keys", "flaw"),
    [
        ({}, "url_env"),
        ({"url_env": "A", "token_env": "B"}, "url_env"),
        ({"token_env": "B"}, "channel"),
        ({"url_env": "A", "channel": "C"}, "channel"),
    ],
)
def test_slack_needs_an_address_or_a_token_with_a_channel(keys, flaw):
    form = notifiers.KINDS["slack"]

    assert [key for key, _ in form(**keys).find_errors()] == [flaw]
    assert form(token_env="B", channel="C").find_errors() == form(url_env="A").find_errors() == []
