"""`supervise audit`: check the audit log of a run, or print it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ..errors import StoreError, TamperError
from ..store import audit, run_records
from ..store.run_directory import RunDir
from ._output import escaped, printable
from ._runs import run_argument


@click.group(name="audit")
def command() -> None:
    """Verify or print the audit log of a run.

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit show --json runs/20260105-101112-7f3a9c | jq 'select(.kind == "intent")'
    """


def _log(path: Path) -> tuple[Path, str | None]:
    """Return the audit log at `path`, and the id of the run that it must belong to."""
    try:
        if path.is_file():
            return path, None  # a copy kept elsewhere
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    run = RunDir.open(path)
    return run.audit_path, run.id


@command.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--witness",
    nargs=2,
    type=(click.IntRange(min=1), str),
    metavar="SIZE ROOT",
    help="Audit head of a message: detects a log that was cut or rewritten.",
)
@click.pass_context
def verify(ctx: click.Context, run: Path, as_json: bool, witness: tuple[int, str] | None) -> None:
    """Verify that the audit log and the files it refers to are unchanged.

    RUN is a run directory, or a copy of an audit.log. In a directory the policies, the evidence and
    the journal are compared with their digests in the log.

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit verify runs/20260105-101112-7f3a9c --witness 412 9c1b...

    Exit codes: 0 good; 1 changed (the log, or a file it refers to); 2 only the last record is
    incomplete, after a killed supervisor or a power cut; `supervise adopt` repairs it.
    """
    path, run_id = _log(run)
    found = audit.verify(path, run_id, witness)
    parts = [] if run_id is None else _parts(RunDir.open(run), found.status)
    if as_json:
        shown = {name: getattr(found, name) for name in found.__slots__}
        shown["parts"] = [{name: getattr(part, name) for name in part.__slots__} for part in parts]
        click.echo(json.dumps({**shown, "not_checked": run_records.NOT_CHECKED}))
    else:
        click.echo(f"{found.status}: {found.message}")
        click.echo(f"head: {found.records} {found.head}")
        for part in parts:
            click.echo(printable(f"{part.part}: {part.status}: {part.text}"))
        if run_id is None:
            click.echo(
                "checked: the log only; give the run directory to check the files it refers to"
            )
        click.echo(f"not checked: {'; '.join(run_records.NOT_CHECKED)}")
    changed = any(part.status in (run_records.CHANGED, run_records.MISSING) for part in parts)
    ctx.exit(1 if changed else found.exit_code)


def _parts(run: RunDir, status: str) -> list[run_records.Part]:
    """Compare the files of a run with their digests in the valid records of its log."""
    digests = run_records.Digests()
    with suppress(TamperError):  # reported already; the records before it are good
        for record in audit.read(run.audit_path):
            digests.take(record)
    digests.ended = digests.ended and status == "good"
    return list(run_records.check(run, digests))


@command.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record a line, as stored.")
def show(run: Path, as_json: bool) -> None:
    """Print the audit log: each decision, its reason and its outcome.

    \b
    Examples:
      supervise audit show runs/20260105-101112-7f3a9c
      supervise audit show --json runs/20260105-101112-7f3a9c | grep '"kind":"suppressed"'
    """
    path, _ = _log(run)
    for record in audit.read(path):
        if as_json:
            text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
            click.echo(escaped(text))
        else:
            click.echo(_line(record))


def _line(record: dict[str, Any]) -> str:
    marks = [record.get(key) for key in ("severity", "incident", "rule")]
    head = [f"{record['seq']:>5}", str(record.get("wall", ""))[11:23], f"step {record.get('step')}"]
    text = [*head, str(record.get("kind")), *[str(mark) for mark in marks if mark]]
    return printable(f"{'  '.join(text)}  {record.get('reason', '')}".rstrip())
