"""`supervise notify`: whether the channels of a policy work."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from .. import system
from ..core.model import formats
from ..core.model.interfaces import CLOSED, OPENED, WATCHER, Advice, Lead, Message, NotifyError
from ..errors import StoreError, UsageError
from ..runtime import late_messages
from ._output import echo, echo_json, print_table

if TYPE_CHECKING:
    from ..notifiers import Sender

ALERTS = "pagerduty"  # what is opened there must be closed


@click.group(name="notify")
def notify_command() -> None:
    """Try the channels that a policy notifies.

    \b
    Examples:
      supervise notify test --policy supervise.yaml
    """


@notify_command.command()
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

    A test in PagerDuty opens an alert of the severity info and resolves it. The channels' filters
    in the policy (severities, kinds, rules, quiet hours) are ignored.

    \b
    Examples:
      supervise notify test --policy supervise.yaml
      supervise notify test slack --notify slack:SLACK_URL

    Exit codes: 0 all delivered; 1 a message was not; 64 no such channel; 65 the policy is invalid.
    """
    from ..catalog import load_policy
    from ..notifiers import NO_CHANNELS, build_senders, channels_from_options

    policy = load_policy(name, notify=channels_from_options(notify, os.environ))
    channels = {kind: keys for kind, keys in policy.notify.items() if kind not in NO_CHANNELS}
    if channel is not None and channel not in channels:
        hint = f"it has: {', '.join(channels)}"
        raise UsageError(f"policy {policy.name} has no channel {channel!r}", hint=hint)
    message = _message(policy.name)
    results = []
    for kind, keys in channels.items():
        if channel not in (None, kind):
            continue
        ok, (senders, unset) = False, build_senders({kind: keys}, os.environ)
        if not senders:
            detail = unset[0]
        else:
            try:
                detail, ok = _send(senders[0], message), True
            except NotifyError as error:
                detail = str(error)
        results.append({"channel": kind, "ok": ok, "detail": detail})
        if not as_json:
            echo(f"{kind}: {'ok' if ok else 'FAILED'}: {detail}")
    if as_json:
        echo_json(results)
    ctx.exit(0 if all(result["ok"] for result in results) else 1)


def _message(policy: str) -> Message:
    host, wall_time = socket.gethostname(), system.wall_time()
    return Message(
        run=f"test-{wall_time[:19]}",
        incident=None,
        severity="INFO",
        title=f"test message from {host}",
        verdict="this channel works",
        why="supervise notify test",
        next=Advice(Lead.NOTHING),
        step=-1,
        kind=WATCHER,
        host=host,
        policy=policy,
        at=wall_time,
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


HEADER = ("sev", "channel", "run", "late by", "attempts", "message")


@click.group(name="outbox", invoke_without_command=True)
@click.pass_context
def outbox_command(ctx: click.Context) -> None:
    """List or send messages that were not delivered.

    A message whose receiver was down at the end of a run stays in the directory of the run, without
    the address and the secret of its channel. Your next run sends messages of SEV0 and SEV1 of the
    last 7 days; `flush` sends all. Both need the environment variables that the policy of the
    earlier run names.

    \b
    Examples:
      supervise outbox
      supervise outbox flush
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(show)


@outbox_command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(as_json: bool = False) -> None:
    """List undelivered messages of all your runs.

    \b
    Examples:
      supervise outbox list
      supervise outbox list --json | jq length
    """
    messages = []
    for run in late_messages.runs_with_undelivered(os.environ):
        try:
            messages += late_messages.undelivered_messages(run)
        except StoreError as error:
            echo(str(error), err=True)
    if as_json:
        echo_json([_summary(message) for message in messages])
    elif messages:
        print_table([_row(message) for message in messages], HEADER)
    else:
        echo("no undelivered messages")


@outbox_command.command()
@click.argument("run", type=click.Path(path_type=Path), required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def flush(ctx: click.Context, run: Path | None, as_json: bool) -> None:
    """Send undelivered messages now: those of RUN, else of all runs.

    The messages are marked as late. A message that its receiver rejects permanently is not tried
    again.

    \b
    Examples:
      supervise outbox flush
      supervise outbox flush runs/20260105-101112-7f3a9c

    Exit codes: 0 all delivered; 1 some remain, or were rejected; 64 RUN is not a run of yours.
    """
    sender = late_messages.Flush(os.environ, limited=False, stop=threading.Event())
    sent, remaining, errors = [], 0, 0
    for path in late_messages.runs_with_undelivered(os.environ) if run is None else [run]:
        try:
            for message in sender.send(path):
                sent.append(message)
                if not as_json:
                    echo(message.text)
            remaining += len(late_messages.undelivered_messages(path))
        except StoreError as error:
            if run is not None:
                raise
            echo(str(error), err=True)
            errors += 1
    states = [message.state for message in sent]
    if as_json:
        rows = [{"state": each.state, **_summary(each)} for each in sent]
        echo_json({"sent": rows, "remaining": remaining, "unreadable_runs": errors})
    else:
        echo(f"{states.count('delivered')} delivered, {remaining} remain")
    ctx.exit(1 if remaining or errors or "refused" in states else 0)


def _summary(late: late_messages.LateMessage) -> dict[str, Any]:
    summary: dict[str, Any] = msgspec.to_builtins(late_messages.Summary.from_message(late))
    return summary


def _row(late: late_messages.LateMessage) -> tuple[str, ...]:
    return (
        late.message.severity,
        late.channel,
        late.message.run,
        formats.format_age(late.age_s),
        str(late.attempts),
        late.message.title + (f" (last error: {late.detail})" if late.detail else ""),
    )
