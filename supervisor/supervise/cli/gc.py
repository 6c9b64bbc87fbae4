"""`supervise gc`: free the disk space of runs that are over."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import system
from ..errors import StoreError
from ..store import run_records
from ..store.run_directory import RUNS, RunDir
from ..store.run_records import Survey
from ._output import document, printable
from ._params import duration
from .checkpoints import size

OLDER_THAN = "30d"
KEEP = 5  # runs; project default


@click.command(name="gc")
@click.argument(
    "directory", type=click.Path(path_type=Path), metavar="[RUNS]", default=RUNS, required=False
)
@click.option(
    "--older-than",
    type=duration,
    default=OLDER_THAN,
    metavar="TIME",
    help=f"Since the last record of a run. Default: {OLDER_THAN}.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=KEEP,
    help=f"The newest runs are left whole, whatever their age. Default: {KEEP}.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(directory: Path, older_than: float, keep: int, dry_run: bool, as_json: bool) -> int:
    """Free the disk space of runs that are over.

    Removes, in this order, savepoints, journal, output and evidence bundles of each run in RUNS
    (default: ./runs). The audit log, the policies and pinned checkpoints stay, so `why`, `status`
    and `audit verify` go on working; `replay`, `export` and `why-not` need the journal. A run whose
    supervisor or job lives is left alone, and one that was never ended and has an open incident.

    \b
    Examples:
      supervise gc --dry-run
      supervise gc --older-than 7d --keep 20 /data/runs

    Exit codes: 0; 1 a part could not be removed; 64 no such directory.
    """
    found = run_records.survey(
        directory,
        now_s=time.time(),
        older_than_s=older_than,
        keep=keep,
        host=socket.gethostname(),
        lives=_lives,
    )
    failed, freed = 0, 0
    rows: list[dict[str, Any]] = []
    for run in found:
        error = None if dry_run or run.kept else _remove(run)
        failed += error is not None
        freed += 0 if error or run.kept else sum(part.size_bytes for part in run.parts)
        rows.append({**asdict(run), "path": str(run.path), "error": error})
        if not as_json:
            click.echo(printable(_line(run, error)))
    if as_json:
        click.echo(document({"freed_bytes": freed, "dry_run": dry_run, "runs": rows}))
        return 1 if failed else 0
    verb = "would free" if dry_run else "freed"
    click.echo(f"{verb} {size(freed)} of {len(found)} run{'' if len(found) == 1 else 's'}")
    return 1 if failed else 0


def _remove(run: Survey) -> str | None:
    """Remove what may be removed; return why that failed, None if it did not."""
    try:
        run_records.remove(run.path, run.parts, system.wall())
    except StoreError as error:
        return str(error)
    return None


def _line(run: Survey, error: str | None) -> str:
    age = f"{run.path}  {run.age_s / 86400.0:.1f} days"
    if error is not None:
        return f"{age}  failed: {error}"
    return f"{age}  {f'kept: {run.kept}' if run.kept else _parts(run.parts)}"


def _parts(parts: Sequence[run_records.Removable]) -> str:
    return ", ".join(f"{part.name} {size(part.size_bytes)}" for part in parts)


def _lives(run: RunDir) -> bool:
    from ..runtime.launcher import last_launch
    from ..runtime.process_tree import start_ticks

    made = last_launch(run)
    return made is not None and start_ticks(made["pid"]) == made["start_ticks"]
