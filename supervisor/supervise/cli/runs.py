"""`supervise runs`, `gc`, `checkpoints`, `checkpoint`: runs, and the checkpoints of one."""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from .. import system
from ..checkpoints import registry
from ..checkpoints.verification import (
    VERDICT_STATES,
    Evaluation,
    VerifierProcess,
    evaluate_checkpoint,
    resolve_evaluate_paths,
)
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.decisions import plain_json
from ..core.model.policy import Checkpoints, Evaluate, Local
from ..errors import MISSHAPEN, StoreError, UsageError
from ..runtime import host
from ..store import files, run_records
from ..store.audit import read_audit
from ..store.journal import RETENTION
from ..store.run_directory import RUNS, RunDir, cache_directory, is_run
from ..store.run_records import skim_run
from ._output import echo, echo_json, format_age, format_number, print_table
from ._params import parse_duration
from ._runs import (
    FINISHED,
    NO_RUN,
    STATES,
    UNKNOWN,
    find_run,
    newest_run,
    run_argument,
    run_state,
    runs_in,
)

if TYPE_CHECKING:
    from ..runtime.status import Ending
    from .status import RunStatus

SURELY, SURELY_NOT = 3.0, 2.0  # standard errors of a difference; project defaults
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
@click.option(
    "--state", type=click.Choice(STATES), multiple=True, help="Only runs in this state; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def runs_command(directory: Path, state: tuple[str, ...], as_json: bool) -> None:
    """List the runs, the newest first.

    `running`: with a supervisor. `unsupervised`: the job runs, its supervisor died. `lost`: both
    died. `supervise adopt` takes over an `unsupervised` or `lost` run. Runs that are over are
    `crashed`, `stopped` (by policy, operator or signal) or `finished`. `unknown`: on another
    machine, or unreadable.

    Where a command shows [RUN], give a path, a name, an id, or the beginning of a name or id. Names
    and ids of your runs work in every directory.

    \b
    Examples:
      supervise runs
      supervise runs --state running --state unsupervised
      supervise runs --json | jq -r '.[] | select(.state == "crashed") | .path'

    Exit codes: 0; 64 no such directory.
    """
    if not directory.is_dir():
        raise StoreError(f"there is no directory {directory}", hint=NO_RUN)
    rows = [summarize_run(path) for path in runs_in(directory)]
    rows = [row for row in rows if not state or row.state in state]
    if as_json:
        echo_json(msgspec.to_builtins(rows))
    elif rows:
        print_table([_row(row) for row in rows], HEADER)
    else:
        echo(f"no runs in {directory}" if not state else f"none of {', '.join(state)}")


@dataclass(slots=True)
class RunSummary:
    """A run in the list; `problem` says why the rest is None."""

    run: str
    path: str
    state: str = UNKNOWN
    exit_code: int | None = None
    step: int | None = None
    loss: float | None = None
    created: str | None = None
    policy: str | None = None
    mode: str | None = None
    incidents: int = 0
    gravest: run_records.IncidentOutcome | None = None
    ending: Ending | None = None
    problem: str | None = None


def summarize_run(
    path: Path, outcome: run_records.RunOutcome | None = None, state: RunStatus | None = None
) -> RunSummary:
    """Return what the list shows of a run; `outcome`, `state`: of a view that has read them."""
    row = RunSummary(path.name, str(path))
    try:
        run = RunDir.open(path)
        _fill(row, run, skim_run(run.audit_path) if outcome is None else outcome, state)
    except StoreError as error:
        row.problem = str(error)
    except MISSHAPEN as error:
        row.problem = f"its records cannot be understood: {type(error).__name__}"
    return row


def _fill(
    row: RunSummary, run: RunDir, outcome: run_records.RunOutcome, state: RunStatus | None
) -> None:
    from .status import read_status

    described = run.describe()
    row.created, row.policy, row.mode = described.created, described.policy, described.mode
    row.state, row.exit_code = run_state(run, outcome, described.host)
    row.step = outcome.step
    row.incidents, row.gravest = len(outcome.incidents), outcome.worst
    if state is None:
        with suppress(StoreError):  # its status is damaged
            state = read_status(run, outcome=outcome, brief=True)
    if state is None:
        return
    row.ending = None if row.state == UNKNOWN else state.ending
    if (status := state.newest) is not None:
        row.policy, row.mode = status.policy or row.policy, status.mode or row.mode
        row.step, row.loss = max(row.step, status.step), plain_json(status.training.loss)


def _row(row: RunSummary) -> tuple[str, ...]:
    worst, step, state = row.gravest, row.step, row.state
    if row.ending is not None and state == FINISHED and row.ending.kind != state:
        state = f"{state}, {row.ending.facts[0].text}"
    incident = "-"
    if worst is not None:
        ellipsis = f" (of {row.incidents})" if row.incidents > 1 else ""
        still = "" if worst.phase == "closed" else f" {worst.phase}"
        incident = f"{worst.severity} {worst.id}{still}{ellipsis}"
    return (
        row.path,
        f"{state} ({row.exit_code})" if row.exit_code else state,
        "-" if step is None or step < 0 else str(step),
        format_number(row.loss),
        format_age(row.created, datetime.now(UTC)),
        row.problem or incident,
        f"{row.policy or '?'} ({row.mode or '?'})",
    )


OLDER_THAN = "30d"
KEEP = 5  # runs; project default


@click.command(name="gc")
@click.argument(
    "directory", type=click.Path(path_type=Path), metavar="[RUNS]", default=RUNS, required=False
)
@click.option(
    "--older-than",
    type=parse_duration,
    default=OLDER_THAN,
    metavar="TIME",
    help=f"Time since the last record of a run. Default: {OLDER_THAN}.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=KEEP,
    help=f"Number of newest runs to leave whole, whatever their age. Default: {KEEP}.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def gc_command(directory: Path, older_than: float, keep: int, dry_run: bool, as_json: bool) -> int:
    """Delete large files of past runs, never the job's checkpoints.

    Removes savepoints, journal, output and evidence bundles, in this order, of old runs in RUNS
    (default: ./runs), and what `web` has cached of them. A run is old 30 days after its last record
    (--older-than); the newest 5 are left whole (--keep). Also left alone: runs whose supervisor or
    job lives, and runs that never ended and have an open incident. The audit log, the policies and
    pinned checkpoints stay, so `why`, `status` and `audit verify` go on working; `replay`, `export`
    and `why-not` need the journal.

    \b
    Examples:
      supervise gc --dry-run
      supervise gc --older-than 7d --keep 20 /data/runs

    Exit codes: 0; 1 a part could not be removed; 64 no such directory.
    """
    survey = survey_runs(
        directory,
        now_s=time.time(),
        older_than_s=older_than,
        keep=keep,
        host=socket.gethostname(),
        lives=_lives,
    )
    failed, freed = 0, 0
    rows: list[dict[str, Any]] = []
    for run in survey:
        error = None if dry_run or run.kept else _remove(run)
        failed += error is not None
        freed += 0 if error or run.kept else sum(part.size_bytes for part in run.parts)
        rows.append({**asdict(run), "path": str(run.path), "error": error})
        if not as_json:
            echo(_line(run, error))
    if as_json:
        echo_json({"freed_bytes": freed, "dry_run": dry_run, "runs": rows})
        return 1 if failed else 0
    verb = "would free" if dry_run else "freed"
    echo(f"{verb} {format_size(freed)} of {len(survey)} run{'' if len(survey) == 1 else 's'}")
    return 1 if failed else 0


def _remove(run: Survey) -> str | None:
    """Remove what may be removed; return why that failed, None if it did not."""
    try:
        remove_parts(run.path, run.parts, system.wall_time())
        if any(part.name == "journal" for part in run.parts):
            _remove_curves(run.path)
    except StoreError as error:
        return str(error)
    return None


def _remove_curves(path: Path) -> None:
    """Remove what the page made of the journal; a cache elsewhere (`--cache`) is its owner's."""
    with suppress(OSError, StoreError):
        files.remove_tree(cache_directory(os.environ, RunDir.open(path).id))


def _line(run: Survey, error: str | None) -> str:
    age = f"{run.path}  {run.age_s / 86400.0:.1f} days"
    if error is not None:
        return f"{age}  failed: {error}"
    return f"{age}  {f'kept: {run.kept}' if run.kept else _parts(run.parts)}"


def _parts(parts: Sequence[Removable]) -> str:
    return ", ".join(f"{part.name} {format_size(part.size_bytes)}" for part in parts)


def _lives(run: RunDir) -> bool:
    from ..runtime.launcher import last_launch
    from ..runtime.process_tree import start_ticks

    launch = last_launch(run)
    return launch is not None and start_ticks(launch["pid"]) == launch["start_ticks"]


# What `gc` removes of a run, in this order: first what only a run that goes on needs, a savepoint
# for a relaunch; what replay and export read; what the job printed (`--logs`); evidence bundles.
# All else stays: the audit log, the policies, and pinned checkpoints, which may be the only copy.
REMOVABLE = ("savepoints", "journal", "output", "incidents")


@dataclass(frozen=True, slots=True)
class Removable:
    """One directory of a run, and what its removal frees."""

    name: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """A run, and what may be removed of it.

    Attributes:
        age_s: since its last record.
        kept: why nothing is removed, "" where `parts` may be.
    """

    path: Path
    age_s: float
    kept: str = ""
    parts: tuple[Removable, ...] = field(default=())


def survey_runs(
    directory: Path,
    *,
    now_s: float,
    older_than_s: float,
    keep: int,
    host: str,
    lives: Callable[[RunDir], bool],
) -> list[Survey]:
    """Return all runs in a directory, the newest first.

    One is left alone while its supervisor or its job lives, while its supervisor is dead and an
    incident is open, or where that cannot be known.

    Args:
        now_s: time since the epoch.
        older_than_s: since the last record of a run that is over.
        keep: the newest runs that are left whole, whatever their age.
        host: this machine's name; a job on another one cannot be looked at.
        lives: whether the job of a run lives.

    Raises:
        StoreError: the directory cannot be read.
    """
    surveys = []
    for rank, (age_s, path) in enumerate(sorted(_ages(directory, now_s))):
        reason = f"one of the newest {keep}" if rank < keep else ""
        reason = reason or ("" if age_s >= older_than_s else "not old enough")
        reason = reason or _why_kept(path, host, lives)
        parts = () if reason else tuple(_removable(path))
        surveys.append(Survey(path, age_s, reason or ("" if parts else "nothing to remove"), parts))
    return surveys


def remove_parts(path: Path, parts: tuple[Removable, ...], wall: str) -> None:
    """Remove these parts of a run, as its only writer; `retention.json` is on disk before.

    Raises:
        StoreError: a supervisor has taken the run over, or it cannot be written.
    """
    run = RunDir.open(path)
    try:
        fd = files.open_file(run.audit_path, os.O_RDWR)
        try:
            files.lock_file(fd, run.audit_path)
            removed_before = run.read_json(RETENTION) if (path / RETENTION).exists() else {}
            rows = [
                {"part": p.name, "files": p.files, "bytes": p.size_bytes, "wall": wall}
                for p in parts
            ]
            run.write_json(
                RETENTION, {"removed": [*removed_before.get("removed", []), *rows]}, durable=True
            )
            for part in parts:
                shutil.rmtree(path / part.name)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(f"cannot remove from {path}: {error.strerror}") from error
    except MISSHAPEN as error:
        raise StoreError(f"{path / RETENTION} is damaged", hint="remove this file") from error


def _ages(directory: Path, now_s: float) -> Iterator[tuple[float, Path]]:
    try:
        for path in directory.iterdir():
            if is_run(path):
                log = path / "audit.log"
                newest = log if log.exists() else path / "run.json"
                yield now_s - newest.stat().st_mtime, path
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error


def _why_kept(path: Path, host: str, lives: Callable[[RunDir], bool]) -> str:
    """Return why a run must be left alone, "" if it is over."""
    if path.is_symlink():
        return "a symbolic link to another run"
    try:
        run = RunDir.open(path)
        if not files.is_own_directory(path):
            return "belongs to another user"
        if not run.audit_path.exists():
            return "has no audit log"
        if files.is_locked(run.audit_path):
            return "is watched"
        ended, open_incident = _end(run)
        if not ended and run.read_json("run.json")["host"] != host:
            return "did not end, on another machine"
        if not ended and open_incident:
            return f"its supervisor died with {open_incident} open: `supervise adopt` ends it"
        if lives(run):
            return "its job lives"
    except StoreError as error:
        return f"cannot be read: {error}"
    except (OSError, *MISSHAPEN) as error:
        return f"cannot be read: {type(error).__name__}"
    return ""


def _end(run: RunDir) -> tuple[bool, str]:
    """Return whether the run ended, and the incident that was open in its last record."""
    ended, open_incident = False, ""
    for record in read_audit(run.audit_path):
        ended = record["kind"] == "run_end"
        if record["kind"] == "incident":
            code = (record.get("data") or {}).get("what")
            open_incident = str(record["incident"]) if code == "opened" else open_incident
            open_incident = "" if code == "closed" else open_incident
    return ended, open_incident


def _removable(path: Path) -> Iterator[Removable]:
    for name in REMOVABLE:
        part = path / name
        if part.is_symlink() or not part.is_dir():
            continue
        sizes = [file.lstat().st_blocks * 512 for file in part.rglob("*") if not file.is_dir()]
        if sizes:
            yield Removable(name, len(sizes), sum(sizes))


CHECKPOINT_HEADER = ("id", "step", "attempt", "state", "pinned", "size", "saved", "path")


@click.command(name="checkpoints")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--verify", is_flag=True, help="Verify the newest one of a run that has ended.")
def checkpoints_command(run: Path, as_json: bool, verify: bool) -> int:
    """List the job's checkpoints and their verification.

    Without --verify it reads only the run directory: it works from any terminal, and after the run.
    A checkpoint in state `found` is not verified yet. A pinned one is kept as a copy in
    RUN/checkpoints/ID. When the job ends, the supervisor verifies its newest checkpoint, for at
    most 60 s (longer after a crash without a good one); --verify does this now, without a limit.
    In --json `suspect` says why the job must not go back to one, and `resumable` is `full` (weights
    and optimizer), `weights only`, or `unknown`.

    \b
    Examples:
      supervise checkpoints runs/20260105-101112-7f3a9c
      supervise checkpoints --verify runs/20260105-101112-7f3a9c
      supervise checkpoints --json 7f3a9c | jq '.[] | select(.pinned) | .id'

    Exit codes: 0; 1 with --verify: the newest is damaged, or could not be verified; 64 no such run,
    or with --verify one that cannot be written.
    """
    if verify:
        return _verify(RunDir.open_own(run))
    directory = RunDir.open(run)
    entries = registry.read_registry(directory.path).checkpoints
    outcome = run_records.skim_run(directory.audit_path) if entries else run_records.RunOutcome()
    suspect = {entry.id: registry.describe_suspicion(entry, outcome) for entry in entries}
    if as_json:
        echo_json([{**msgspec.to_builtins(e), "suspect": suspect[e.id]} for e in entries])
    elif entries:
        print_table([_checkpoint_row(e, suspect[e.id]) for e in entries], CHECKPOINT_HEADER)
    else:
        echo("no checkpoints")
    return 0


def _verify(run: RunDir) -> int:
    """Verify the newest checkpoint where it lies, and register the verdict.

    Raises:
        UsageError: a supervisor does it, or there is none.
    """
    if files.is_locked(run.audit_path):
        raise UsageError(
            f"{run.path} has a supervisor, which verifies its checkpoints",
            hint=f"supervise checkpoints {run.path}",
        )
    register = registry.Register(run.path)
    entry = register.newest()
    if entry is None:
        raise UsageError(f"{run.path} has no checkpoint that could be verified")
    verdict = VerifierProcess(Checkpoints().verify).verify(
        entry.path, entry.bytes, entry.python, urgent=True
    )
    entry.state, entry.problems = VERDICT_STATES[verdict.ok], list(verdict.problems)
    entry.verified = system.wall_time()
    if verdict.findings is not None:
        entry.take_findings(verdict.findings)
    print_table([_checkpoint_row(entry)], CHECKPOINT_HEADER)
    try:
        register.write()
    except OSError as error:
        raise StoreError(f"the run keeps no verdict: {run.path}: {error.strerror}") from error
    return 0 if verdict.ok else 1


@click.group(name="checkpoint", no_args_is_help=True)
def checkpoint_command() -> None:
    """Evaluate a checkpoint of a run."""


@checkpoint_command.command(name="eval")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--run", "name", metavar="RUN", help="Run of CHECKPOINT. Default: the newest in ./runs."
)
@click.option(
    "--val",
    multiple=True,
    metavar="NAME=FILE",
    help="Held-out token ids (.bin, uint16 or uint32); repeatable.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=Evaluate().tokens,
    show_default=True,
    help="Tokens of each file, at most.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    metavar="FILE",
    help="Tokenizer of --val; with another one nothing is compared.",
)
@click.option(
    "--index",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    metavar="FILE",
    help="Of `supervise data check --index`: search the model's texts for copies.",
)
@click.option("--limit", default="10m", show_default=True, help="Time that it may take.")
@click.option(
    "--policy",
    metavar="P",
    help="Evaluate as its job: {evaluate: ...} says; no other option counts.",
)
@click.option(
    "--reimport",
    is_flag=True,
    help="Import the script without a `__main__` guard, too, less its top-level loops and calls.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def evaluate_command(
    checkpoint: str,
    name: str | None,
    val: tuple[str, ...],
    tokens: int,
    tokenizer: str | None,
    index: str | None,
    limit: str,
    policy: str | None,
    reimport: bool,
    as_json: bool,
) -> int:
    """Rebuild the model of a checkpoint, test its output, and measure it.

    CHECKPOINT is an id of `supervise checkpoints`, or the path of its file. The policy of its run
    must have had job: {evaluate: {}} or {probe_batch: true}: then the job wrote the structure of
    the model at its first save. The model is rebuilt by the job's Python, on one thread of the CPU
    at the lowest priority. No code runs from the checkpoint. The rebuilt model is tested first: two
    input rows that were recorded at the save must give the same output as in the job, else nothing
    is measured. The result is compared with that of the previous evaluation. Benchmarks and
    toxicity are measured as a --policy says.

    \b
    Examples:
      supervise checkpoint eval ckpt-3
      supervise checkpoint eval out/ckpt_200.pt --run 7f3a9c --val held=val.bin

    Exit codes: 0; 1 it could not be measured; 64 wrong usage, or no such run or checkpoint; 65 the
    policy has errors; 130 interrupted.
    """
    evaluator = _Evaluator.of_run(name)
    entry = evaluator.find(checkpoint)
    settings = (
        _settings_of(policy)
        if policy is not None
        else Evaluate(
            val=_held_out(val),
            tokens=tokens,
            tokenizer=tokenizer,
            index=index,
            limit_s=parse_duration(limit),
            reimport=reimport,
        )
    )
    evaluation = evaluator.evaluate(entry, settings)
    if as_json:
        about = {"id": entry.id, "step": entry.step, "path": entry.path}
        echo_json({**about, **msgspec.to_builtins(evaluation)})
    else:
        _print_evaluation(entry, evaluation)
    return 1 if evaluation.reason else 0


def _settings_of(name: str) -> Evaluate:
    """Return `job.evaluate` of a policy, with absolute paths."""
    from ..catalog import load_policy

    settings = load_policy(name, mode="observe").job.evaluate
    if settings is None:
        raise UsageError(f"{name} evaluates no checkpoints", hint="job: {evaluate: {tasks: ...}}")
    return resolve_evaluate_paths(settings, Path.cwd())


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates checkpoints of one run by hand."""

    run: Path
    register: registry.RegisterDocument
    lives: bool

    @classmethod
    def of_run(cls, name: str | None) -> _Evaluator:
        """Open a run, the newest for None."""
        run = RunDir.open_own(newest_run() if name is None else find_run(name))
        lives = files.is_locked(run.audit_path) or _lives(run)
        return cls(run.path, registry.read_registry(run.path), lives)

    def find(self, checkpoint: str) -> registry.Entry:
        """Return a checkpoint by its id or path. Raises UsageError."""
        names = checkpoint, str(Path(checkpoint).absolute())
        for entry in reversed(self.register.checkpoints):
            if entry.id == checkpoint or entry.path in names:
                return entry
        raise UsageError(
            f"{self.run} has no checkpoint {checkpoint}", hint=f"supervise checkpoints {self.run}"
        )

    def evaluate(
        self, entry: registry.Entry, settings: Evaluate, *, is_alone: bool = False
    ) -> Evaluation:
        """Evaluate one; `is_alone`: it is not compared with others."""
        pinned = self.run / registry.PINNED / entry.id / "data" / entry.name
        first_steps = dict(self.register.first_steps)
        earlier = registry.predecessors(self.register.checkpoints, first_steps, entry)
        return evaluate_checkpoint(
            VerifierProcess(()),
            [] if is_alone else earlier,
            entry,
            pinned,
            settings,
            host.available_bytes(),
            # Of a run that lives its supervisor compares with its own, of its own files.
            is_kept=not (is_alone or self.lives),
        )


@checkpoint_command.command(name="cross")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option(
    "--harness",
    "policies",
    nargs=2,
    required=True,
    metavar="OLD_POLICY NEW_POLICY",
    help="Policies with job: {evaluate: ...}, as it was and as it is.",
)
@click.option("--run", "name", metavar="RUN", help="Run of OLD and NEW. Default: the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def cross_command(
    old: str, new: str, policies: tuple[str, str], name: str | None, as_json: bool
) -> int:
    """Evaluate two checkpoints by two settings: did the model change, or its evaluation?

    Each metric that all four evaluations have with a standard error (held-out losses, benchmarks,
    toxicity) gets a verdict: model, harness or both where these differences exceed three standard
    errors, neither where all are below two, else open. For another version of
    lm-evaluation-harness name its interpreter: job: {evaluate: {tasks: {python: ...}}}.

    \b
    Examples:
      supervise checkpoint cross ckpt-3 ckpt-9 --harness old.yaml new.yaml

    Exit codes: 0; 1 one of the four could not be measured, or nothing to compare; 64 wrong usage,
    or no such run or checkpoint; 65 a policy has errors; 130 interrupted.
    """
    evaluator = _Evaluator.of_run(name)
    entries, settings = [evaluator.find(c) for c in (old, new)], [*map(_settings_of, policies)]
    cells = [evaluator.evaluate(entry, way, is_alone=True) for way in settings for entry in entries]
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))
    shared = [metric for metric in cells[0].errors if all(metric in c.errors for c in cells)]
    rows = [_cross_row(metric, cells) for metric in sorted(shared)]
    if not (rows or reasons):
        reasons = ["no metric has a standard error in all four: evaluate: {val: ...}, or tasks"]
    if as_json:
        echo_json({"unknown": reasons, "metrics": [asdict(row) for row in rows]})
    else:
        for reason in reasons:
            echo(f"UNKNOWN: {reason}")
        labels = [f"{e.id} by {policy}" for policy in policies for e in entries]
        table = [(r.metric, *map(format_number, r.values), r.verdict) for r in rows]
        if table:
            print_table(table, ("metric", *labels, "moved by"))
        for cell in cells:
            for metric, why in cell.unmeasured.items():
                echo(f"{metric}: UNKNOWN: {why}")
    return 1 if reasons or not rows else 0


@dataclass(frozen=True)
class CrossRow:
    """One metric of both checkpoints by the old settings, then by the new ones.

    Attributes:
        errors: standard errors of the values. verdict: model, harness, both, neither, open.
    """

    metric: str
    values: tuple[float, ...]
    errors: tuple[float, ...]
    verdict: str


def _cross_row(metric: str, cells: Sequence[Evaluation]) -> CrossRow:
    values = tuple(cell.values[metric] for cell in cells)
    errors = tuple(cell.errors[metric] for cell in cells)
    return CrossRow(metric, values, errors, judge_cross(values, errors))


def judge_cross(values: Sequence[float], errors: Sequence[float]) -> str:
    """Return what moved a metric, see `CrossRow`. Surest of two differences each."""

    def surest(pairs: tuple[tuple[int, int], ...]) -> float:
        return max(
            abs(values[b] - values[a]) / max(1e-12, math.hypot(errors[a], errors[b]))
            for a, b in pairs
        )

    model, harness = surest(((0, 1), (2, 3))), surest(((0, 2), (1, 3)))
    if model < SURELY_NOT and harness < SURELY_NOT:
        return "neither"
    if model > SURELY and harness > SURELY:
        return "both"
    if model > SURELY and harness < SURELY_NOT:
        return "model"
    return "harness" if harness > SURELY and model < SURELY_NOT else "open"


def _held_out(pairs: Sequence[str]) -> dict[str, str]:
    """Return the files of `--val`, by the names of their slices."""
    files: dict[str, str] = {}
    for pair in pairs:
        name, file = pair.split("=", 1) if "=" in pair else ("val", pair)
        try:
            msgspec.convert(name, Local)
        except msgspec.ValidationError as error:
            text = f"--val {pair}: {name!r} is no name"
            raise UsageError(text, hint="--val held=FILE") from error
        path = Path(file).absolute()
        try:
            path.stat()
        except FileNotFoundError:
            raise UsageError(f"--val {pair}: there is no file {path}") from None
        except OSError as error:
            raise UsageError(f"--val {pair}: cannot read {path}: {error.strerror}") from error
        if name in files:
            raise UsageError(f"--val {pair}: another file has the name {name}")
        files[name] = str(path)
    return files


def _print_evaluation(entry: registry.Entry, evaluation: Evaluation) -> None:
    if evaluation.reason:
        echo(f"UNKNOWN: nothing is known of checkpoint {entry.label}: {evaluation.reason}")
        return
    echo(
        f"checkpoint {entry.label}: proved, as the model's output for the probe batch is "
        f"{evaluation.now:.6g} here, and was {evaluation.was:.6g} in the job"
    )
    rows = [(name, format_number(value)) for name, value in sorted(evaluation.values.items())]
    rows += [(name, f"UNKNOWN: {why}") for name, why in sorted(evaluation.unmeasured.items())]
    rows += [("evaluated by", f"sha256:{evaluation.artefact}")] if evaluation.artefact else []
    rows += [(f"restore of {part}", verdict) for part, verdict in evaluation.parts.items()]
    print_table(rows, ("metric", "value"))


def _checkpoint_row(entry: registry.Entry, suspect: str = "") -> tuple[str, ...]:
    return (
        entry.id,
        str(entry.step) if entry.step >= 0 else "?",
        str(entry.attempt),
        entry.state,
        "yes" if entry.pinned else "no",
        format_size(entry.bytes),
        entry.saved[:19],
        "; ".join([entry.path, *filter(None, [suspect]), *_weights_only(entry), *entry.problems]),
    )


def _weights_only(entry: registry.Entry) -> list[str]:
    only = entry.resumable == WEIGHTS_ONLY
    return ["weights only: a relaunch prefers one with the optimizer's state"] if only else []


def format_size(count: int) -> str:
    """Return a number of bytes with a unit: `4.7 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"
