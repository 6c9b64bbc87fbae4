"""`supervise runs`: the runs in a directory, the newest first."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..errors import MISSHAPEN, StoreError
from ..store.run_directory import RUNS, RunDir
from ..store.run_records import skim
from ._output import document, print_table
from ._run_life import STATES, UNKNOWN, state_of
from ._runs import NO_RUN, runs_in
from ._text import age, number

HEADER = ("run", "state", "step", "loss", "started", "gravest incident", "policy")


@click.command(name="runs")
@click.option(
    "--runs",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=RUNS,
    metavar="DIR",
    help="Directory of the runs. Default: runs.",
)
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only these; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(directory: Path, state: tuple[str, ...], as_json: bool) -> None:
    """List the runs, the newest first.

    `running` has a supervisor. `unsupervised`: the job runs, its supervisor died; `lost`: so did
    the job, unseen (`supervise adopt` handles both). `crashed`, `stopped` (by policy, operator or
    signal) and `finished` are over. `unknown` runs on another machine, or cannot be read.

    Where a command shows [RUN], it takes a path, a name in this list, or the beginning of one; and
    from everywhere the id of a run of yours, or the name of its directory.

    \b
    Examples:
      supervise runs
      supervise runs --state running --state unsupervised
      supervise runs --json | jq -r '.[] | select(.state == "crashed") | .path'

    Exit codes: 0; 64 no such directory.
    """
    if not directory.is_dir():
        raise StoreError(f"there is no directory {directory}", hint=NO_RUN)
    rows = [summary(path) for path in runs_in(directory)]
    rows = [row for row in rows if not state or row["state"] in state]
    if as_json:
        click.echo(document(rows))
    elif rows:
        print_table([_row(row) for row in rows], HEADER)
    else:
        click.echo(f"no runs in {directory}" if not state else f"none of {', '.join(state)}")


def summary(path: Path) -> dict[str, Any]:
    """Return what the list shows of a run; `problem` says why the rest is None."""
    row: dict[str, Any] = {
        "run": path.name,
        "path": str(path),
        "state": UNKNOWN,
        "exit_code": None,
        "step": None,
        "loss": None,
        "created": None,
        "policy": None,
        "mode": None,
        "incidents": 0,
        "gravest": None,
        "problem": None,
    }
    try:
        _fill(row, RunDir.open(path))
    except StoreError as error:
        row["problem"] = str(error)
    except MISSHAPEN as error:
        row["problem"] = f"its records cannot be understood: {type(error).__name__}"
    return row


def _fill(row: dict[str, Any], run: RunDir) -> None:
    described = run.read_json("run.json")
    row |= {key: described.get(key) for key in ("created", "policy", "mode")}
    status: Mapping[str, Any] = {}
    with suppress(StoreError):  # no status was written yet
        status = run.read_json("state.json")
        row |= {key: status[key] for key in ("policy", "mode") if key in status}
    found = skim(run.audit_path)
    row["state"], row["exit_code"] = state_of(run, found, str(described.get("host")))
    last = -1 if found.last is None else int(found.last["step"])
    row["step"] = max(last, int(status.get("step", -1)))
    row["loss"] = (status.get("training") or {}).get("loss")
    row["incidents"], row["gravest"] = len(found.incidents), found.worst


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    worst, code = row["gravest"], row["exit_code"]
    incident = "-"
    if worst is not None:
        more = f" (of {row['incidents']})" if row["incidents"] > 1 else ""
        still = "" if worst["phase"] == "closed" else f" {worst['phase']}"
        incident = f"{worst['severity']} {worst['id']}{still}{more}"
    state = row["state"] if not code else f"{row['state']} ({code})"
    step = row["step"]
    return (
        row["path"],
        state,
        "-" if step is None or step < 0 else str(step),
        number(row["loss"]),
        age(row["created"], datetime.now(UTC)),
        row["problem"] or incident,
        f"{row['policy'] or '?'} ({row['mode'] or '?'})",
    )
