"""PagerDuty, by its Events API v2: an incident is one alert there per severity that it has had.

The deduplication key is "run:incident:severity". PagerDuty pages for none of an open alert: so a
message that arrives twice is no second page, and an incident that somebody acknowledged there would
be one no more when it became worse. Its end resolves all its alerts; a failed end of the run leaves
them open, since nobody has repaired anything.

Source: https://developer.pagerduty.com/docs/send-alert-event
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import SEVERITIES
from ..core.model.interfaces import CLOSED, FINISHED, Message, Severity
from ._channel_settings import (
    TIMEOUT_S,
    ChannelSettings,
    Poster,
    Sender,
    clip_text,
    fit_payload,
    message_sentences,
    required_variable,
)

MAX_BYTES = 100_000  # PagerDuty takes 512 kB
MAX_KEY = 255  # characters
LEVELS = {"SEV0": "critical", "SEV1": "error", "SEV2": "warning", "INFO": "info"}
URL = "https://events.pagerduty.com/v2/enqueue"
URL_EU = "https://events.eu.pagerduty.com/v2/enqueue"


@dataclass(frozen=True, kw_only=True)
class PagerDuty(ChannelSettings):
    """Alerts in PagerDuty, one per incident, and another one where it becomes worse.

    Attributes:
        key_env: the environment variable that holds the integration key (Events API v2).
        eu: the account is in the service region EU.
    """

    key_env: str
    min_sev: Severity = "SEV1"
    eu: bool = False

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender. Raises UnsetError."""
        key = required_variable(env, self.key_env)
        return PagerDutySender(key, URL_EU if self.eu else URL, min_sev=self.min_sev)

    def find_errors(self) -> list[tuple[str, str]]:
        if self.quiet is not None:  # a digest could resolve no alert
            return [("quiet", "is set in PagerDuty itself")]
        return super().find_errors()


_RANK = [*LEVELS].index


class PagerDutySender:
    """Sends events with one integration key."""

    name = "pagerduty"
    group_s = 0.0
    gap_s = 0.0
    per_hour: int | None = None  # a digest could not resolve an alert

    def __init__(
        self, key: str, url: str, *, min_sev: Severity = "SEV1", timeout_s: float = TIMEOUT_S
    ) -> None:
        self.min_sev: Severity = min_sev
        self._key = key
        self._poster = Poster(url, timeout_s=timeout_s)
        self._worst: dict[str, str] = {}  # of an open incident -> that it was alerted with

    def send(self, message: Message, *, key: str) -> str:
        """Deliver. Raises NotifyError."""
        if message.kind == FINISHED and message.severity == "INFO":
            return "a good end is no alert, nothing sent"
        incident = f"{message.run}:{message.incident}"
        worst = self._worst.get(incident, "INFO")
        worst = min(message.severity, message.incident_severity or "INFO", worst, key=_RANK)
        events = _events(message, self._key, key, worst)
        answers = [self._poster.post(event, {}) for event in events]
        if message.kind == CLOSED:
            self._worst.pop(incident, None)
        elif message.incident is not None:
            self._worst[incident] = worst
        return answers[-1]


def _events(message: Message, routing_key: str, key: str, worst: str) -> Iterator[bytes]:
    """Yield the JSON of each event. `key`: of the message. worst: severity of its incident yet."""
    action = "resolve" if message.kind == CLOSED else "trigger"
    action = "acknowledge" if message.acknowledged_by else action
    event = {"routing_key": routing_key, "event_action": action}
    if action == "trigger":
        event |= {"dedup_key": _dedup_key(message, key, worst), "client": "supervise"}
        yield fit_payload(lambda share: {**event, "payload": _payload(message, share)}, MAX_BYTES)
        return
    for severity in SEVERITIES:  # PagerDuty ignores those of an alert that was never triggered
        event["dedup_key"] = _dedup_key(message, key, severity)
        yield fit_payload(lambda _: event, MAX_BYTES)


def _dedup_key(message: Message, key: str, severity: str) -> str:
    """Return "run:incident:severity".

    Of a message about no incident it is "run:end", or the key of the message.
    """
    text = f"{message.run}:end" if message.kind == FINISHED else key
    if message.incident is not None:
        text = f"{message.run}:{message.incident}:{severity}"
    return text if len(text) <= MAX_KEY else hashlib.sha256(text.encode()).hexdigest()


def _payload(message: Message, share: float) -> dict[str, Any]:
    def cut(text: str, limit: int) -> str:
        return clip_text(text, int(limit * share))

    about = {"run": message.run, "directory": cut(message.directory, 500)}
    about |= {"policy": message.policy, "mode": message.mode}
    details = {head: cut(text, 4000) for head, text in message_sentences(message)}
    details |= {name: cut(text, 500) for name, text in message.facts[:8]}
    details |= {name: text for name, text in about.items() if text}
    return {
        "summary": clip_text(message.title, 1024),
        "source": message.host or message.run,
        "severity": LEVELS[message.severity],
        "component": cut(message.job, 200) or message.run,
        "group": message.run,
        **({"timestamp": message.at} if message.at else {}),
        "class": message.rules[0] if message.rules else message.kind,
        "custom_details": {**details, "step": message.step, "audit": message.audit_head},
    }
