"""`supervise export`: the metrics of a run as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..errors import StoreError, UsageError
from ..store import files, journal, run_records
from ..store.run_directory import RunDir
from ._runs import run_argument

CSV, PARQUET = "csv", "parquet"


@click.command(name="export")
@run_argument
@click.option("--csv", "kind", flag_value=CSV, help="Write CSV.")
@click.option("--parquet", "kind", flag_value=PARQUET, help="Write Parquet; needs pyarrow.")
@click.option("--metrics", metavar="A,B", help="Export only these metrics, in this order.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE instead of standard output; its suffix gives the format, too.",
)
def command(run: Path, kind: str | None, metrics: str | None, output: Path | None) -> None:
    """Export the metrics of a run.

    One row per step and rank: step,rank,attempt,wall,METRICS; `wall` is the time of day in UTC. A
    missing value is empty, NaN is nan. Steps undone by a rollback are included, with a lower
    attempt number. A live run can be exported too. Frames that a limit of the journal
    (journal.max_gb) removed are missing, which is reported.

    \b
    Examples:
      supervise export --csv -o run.csv
      supervise export 7f3a9c -o run.parquet
      supervise export --csv --metrics train_loss_raw,learning_rate

    Exit codes: 0 written; 64 no such run or metric; 65 no pyarrow; 74 standard output cannot be
    written.
    """
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    kind = kind or (suffix if suffix in (CSV, PARQUET) else None)
    if kind is None:
        raise UsageError("no export format given", hint="add --csv, or --parquet -o FILE")
    if kind == PARQUET and output is None:
        raise UsageError("Parquet is no text for a terminal or a pipe", hint="add -o run.parquet")
    found = RunDir.open(run)
    columns = _columns(run_records.metric_ids(found), metrics)
    for first, end in journal.thinned(found.journal_path):
        text = f"events {first} to {end - 1}: frames were removed (journal.max_gb)"
        click.echo(f"supervise: warning: {text}", err=True)
    if output is None:
        run_records.export_csv(found, sys.stdout, columns)
        return
    try:
        if kind == CSV:
            with files.replacing(
                output, "w", shared=True, encoding="utf-8", newline=""
            ) as text_file:
                rows = run_records.export_csv(found, text_file, columns)
        else:
            with files.replacing(output, shared=True) as binary_file:
                rows = run_records.export_parquet(found, binary_file, columns)
    except OSError as error:
        raise StoreError(f"cannot write {output}: {error.strerror}") from error
    click.echo(f"wrote {rows} rows to {output}", err=True)


def _columns(known: Sequence[str], wanted: str | None) -> list[str]:
    """Return the metrics to export. Raises UsageError for one that the run has not."""
    if wanted is None:
        return list(known)
    columns = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in columns:
        if name in known:
            continue
        if not known:
            hint = "the probe announced none; see: supervise status RUN"
            raise UsageError(f"no metric {name!r}: this run has none", hint=hint)
        from ..catalog.metrics import meant  # only now: it imports the collectors

        near = meant(name, known)
        hint = f"{near} " if near else ""
        raise UsageError(
            f"no metric {name!r} in this run", hint=f"{hint}it has: {', '.join(known)}"
        )
    return columns
