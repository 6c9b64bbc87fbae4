"""`supervise events`: decisions and incidents of a run as lines, also as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError, understood
from ..store.files import locked
from ..store.run_directory import RunDir
from ._follow import HIDDEN, LogTail, event_line
from ._output import document, printable
from ._params import duration
from ._runs import run_argument

POLL_S = 0.5


@click.command(name="events")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Print new ones until the run is over.")
@click.option(
    "--since", metavar="TIME", help="Only newer ones: 10m, 2h, or a time (2026-01-05T10:11)."
)
@click.option("--all", "everything", is_flag=True, help="Also rules, near misses and messages.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record a line, as stored.")
def command(run: Path, follow: bool, since: str | None, everything: bool, as_json: bool) -> None:
    """Print the decisions and incidents of a run, a line each.

    With --follow it goes on until the run is over, also over a dead supervisor, which is reported
    on stderr. Times are UTC. The log is not verified: see `supervise audit verify`.

    \b
    Examples:
      supervise events --since 10m
      supervise events -f runs/20260105-101112-7f3a9c
      supervise events -f --json | jq -r 'select(.kind == "intent") | .reason'

    Exit codes: 0; 64 no such run, or not a time; 141 the reader closed the pipe.
    """
    found = RunDir.open(run)
    after = None if since is None else _moment(since)
    tail = LogTail(found.audit_path)
    is_reported, is_over = False, False
    while True:
        alive = locked(found.audit_path)  # before the records: the last one may come meanwhile
        records = tail.read()
        with understood(f"the records in {found.audit_path}", "supervise audit verify RUN"):
            _print(records, after, everything=everything, as_json=as_json)
        if records:
            is_over = records[-1].get("kind") == "run_end"
        if not follow or (is_over and not alive):
            return
        if not alive and not is_reported:
            is_reported = True
            text = f"supervise: the supervisor of {run} died; try: supervise adopt {run}"
            click.echo(text, err=True)
        time.sleep(POLL_S)


def _print(
    records: Iterable[dict[str, Any]],
    after: datetime | None,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    for record in records:
        if not everything and str(record.get("kind")) in HIDDEN:
            continue
        if after is not None and not _is_newer(record, after):
            continue
        click.echo(document(record) if as_json else printable(event_line(record)))


def _is_newer(record: dict[str, Any], after: datetime) -> bool:
    try:
        return datetime.fromisoformat(str(record.get("wall"))) >= after
    except (ValueError, TypeError):
        return True


def _moment(since: str) -> datetime:
    """Return the time that is meant: so long ago, or an ISO-8601 time, UTC without a zone."""
    try:
        return datetime.now(UTC) - timedelta(seconds=duration(since))
    except click.BadParameter:
        pass
    try:
        found = datetime.fromisoformat(since)
    except ValueError:
        hint = "write 10m, 2h, 1d, or a time such as 2026-01-05T10:11"
        raise UsageError(f"--since {since!r} is not a time", hint=hint) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
