"""A word to a running supervisor, and its answer, which comes back through the audit log."""

from __future__ import annotations

import difflib
import getpass
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import StoreError, UsageError
from ..inputs import clock, control_inbox
from ..store import audit
from ..store.lock import locked
from ..store.quarantine_list import Quarantine
from ..store.run_directory import RUNS, RunDir, is_run
from .audit import printable

PATIENCE_S = 15.0  # the word of mouth of a run: a round of the loop, and a step boundary of the job
PAUSE_S = 0.3
REFUSED, NO_ANSWER = 1, 75
OUTCOMES = ("commit", "abort", "in_doubt")


def split(given: Sequence[str], least: int, most: int | None) -> tuple[Path, list[str]]:
    """Return the run that is meant, and the other arguments.

    A first argument that is a run directory is the run; without one it is the only living run
    under ./runs. One that lies where runs are, and is none, is a mistake and no name of anything.

    Raises:
        UsageError: too few arguments, too many, or no run that can be meant.
        StoreError: what stands in the place of a run is none.
    """
    rest, run = list(given), None
    if rest and is_run(Path(rest[0])):
        run = Path(rest.pop(0))
    elif rest:
        _mistyped(rest[0])
    if run is None and most is not None and len(rest) > most:
        run = Path(rest.pop(0))
        RunDir.open(run)  # it is none, and what it may be instead is known there
    if len(rest) < least or (most is not None and len(rest) > most):
        raise UsageError(
            f"too {'few' if len(rest) < least else 'many'} arguments", hint="--help has examples"
        )
    return run or _living(), rest


def _mistyped(given: str) -> None:
    """Raise `StoreError` for a path whose directory holds runs, or is ./runs, when it is none."""
    path = Path(given)
    if "/" not in given or path.is_file():
        return
    runs = [found.parent for found in sorted(path.parent.glob("*/run.json"))]
    if runs or path.parent == RUNS:
        near = difflib.get_close_matches(path.name, [run.name for run in runs], n=1)
        if near:
            raise StoreError(f"{path} holds no run", hint=f"did you mean {path.parent / near[0]}?")
        RunDir.open(path)


def missing(run: Path, shards: Sequence[str]) -> str:
    """Say which of the shards are not in the quarantine of a run, "" when all are."""
    if not shards:
        return ""
    held = Quarantine(RunDir.open(run).quarantine_path).read()["entries"]
    kept = sorted(each["name"] for each in held if each["until_attempt"] is None)
    absent = ", ".join(name for name in shards if name not in kept)
    holds = ", ".join(kept) or "nothing"
    return (
        f"nothing to release: {absent} is not in the quarantine; it holds {holds}" if absent else ""
    )


def _living() -> Path:
    """Return the only run under ./runs that has a supervisor."""
    found = [path.parent for path in sorted(RUNS.glob("*/audit.log")) if locked(path)]
    if not found:
        raise UsageError("no run under ./runs has a supervisor", hint="name the run directory")
    if len(found) > 1:
        names = ", ".join(str(path) for path in found[:4])
        raise UsageError(f"{len(found)} runs have a supervisor: {names}", hint="name one of them")
    return found[0]


def speak(run: Path, word: str, by: str | None, args: Mapping[str, Any]) -> int:
    """Say a word to a run, wait for what becomes of it, and print that.

    Returns:
        0 done, or accepted and under way; 1 refused, or failed; 75 no answer yet.
    """
    found = RunDir.open(run)
    if not locked(found.audit_path):
        raise StoreError(f"{run} has no supervisor any more", hint=f"supervise status {run}")
    at_ns = clock.monotonic_ns()
    key = f"{at_ns}-{os.getpid()}"
    known = sum(1 for _ in audit.read(found.audit_path))
    try:
        control_inbox.post(
            found.path, word, by or getpass.getuser(), {**args, "key": key}, at_ns=at_ns
        )
    except OSError as error:
        raise StoreError(f"cannot write in {run}: {error.strerror}") from error
    answer, outcome = _await(found, key, known)
    if answer is None:
        click.echo(f"no answer within {PATIENCE_S:.0f} s; supervise audit show {run}", err=True)
        return NO_ANSWER
    for record in (answer, outcome):
        if record is not None:
            click.echo(
                f"record {record['seq']}, step {record['step']}: {printable(record['reason'])}",
                err=True,
            )
    failed = outcome is not None and outcome["kind"] != "commit"
    return REFUSED if failed or not answer["data"]["ok"] else 0


def _await(
    run: RunDir, key: str, known: int
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the answer, and the outcome of the action it led to; None for what did not come."""
    answer: Mapping[str, Any] | None = None
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        alive = locked(run.audit_path)
        for number, record in enumerate(audit.read(run.audit_path)):
            if number < known:
                continue
            data = record.get("data") or {}
            if data.get("command_id") == key:
                answer = record
            elif answer is not None and _ends(record, answer["data"]["action"]):
                return answer, record
        if answer is not None and not (answer["data"]["ok"] and answer["data"]["action"]):
            return answer, None
        if not alive:
            break
        time.sleep(PAUSE_S)
    return answer, None


def _ends(record: Mapping[str, Any], action: str | None) -> bool:
    """Return whether the record tells what became of the action."""
    about = (record.get("data") or {}).get("action")
    return record["kind"] in OUTCOMES and isinstance(about, Mapping) and about["id"] == action
