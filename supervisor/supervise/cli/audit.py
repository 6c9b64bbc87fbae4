"""`supervise audit`: check the audit log of a run, or print it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import StoreError
from ..store import audit
from ..store.rundir import RunDir


@click.group(name="audit")
def command() -> None:
    """Check or print the audit log of a run.

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit show --json runs/20260105-101112-7f3a9c | jq 'select(.kind == "intent")'
    """


def _log(path: Path) -> tuple[Path, str | None]:
    """Return the audit log that `path` means, and the run that it must belong to."""
    try:
        if path.is_file():
            return path, None  # a copy that somebody kept elsewhere
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    run = RunDir.open(path)
    return run.audit_path, run.id


@command.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--witness",
    nargs=2,
    type=(click.IntRange(min=1), str),
    metavar="SIZE ROOT",
    help="Also compare with the audit head of a message: shows a log that was cut or rewritten.",
)
@click.pass_context
def verify(ctx: click.Context, run: Path, as_json: bool, witness: tuple[int, str] | None) -> None:
    """Tell whether the audit log is as it was written.

    RUN is a run directory, or a copy of an audit.log. Exit status: 0 good, 1 tampered, 2 torn tail
    only (a killed supervisor or a power cut; the next supervisor repairs it).

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit verify runs/20260105-101112-7f3a9c --witness 412 9c1b...
    """
    path, run_id = _log(run)
    found = audit.verify(path, run_id, witness)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "status": found.status,
                    "records": found.records,
                    "root": found.root,
                    "bad_seq": found.bad_seq,
                    "offset": found.offset,
                    "message": found.message,
                }
            )
        )
    else:
        click.echo(f"{found.status}: {found.message}")
        click.echo(f"head: {found.records} {found.root}")
    ctx.exit(found.exit_code)


@command.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record a line, as stored.")
def show(run: Path, as_json: bool) -> None:
    """Print the audit log: what was decided, why, and what came of it.

    \b
    Examples:
      supervise audit show runs/20260105-101112-7f3a9c
      supervise audit show --json runs/20260105-101112-7f3a9c | grep '"kind":"suppressed"'
    """
    path, _ = _log(run)
    for record in audit.read(path):
        if as_json:
            click.echo(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
        else:
            click.echo(_line(record))


def printable(text: str) -> str:
    """Return `text` without control characters: what a job said must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _line(record: dict[str, Any]) -> str:
    marks = [record.get(key) for key in ("severity", "incident", "rule")]
    head = [f"{record['seq']:>5}", str(record.get("wall", ""))[11:23], f"step {record.get('step')}"]
    text = [*head, str(record.get("kind")), *[str(mark) for mark in marks if mark]]
    return printable(f"{'  '.join(text)}  {record.get('reason', '')}".rstrip())
