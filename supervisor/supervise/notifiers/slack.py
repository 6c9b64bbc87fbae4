"""Slack, by an incoming webhook.

Limits: header 150, section 3000, field 2000 characters, and an undocumented one near 13 000 for
the whole; ours are under 8000 bytes. `& < >` are escaped, so that text from a job can neither
mention nor link. Incoming webhooks cannot edit or thread: each change of an incident is a message.

Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.model.interfaces import Message
from ._http import TIMEOUT_S, Poster
from ._settings import ChannelSettings, Sender, Severity, address, clip, fit, footer

MAX_BYTES = 8000


@dataclass(frozen=True, kw_only=True)
class Slack(ChannelSettings):
    """Messages in a Slack channel.

    Attributes:
        url_env: the environment variable that holds the incoming webhook's URL.
        allow_http: accept a plain http URL of another machine.
    """

    url_env: str
    allow_http: bool = False

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError."""
        url = address(env, self.url_env, allow_http=self.allow_http)
        return SlackSender(url, min_sev=self.min_sev)


class SlackSender:
    """Posts to one incoming webhook. Slack takes one message a second."""

    name = "slack"
    group_s = 10.0
    gap_s = 1.0
    per_hour: int | None = 20

    def __init__(
        self, url: str, *, min_sev: Severity = "SEV2", timeout_s: float = TIMEOUT_S
    ) -> None:
        self.min_sev: Severity = min_sev
        self._poster = Poster(url, timeout_s=timeout_s)

    def send(self, message: Message, *, key: str) -> str:
        """Deliver. Raises NotifyError."""
        return self._poster.post(body(message), {})


def body(message: Message) -> bytes:
    """Return the JSON of one message, at most MAX_BYTES."""
    return fit(lambda share: _payload(message, share), MAX_BYTES)


def _payload(message: Message, share: float) -> dict[str, Any]:
    def cut(text: str, limit: int) -> str:
        return _escape(text, int(limit * share))

    title = f"[{message.severity}] {message.title}"
    parts = (
        ("What", message.verdict),
        ("Why", message.why),
        *message.card,
        ("Next", message.next),
    )
    lines = [f"*{head}* {cut(text, 900)}" for head, text in parts if text]
    foot = footer(message)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": clip(title, 150)}}
    ]
    if lines:
        blocks.append({"type": "section", "text": _mrkdwn("\n".join(lines))})
    if message.facts:
        blocks.append(
            {
                "type": "section",
                "fields": [
                    _mrkdwn(f"*{cut(name, 60)}*\n{cut(value, 240)}")
                    for name, value in message.facts[:8]
                ],
            }
        )
    blocks.append({"type": "context", "elements": [_mrkdwn(_escape(" · ".join(foot), 600))]})
    return {"text": cut(f"{title} (run {message.run}, step {message.step})", 300), "blocks": blocks}


def _mrkdwn(text: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": text}


def _escape(text: str, limit: int) -> str:
    """Escape for mrkdwn; the result has at most `limit` characters and no partial escape."""
    safe = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    pieces = [safe.get(c, c) for c in text[:limit]]
    size = sum(map(len, pieces))
    if size <= limit and len(text) <= limit:
        return "".join(pieces)
    while pieces and size > limit - 1:
        size -= len(pieces.pop())
    return "".join(pieces) + "…"
