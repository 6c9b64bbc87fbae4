"""`supervise checkpoints`: what the guard knows of the job's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..checkpoints import registry
from ..store.run_directory import RunDir
from .audit import document, printable

HEADS = ("id", "step", "attempt", "state", "pinned", "size", "saved", "path")


@click.command(name="checkpoints")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool) -> None:
    """List the job's checkpoints: which are verified, bad or gone, and which are pinned.

    Reads the run directory only, so it works from any terminal, and after the run. A pinned one is
    in RUN/checkpoints/ID, with a manifest beside it. One that is `found` was not verified, as often
    the last one of a run: its end waits for no verification.

    \b
    Examples:
      supervise checkpoints runs/20260105-101112-7f3a9c
      supervise checkpoints --json runs/20260105-101112-7f3a9c | jq '.[] | select(.pinned) | .id'
    """
    found = registry.read(RunDir.open(run).path)["checkpoints"]
    if as_json:
        click.echo(document(found))
        return
    if not found:
        click.echo("no checkpoint was seen")
        return
    rows = [HEADS, *(_row(entry) for entry in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    for row, entry in zip(rows, [{}, *found], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo(printable("  ".join([*cells, row[-1]])))
        for problem in entry.get("problems", ()):
            click.echo(printable(f"    {problem}"))


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(entry["id"]),
        str(entry["step"]) if entry["step"] >= 0 else "?",
        str(entry["attempt"]),
        str(entry["state"]),
        "yes" if entry["pinned"] else "no",
        size(entry["bytes"]),
        str(entry["saved"])[:19],
        str(entry["path"]),
    )


def size(count: int) -> str:
    """Return a count of bytes for people: `4.7 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"
