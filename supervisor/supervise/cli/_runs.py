"""Lookup of the run that a command names: a path, name, id, the beginning of one, or the newest;
and what commands share that make runs as trials: their directory, and the policy of these.

A run is looked for under ./runs, and, by its id or the name of its directory, among all runs that
this user has watched (their index in `store.run_directory`).

A command that only reads takes the newest run where none is named; one that acts on the job takes
the run that has a supervisor, if that is one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shlex
import socket
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import system
from ..core.model.events import Event, Exited, Launched
from ..errors import (
    MISSHAPEN,
    StoreError,
    SuperviseError,
    UsageError,
    reading_recorded_data,
)
from ..store import files, run_directory
from ..store.files import is_locked
from ..store.run_directory import RUNS, RunDir, is_run
from ..store.run_records import ASKED, RunOutcome, skim_run
from ._params import ARGV, PROGRAM

if TYPE_CHECKING:
    from ..catalog.loader import Isolated
    from ..runtime.status import Life

# States of a list of runs, those that need attention first.
UNSUPERVISED, RUNNING, LOST, CRASHED, STOPPED, FINISHED, UNKNOWN = STATES = (
    *("unsupervised", "running", "lost", "crashed", "stopped", "finished", "unknown"),
)
LAST_SEGMENTS = 2  # of the journal, in which an end would be


def run_state(run: RunDir, outcome: RunOutcome, host: str) -> tuple[str, int | None]:
    """Return one of STATES and the exit code, without reading the journal.

    Args:
        host: the machine that the run was started on; a process on another one cannot be seen.
    """
    if is_locked(run.audit_path):
        return RUNNING, None
    if outcome.end is not None:
        code = outcome.end.exit_code
        if code == 0:
            return FINISHED, code
        return (STOPPED if code in ASKED else CRASHED), code
    if host != socket.gethostname():
        return UNKNOWN, None
    _, runs = _process(run, None)
    return (UNSUPERVISED if runs else LOST), None


def run_life(run: RunDir, outcome: RunOutcome, segments: Iterator[Sequence[Event]]) -> Life:
    """Return whether anybody watches a run, and what became of its job.

    A live supervisor holds the lock of the audit log. Without one, the journal has the last state
    of the job, and the audit log whether the run ended with it: a supervisor that died before may
    have been about to relaunch the job.

    Args:
        segments: launches and ends in the journal, see `read_segments_back`.
    """
    from ..runtime.status import Life  # it imports the engine, which most commands do not need

    if is_locked(run.audit_path):
        return Life(supervisor="running", job="running")
    end = outcome.end
    launched, returncode = _last_seen(segments)
    pid, runs = _process(run, launched)
    code = returncode if returncode is None or returncode >= 0 else 128 - returncode
    if end is not None and (code is None or outcome.incomplete):
        code, returncode = end.exit_code, None
    again = end is None and outcome.relaunching
    if code is not None and not (end is None and runs):
        job = "ended"
    elif pid is not None:
        job, code = "running" if runs else "lost", None
    else:
        job = "unknown"
    name = None
    if returncode is not None and returncode < 0:
        name = system.signal_name(-returncode)
    return Life(
        job=job, job_pid=pid, exit_code=code, signal=name, over=end is not None, relaunching=again
    )


def _last_seen(segments: Iterator[Sequence[Event]]) -> tuple[Launched | None, int | None]:
    """Return the newest launch near the end of the journal, and its return code if it ended.

    A job whose launch is older than a segment has made frames since, so it had not ended then.
    """
    with suppress(StoreError):  # `replay` and `export` report a damaged journal
        for segment in islice(segments, LAST_SEGMENTS):
            events = [event for event in segment if isinstance(event, Launched | Exited)]
            launches = [event for event in events if isinstance(event, Launched)]
            if events:
                newest = events[-1]
                code = newest.returncode if isinstance(newest, Exited) else None
                return (launches[-1] if launches else None), code
    return None, None


def _process(run: RunDir, launched: Launched | None) -> tuple[int | None, bool]:
    """Return the pid of the newest launch, which the journal may lack, and whether it runs."""
    # Here, not above: not needed while the supervisor lives.
    from ..runtime.launcher import LAUNCHED, last_launch
    from ..runtime.process_tree import start_ticks

    with suppress(StoreError), reading_recorded_data(LAUNCHED, ""):
        launch = last_launch(run)
        if launch is not None and (launched is None or launch["attempt"] >= launched.attempt):
            return int(launch["pid"]), start_ticks(launch["pid"]) == launch["start_ticks"]
    pid = None if launched is None else launched.pid
    return pid, pid is not None and Path(f"/proc/{pid}").exists()


INCIDENT = re.compile(r"inc-\d+")
EARLY = "supervise.incident"  # key of `click.Context.meta`: an incident that stands where a run may
LEAST = 3  # characters of a name that is shortened
LISTED = 6
NO_RUN = "supervise -- COMMAND starts one below ./runs; name one elsewhere by its path"


def runs_in(directory: Path = RUNS) -> list[Path]:
    """Return the run directories in a directory, the newest first. Raises StoreError."""
    try:
        directories = [path.parent for path in directory.glob("*/run.json")]
        return sorted(
            directories, key=lambda path: (path / "run.json").stat().st_mtime, reverse=True
        )
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error


def newest_run() -> Path:
    """Return the newest run under ./runs. Raises StoreError."""
    runs = runs_in()
    if not runs:
        raise StoreError("no run is named, and there is none under ./runs", hint=NO_RUN)
    return runs[0]


def only_live_run() -> Path:
    """Return the only run under ./runs with a supervisor. Raises UsageError with the choice."""
    runs = [path for path in runs_in() if is_locked(path / "audit.log")]
    if len(runs) == 1:
        return runs[0]
    if runs:
        text = f"{len(runs)} runs have a supervisor, and this command acts on one"
        raise UsageError(text, hint=_choices(runs))
    raise UsageError(
        "no run under ./runs has a supervisor", hint="name the run; `supervise runs` lists them"
    )


def only_adoptable_run() -> Path:
    """Return the only run under ./runs whose supervisor died. Raises UsageError with the choice."""
    runs = []
    for path in runs_in():
        with suppress(StoreError, *MISSHAPEN):
            run = RunDir.open(path)
            host = str(run.read_json("run.json")["host"])
            if run_state(run, skim_run(run.audit_path), host)[0] in (UNSUPERVISED, LOST):
                runs.append(path)
    if len(runs) == 1:
        return runs[0]
    if runs:
        text = f"the supervisors of {len(runs)} runs died, and this command takes over one"
        raise UsageError(text, hint=_choices(runs))
    raise UsageError("no run under ./runs has lost its supervisor", hint="supervise runs")


def find_run(name: str) -> Path:
    """Return the run that is named: a path, an id, a name, or the beginning of one.

    Names are looked for under ./runs first. The last part of a name, as `7f3a9c`, will do, too.

    Raises:
        StoreError: there is no such run.
        UsageError: several begin with it.
    """
    run = find_exact_run(name)
    if run is not None:
        return run
    path = Path(name)
    parent = path.parent if "/" in name else RUNS
    runs = runs_in(parent) if path.name and parent.is_dir() else []
    near = [run for run in runs if _is_short_for(path.name, run.name)]
    near = near or [run for run in runs if _is_short_for(path.name, _id_of(run))]
    elsewhere = {} if "/" in name else run_directory.list_run_directories(os.environ)
    named = {i: p for i, p in elsewhere.items() if _is_short_for(name, i, p.name)}
    here = {run.resolve() for run in near}
    near += [
        p for i, p in named.items() if p.resolve() not in here and run_directory.is_same_run(i, p)
    ]
    if len(near) == 1:
        return near[0]
    if near:
        raise UsageError(f"{len(near)} runs are called {name}…", hint=_choices(near, name))
    if path.exists():
        RunDir.open(path)  # raises, with what is wrong with it
    if named:
        old = next(iter(named.values()))
        raise StoreError(f"{name} was in {old}, and is not there any more", hint=NO_RUN)
    alike = difflib.get_close_matches(path.name, [run.name for run in runs], n=1)
    if alike:
        raise StoreError(f"{name} is not a run", hint=f"did you mean {parent / alike[0]}?")
    raise StoreError(f"{name} is not a run", hint="`supervise runs` lists all" if runs else NO_RUN)


def find_exact_run(name: str) -> Path | None:
    """Return the run that this is the path, the id or the whole name of, None for another text."""
    path = Path(name)
    if is_run(path):
        return path
    if not name or "/" in name:
        return None
    if is_run(RUNS / name):
        return RUNS / name
    linked = run_directory.list_run_directories(os.environ).get(name)
    return linked if linked is not None and run_directory.is_same_run(name, linked) else None


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that only reads: it becomes the `run` of the function, a path."""
    return _argument(function, newest_run)


def incident_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN] [INCIDENT]` to a command that only reads; `inc-2` alone: of the newest run."""

    def resolve(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return value or ctx.meta.get(EARLY)

    with_incident = click.argument(
        "incident", required=False, metavar="[INCIDENT]", callback=resolve
    )(function)
    return _argument(with_incident, newest_run, or_incident=True)


def live_run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that acts on a run with a supervisor, by default the only one."""
    return _argument(function, only_live_run)


def adoptable_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[RUN]` to a command that takes a run over, by default the only one without one."""
    return _argument(function, only_adoptable_run)


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
        return Path(value) if Path(value).is_file() else find_run(value)  # a copy of an audit log

    decorated: Callable[..., Any] = click.argument(
        "run", metavar="[RUN]", required=False, callback=resolve, shell_complete=complete_run
    )(function)
    return decorated


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Return the runs that a shell may complete to."""
    from click.shell_completion import CompletionItem

    if "/" in incomplete:
        return [CompletionItem(incomplete, type="dir")]
    names = dict.fromkeys(
        [*(run.name for run in runs_in()), *run_directory.list_run_directories(os.environ)]
    )
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


def _choices(runs: Sequence[Path], name: str | None = None) -> str:
    """Return the command line again for each run, to be pasted."""
    context = click.get_current_context(silent=True)
    argv = list(context.meta.get(ARGV, ())) if context is not None else []
    index = argv.index(name) if name in argv else 1
    tail = argv[index + 1 :] if name in argv else argv[1:]
    lines = [shlex.join([PROGRAM, *argv[:index], str(run), *tail]) for run in runs[:LISTED]]
    ellipsis = [f"({len(runs) - LISTED} more: supervise runs)"] if runs[LISTED:] else []
    return "\n         ".join([*lines, *ellipsis])


HIDDEN = frozenset(
    {"rule", "near_miss", "rebaseline", "notify_intent", "notify_result", "notify_text"}
)


class LogTail:
    """Reads what was appended since the last call; verification is left to `audit verify`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the complete new records; none while there is no log. Raises StoreError."""
        try:
            with os.fdopen(files.open_file(self._path), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:  # a truncated last record was removed
                    self._offset = size
                file.seek(self._offset)
                lines, end, _ = file.read(size - self._offset).rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        self._offset += len(lines) + len(end)
        records = []
        for line in lines.split(b"\n") if end else ():
            with suppress(ValueError, RecursionError):
                record = json.loads(line[65:])
                records += [record] if isinstance(record, dict) else []
        return records


def event_line(record: dict[str, Any]) -> str:
    """Return a record as one line: time in UTC, step, severity, incident, kind, reason."""
    wall = str(record.get("wall"))
    marks = [str(record[key]) for key in ("severity", "incident") if record.get(key)]
    step = record.get("step", -1)
    position = f"step {step}" if isinstance(step, int) and step >= 0 else "-"
    head = f"{wall[5:10]} {wall[11:19]}Z  {position:<11}  {record.get('kind')!s:<10}"
    return f"{head}  {' '.join([*marks, str(record.get('reason', ''))])}".rstrip()


# ── trials ────────────────────────────────────────────────────────────────────────────────────────

SCRATCH, POLICY = "scratch", "policy.yaml"


@contextmanager
def errors_without_verdict(verdicts: Collection[int]) -> Iterator[None]:
    """Give errors an exit code that is no verdict; a broken gate must not look like one.

    Args:
        verdicts: exit codes that mean something else.
    """
    try:
        yield
    except SuperviseError as error:
        if error.exit_code not in verdicts:
            raise
        raise SuperviseError(str(error), hint=error.hint) from error
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # standard output, see `Commands`
            raise
        traceback.print_exc()
        text = f"the runs could not be judged: {type(error).__name__}: {error}"
        raise SuperviseError(text) from error


def trial_directory(directory: Path | None, sort: str) -> Path:
    """Return the directory of a trial: the one given, else `runs/SORT-<time>-<id>`."""
    stamp = system.wall_time()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return (directory or RUNS / f"{sort}-{stamp}-{secrets.token_hex(3)}").absolute()


def make_empty(path: Path) -> Path:
    """Make a directory. Raises UsageError: it holds something; StoreError: it cannot be made."""
    try:
        if path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty", hint="choose another one with --dir DIR")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.make_directory(path)
    except OSError as error:
        raise StoreError(f"cannot make {path}: {error.strerror}") from error
    return path


def write_policy(directory: Path, policy: Isolated) -> Path:
    """Write the policy of the runs of a trial, and return its file. Raises StoreError."""
    path = directory / POLICY
    try:
        files.replace_file(path, policy.text.encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path
