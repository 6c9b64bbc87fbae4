"""`supervise checkpoints`: the job's checkpoints and their verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import system
from ..catalog.forms.job_form import CheckpointsForm
from ..checkpoints import registry
from ..checkpoints.verification import STATES, VerifierProcess
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..errors import UsageError
from ..store.files import is_own_directory, locked
from ..store.run_directory import RunDir
from ._output import document, print_table
from ._runs import run_argument

HEADER = ("id", "step", "attempt", "state", "pinned", "size", "saved", "path")


@click.command(name="checkpoints")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--verify", is_flag=True, help="Verify the newest one of a run that has ended.")
def command(run: Path, as_json: bool, verify: bool) -> int:
    """List the job's checkpoints and their verification.

    Reads only the run directory, so it works from any terminal, and after the run. A pinned
    checkpoint is in RUN/checkpoints/ID, with a manifest beside it. A checkpoint in state `found` is
    not verified yet. The newest one is verified for up to 60 s after the end of the job; the last
    line of the run says if that was not enough, and --verify does it then, however long it takes.
    `resumable` of --json is `full` (weights and optimizer), `weights only`, or `unknown`.

    \b
    Examples:
      supervise checkpoints runs/20260105-101112-7f3a9c
      supervise checkpoints --verify runs/20260105-101112-7f3a9c
      supervise checkpoints --json runs/20260105-101112-7f3a9c | jq '.[] | select(.pinned) | .id'

    Exit codes: 0; 1 with --verify: it is damaged, or could not be verified; 64 no such run.
    """
    opened = RunDir.open(run)
    if verify:
        return _verify(opened)
    found = registry.read(opened.path)["checkpoints"]
    if as_json:
        click.echo(document(found))
    elif found:
        print_table([_row(entry) for entry in found], HEADER)
    else:
        click.echo("no checkpoints")
    return 0


def _verify(run: RunDir) -> int:
    """Verify the newest checkpoint where it lies, and register the verdict.

    Raises:
        UsageError: a supervisor does it; there is none; or the run belongs to somebody else, who
            could name any program as the interpreter of the job.
    """
    if locked(run.audit_path):
        raise UsageError(
            f"{run.path} has a supervisor, which verifies its checkpoints",
            hint=f"supervise checkpoints {run.path}",
        )
    if not is_own_directory(run.path):
        raise UsageError(f"{run.path} belongs to another user", hint="ask the owner to verify it")
    register = registry.Register(run.path)
    entry = register.newest()
    if entry is None:
        raise UsageError(f"{run.path} has no checkpoint that could be verified")
    verdict = VerifierProcess(CheckpointsForm().verify).verify(
        entry.path, entry.bytes, entry.python, urgent=True
    )
    entry.state, entry.problems = STATES[verdict.ok], list(verdict.problems)
    entry.verified = system.wall()
    if verdict.found:
        entry.describe(verdict.found)
    register.write()
    print_table([_row(asdict(entry))], HEADER)
    return 0 if verdict.ok else 1


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
