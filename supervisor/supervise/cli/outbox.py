"""`supervise outbox`: messages that were not delivered before their run ended."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import click
import msgspec

from ..errors import StoreError
from ..runtime import late_messages
from ._output import print_table, printable

HEADER = ("sev", "channel", "run", "late by", "attempts", "message")


@click.group(name="outbox", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List or send messages that were not delivered.

    A message whose receiver was down at the end of a run stays in the directory of the run, without
    the address and the secret of its channel. Your next run sends SEV0 and SEV1 ones for 7 days;
    `flush` sends all. Both need the environment variables that the policy of that run names.

    \b
    Examples:
      supervise outbox
      supervise outbox flush
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(show)


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(as_json: bool = False) -> None:
    """List undelivered messages of all your runs.

    \b
    Examples:
      supervise outbox list
      supervise outbox list --json | jq length
    """
    messages = []
    for run in late_messages.runs(os.environ):
        try:
            messages += late_messages.waiting(run)
        except StoreError as error:
            click.echo(printable(str(error)), err=True)
    if as_json:
        summaries = [late_messages.Summary.of(message) for message in messages]
        click.echo(msgspec.json.encode(summaries))
    elif messages:
        print_table([_row(message) for message in messages], HEADER)
    else:
        click.echo("no undelivered messages")


@command.command()
@click.argument("run", type=click.Path(path_type=Path), required=False, metavar="[RUN]")
@click.pass_context
def flush(ctx: click.Context, run: Path | None) -> None:
    """Send undelivered messages now, marked as late: those of RUN, else of all your runs.

    A message that its receiver rejects permanently is not tried again.

    \b
    Examples:
      supervise outbox flush
      supervise outbox flush runs/20260105-101112-7f3a9c

    Exit codes: 0 all delivered; 1 some remain, or were rejected; 64 RUN is not a run of yours.
    """
    sender = late_messages.Flush(os.environ, limited=False, stop=threading.Event())
    outcomes: Counter[str] = Counter()
    remaining = errors = 0
    for path in late_messages.runs(os.environ) if run is None else [run]:
        try:
            for message in sender.send(path):
                outcomes[message.state] += 1
                click.echo(printable(message.text))
            remaining += len(late_messages.waiting(path))
        except StoreError as error:
            if run is not None:
                raise
            click.echo(printable(str(error)), err=True)
            errors += 1
    click.echo(f"{outcomes['delivered']} delivered, {remaining} remain")
    ctx.exit(1 if remaining or errors or outcomes["refused"] else 0)


def _row(late: late_messages.LateMessage) -> tuple[str, ...]:
    return (
        late.message.severity,
        late.channel,
        late.message.run,
        late_messages.age(late.age_s),
        str(late.attempts),
        late.message.title + (f" (last error: {late.detail})" if late.detail else ""),
    )
