import json

from hypothesis import example, given
from hypothesis import strategies as st

from supervise.core.model.interfaces import Message
from supervise.notifiers.slack import MAX_BYTES, SlackSender, body

WIDE = st.text(alphabet=st.sampled_from('a&<>"\\\n\u0000é漢🔥\ud800'), max_size=5000)


def test_a_message_has_a_fallback_text_and_says_it_all(hook, message):
    """What, why, what next, where; and the audit head, so that Slack becomes a witness."""
    SlackSender(hook.url).send(message(facts=[("budget", "1 of 3")]), key="k")

    (path, headers, sent) = hook.requests[0]
    assert path == "/services/T0/SECRETSECRET"
    assert headers["content-type"] == "application/json"
    payload = json.loads(sent)
    assert payload["text"] == "[SEV1] loss spike (run run-1, step 152)"
    header, section, fields, context = payload["blocks"]
    assert header["text"] == {"type": "plain_text", "text": "[SEV1] loss spike"}
    assert section["text"]["text"] == (
        "*What* train_loss_raw 9.7 is 8.2 sigma above 2.6\n"
        "*Why* spike: loss_z &gt; 5\n"
        "*Next* rollback to step 125"
    )
    assert fields["fields"][0]["text"] == "*budget*\n1 of 3"
    assert context["elements"][0]["text"].endswith("audit 412 9c9c9c9c9c9c")
    assert "inc-1" in context["elements"][0]["text"]


def test_nothing_from_a_job_can_mention_or_link(message):
    """`<!channel>` in a log line must not page the company."""
    text = body(message(verdict="<!channel> <https://evil|click> &amp;")).decode()

    assert "<" not in text.replace("\\u003c", "<")
    assert "&lt;!channel&gt;" in text


@example(
    title="🔥" * 9999, verdict='"' * 9999, why="&" * 9999, facts=[("\0" * 999, "漢" * 999)] * 20
)
@given(title=WIDE, verdict=WIDE, why=WIDE, facts=st.lists(st.tuples(WIDE, WIDE), max_size=12))
def test_no_message_is_too_large_for_slack(title, verdict, why, facts):
    """Under 8000 bytes whatever a job puts in, valid JSON, each block within Slack's limits."""
    sent = body(Message("run-1", "inc-1", "SEV0", title, verdict, why, verdict, 7, facts=facts))

    assert len(sent) <= MAX_BYTES
    payload = json.loads(sent)
    assert payload["text"]
    for block in payload["blocks"]:
        for text in [block.get("text"), *block.get("fields", []), *block.get("elements", [])]:
            if text is not None:
                limit = {"header": 150, "context": 2000}.get(block["type"], 3000)
                assert 1 <= len(text["text"]) <= limit
        assert len(block.get("fields", [])) <= 10


def test_a_cut_never_leaves_half_an_escape(message):
    """`&am` would show as garbage; the last character is an ellipsis instead."""
    payload = json.loads(body(message(verdict="&" * 5000)))

    what = payload["blocks"][1]["text"]["text"].splitlines()[0]
    assert what.removeprefix("*What* ").replace("&amp;", "") == "…"
