"""`supervise audit`: check the audit log of a run, or print it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ..errors import StoreError, TamperError
from ..store import audit, record_check
from ..store.run_directory import RunDir


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
    """Tell whether the audit log is as it was written, and what it tells of.

    RUN is a run directory, or a copy of an audit.log. Of a directory the policies, the evidence
    and the journal are compared with their digests in the log too. Exit status: 0 good, 1 tampered
    (the log, or what it tells of), 2 torn tail only (a killed supervisor or a power cut; the next
    supervisor repairs it).

    \b
    Examples:
      supervise audit verify runs/20260105-101112-7f3a9c
      supervise audit verify runs/20260105-101112-7f3a9c --witness 412 9c1b...
    """
    path, run_id = _log(run)
    found = audit.verify(path, run_id, witness)
    parts = [] if run_id is None else _parts(RunDir.open(run), found.status)
    if as_json:
        told = {name: getattr(found, name) for name in found.__slots__}
        told["parts"] = [{name: getattr(part, name) for name in part.__slots__} for part in parts]
        click.echo(json.dumps({**told, "not_seen": record_check.BLIND}))
    else:
        click.echo(f"{found.status}: {found.message}")
        click.echo(f"head: {found.records} {found.root}")
        for part in parts:
            click.echo(printable(f"{part.part}: {part.status}: {part.text}"))
        if run_id is None:
            click.echo("checked: the log alone; a run directory holds what it tells of")
        click.echo(f"not seen: {'; '.join(record_check.BLIND)}")
    changed = any(part.status in (record_check.CHANGED, record_check.MISSING) for part in parts)
    ctx.exit(1 if changed else found.exit_code)


def _parts(run: RunDir, status: str) -> list[record_check.Part]:
    """Return what the good records of a run's log say of the files beside it."""
    digests = record_check.Digests()
    with suppress(TamperError):  # told already; the records before it are good
        for record in audit.read(run.audit_path):
            digests.take(record)
    digests.over = digests.over and status == "good"
    return list(record_check.check(run, digests))


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
            text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
            click.echo(text.encode("utf-8", "backslashreplace"))
        else:
            click.echo(_line(record))


def printable(text: str) -> str:
    """Return `text` without control characters: what a job said must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def document(value: Any) -> str:
    """Return data as JSON that any terminal and any file can hold."""
    text = json.dumps(audit.encode(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair: escaped


def _line(record: dict[str, Any]) -> str:
    marks = [record.get(key) for key in ("severity", "incident", "rule")]
    head = [f"{record['seq']:>5}", str(record.get("wall", ""))[11:23], f"step {record.get('step')}"]
    text = [*head, str(record.get("kind")), *[str(mark) for mark in marks if mark]]
    return printable(f"{'  '.join(text)}  {record.get('reason', '')}".rstrip())
