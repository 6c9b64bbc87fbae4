"""`supervise notify`: whether the channels of a policy work."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from .. import system
from ..core.model.interfaces import CLOSED, OPENED, WATCHER, Message, NotifyError
from ..errors import UsageError
from ._output import document, printable

if TYPE_CHECKING:
    from ..notifiers import Sender

ALERTS = "pagerduty"  # what is opened there must be closed


@click.group(name="notify")
def command() -> None:
    """Try the channels that a policy notifies.

    \b
    Examples:
      supervise notify test --policy supervise.yaml
    """


@command.command()
@click.argument("channel", required=False, metavar="[CHANNEL]")
@click.option(
    "-p", "--policy", "name", default="nano", metavar="P", help="Policy to read. Default: nano."
)
@click.option(
    "--notify",
    multiple=True,
    metavar="CHANNEL:VARIABLE",
    help="Add a channel, as `supervise run` does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def test(
    ctx: click.Context, channel: str | None, name: str, notify: Sequence[str], as_json: bool
) -> None:
    """Send one test message to each channel, or to CHANNEL only.

    A test in PagerDuty opens an alert of the severity info and resolves it. Severities, kinds,
    rules and quiet hours of the policy do not matter here.

    \b
    Examples:
      supervise notify test --policy supervise.yaml
      supervise notify test slack --notify slack:SLACK_URL

    Exit codes: 0 all delivered; 1 one was not; 64 no such channel; 65 the policy is invalid.
    """
    from ..catalog import load_policy
    from ..notifiers import HEARTBEAT, build, of_options

    policy = load_policy(name, notify=of_options(notify, os.environ))
    known = {kind: keys for kind, keys in policy.notify.items() if kind != HEARTBEAT}
    if channel is not None and channel not in known:
        hint = f"it has: {', '.join(known)}"
        raise UsageError(f"policy {policy.name} has no channel {channel!r}", hint=hint)
    message = _message(policy.name)
    found = []
    for kind, keys in known.items():
        if channel not in (None, kind):
            continue
        ok, (senders, unset) = False, build({kind: keys}, os.environ)
        if not senders:
            detail = unset[0]
        else:
            try:
                detail, ok = _send(senders[0], message), True
            except NotifyError as error:
                detail = str(error)
        found.append({"channel": kind, "ok": ok, "detail": detail})
        if not as_json:
            click.echo(printable(f"{kind}: {'ok' if ok else 'FAILED'}: {detail}"))
    if as_json:
        click.echo(document(found))
    ctx.exit(0 if all(one["ok"] for one in found) else 1)


def _message(policy: str) -> Message:
    host, at = socket.gethostname(), system.wall()
    return Message(
        run=f"test-{at[:19]}",
        incident=None,
        severity="INFO",
        title=f"test message from {host}",
        verdict="this channel works",
        why="supervise notify test",
        next="nothing to do",
        step=-1,
        kind=WATCHER,
        host=host,
        policy=policy,
        at=at,
        directory="",
    )


def _send(sender: Sender, message: Message) -> str:
    """Send the message. Raises NotifyError."""
    key = f"{message.run}:0"
    if sender.name != ALERTS:
        return sender.send(message, key=key)
    opened = replace(message, incident="test", kind=OPENED)
    detail = sender.send(opened, key=key)
    sender.send(replace(opened, kind=CLOSED), key=f"{message.run}:1")
    return detail
