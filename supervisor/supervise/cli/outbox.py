"""`supervise outbox`: pages that nobody got before their run ended."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter

import click

from ..app.late_page_delivery import DAYS, Flush, age
from ..inputs import clock
from ..store.late_page_spool import Page, Spool, place
from .audit import printable


@click.group(name="outbox", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show or send the pages that were not delivered before their run ended.

    SEV0 and SEV1 messages whose receiver was down at the end of a run are kept for 7 days in
    ~/.local/state/supervise/outbox ($XDG_STATE_HOME), in files that only you can read: they hold
    the address and the secret of the channel. Your next run sends them while it is watched.
    delivered.log there says what became of each.

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
    """Show what waits: severity, channel, run, age, tries. Addresses are not shown.

    \b
    Examples:
      supervise outbox list
      supervise outbox list --json | jq length
    """
    pages, aside, path = [], [], place(os.environ)
    with Spool.open(path, clock.wall) as spool:
        if spool is not None:
            found = [spool.read(name) for name in spool.names()]
            pages = [page for page in found if page is not None]
            aside = spool.set_aside()
    if as_json:
        told = [{**page.facts(), "error": page.error} for page in pages]
        click.echo(json.dumps(told, ensure_ascii=False))
        return
    for page in pages:
        click.echo(printable(_line(page)))
    for name in aside:
        click.echo(printable(f"set aside, no page of supervise: {path / name}"), err=True)
    if not pages:
        click.echo("nothing waits")


@command.command()
@click.pass_context
def flush(ctx: click.Context) -> None:
    """Send what waits now, each page to its own channel, marked as late.

    Exit status: 0 nothing waits any more and nothing was refused, 1 something does or was. A page
    that its receiver refuses for good, and one that is older than 7 days, is dropped, on record.

    \b
    Examples:
      supervise outbox flush
    """
    sender = Flush("flush", limited=False, stop=threading.Event())
    count: Counter[str] = Counter()
    left = 0
    with Spool.open(place(os.environ), clock.wall) as spool:
        if spool is not None:
            for outcome in sender.once(spool):
                count[outcome.what] += 1
                click.echo(printable(outcome.text))
            for name, why in spool.aside.items():
                click.echo(printable(f"{spool.path / name} set aside: {why}"), err=True)
            left = len(spool.names())
    click.echo(f"{count['delivered']} delivered, {left} left")
    ctx.exit(1 if left or count["refused"] or count["dropped"] else 0)


def _line(page: Page) -> str:
    wall, message = clock.wall(), page.message
    tries = "1 try" if page.attempts == 1 else f"{page.attempts} tries"
    tries += f", last: {page.error}" if page.error else ""
    left_s = max(DAYS * 86_400 - page.age_s(wall), 0.0)
    return (
        f"{message.severity}  {page.channel}  run {message.run}  {age(page.age_s(wall))} late, "
        f"{tries}; dropped in {age(left_s)}: {message.title}"
    )
