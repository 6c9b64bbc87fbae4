"""Every message of a drill run, an approval, a crash and a hang, as each channel gets it.

Scripted metrics and events drive the engine; a message has the facts of its incident's document as
of its record. Review the wording here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from supervise import notifiers
from supervise.core.model import Message, Notified
from supervise.notifiers import (
    PagerDutySender,
    SlackSender,
    WebhookSender,
    message_of,
    render_console,
)
from supervise.report import add_report_to_message
from tests.support.receivers import http_server, mail_server

from . import stories
from .messages import HEAD

PLAYED = ("rate", "approved", "crash", "hang")


def sent(name: str) -> Iterator[tuple[Message, str]]:
    """Yield each message of a story, and its key."""
    story = stories.played(name)
    for r in story.records:
        if not isinstance(r.decision, Notified):
            continue
        message = replace(
            message_of(r.decision, stories.RUN, HEAD, "/runs/demo"),
            host="gpu-07",
            job="python train.py",
            policy=story.policy.name,
            mode=story.policy.mode,
            at=stories.WALL,
        )
        if message.incident is not None:
            report = stories.report(name, message.incident, until=r.seq + 1)
            message = add_report_to_message(message, report)
        yield message, f"{stories.RUN}:{r.seq}"


def of_slack(payload: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a Slack message, in order."""
    yield payload["text"]
    for block in payload["blocks"]:
        for text in [block.get("text"), *block.get("fields", ()), *block.get("elements", ())]:
            if text is not None:
                yield from text["text"].splitlines()


def channels() -> str:
    """Return the whole file."""
    text: list[str] = []
    with http_server() as hook, mail_server() as mail:
        keys = {"host": "127.0.0.1", "port": mail.port, "tls": "none"}
        keys |= {"sender": "a@example.org", "to": ("b@example.org",)}
        for name in PLAYED:
            (email,), _ = notifiers.build_senders({"email": keys}, {})
            senders = (
                SlackSender(hook.url),
                WebhookSender(hook.url, []),
                PagerDutySender("KEY", hook.url),
                email,
            )
            for message, key in sent(name):
                text.append(f"== {name}: {message.kind} {message.incident}")
                text += render_console(message, colour=False).splitlines()
                hook.requests.clear()
                for sender in senders:
                    sender.send(message, key=key)
                payloads = [json.loads(body) for _, _, body in hook.requests]
                text += [f"slack:     {line}" for line in of_slack(payloads[0])]
                letter = mail.taken[-1]
                shown = ("Subject", "Message-ID", "References")
                heads = [f"{head}: {letter[head]}" for head in shown]
                lines = [*heads, "", *letter.get_content().splitlines()]
                text += [f"email:     {line}" for line in lines]
                for channel, payload in zip(("webhook", "pagerduty"), payloads[1:], strict=False):
                    text.append(f"{channel + ':':11}{json.dumps(payload, ensure_ascii=False)}")
                text.append("")
    return "\n".join(text)
