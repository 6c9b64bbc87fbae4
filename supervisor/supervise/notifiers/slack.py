"""Slack, by an incoming webhook, or with a bot token: one thread per incident.

Limits: header 150, section 3000, field 2000 characters, and an undocumented one near 13 000 for
the whole; ours are under 8000 bytes. `& < >` are escaped, so that text from a job can neither
mention nor link. Incoming webhooks cannot edit or thread: each change of an incident is a message.
A bot answers in the thread of the first message, which then shows the newest state.

Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks,
https://docs.slack.dev/reference/methods/chat.postMessage
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.model.interfaces import Message, NotifyError, Severity
from ._channel_settings import (
    TIMEOUT_S,
    ChannelSettings,
    Poster,
    Sender,
    clip_text,
    fit_payload,
    message_footer,
    message_sentences,
    required_url,
    required_variable,
)

MAX_BYTES = 8000
MAX_ANSWER = 64_000  # bytes; it repeats the message
API = "https://slack.com/api"
JSON_TYPE = "application/json; charset=utf-8"
KEPT = 256  # threads
# Errors of the Web API that may pass; the others are of the token, the channel or the message.
PASSING = (
    *("ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable"),
    *("request_timeout", "team_added_to_org", "org_login_required"),
)


@dataclass(frozen=True, kw_only=True)
class Slack(ChannelSettings):
    """Messages in a Slack channel; with a bot token one thread per incident.

    Attributes:
        url_env: the environment variable that holds the incoming webhook's URL.
        token_env: in its place, that which holds a bot token (scope `chat:write`).
        channel: of the bot: the id of the channel, such as `C0123456789`.
        allow_http: accept a plain http URL of another machine.
    """

    url_env: str | None = None
    token_env: str | None = None
    channel: str | None = None
    allow_http: bool = False

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError."""
        if self.token_env is not None:
            token = required_variable(env, self.token_env)
            return SlackBotSender(token, self.channel or "", API, min_sev=self.min_sev)
        url = required_url(env, self.url_env or "", allow_http=self.allow_http)
        return SlackSender(url, min_sev=self.min_sev)

    def find_errors(self) -> list[tuple[str, str]]:
        if (self.url_env is None) == (self.token_env is None):
            return [("url_env", "either this or token_env is needed, and not both")]
        if (self.token_env is None) != (self.channel is None):
            return [("channel", "belongs together with token_env")]
        return super().find_errors()


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
        return self._poster.post(build_slack_body(message), {})


class SlackBotSender:
    """Posts to one channel with a bot token.

    The threads are known to this object only: another supervisor begins new ones.
    """

    name = "slack"
    group_s = 10.0
    gap_s = 1.0
    per_hour: int | None = 40  # answers in a thread disturb less

    def __init__(
        self,
        token: str,
        channel: str,
        api: str,
        *,
        min_sev: Severity = "SEV2",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.min_sev: Severity = min_sev
        self._channel = channel
        self._headers = {"authorization": f"Bearer {token}", "content-type": JSON_TYPE}
        self._post = Poster(f"{api}/chat.postMessage", timeout_s=timeout_s)
        self._update = Poster(f"{api}/chat.update", timeout_s=timeout_s)
        self._threads: dict[str, tuple[str, str]] = {}  # incident -> channel, time of the first

    def send(self, message: Message, *, key: str) -> str:
        """Deliver. Raises NotifyError.

        Once the message is in the thread, a first message that cannot be updated is no failure: a
        further try would say it twice.
        """
        thread = self._threads.get(message.incident or "")
        keys: dict[str, Any] = {"channel": self._channel, "metadata": _metadata(key)}
        if thread is not None:
            keys["thread_ts"] = thread[1]
        answer = self._call(self._post, build_slack_body(message, keys))
        outcome = "delivered" if thread is None else "delivered in its thread"
        if thread is None:
            thread = str(answer.get("channel", self._channel)), str(answer.get("ts", ""))
            self._remember(message.incident, thread)
        else:
            try:
                update = {"channel": thread[0], "ts": thread[1]}
                self._call(self._update, build_slack_body(message, update))
            except NotifyError as error:
                outcome += f"; the first message was not updated: {error}"
        return outcome

    def _remember(self, incident: str | None, thread: tuple[str, str]) -> None:
        if incident is not None:
            self._threads[incident] = thread
            while len(self._threads) > KEPT:
                del self._threads[next(iter(self._threads))]

    def _call(self, method: Poster, content: bytes) -> Mapping[str, Any]:
        """Call a method of the Web API, which says in an answer of 200 whether it worked."""
        raw = method.exchange(content, self._headers, MAX_ANSWER)
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NotifyError("Slack gave no JSON", retry_after_s=0.0)
        if answer.get("ok") is True:
            return answer
        error = str(answer.get("error", "unknown error"))
        is_plain = error.isascii() and error.replace("_", "").isalnum() and len(error) <= 60
        raise NotifyError(
            f"Slack: {error if is_plain else 'unknown error'}",
            retry_after_s=0.0 if error in PASSING else None,
        )


def _metadata(key: str) -> dict[str, Any]:
    """Return what tells a receiver that a message is the same one again."""
    return {"event_type": "supervise_message", "event_payload": {"key": key}}


def build_slack_body(message: Message, keys: Mapping[str, Any] | None = None) -> bytes:
    """Return the JSON of one message, at most MAX_BYTES; `keys`: further ones."""
    return fit_payload(lambda share: {**_payload(message, share), **(keys or {})}, MAX_BYTES)


def _payload(message: Message, share: float) -> dict[str, Any]:
    def cut(text: str, limit: int) -> str:
        return _escape(text, int(limit * share))

    title = f"[{message.severity}] {message.title}"
    lines = [f"*{head}* {cut(text, 900)}" for head, text in message_sentences(message)]
    foot = message_footer(message)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": clip_text(title, 150)}}
    ]
    for start in range(0, len(lines), 3):  # a section holds three of them
        part = "\n".join(lines[start : start + 3])
        blocks.append({"type": "section", "text": _mrkdwn(part)})
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
