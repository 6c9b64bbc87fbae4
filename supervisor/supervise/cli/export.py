"""`supervise export`: the metrics of a run as a table."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..errors import StoreError, UsageError
from ..store import files, history, journal
from ..store.run_directory import RunDir
from ._runs import run_argument


@click.command(name="export")
@run_argument
@click.option("--csv", "as_csv", is_flag=True, help="Write CSV, the only format.")
@click.option("--metrics", metavar="A,B", help="Export only these metrics, in this order.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE instead of standard output.",
)
def command(run: Path, as_csv: bool, metrics: str | None, output: Path | None) -> None:
    """Export the metrics of a run.

    One row per step and rank: step,rank,attempt,METRICS. A missing value is empty, NaN is nan.
    Steps undone by a rollback are included, with a lower attempt number. A live run can be exported
    too. Frames that a limit of the journal (journal.max_gb) removed are missing, which is reported.

    \b
    Examples:
      supervise export runs/20260105-101112-7f3a9c --csv -o run.csv
      supervise export runs/20260105-101112-7f3a9c --csv --metrics train_loss_raw,learning_rate

    Exit codes: 0 written; 64 no such run or metric; 74 standard output cannot be written.
    """
    if not as_csv:
        raise UsageError("no export format given", hint="add --csv")
    found = RunDir.open(run)
    wanted = None if metrics is None else [m.strip() for m in metrics.split(",") if m.strip()]
    for first, end in journal.thinned(found.journal_path):
        text = f"events {first} to {end - 1}: frames were removed (journal.max_gb)"
        click.echo(f"supervise: warning: {text}", err=True)
    if output is None:
        history.export_csv(found, sys.stdout, wanted)
        return
    try:
        with files.replacing(output, "w", shared=True, encoding="utf-8", newline="") as file:
            rows = history.export_csv(found, file, wanted)
    except OSError as error:
        raise StoreError(f"cannot write {output}: {error.strerror}") from error
    click.echo(f"wrote {rows} rows to {output}", err=True)
