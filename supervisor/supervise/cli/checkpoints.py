"""`supervise checkpoints`: the job's checkpoints and their verification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..checkpoints import registry
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..store.run_directory import RunDir
from ._output import document, print_table
from ._runs import run_argument

HEADER = ("id", "step", "attempt", "state", "pinned", "size", "saved", "path")


@click.command(name="checkpoints")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool) -> None:
    """List the job's checkpoints and their verification.

    Reads only the run directory, so it works from any terminal, and after the run. A pinned
    checkpoint is in RUN/checkpoints/ID, with a manifest beside it. A checkpoint in state `found` is
    not verified yet; the last one of a run often stays so, because the run does not wait for it.
    `resumable` of --json is `full` (weights and optimizer), `weights only`, or `unknown`.

    \b
    Examples:
      supervise checkpoints runs/20260105-101112-7f3a9c
      supervise checkpoints --json runs/20260105-101112-7f3a9c | jq '.[] | select(.pinned) | .id'

    Exit codes: 0; 64 no such run.
    """
    found = registry.read(RunDir.open(run).path)["checkpoints"]
    if as_json:
        click.echo(document(found))
        return
    if not found:
        click.echo("no checkpoints")
        return
    print_table([_row(entry) for entry in found], HEADER)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(entry["id"]),
        str(entry["step"]) if entry["step"] >= 0 else "?",
        str(entry["attempt"]),
        str(entry["state"]),
        "yes" if entry["pinned"] else "no",
        size(entry["bytes"]),
        str(entry["saved"])[:19],
        "; ".join([str(entry["path"]), *_weights_only(entry), *entry.get("problems", ())]),
    )


def _weights_only(entry: Mapping[str, Any]) -> list[str]:
    only = entry["resumable"] == WEIGHTS_ONLY
    return ["weights only: a relaunch prefers one with the optimizer's state"] if only else []


def size(count: int) -> str:
    """Return a number of bytes with a unit: `4.7 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"
