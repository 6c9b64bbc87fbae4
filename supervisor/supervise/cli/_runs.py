"""Lookup of the run that a command names: a path, name, id, the beginning of one, or the newest.

A run is looked for under ./runs, and, by its id or the name of its directory, among all runs that
this user has watched (`run_index`).

A command that only reads takes the newest run where none is named; one that acts on the job takes
the run that has a supervisor, if that is one.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ..errors import MISSHAPEN, StoreError, UsageError
from ..store import run_directory
from ..store.files import locked
from ..store.run_directory import RUNS, RunDir, is_run
from ..store.run_records import skim
from ._params import ARGV, PROGRAM
from ._run_life import LOST, UNSUPERVISED, state_of

INCIDENT = re.compile(r"inc-\d+")
EARLY = "supervise.incident"  # key of `click.Context.meta`: an incident that stands where a run may
LEAST = 3  # characters of a name that is shortened
LISTED = 6
NO_RUN = "supervise -- COMMAND starts one below ./runs; name one elsewhere by its path"


def runs_in(directory: Path = RUNS) -> list[Path]:
    """Return the run directories in a directory, the newest first. Raises StoreError."""
    try:
        found = [path.parent for path in directory.glob("*/run.json")]
        return sorted(found, key=lambda path: (path / "run.json").stat().st_mtime, reverse=True)
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error


def live_runs(directory: Path = RUNS) -> list[Path]:
    """Return the runs in a directory that have a supervisor, the newest first."""
    return [path for path in runs_in(directory) if locked(path / "audit.log")]


def newest() -> Path:
    """Return the newest run under ./runs. Raises StoreError."""
    found = runs_in()
    if not found:
        raise StoreError("no run is named, and there is none under ./runs", hint=NO_RUN)
    return found[0]


def only_live() -> Path:
    """Return the only run under ./runs with a supervisor. Raises UsageError with the choice."""
    found = live_runs()
    if len(found) == 1:
        return found[0]
    if found:
        text = f"{len(found)} runs have a supervisor, and this command acts on one"
        raise UsageError(text, hint=_choices(found))
    raise UsageError(
        "no run under ./runs has a supervisor", hint="name the run; `supervise runs` lists them"
    )


def only_adoptable() -> Path:
    """Return the only run under ./runs whose supervisor died. Raises UsageError with the choice."""
    found = []
    for path in runs_in():
        with suppress(StoreError, *MISSHAPEN):
            run = RunDir.open(path)
            host = str(run.read_json("run.json")["host"])
            if state_of(run, skim(run.audit_path), host)[0] in (UNSUPERVISED, LOST):
                found.append(path)
    if len(found) == 1:
        return found[0]
    if found:
        text = f"the supervisors of {len(found)} runs died, and this command takes over one"
        raise UsageError(text, hint=_choices(found))
    raise UsageError("no run under ./runs has lost its supervisor", hint="supervise runs")


def find(given: str) -> Path:
    """Return the run that is named: a path, an id, a name, or the beginning of one.

    Names are looked for under ./runs first. The last part of a name, as `7f3a9c`, will do, too.

    Raises:
        StoreError: there is no such run.
        UsageError: several begin with it.
    """
    found = exactly(given)
    if found is not None:
        return found
    path = Path(given)
    parent = path.parent if "/" in given else RUNS
    known = runs_in(parent) if path.name and parent.is_dir() else []
    near = [run for run in known if _is_short_for(path.name, run.name)]
    near = near or [run for run in known if _is_short_for(path.name, _id_of(run))]
    elsewhere = {} if "/" in given else run_directory.entries(os.environ)
    named = {i: p for i, p in elsewhere.items() if _is_short_for(given, i, p.name)}
    here = {run.resolve() for run in near}
    near += [
        p for i, p in named.items() if p.resolve() not in here and run_directory.still_there(i, p)
    ]
    if len(near) == 1:
        return near[0]
    if near:
        raise UsageError(f"{len(near)} runs are called {given}…", hint=_choices(near, given))
    if path.exists():
        RunDir.open(path)  # raises, with what is wrong with it
    if named:
        old = next(iter(named.values()))
        raise StoreError(f"{given} was in {old}, and is not there any more", hint=NO_RUN)
    alike = difflib.get_close_matches(path.name, [run.name for run in known], n=1)
    if alike:
        raise StoreError(f"{given} is not a run", hint=f"did you mean {parent / alike[0]}?")
    raise StoreError(
        f"{given} is not a run", hint="`supervise runs` lists all" if known else NO_RUN
    )


def exactly(given: str) -> Path | None:
    """Return the run that this is the path, the id or the whole name of, None for another text."""
    path = Path(given)
    if is_run(path):
        return path
    if not given or "/" in given:
        return None
    if is_run(RUNS / given):
        return RUNS / given
    linked = run_directory.entries(os.environ).get(given)
    return linked if linked is not None and run_directory.still_there(given, linked) else None


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that only reads: it becomes the `run` of the function, a path."""
    return _argument(function, newest)


def incident_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN] [INCIDENT]` to a command that only reads; `inc-2` alone: of the newest run."""

    def resolve(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return value or ctx.meta.get(EARLY)

    with_incident = click.argument(
        "incident", required=False, metavar="[INCIDENT]", callback=resolve
    )(function)
    return _argument(with_incident, newest, or_incident=True)


def live_run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that acts on a run with a supervisor, by default the only one."""
    return _argument(function, only_live)


def adoptable_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that takes a run over, by default the only one without one."""
    return _argument(function, only_adoptable)


def _argument(
    function: Callable[..., Any], default: Callable[[], Path], *, or_incident: bool = False
) -> Callable[..., Any]:
    def resolve(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if ctx.resilient_parsing:
            return None
        if or_incident and value is not None and INCIDENT.fullmatch(value):
            ctx.meta[EARLY], value = value, None
        if value is None:
            return default()
        return Path(value) if Path(value).is_file() else find(value)  # a copy of an audit log

    decorated: Callable[..., Any] = click.argument(
        "run", metavar="[RUN]", required=False, callback=resolve, shell_complete=complete
    )(function)
    return decorated


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Return the runs that a shell may complete to."""
    from click.shell_completion import CompletionItem

    if "/" in incomplete:
        return [CompletionItem(incomplete, type="dir")]
    names = dict.fromkeys([*(run.name for run in runs_in()), *run_directory.entries(os.environ)])
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _id_of(run: Path) -> str:
    with suppress(StoreError):
        return RunDir.open(run).id
    return ""


def _is_short_for(text: str, *names: str) -> bool:
    if len(text) < LEAST:
        return text in names
    parts = [*names, *(name.rpartition("-")[2] for name in names)]
    return any(part.startswith(text) for part in parts)


def _choices(runs: Sequence[Path], given: str | None = None) -> str:
    """Return the command line again for each run, to be pasted."""
    context = click.get_current_context(silent=True)
    argv = list(context.meta.get(ARGV, ())) if context is not None else []
    at = argv.index(given) if given in argv else 1
    rest = argv[at + 1 :] if given in argv else argv[1:]
    lines = [shlex.join([PROGRAM, *argv[:at], str(run), *rest]) for run in runs[:LISTED]]
    more = [f"({len(runs) - LISTED} more: supervise runs)"] if runs[LISTED:] else []
    return "\n         ".join([*lines, *more])
