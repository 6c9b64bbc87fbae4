"""Notification channels, one per file: the file name is the key under `notify` in a policy.

Each file has one `Settings` class; its fields are the YAML keys. Addresses and secrets come from
environment variables, which the fields ending in `_env` name; no file of a run contains them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ..core.model.interfaces import PingSender
from ..errors import InputError, UsageError
from ._route import Route
from ._settings import ChannelSettings, Sender, Settings, UnsetError

__all__ = [
    "Route",
    "Sender",
    "Settings",
    "UnsetError",
    "build",
    "heartbeat_sender",
    "kinds",
    "of_options",
    "routes",
]


HEARTBEAT = "heartbeat"


def kinds() -> dict[str, type[Settings]]:
    """Return the settings class of every notifier, by its name in YAML."""
    found = {}
    for name in sorted(info.name for info in iter_modules(__path__)):
        if not name.startswith("_"):
            module = import_module(f"{__name__}.{name}")
            found[name] = next(
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and issubclass(value, Settings)
                and value.__module__ == module.__name__
            )
    return found


def of_options(options: Sequence[str], env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the `notify` section for options such as `slack:SLACK_URL`.

    Raises:
        UsageError: there is no such channel, or the variable does not hold its URL.
    """
    found: dict[str, dict[str, str]] = {}
    known = {k: of for k, of in kinds().items() if "url_env" in (f.name for f in fields(of))}
    for option in options:
        kind, _, name = option.partition(":")
        if kind not in known:
            hint = f"channels by --notify: {', '.join(known)}"
            raise UsageError(f"--notify: no channel {kind!r}", hint=hint)
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):  # a URL is a secret: it is not shown
            example = f"{kind.upper()}_URL"
            hint = f"export {example}=https://...; then --notify {kind}:{example}"
            raise UsageError(
                f"--notify {kind}:... needs the name of an environment variable", hint=hint
            )
        if kind in found:
            raise UsageError(f"--notify: {kind} is given twice", hint="one channel of a kind")
        keys: dict[str, Any] = {"url_env": name}
        try:
            known[kind](**keys).open(env)
        except UnsetError as error:
            hint = f"export {name}=https://... and start again"
            raise UsageError(f"--notify {option}: {error}", hint=hint) from None
        found[kind] = keys
    return found


def build(
    notify: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]
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


def routes(notify: Mapping[str, Mapping[str, Any]]) -> dict[str, Route]:
    """Return channel -> which messages it takes. Raises InputError: unknown notifier or key."""
    found = {name: _settings_of(name, keys) for name, keys in notify.items()}
    return {name: of.route() for name, of in found.items() if isinstance(of, ChannelSettings)}


def heartbeat_sender(
    notify: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]
) -> tuple[PingSender | None, list[str]]:
    """Return the sender of `notify.heartbeat`, None without one, and why it is unusable."""
    if HEARTBEAT not in notify:
        return None, []
    try:
        return _settings_of(HEARTBEAT, notify[HEARTBEAT]).open(env), []
    except UnsetError as error:
        return None, [f"no heartbeat is sent: {error}"]


def _settings_of(name: str, keys: Mapping[str, Any]) -> Settings:
    known = kinds()
    if name not in known:
        raise InputError(f"unknown notifier {name!r}", hint=f"known: {', '.join(known)}")
    allowed = [field.name for field in fields(known[name])]
    if unknown := [key for key in keys if key not in allowed]:
        raise InputError(
            f"notify.{name} has no key {unknown[0]!r}", hint=f"it has: {', '.join(allowed)}"
        )
    return known[name](**keys)
