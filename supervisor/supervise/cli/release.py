"""`supervise release`: end a hold."""

from __future__ import annotations

import getpass
from pathlib import Path

import click

from ..errors import StoreError
from ..inputs import clock, words
from ..store.lock import locked
from ..store.rundir import RunDir


@click.command(name="release")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--by", default=None, metavar="NAME", help="Who says so; your login by default.")
def command(run: Path, by: str | None) -> None:
    """Release a held run: the supervisor may act again, beginning with a new warm-up.

    The incident is closed with your name in the audit log. A rule that is still in breach fires
    again.

    \b
    Examples:
      supervise release runs/20260105-101112-7f3a9c
      supervise release --by anna runs/20260105-101112-7f3a9c
    """
    found = RunDir.open(run)
    if not locked(found.audit_path):
        raise StoreError(f"{run} has no supervisor any more", hint=f"supervise status {run}")
    try:
        words.post(found.path, "release", by or getpass.getuser(), {}, at_ns=clock.monotonic_ns())
    except OSError as error:
        raise StoreError(f"cannot write in {run}: {error.strerror}") from error
    click.echo("released; supervise status tells what the run makes of it", err=True)
