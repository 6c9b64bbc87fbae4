"""Notification channels, one per file: the file name is the key under `notify` in a policy.

Each has one `Settings` class; its fields are the YAML keys. Addresses and secrets come from
environment variables, which the fields ending in `_env` name; no file of a run contains them. The
`outbox` sends messages to all channels, with a queue of `delivery` for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from ..core.model.policy import ChannelKey
from ..errors import InputError, UsageError
from ..exports import LazyClasses, lazy_exports
from ._channel_settings import ChannelSettings, Route, Sender, Settings, UnsetError
from .heartbeat import HeartbeatSender

__all__ = [
    "KINDS",
    "Route",
    "Sender",
    "Settings",
    "UnsetError",
    "build_routes",
    "build_senders",
    "channels_from_options",
    "heartbeat_sender",
]


HEARTBEAT, PAGE = "heartbeat", "page"
NO_CHANNELS = (HEARTBEAT, PAGE)  # they take no messages


# The settings class of every notifier, by its name in YAML, which is that of its file.
KINDS: Mapping[str, type[Settings]] = LazyClasses(
    __name__,
    {
        "console": "Console",
        "email": "Email",
        "heartbeat": "Heartbeat",
        "page": "Page",
        "pagerduty": "PagerDuty",
        "slack": "Slack",
        "webhook": "Webhook",
    },
)


def channels_from_options(
    options: Sequence[str], env: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the `notify` section for options such as `slack:SLACK_URL`.

    Raises:
        UsageError: there is no such channel, or the variable does not hold its URL.
    """
    notify: dict[str, dict[str, str]] = {}
    channels = {
        k: settings_class
        for k, settings_class in KINDS.items()
        if "url_env" in (f.name for f in fields(settings_class))
    }
    for option in options:
        kind, _, name = option.partition(":")
        if kind not in channels:
            hint = f"channels by --notify: {', '.join(channels)}"
            raise UsageError(f"--notify: no channel {kind!r}", hint=hint)
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):  # a URL is a secret: it is not shown
            example = f"{kind.upper()}_URL"
            hint = f"export {example}=https://...; then --notify {kind}:{example}"
            raise UsageError(
                f"--notify {kind}:... needs the name of an environment variable", hint=hint
            )
        if kind in notify:
            raise UsageError(f"--notify: {kind} is given twice", hint="one channel of a kind")
        keys = {"url_env": name}
        try:
            channels[kind](**keys).open(env)
        except UnsetError as error:
            hint = f"export {name}=https://... and start again"
            raise UsageError(f"--notify {option}: {error}", hint=hint) from None
        notify[kind] = keys
    return notify


def build_senders(
    notify: Mapping[str, Mapping[str, ChannelKey]], env: Mapping[str, str]
) -> tuple[list[Sender], list[str]]:
    """Return the channels of a policy's `notify` section, and one warning per unusable one.

    Raises:
        InputError: unknown notifier or key.
    """
    senders: list[Sender] = []
    warnings = []
    for name, keys in notify.items():
        settings = _settings_of(name, keys)
        if isinstance(settings, ChannelSettings):
            try:
                senders.append(settings.open(env))
            except UnsetError as error:
                warnings.append(f"{name} notifications are off: {error}")
    return senders, warnings


def build_routes(notify: Mapping[str, Mapping[str, ChannelKey]]) -> dict[str, Route]:
    """Return channel -> which messages it takes. Raises InputError: unknown notifier or key."""
    settings = {name: _settings_of(name, keys) for name, keys in notify.items()}
    return {
        name: channel.route()
        for name, channel in settings.items()
        if isinstance(channel, ChannelSettings)
    }


def heartbeat_sender(
    notify: Mapping[str, Mapping[str, ChannelKey]], env: Mapping[str, str]
) -> tuple[HeartbeatSender | None, list[str]]:
    """Return the sender of `notify.heartbeat`, None without one, and why it is unusable."""
    if HEARTBEAT not in notify:
        return None, []
    try:
        return _settings_of(HEARTBEAT, notify[HEARTBEAT]).open(env), []
    except UnsetError as error:
        return None, [f"no heartbeat is sent: {error}"]


def _settings_of(name: str, keys: Mapping[str, ChannelKey]) -> Settings:
    if name not in KINDS:
        raise InputError(f"unknown notifier {name!r}", hint=f"known: {', '.join(KINDS)}")
    allowed = [field.name for field in fields(KINDS[name])]
    if unknown := [key for key in keys if key not in allowed]:
        raise InputError(
            f"notify.{name} has no key {unknown[0]!r}", hint=f"it has: {', '.join(allowed)}"
        )
    return KINDS[name](**keys)


__getattr__ = lazy_exports(
    __name__,
    {
        "delivery": "Result, Undelivered",
        "console": "Console, render_console",
        "email": "Email, EmailSender",
        "heartbeat": "DeadManPing, Health, Heartbeat, Vitals",
        "outbox": "Outbox, message_of",
        "page": "Page, page_link",
        "pagerduty": "PagerDuty, PagerDutySender",
        "slack": "Slack, SlackBotSender, SlackSender",
        "webhook": "Webhook, WebhookSender, build_webhook_body",
    },
)
