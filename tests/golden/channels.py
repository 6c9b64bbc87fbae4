"""Every message of a drill run, an approval, a crash and a hang, as each channel gets it.

Scripted metrics and events drive the engine; a message has the facts of its incident's document as
of its record. Review the wording here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from supervise.core.model import Message, Notified
from supervise.notifiers import (
    letter_of,
    message_of,
    pagerduty_body,
    render_console,
    slack_body,
    webhook_body,
)
from supervise.report import with_report
from tests.golden.messages import HEAD, RUN
from tests.report import stories

PLAYED = ("rate", "approved", "crash", "hang")


def sent(name: str) -> Iterator[tuple[Message, str]]:
    """Yield each message of a story, and its key."""
    policy, records, _ = stories.played(name)
    for r in records:
        if not isinstance(r.decision, Notified):
            continue
        decision = r.decision
        message = replace(
            message_of(decision, RUN, HEAD, "/runs/demo"),
            host="gpu-07",
            job="python train.py",
            policy=policy.name,
            mode=policy.mode,
            at=stories.WALL,
        )
        if message.incident is not None:
            report = stories.report(name, message.incident, until=r.seq + 1)
            message = with_report(message, report)
        yield message, f"{RUN}:{r.seq}"


def of_slack(message: Message) -> Iterator[str]:
    """Yield the texts of a Slack message, in order."""
    payload = json.loads(slack_body(message))
    yield payload["text"]
    for block in payload["blocks"]:
        for text in [block.get("text"), *block.get("fields", ()), *block.get("elements", ())]:
            if text is not None:
                yield from text["text"].splitlines()


def channels() -> str:
    """Return the whole file."""
    text: list[str] = []
    for name in PLAYED:
        for message, key in sent(name):
            text.append(f"== {name}: {message.kind} {message.incident}")
            text += render_console(message, colour=False).splitlines()
            text += [f"slack:     {line}" for line in of_slack(message)]
            letter = letter_of(message, key, f"[{message.severity}] {message.title}")
            heads = [f"{head}: {letter[head]}" for head in ("Subject", "Message-ID", "References")]
            lines = [*heads, "", *letter.get_content().splitlines()]
            text += [f"email:     {line}" for line in lines]
            for channel, body in (
                ("webhook", webhook_body(message)),
                ("pagerduty", pagerduty_body(message, "KEY", key)),
            ):
                shown = json.dumps(json.loads(body), ensure_ascii=False)
                text.append(f"{channel + ':':11}{shown}")
            text.append("")
    return "\n".join(text)
