"""A service that accepts Standard Webhooks 1.0. `docs/message.schema.json` describes the JSON.

The signature is an HMAC-SHA256 over `id.timestamp.body` with the bytes as sent. The id is the same
for each retry, so that the receiver can deduplicate; the timestamp is that of the try.

Source: the specification at https://www.standardwebhooks.com
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, to_builtins

from ..core.model.interfaces import KINDS, Kind, Message, Severity, Step
from ..json_schemas import published_schema
from ._channel_settings import (
    TIMEOUT_S,
    ChannelSettings,
    Poster,
    Sender,
    UnsetError,
    clip_text,
    fit_payload,
    required_url,
    required_variable,
)

MAX_BYTES = 20_000
MAX_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Webhook(ChannelSettings):
    """Signed JSON posts.

    Attributes:
        url_env: the environment variable that holds the URL.
        secret_env: the environment variable that holds the secret, `whsec_` and base64; several,
            separated by spaces, while it is rotated. Without it posts are not signed.
        allow_http: accept a plain http URL of another machine.
    """

    url_env: str
    secret_env: str | None = None
    allow_http: bool = False

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError, also if the secret is missing."""
        url = required_url(env, self.url_env, allow_http=self.allow_http)
        secrets = []
        if self.secret_env is not None:
            secrets = [
                _key(s, self.secret_env) for s in required_variable(env, self.secret_env).split()
            ]
        return WebhookSender(url, secrets, min_sev=self.min_sev)


class WebhookSender:
    """Posts to one address."""

    name = "webhook"
    group_s = 10.0
    gap_s = 0.0
    per_hour: int | None = 20

    def __init__(
        self,
        url: str,
        secrets: Sequence[bytes],
        *,
        min_sev: Severity = "SEV2",
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.min_sev: Severity = min_sev
        self._secrets = list(secrets)
        self._now = now
        self._poster = Poster(url, timeout_s=timeout_s)

    def send(self, message: Message, *, key: str) -> str:
        """Deliver. Raises NotifyError."""
        content = build_webhook_body(message)
        digest = hashlib.sha256(f"{message.run}|{key}".encode("utf-8", "replace")).hexdigest()
        message_id = f"msg_{digest[:32]}"
        headers = {"webhook-id": message_id, "webhook-timestamp": str(int(self._now()))}
        if self._secrets:
            signed = f"{message_id}.{headers['webhook-timestamp']}.".encode() + content
            headers["webhook-signature"] = " ".join(_sign(s, signed) for s in self._secrets)
        return self._poster.post(content, headers)


class Fact(Struct, frozen=True):
    """A further fact."""

    name: str
    value: str


class Card(Struct, frozen=True, omit_defaults=True):
    """The incident once something was done; the loss as a line of bars."""

    cause: str = ""
    did: str = ""
    cost: str = ""
    proof: str = ""
    loss: str = ""


class MessageData(Struct, frozen=True):
    """A message.

    Attributes:
        incident: pairs the messages from opened to closed
        step: -1: before the first one
        directory: of the run, on that host
        job: its command line, without secrets
        verdict: what is wrong, with the numbers
        reason: the rule that fired, and its limit
        next: what happens now, or what a person should do
        steps: the same, step by step
        request: id of the approval that is asked for
        acknowledged_by: the operator who has just done that
        audit_head: size and head, for audit verify --witness
    """

    run: str
    incident: str | None
    kind: Kind
    severity: Severity
    step: int
    host: str
    directory: str
    job: str
    policy: str
    mode: str
    title: str
    verdict: str
    reason: str = field(name="why")
    next: str
    steps: Sequence[Step]
    rules: Sequence[str]
    request: str | None
    acknowledged_by: str | None
    card: Card
    facts: Sequence[Fact]
    audit_head: str

    @classmethod
    def shorten(cls, message: Message, share: float) -> MessageData:
        """Return a message with texts of this share of their limits."""

        def cut(text: str, limit: int) -> str:
            return clip_text(text, int(limit * share))

        def step_of(step: Step) -> Step:  # part of a command must not be pasted
            return Step(cut(step.text, 1000), step.command * (len(step.command) < 2000 * share))

        return cls(
            run=message.run,
            incident=message.incident,
            kind=message.kind,
            severity=message.severity,
            step=message.step,
            host=message.host,
            directory=cut(message.directory, 500),
            job=cut(message.job, 500),
            policy=message.policy,
            mode=message.mode,
            title=cut(message.title, 300),
            verdict=cut(message.verdict, 4000),
            reason=cut(message.why, 4000),
            next=cut(message.next.text, 2000),
            steps=[step_of(step) for step in message.next.whole[:MAX_STEPS]],
            rules=list(message.rules[:32]),
            request=message.request or None,
            acknowledged_by=message.acknowledged_by or None,
            card=Card(**{name.lower(): cut(text, 2000) for name, text in message.card}),
            facts=[Fact(cut(name, 100), cut(text, 500)) for name, text in message.facts[:16]],
            audit_head=message.audit_head,
        )


class WebhookMessage(Struct, frozen=True):
    """The JSON of a post. Receivers must allow more keys.

    Attributes:
        timestamp: UTC ISO-8601; when it was decided
    """

    schema: Literal["supervise/message/v1"]
    type: Annotated[str, Meta(pattern=rf"^supervise\.(incident|run)\.({'|'.join(KINDS)})$")]
    timestamp: str
    data: MessageData


def build_webhook_body(message: Message) -> bytes:
    """Return the JSON of one message, at most MAX_BYTES."""
    event = f"supervise.{'incident' if message.incident else 'run'}.{message.kind}"

    def payload(share: float) -> Any:
        data = MessageData.shorten(message, share)
        return to_builtins(WebhookMessage("supervise/message/v1", event, message.at, data))

    return fit_payload(payload, MAX_BYTES)


def message_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `body` returns."""
    return published_schema(WebhookMessage, "A message of supervise to a webhook")


def _key(secret: str, name: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not 24 <= len(key) <= 64:
        raise UnsetError(f"{name} must hold whsec_ and the base64 of 24 to 64 bytes")
    return key


def _sign(secret: bytes, signed: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()
