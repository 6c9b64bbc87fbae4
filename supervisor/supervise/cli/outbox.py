"""`supervise outbox`: messages that were not delivered before their run ended."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter

import click

from ..app.late_page_delivery import DAYS, Flush, age
from ..inputs import clock
from ..store.late_page_spool import Page, Spool, spool_directory
from ._output import print_table, printable

HEADER = ("sev", "channel", "run", "late by", "attempts", "kept for", "message")


@click.group(name="outbox", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List or send messages that were not delivered.

    SEV0 and SEV1 messages whose receiver was down at the end of a run are kept for 7 days in
    ~/.local/state/supervise/outbox ($XDG_STATE_HOME), in files readable by you alone, because they
    contain the address and the secret of the channel. Your next run sends them. The result of each
    is in delivered.log there.

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
    """List undelivered messages, without addresses.

    \b
    Examples:
      supervise outbox list
      supervise outbox list --json | jq length
    """
    pages, aside, path = [], [], spool_directory(os.environ)
    with Spool.open(path, clock.wall) as spool:
        if spool is not None:
            found = [spool.read(name) for name in spool.names()]
            pages = [page for page in found if page is not None]
            aside = spool.names_aside()
    if as_json:
        facts = [{**page.facts(), "error": page.error} for page in pages]
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    if pages:
        print_table([_row(page) for page in pages], HEADER)
    for name in aside:
        click.echo(printable(f"set aside, not a page of supervise: {path / name}"), err=True)
    if not pages:
        click.echo("no undelivered messages")


@command.command()
@click.pass_context
def flush(ctx: click.Context) -> None:
    """Send undelivered messages now, marked as late.

    A message that its receiver rejects permanently, or that is older than 7 days, is dropped and
    recorded in delivered.log.

    \b
    Examples:
      supervise outbox flush

    Exit codes: 0 all delivered; 1 some are left, rejected or dropped.
    """
    sender = Flush("flush", limited=False, stop=threading.Event())
    count: Counter[str] = Counter()
    left = 0
    with Spool.open(spool_directory(os.environ), clock.wall) as spool:
        if spool is not None:
            for outcome in sender.once(spool):
                count[outcome.what] += 1
                click.echo(printable(outcome.text))
            for name, why in spool.aside.items():
                click.echo(printable(f"{spool.path / name} set aside: {why}"), err=True)
            left = len(spool.names())
    click.echo(f"{count['delivered']} delivered, {left} left")
    ctx.exit(1 if left or count["refused"] or count["dropped"] else 0)


def _row(page: Page) -> tuple[str, ...]:
    late_s = page.age_s(clock.wall())
    return (
        page.message.severity,
        page.channel,
        page.message.run,
        age(late_s),
        str(page.attempts),
        age(max(DAYS * 86_400 - late_s, 0.0)),
        page.message.title + (f" (last error: {page.error})" if page.error else ""),
    )
