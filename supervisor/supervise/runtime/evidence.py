"""The evidence bundle: the state of the job at an incident, collected before any action.

A bundle is a directory `incidents/<id>/snapshot-<n>` in the run directory. Its `manifest.json`
lists every file with size and SHA-256, what was redacted, and what is missing and why. The audit
log records the SHA-256 of the manifest.

A bundle is written to a temporary name and renamed, so it is complete or absent. The probe is asked
for stacks, random state and batch fingerprints; if it does not answer (the job hangs, or has no
probe) stacks are read from outside where the machine allows it, and `standstill.json` says which
rank the others wait for. If the job reports its shards, `shards.json` has those of the steps up to
the first breach. `failures.json` has what the job's processes recorded of their ends, with
tracebacks, the cause first. The incident as JSON, Markdown and HTML says what is known by then;
those beside the bundle are rewritten until the incident closes. A failing source costs its own file
only; a full disk fails the bundle. Samples of training data are never included, only fingerprints.

Runs on the performer's thread; the segments and the metric window are read on the main loop through
`EvidenceSource.on_loop`.

The shards of the steps before an incident come from the probe's record of the newest batches, or,
for a rank that does not answer, from its frames and the names in its last status.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import psutil
from msgspec import Struct

from ..core.incident import Incident
from ..core.model.events import Frame
from ..core.model.failure import Failure
from ..core.model.payload import Payload
from ..core.model.redaction import Redactor, spreadsheet_cell
from ..errors import FULL, ActionError
from ..store import files
from . import host
from .segment_reader import RankView
from .stacks import (
    ANSWER_S,
    PY_SPY_S,
    RankSurvey,
    ask_for_stacks,
    main_stack,
    py_spy_dump,
    read_kernel_stack,
)

BEFORE = 5  # steps before the first breach: the cause may be a slightly earlier batch
NAMED = 12  # shards in the summary

Frames = Iterable[tuple[Sequence[str], Frame]]
Row = dict[str, Any]


def trace_origins(
    tapes: Mapping[int, Any], ranks: Mapping[int, RankView], window: Frames, breach_step: int | None
) -> dict[str, Any] | None:
    """Return the shards of the steps from `BEFORE` before the first breach to it; None if unknown.

    Args:
        tapes: the probe's record of the newest batches, by rank.
        ranks: the view of each rank, with its `status`.
        window: the newest frames with their names.
        breach_step: None takes the newest steps instead.

    Returns:
        `breach_step`, `steps` (rank, attempt, step, fingerprint, shards with their offsets) and
        `shards`: name -> its steps, as text.
    """
    rows = [
        {"rank": rank, "attempt": int(batch.get("attempt", 0)), **batch}
        for rank, tape in tapes.items()
        for batch in (tape if isinstance(tape, list) else ())
        if isinstance(batch, dict) and isinstance(batch.get("step"), int) and batch.get("shards")
    ]
    recorded = {row["rank"] for row in rows}
    rows += [row for row in _of_frames(window, ranks) if row["rank"] not in recorded]
    if not rows:
        return None
    last_step = max(row["step"] for row in rows) if breach_step is None else breach_step
    rows = [row for row in rows if last_step - BEFORE <= row["step"] <= last_step]
    rows.sort(key=lambda row: (row["attempt"], row["step"], row["rank"]))
    return {"breach_step": breach_step, "steps": rows, "shards": _summary(rows)}


def _of_frames(window: Frames, ranks: Mapping[int, RankView]) -> Iterable[Row]:
    for names, frame in window:
        values = dict(zip(names, frame.values, strict=False))
        number = values.get("batch_shard")
        if number is None:
            continue
        view = ranks.get(frame.rank)
        shard_names = {} if view is None else view.status.shards
        shard = "several shards" if number < 0 else f"shard number {number:.0f}"
        yield {
            "rank": frame.rank,
            "attempt": frame.attempt,
            "step": frame.step,
            "fingerprint": values.get("batch_fingerprint"),
            "shards": [
                {
                    "shard": str(shard_names.get(f"{number:.0f}", shard)),
                    "offset": values.get("batch_offset"),
                }
            ],
        }


def _summary(rows: Sequence[Row]) -> dict[str, str]:
    """Return the steps of each shard; shards of the newest step come first."""
    steps: dict[str, dict[int, set[int]]] = {}
    for row in reversed(rows):
        for origin in row["shards"]:
            by_attempt = steps.setdefault(str(origin["shard"]), {})
            by_attempt.setdefault(row["attempt"], set()).add(row["step"])
    summary = {
        shard: ", ".join(
            _span(attempt, shard_steps) for attempt, shard_steps in sorted(by_attempt.items())
        )
        for shard, by_attempt in list(steps.items())[:NAMED]
    }
    if len(steps) > NAMED:
        summary["more"] = f"{len(steps) - NAMED} shards"
    return summary


def _span(attempt: int, steps: set[int]) -> str:
    first, last = min(steps), max(steps)
    text = f"step {first}" if first == last else f"steps {first} to {last}"
    return text + (f" of attempt {attempt}" if attempt else "")


_log = logging.getLogger(__name__)

T = TypeVar("T")

Window = Sequence[tuple[Sequence[str], Frame]]  # names of the values, and the frame

LOOP_S = 2.0
RESERVE_S = 15.0  # for the sources that replace a probe without an answer
PATIENCE_S = 20.0  # for a live probe to reach a step boundary
HUNG_PATIENCE_S = 2.0
HUNG_AFTER_S = 10.0
PROCESSES = 64
MANIFEST = "manifest.json"
SHARDS = "shards.json"
STANDSTILL = "standstill.json"


class Pending(Protocol):
    """A command under way."""

    def wait(self, timeout_s: float) -> Mapping[int, Any]: ...


class EvidenceSource(Protocol):
    """The part of `runtime.controller.Control` that evidence needs."""

    def send_command(
        self, verb: str, args: Payload, *, key: str, partly: bool = False
    ) -> Pending: ...
    def stop_waiting(self, pending: Any) -> None: ...
    def on_loop(self, call: Callable[[], T], timeout_s: float) -> T: ...
    def ranks(self) -> Mapping[int, RankView]: ...
    def processes(self) -> list[psutil.Process]: ...


class Evidence:
    """Collects the bundles of one run.

    Args:
        incidents: parent directory of the incidents' directories.
        marks: directory of the probe's marks and stack dumps.
        window: returns the newest frames with their names; called on the main loop.
        onset: returns the open incident; called on the main loop.
        failures: returns how the job's processes ended; called on the main loop.
        directory: working directory of the job, for the version of its code.
        logs: known log files; files that receive the job's output are found without it.
        redactor: knows the secrets of the job.

    Attributes:
        views: returns the files on an incident so far, name -> content; called on the main loop.
    """

    def __init__(
        self,
        incidents: Path,
        marks: Path,
        window: Callable[[], Window],
        *,
        directory: Path,
        onset: Callable[[], Incident | None] = lambda: None,
        failures: Callable[[], Sequence[Failure]] = tuple,
        logs: Sequence[Path] = (),
        redactor: Redactor | None = None,
    ) -> None:
        self._incidents = incidents.resolve()  # the job may have another working directory
        self._marks = marks
        self._window = window
        self._onset = onset
        self._failures = failures
        self._directory = directory
        self._logs = logs
        self._redactor = redactor or Redactor()
        self.views: Callable[[str], Mapping[str, str]] = lambda incident: {}

    def collect(
        self, job: EvidenceSource, incident: str, key: str, deadline_s: float
    ) -> BundleSummary:
        """Collect the bundle of `incident`; for the same `key` return the existing one.

        Raises:
            ActionError: it cannot be written, for instance on a full disk; no files are left.
        """
        home = self._incidents / re.sub(r"[^A-Za-z0-9_.-]", "_", incident).lstrip(".")
        try:
            files.make_directory(home)
            for manifest in sorted(home.glob(f"snapshot-*/{MANIFEST}")):
                with suppress(OSError, ValueError, KeyError, TypeError):  # not a bundle
                    if json.loads(files.read_file(manifest))["key"] == key:
                        return read_summary(manifest)
            for remnant in home.glob(".snapshot-*"):  # of a killed supervisor
                files.remove_tree(remnant)
            number = 1 + sum(1 for _ in home.glob("snapshot-*"))
            temporary = files.hidden_name(home / f"snapshot-{number}")
            files.make_directory(temporary)
        except OSError as error:
            raise _unwritable(home, error) from error
        bundle = Bundle(temporary, deadline_s, self._redactor)
        try:
            self._fill(bundle, job, incident, key)
            bundle.write_manifest(incident, key)
            manifest = temporary.rename(home / f"snapshot-{number}")
        except OSError as error:
            raise _unwritable(home, error) from error
        finally:
            files.remove_tree(temporary)
        return read_summary(manifest / MANIFEST)

    def main_stack(self, pid: int) -> str:
        """Return where the main thread of a process of the job is, "" where nobody can tell."""
        return main_stack(self._marks, pid)

    def _fill(self, bundle: Bundle, job: EvidenceSource, incident: str, key: str) -> None:
        members = job.processes()[:PROCESSES]
        bundle.text("kernel.txt", "".join(read_kernel_stack(process.pid) for process in members))
        ranks = bundle.source("ranks", lambda: dict(job.on_loop(job.ranks, LOOP_S))) or {}
        survey = RankSurvey(ranks, members)
        ended = bundle.source("failures", lambda: job.on_loop(self._failures, LOOP_S))
        if ended:
            bundle.json("failures.json", [asdict(failure) for failure in ended])
        pending = job.send_command(
            "snapshot", Payload({"directory": str(bundle.path)}), key=key, partly=True
        )
        try:
            metrics = bundle.source("metrics", lambda: job.on_loop(self._window_and_onset, LOOP_S))
            window, onset = metrics or ((), None)
            bundle.text("metrics.csv", metrics_csv(window))
            bundle.json("ranks.json", {str(rank): _plain(ranks[rank]) for rank in sorted(ranks)})
            self._environment(bundle, members)
            stands_still = survey.silent_s() > HUNG_AFTER_S
            hung = survey.has_exited() or stands_still
            answers = pending.wait(_patience_s(bundle.left_s(), hung=hung) if ranks else 0.0)
        finally:
            job.stop_waiting(pending)
        for rank in ranks:
            _confirm(bundle, rank, answers.get(rank))
        breach = onset.breach_step if onset is not None and onset.id == incident else None
        bundle.source("shards", lambda: _shards(bundle, ranks, window, breach))
        confirmed = {
            view.pid
            for rank, view in ranks.items()
            if (bundle.path / f"rank-{rank}-stacks.txt").exists()
        }
        pids = {view.pid for view in ranks.values()}
        for process in members:
            if process.pid not in confirmed:
                is_wanted = process.pid in pids or not ranks
                self._stacks(bundle, process, is_hung=is_wanted, forks=stands_still)
        if ranks and stands_still:
            bundle.source("standstill", lambda: _standstill(bundle, survey, ranks, window))
        views = bundle.source("incident", lambda: job.on_loop(lambda: self.views(incident), LOOP_S))
        for name, text in (views or {}).items():  # for people who have the bundle alone
            bundle.text(name, text)

    def _window_and_onset(self) -> tuple[Window, Incident | None]:
        return self._window(), self._onset()

    def _environment(self, bundle: Bundle, members: Sequence[psutil.Process]) -> None:
        clean = bundle.redactor
        leader = members[0].pid if members else os.getpid()
        bundle.json("environment.json", clean.environment(host.environment_of(leader)))
        rows = host.process_rows(members)
        rows = [msgspec.structs.replace(r, command=clean.command(r.command)) for r in rows]
        bundle.json("processes.json", rows)
        bundle.json("git.json", bundle.source("git", lambda: host.read_git_facts(self._directory)))
        disks = (self._incidents, Path("/dev/shm"))  # noqa: S108 - only its free space is read
        bundle.json("host.json", bundle.source("host", lambda: host.machine_facts(*disks)))
        logs = host.output_files_by_path(leader) | {str(log.resolve()): log for log in self._logs}
        for number, (name, log) in enumerate(logs.items()):
            text = bundle.source(f"log {name}", partial(host.read_tail, log))
            if text is not None:
                bundle.text(clean.text(f"log-{number}-{Path(name).name}"), text)

    def _stacks(
        self, bundle: Bundle, process: psutil.Process, *, is_hung: bool, forks: bool
    ) -> None:
        """Read stacks without the probe; only failures of `wanted` ones are reported.

        Args:
            forks: of what was forked, too: nobody works whom a signal may disturb.
        """
        forks = forks and bundle.left_s() > 2 * ANSWER_S
        readers = [partial(ask_for_stacks, process.pid, self._marks, forks=forks)]
        if is_hung and bundle.left_s() > 1.0:
            limit_s = min(PY_SPY_S, bundle.left_s())
            readers.append(partial(py_spy_dump, process.pid, limit_s))
        reasons = []
        for read in readers:
            try:
                text = read()
            except OSError as error:
                reasons.append(str(error))
            else:
                bundle.text(f"stacks-{process.pid}.txt", text)
                return
        if is_hung:
            bundle.missing(f"Python stacks of process {process.pid}", "; ".join(reasons))


def metrics_csv(window: Iterable[tuple[Sequence[str], Frame]]) -> str:
    """Return frames as CSV: step, rank, attempt, at_ns, then one column per metric.

    An absent value is empty, NaN is `nan`.
    """
    rows = list(window)
    columns = list(dict.fromkeys(name for names, _ in rows for name in names))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "rank", "attempt", "at_ns", *map(spreadsheet_cell, columns)])
    for names, frame in rows:
        values = dict(zip(names, frame.values, strict=False))
        row = (values.get(column) for column in columns)
        writer.writerow(
            [frame.step, frame.rank, frame.attempt, frame.at_ns]
            + ["" if value is None else repr(value) for value in row]
        )
    return out.getvalue()


def _confirm(bundle: Bundle, rank: int, ack: Any) -> None:
    """Keep a rank's files only if its probe confirmed that they are complete."""
    if ack is not None and ack.ok:
        for file in ("stacks.txt", "batches.json"):  # random states are numbers
            name = f"rank-{rank}-{file}"
            if (bundle.path / name).exists():
                bundle.source(name, partial(bundle.clean, name))
        return
    reason = ack.error if ack is not None else "the probe did not answer in time"
    bundle.missing(
        f"stacks, random state and batch fingerprints from the probe of rank {rank}", reason
    )
    for incomplete in bundle.path.glob(f"rank-{rank}-*"):
        incomplete.unlink(missing_ok=True)


def _shards(
    bundle: Bundle, ranks: Mapping[int, RankView], window: Window, breach: int | None
) -> None:
    tapes = {}
    for rank in ranks:
        path = bundle.path / f"rank-{rank}-batches.json"
        if path.exists():
            tapes[rank] = bundle.source(path.name, partial(_json, path))
    origins = trace_origins(tapes, ranks, window, breach)
    if origins is not None:
        bundle.json(SHARDS, origins)


def _standstill(
    bundle: Bundle, survey: RankSurvey, ranks: Mapping[int, RankView], window: Window
) -> None:
    steps: dict[int, int] = {}
    for _, frame in window:
        steps[frame.rank] = max(frame.step, steps.get(frame.rank, -1))
    names = {view.pid: f"rank-{rank}-stacks.txt" for rank, view in ranks.items()}

    def stacks_of(pid: int) -> str:
        for name in (names.get(pid, ""), f"stacks-{pid}.txt"):
            if name and (bundle.path / name).exists():
                return (bundle.path / name).read_text(errors="replace")
        return ""

    bundle.json(STANDSTILL, survey.finish(steps, stacks_of)._asdict())


def _plain(view: RankView) -> dict[str, object]:
    plain = {"pid": view.pid, "phase": view.phase, "seen_ns": view.seen_ns}
    collective = {} if view.collective is None else {"collective": view.collective._asdict()}
    return {**plain, "status": dict(view.document), **collective}


def _json(path: Path) -> Any:
    return json.loads(files.read_file(path))


def _patience_s(left_s: float, *, hung: bool) -> float:
    """Return how long to wait for probes: a process that exited never answers."""
    return min(HUNG_PATIENCE_S if hung else PATIENCE_S, max(0.0, left_s - RESERVE_S))


def _unwritable(home: Path, error: OSError) -> ActionError:
    return ActionError(
        f"cannot write the evidence bundle in {home}: {error.strerror or error}",
        retryable=True,
        no_space=error.errno in FULL,
        hint="free space on that disk, or choose another with --run-dir",
    )


class Bundle:
    """A bundle under construction.

    Args:
        path: its empty directory.
        deadline_s: time limit.
        redactor: knows the secrets of the job.

    Attributes:
        redactor: applied to all files; also records what it redacted here.
    """

    def __init__(self, path: Path, deadline_s: float, redactor: Redactor) -> None:
        self.path = path
        self.redactor = redactor.fresh()
        self._missing: list[dict[str, str]] = []
        self._end = time.monotonic() + deadline_s

    def left_s(self) -> float:
        """Return the seconds left until the deadline."""
        return max(0.0, self._end - time.monotonic())

    def missing(self, subject: str, reason: str) -> None:
        """Record what could not be read."""
        self._missing.append({"what": subject, "why": reason})

    def source(self, subject: str, get: Callable[[], T]) -> T | None:
        """Return the result of `get`; record a failure as missing."""
        try:
            return get()
        except Exception as error:  # one broken source must not cost the others
            _log.warning("evidence without %s", subject, exc_info=True)
            self.missing(subject, str(error) or type(error).__name__)
            return None

    def text(self, name: str, text: str) -> None:
        """Write and sync one file without secrets."""
        self._write(name, self.redactor.text(text))

    def json(self, name: str, document: Any) -> None:
        """Write one JSON file without secrets."""
        plain = json.loads(json.dumps(msgspec.to_builtins(document, enc_hook=str), default=str))
        self._write(name, json.dumps(self.redactor.tree(plain), indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        fd = files.create_file(self.path / name)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def clean(self, name: str) -> None:
        """Remove the secrets from a file that the probe wrote."""
        path = self.path / name
        text = files.read_file(path).decode("utf-8", "replace")
        path.unlink()
        try:
            self.json(name, json.loads(text))
        except ValueError:  # not JSON
            self.text(name, text)

    def write_manifest(self, incident: str, key: str) -> None:
        """Write the manifest of all files."""
        rows = [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(self.path.iterdir())
            if path.is_file()
        ]
        manifest = {
            "version": 1,
            "incident": incident,
            "key": key,
            "made": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "files": rows,
            "missing": self._missing,
            "redacted": self.redactor.names,
        }
        self.json(MANIFEST, manifest)


class BundleSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sealed bundle, as the audit log has it.

    Attributes:
        path: relative to the run directory. sha256: of the manifest. bytes: of all files.
        missing: what could not be read.
        standstill: why the job stands still. standstill_ranks: those that hold it up.
        shards: the steps before the first breach in which the job used each.
    """

    path: str
    sha256: str
    bytes: int
    files: Sequence[str]
    missing: Sequence[str]
    shards: Mapping[str, str] = {}
    standstill: str = ""
    standstill_ranks: Sequence[int] = ()


def read_summary(manifest: Path) -> BundleSummary:
    """Return the summary of a sealed bundle."""
    content = json.loads(files.read_file(manifest))
    size = manifest.stat().st_size + sum(file["bytes"] for file in content["files"])
    traced = manifest.parent / SHARDS
    shards = json.loads(files.read_file(traced))["shards"] if traced.exists() else {}
    still = manifest.parent / STANDSTILL
    standstill = json.loads(files.read_file(still)) if still.exists() else {}
    return BundleSummary(
        path="/".join(manifest.parent.parts[-3:]),
        sha256=_sha256(manifest),
        bytes=size,
        files=[file["name"] for file in content["files"]],
        missing=[gap["what"] for gap in content["missing"]],
        shards=shards,
        standstill=standstill.get("text", ""),
        standstill_ranks=standstill.get("ranks", ()),
    )


def _sha256(path: Path) -> str:
    with os.fdopen(files.open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
