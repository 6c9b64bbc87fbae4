"""Verifies checkpoints in a process of its own, pins those that are good, and evaluates them.

The loop calls none of this directly. See `retention` for the locks.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil

from .. import system
from ..core.model.checkpoint_registry import UNKNOWN, WEIGHTS_ONLY
from ..core.model.policy import Evaluate
from ..errors import StoreError
from ..store import files
from ..system import Child
from . import discovery, registry
from .registry import (
    BAD,
    COPIED,
    FOUND,
    UNVERIFIED,
    VANISHED,
    VERIFIED,
    Entry,
    Environment,
    Findings,
    RunFacts,
    predecessors,
)
from .retention import Retention

LIMIT_S = 900.0  # per checkpoint, plus one second per SLOWEST bytes; project defaults
SLOWEST = 20_000_000
# Signals that reading a damaged file may cause; others come from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
LEAST_MEMORY = 2 << 30  # of an evaluation, where it is not known what is free; project default
START_S = 60.0  # for the start of an interpreter and the import of torch, beside a busy job
LEAST_S = 30.0  # that an evaluation may take, however often the job saves; project default
END_S = 120.0  # for evaluations behind the end of the job; project default
MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
ENDS_WITH_JOB = (
    "the kernel would end the job with it where memory ends (memory.oom.group is 1); the policy's "
    "evaluate: {memory_gb: N} says how much it may take"
)
PROCESS = "the verifier", "its process"
VERDICT_STATES = {True: VERIFIED, False: BAD, None: UNVERIFIED}


@dataclass(frozen=True)
class Verdict:
    """Result of a verification.

    Attributes:
        ok: None if it could not be verified.
        problems: reasons, one sentence each.
        findings: the contents, None if it did not get so far.
        environment: of the interpreter; empty if it did not start.
    """

    ok: bool | None
    problems: tuple[str, ...] = ()
    findings: Findings | None = None
    environment: Environment = field(default_factory=Environment)


class VerifierProcess:
    """Runs the verifier in the job's interpreter, one process at a time.

    It is a process of its own because reading a damaged file may crash, hang or fill memory. It
    runs at the niceness of the calling thread and sees no accelerator, and where we are root as the
    user whom the interpreter belongs to: the job names it, and may not be root's.

    Args:
        required: some of `load`, `finite`, `optimizer`.
    """

    def __init__(self, required: Iterable[str], limit_s: float = LIMIT_S) -> None:
        self._wanted = dict.fromkeys(required, True)
        self._wanted["load"] = bool(self._wanted)
        self._limit_s = limit_s
        self._process: Child | None = None
        self._closed = self._cancelled = False
        spec = importlib.util.find_spec("supervise_offline")
        folders = spec.submodule_search_locations if spec is not None else None
        self._program = str(Path(*folders, "verify.py")) if folders else ""

    def verify(self, path: str, size: int, python: str | None, *, urgent: bool = False) -> Verdict:
        """Verify one checkpoint of `size` bytes. Blocks; never raises for its content.

        Raises:
            InterruptedError: see `cancel`.

        Args:
            python: the job's interpreter; ours if None or not executable here.
            urgent: no job is running, so the disk is free.
        """
        if python is None or not os.access(python, os.X_OK):
            python = sys.executable
        limit_s = self._limit_s + size / SLOWEST
        request = {"paths": [path], **self._wanted}
        try:
            output, error, code = self._run(
                [python, "-I", self._program], request, limit_s, urgent=urgent
            )
        except InterruptedError:  # is an OSError too
            raise
        except OSError as failed:
            return Verdict(None, (f"the verifier could not be started: {failed}",))
        except subprocess.TimeoutExpired:
            return Verdict(None, (f"the verifier took longer than {limit_s:.0f} s",))
        lines = [_answer(line) for line in output]
        environment = next((line.environment for line in lines if line.environment), Environment())
        for line in lines:
            if line.path == path:
                return Verdict(line.ok, (*line.problems, *line.unread), line.findings, environment)
        errors = [line.error for line in lines if line.error]
        ok, problem = _explain_exit(code, errors, error)
        return Verdict(ok, (problem,), None, environment)

    def evaluate(
        self, request: Mapping[str, Any], python: str | None, limit_s: float
    ) -> Evaluation:
        """Evaluate one checkpoint, see `supervise_offline.evaluation`. Blocks.

        Raises:
            InterruptedError: see `cancel`.
        """
        if python is None or not os.access(python, os.X_OK):
            python = sys.executable
        program = str(Path(self._program).with_name("evaluation.py"))
        try:
            lines, error, code = self._run(
                [python, "-I", program], request, limit_s + START_S, urgent=False
            )
        except InterruptedError:
            raise
        except OSError as failed:
            return Evaluation(reason=f"its process could not be started: {failed}")
        except subprocess.TimeoutExpired:
            return Evaluation(reason=f"it took longer than {limit_s:.0f} s, and was ended")
        try:
            return msgspec.convert(json.loads(lines[-1]), Evaluation)
        except (IndexError, ValueError):
            return Evaluation(reason=_explain_exit(code, [], error)[1].replace(*PROCESS))

    def close(self) -> None:
        """End a running verification; the waiting caller returns."""
        self._closed = True
        if (process := self._process) is not None:
            process.hang_up()

    def cancel(self) -> None:
        """Cancel the verification under way. Thread-safe."""
        process = self._process
        if process is not None and process.poll() is None:
            self._cancelled = True
            process.hang_up()

    def activity_total(self) -> float:
        """Return what was read and computed until now, 1 for 1 MB or 0.1 s of CPU. Thread-safe.

        Of the verification under way, and of this process, which copies what is good.
        """
        work_s = 0.0
        with suppress(psutil.Error, AttributeError, OSError):  # ended, or a system without counts
            work_s += psutil.Process().io_counters().write_chars / 1e6  # we read /proc for this
            if (process := self._process) is not None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    times = child.cpu_times()
                    work_s += child.io_counters().read_chars / 1e6 + 10.0 * (
                        times.user + times.system
                    )
        return work_s

    def lower_priority(self, niceness: int) -> None:
        """Set the niceness of the verification under way. Thread-safe."""
        if (process := self._process) is not None:
            with suppress(psutil.Error, OSError):  # already ended
                reaper = psutil.Process(process.pid)
                _set_niceness(reaper, niceness)  # first: later children inherit it
                for child in reaper.children(recursive=True):
                    _set_niceness(child, niceness)

    def _run(
        self, command: Sequence[str], request: Mapping[str, Any], limit_s: float, *, urgent: bool
    ) -> tuple[list[str], str, int]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SUPERVISE")}
        environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._cancelled = False
        pipe = subprocess.PIPE
        command = [*files.run_as_owner_prefix(command[0]), *command]
        process = Child(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
        self._process = process
        try:
            if self._closed:  # during the start
                process.hang_up()
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            if niceness > 0 or not urgent:  # also if `lower_priority` was called during the start
                self.lower_priority(niceness)
            out, error = process.talk(json.dumps(request).encode(), limit_s)
            if self._cancelled:
                raise InterruptedError("the verification was cancelled")
        finally:
            self._process = None
            process.end()
        texts = (data.decode("utf-8", "replace") for data in (out, error))
        return next(texts).splitlines(), next(texts), process.returncode


def _set_niceness(process: psutil.Process, niceness: int) -> None:
    """Set the niceness of all threads, and idle disk priority where the system supports it."""
    with suppress(psutil.Error, OSError):  # already ended
        for thread in process.threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)
    with suppress(psutil.Error, AttributeError, OSError):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


class _Answer(Findings, msgspec.Struct, frozen=True, kw_only=True):
    """One line of the verifier: its environment, an error, or the verdict on a path."""

    environment: Environment | None = None
    error: str = ""
    path: str = ""
    ok: bool | None = None
    problems: list[str] = []
    unread: list[str] = []

    @property
    def findings(self) -> Findings:
        return Findings(
            files=self.files,
            bytes=self.bytes,
            step=self.step,
            rng=self.rng,
            resumable=self.resumable,
        )


def _answer(line: str) -> _Answer:
    try:
        return msgspec.convert(json.loads(line), _Answer)
    except (ValueError, RecursionError):
        return _Answer()


def _explain_exit(code: int, errors: Sequence[str], error: str) -> tuple[bool | None, str]:
    """Return `ok` and a sentence for a verifier that ended without a result."""
    if errors:
        return None, errors[0]
    if -code in CRASHES:
        return False, f"reading it crashes a process: {signal.strsignal(-code)}"
    if -code == signal.SIGALRM:
        return None, "reading it came to a halt: the verifier made no progress for two minutes"
    if code < 0:
        return None, f"the verifier was killed ({signal.strsignal(-code)}), perhaps out of memory"
    last_line = (error.strip().splitlines() or ["no output"])[-1]
    return None, f"the verifier ended with exit code {code}: {last_line[:200]}"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the model in a checkpoint.

    Attributes:
        reason: why nothing is, one sentence; "" where something is.
        was, now: of the probe batch in the job, and of the rebuilt model; None: it came not so far.
        values: metrics by id. errors: one standard error of some. unmeasured: why one is absent.
        parts: `restored`, `absent`, or what failed, by part.
        artefact: SHA-256 of what the numbers depend on besides the weights; "" where unknown.
    """

    reason: str = ""
    was: float | None = None
    now: float | None = None
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    unmeasured: dict[str, str] = {}
    parts: dict[str, str] = {}
    artefact: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """Return what rules judge: the values, and whether there are any."""
        proof = {} if self.now is None else {"checkpoint_proved": float(not self.reason)}
        return {**self.values, **proof, "checkpoint_unknown": float(bool(self.reason))}


_EXAMPLES = Path(__file__).parents[1] / "_shipped" / "examples"
MICRO = (_EXAMPLES if _EXAMPLES.is_dir() else Path(__file__).parents[3] / "examples") / "micro"
HARNESS_METRICS = {"tasks": "microbench_score", "toxicity": "rtp_toxicity_prob"}
OUTPUTS = "outputs."  # beside the probe batch, by id: what the next evaluation is compared with
OUTPUTS_KEPT = 2


def evaluate_checkpoint(
    process: VerifierProcess,
    earlier: Sequence[Entry],
    entry: Entry,
    pinned: Path,
    settings: Evaluate,
    free: int | None,
    *,
    is_kept: bool = True,
    is_fatal: Callable[[], bool] | None = None,
) -> Evaluation:
    """Evaluate a verified checkpoint of a run. Blocks.

    Args:
        earlier: see `registry.predecessors`. pinned: where its copy is, while it is pinned.
        settings: with absolute paths. free: memory in bytes, None: it is not known.
        is_kept: the next evaluation is compared with this one.
        is_fatal: default `has_group_oom_kill`.
    """
    if not settings.memory_gb and (is_fatal or has_group_oom_kill)():
        return Evaluation(reason=ENDS_WITH_JOB)
    half = LEAST_MEMORY if free is None else free // 2
    facts = entry.evaluation or entry.probe_batch or {}
    stamp = entry.stamp
    own = discovery.stamp_files(entry.path) == stamp  # preferred: a pin may be dropped meanwhile
    if entry.state != VERIFIED:
        return Evaluation(reason=f"it is {entry.state}, and only a verified one is evaluated")
    if not (own or pinned.exists()):
        return Evaluation(reason=f"{entry.path} is no longer what was verified, and not pinned")
    try:
        batch, structure = _model_files(facts, pinned.parents[3])
    except _UnusableError as error:
        return Evaluation(reason=str(error))
    folder = batch.parent
    kept = [file for e in earlier if (file := folder / f"{OUTPUTS}{e.id}.pt").exists()]
    keep = folder / f"{OUTPUTS}{entry.id}.pt"
    request = {
        "checkpoint": entry.path if own else str(pinned),
        "structure": str(structure),
        "digest": facts["model"],
        "batch": str(batch),
        "value": facts["value"],
        "previous": str(kept[-1]) if kept else "",
        # Again, by hand: perhaps of other windows.
        "keep": "" if keep.exists() or not is_kept else str(keep),
        "series": re.sub(r"\d+", "#", entry.path),
        "memory": int((settings.memory_gb or 0.0) * 1e9) or half,
        **_settings_request(settings),
    }
    evaluation = process.evaluate(request, entry.python, settings.limit_s)
    for file in kept[:-OUTPUTS_KEPT]:
        with suppress(OSError):
            file.unlink()
    if own and discovery.stamp_files(entry.path) != stamp:
        if not pinned.exists():
            return Evaluation(reason=f"{entry.path} was changed while it was read")
        request["checkpoint"] = str(pinned)
        evaluation = process.evaluate(request, entry.python, settings.limit_s)
    return evaluation


def resolve_evaluate_paths(settings: Evaluate, folder: Path) -> Evaluate:
    """Return settings with absolute paths; theirs are relative to the folder.

    Tasks of a folder `micro` that there is not are the shipped ones.
    """
    replace, tasks, toxicity = msgspec.structs.replace, settings.tasks, settings.toxicity
    if tasks is not None and tasks.include == MICRO.name and not (folder / MICRO.name).exists():
        tasks = replace(tasks, include=str(MICRO))
    return replace(
        settings,
        val={name: str(folder / file) for name, file in settings.val.items()},
        tokenizer=settings.tokenizer and str(folder / settings.tokenizer),
        index=settings.index and str(folder / settings.index),
        tasks=tasks and replace(tasks, include=str(folder / tasks.include)),
        toxicity=toxicity and replace(toxicity, prompts=str(folder / toxicity.prompts)),
    )


def _settings_request(settings: Evaluate) -> dict[str, Any]:
    return {
        "val": dict(settings.val),
        "tokens": settings.tokens,
        "tokenizer": settings.tokenizer or "",
        "index": settings.index or "",
        "harness": harness_request(settings),
        "seconds": settings.limit_s,
        "reimport": settings.reimport,
    }


def harness_request(settings: Evaluate) -> dict[str, Any] | None:
    """Return how the process is started that benchmarks and toxicity need, None for neither."""
    about = {"tasks": settings.tasks, "toxicity": settings.toxicity}
    metrics = [HARNESS_METRICS[name] for name, section in about.items() if section is not None]
    python = (settings.tasks.python if settings.tasks else None) or sys.executable
    command = [python, "-m", "supervise.data.harness"]
    sections: dict[str, Any] = msgspec.to_builtins(about)
    return {"command": command, "metrics": metrics, **sections} if metrics else None


class _UnusableError(Exception):
    """A model cannot be rebuilt; why is its text."""


def _model_files(facts: Mapping[str, Any], run: Path) -> tuple[Path, Path]:
    """Return the probe batch of a checkpoint, and the structure of its model.

    Raises:
        _UnusableError: the job left none, or one that must not be read.
    """
    digest = str(facts.get("model", ""))
    if not re.fullmatch("[0-9a-f]{32}", digest):
        why = facts.get("no_model") or facts.get("why")
        why = why or "no value of a probe batch came with it; the policy needs job: {evaluate: {}}"
        raise _UnusableError(f"the job left nothing to rebuild the model from: {why}")
    batch = Path(str(facts["path"]))
    if (moved := run / batch.parent.name / batch.name).exists():
        batch = moved  # a copy of the run, or one that was moved
    structure = batch.with_name(f"structure.{digest}.pkl")
    for file in (batch, structure):
        if not file.exists():
            raise _UnusableError(f"{file} is missing, of which the model is rebuilt")
    if os.geteuid() == 0 and not _are_roots((batch, structure), run):
        raise _UnusableError(
            f"not all files in {batch.parent} are root's, as whom it would be read"
        )
    return batch, structure


def _are_roots(paths: Iterable[Path], run: Path) -> bool:
    """Whether only root can have put these files there, in the directory of the run."""
    try:
        return all(
            path.resolve().is_relative_to(run.resolve())
            and path.resolve().stat().st_uid == path.resolve().parent.stat().st_uid == 0
            for path in paths
        )
    except OSError:
        return False


def has_group_oom_kill(membership: Path = MEMBERSHIP, root: Path = CGROUPS) -> bool:
    """Whether the kernel ends our whole cgroup, or one around it, where its memory ends.

    Source: `memory.oom.group` (Documentation/admin-guide/cgroup-v2.rst).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return False
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    for group in (own, *map(str, Path(own).parents)):
        with suppress(OSError):
            if (root / group / "memory.oom.group").read_text().strip() == "1":
                return True
    return False


class CheckpointEvaluator:
    """Evaluates the newest verified checkpoint of a register, one at a time.

    One takes at most half of the time between two saves, so that a rest as long leaves each its
    turn.

    Args:
        settings: with paths relative to `cwd`.
        free_memory: in bytes, None: it is not known.
        share: of the time that may be spent evaluating; it rests for the remainder.

    Attributes:
        current: what is being evaluated, None for nothing.
    """

    def __init__(
        self,
        retention: Retention,
        cwd: Path,
        settings: Evaluate,
        free_memory: Callable[[], int | None],
        share: float,
    ) -> None:
        self._settings = resolve_evaluate_paths(settings, cwd)
        self._kept, self._free_memory = retention, free_memory
        self._share, self._rest_until_s = share, -math.inf
        self._turn_s, self._end_s = math.inf, math.inf  # of an ended job, see `finish`
        self.process = VerifierProcess(())
        self.current: Entry | None = None
        entries = retention.register.entries
        self._before = {entry.id for entry in entries if entry.state == VERIFIED}
        self._done, self._evaluated = set(self._before), set[str]()

    def evaluate_newest(self) -> bool:
        """Evaluate one; return whether there was any. Older ones that waited are left out."""
        with self._kept.lock:
            entries = [*self._kept.register.entries]
            first_steps = dict(self._kept.register.first_steps)
        waiting = [e for e in entries if e.state == VERIFIED and e.id not in self._done]
        start_s = time.monotonic()
        if not waiting or start_s < self._rest_until_s or start_s >= self._end_s:
            return False
        self.current = entry = waiting[-1]
        try:
            evaluation = self._evaluate(entry, predecessors(entries, first_steps, entry), start_s)
        except InterruptedError:
            return False
        finally:
            self.current = None
        if self._kept.closed.is_set():
            return False
        end_s = time.monotonic()
        if self._end_s == math.inf:
            self._rest_until_s = end_s + (end_s - start_s) * (1.0 / self._share - 1.0)
        self._done |= {candidate.id for candidate in waiting}
        self._evaluated.add(entry.id)
        notifications = self._kept.notifications
        if len(waiting) > 1:
            labels = ", ".join(overtaken.label for overtaken in waiting[:-1])
            notifications.queue_note(f"not evaluated, since newer ones came: {labels}")
        notifications.report_evaluation(entry, evaluation.metrics, evaluation.reason)
        notifications.report_evaluation_artefact(entry, evaluation.artefact)
        notifications.report_unmeasured(entry, evaluation.unmeasured)
        return True

    def _evaluate(self, entry: Entry, earlier: Sequence[Entry], start_s: float) -> Evaluation:
        own_s = math.inf  # nothing is saved behind the end of the job
        if self._end_s == math.inf:
            own_s = max(LEAST_S, seconds_between_saves(self._kept.register.entries) / 2.0)
        limit_s = min(self._settings.limit_s, own_s, self._end_s - start_s)
        settings = msgspec.structs.replace(self._settings, limit_s=limit_s)
        pinned = self._kept.pins.data(entry)
        free = self._free_memory()
        return evaluate_checkpoint(self.process, earlier, entry, pinned, settings, free)

    def finish(self) -> None:
        """Evaluate the newest without a rest: the job has ended. Thread-safe.

        An older one that is under way has half of the time.
        """
        now_s, within_s = time.monotonic(), min(END_S, self._settings.limit_s)
        self._rest_until_s = -math.inf
        self._turn_s, self._end_s = now_s + within_s / 2.0, now_s + within_s

    def on_relaunch(self) -> None:
        """Take back `finish`: another process of the job runs. Thread-safe."""
        self._turn_s, self._end_s = math.inf, math.inf

    def awaits_newest_evaluation(self) -> bool:
        """Whether the newest waits or is under way, and has time. Thread-safe."""
        waiting = [e for e in self._kept.register.entries if e.state == VERIFIED]
        now_s, current = time.monotonic(), self.current
        if not waiting or waiting[-1].id in self._done or now_s >= self._end_s:
            return False
        if current is not None and current is not waiting[-1] and now_s >= self._turn_s:
            self.process.cancel()
        return True

    def list_missing_metrics(self) -> dict[str, list[str]]:
        """Return the ids of this run's checkpoints that were not evaluated, by `UNEVALUATED`."""
        by_reason: dict[str, list[str]] = {}
        for entry in self._kept.register.entries:
            reason = UNEVALUATED.get(entry.state)
            if entry.state == VERIFIED and entry.id in self._done:
                reason = OVERTAKEN
            if reason is not None and entry.id not in self._before | self._evaluated:
                by_reason.setdefault(reason, []).append(entry.id)
        return by_reason

    @property
    def count(self) -> int:
        """How many were evaluated."""
        return len(self._evaluated)


OVERTAKEN, TOO_LATE = "newer ones came", "the job ended first"
# Reasons by the state of an entry; one that is bad, or not the job's own, is said elsewhere.
UNEVALUATED = {
    VERIFIED: TOO_LATE,
    FOUND: "not verified",
    COPIED: "not verified",
    VANISHED: "no longer there",
}


def seconds_between_saves(entries: Sequence[Entry]) -> float:
    """Return the seconds between the two newest saves of a step; infinite for fewer.

    After a rollback a step may be saved again, behind later ones.
    """
    saves = {entry.step: datetime.fromisoformat(entry.saved) for entry in entries if entry.saved}
    newest = sorted(saves.values())[-2:]
    return (newest[-1] - newest[0]).total_seconds() if len(newest) > 1 else math.inf


def _describe(entry: Entry, verdict: Verdict) -> None:
    """Put a verdict into the register, but for the state: the checkpoint is being pinned."""
    entry.state = COPIED
    entry.problems, entry.verified = list(verdict.problems), system.wall_time()
    entry.take_findings(verdict.findings or Findings())
    if entry.resumable == WEIGHTS_ONLY and discovery.has_optimizer_alongside(entry.path):
        entry.resumable = UNKNOWN  # a set of files


class CheckpointVerifier:
    """Verifies the checkpoints of a register, one at a time, and pins the good ones.

    Args:
        required: what must hold of one, see `core.model.policy.Checkpoints`.
        facts, code, data: for manifests, see `registry.build_manifest` and `registry.hash_files`.

    Attributes:
        current: what is being verified, None for nothing.
    """

    def __init__(
        self,
        retention: Retention,
        cwd: Path,
        required: Sequence[str],
        *,
        limit_s: float = LIMIT_S,
        facts: RunFacts,
        code: Callable[[], object],
        data: Sequence[str],
    ) -> None:
        self.process = VerifierProcess(required, limit_s)
        self._kept, self._cwd, self._facts, self._data = retention, cwd, facts, data
        self._code = code
        self._notifications = retention.notifications
        self._tried: set[str] = set()
        self.current: Entry | None = None
        self._handed_over: Entry | None = None  # its copy stays for another thread

    def cancel_keeping_copy(self, before_step: int) -> None:
        """Cancel the verification under way; a copy of a checkpoint before this step stays."""
        with self._kept.lock:
            entry = self.current
            self._handed_over = (
                entry if entry is not None and entry.earliest < before_step else None
            )
        self.process.cancel()

    def release_copies(self) -> None:
        """Drop the copies that were handed over, and nobody took."""
        with self._kept.lock:
            for entry in self._kept.register.entries:
                if entry.state == COPIED:
                    self._kept.release(entry)

    def verify(self, entry: Entry, *, urgent: bool = False, awaited: bool = False) -> None:
        """Verify a complete checkpoint, and pin it if it is good.

        Args:
            urgent: the job has ended: the disk is free, and the job overwrites nothing.
            awaited: the job runs, and a rollback waits for this checkpoint.
        """
        retention = self._kept
        with retention.lock:
            self.current = entry
            link = retention.holds.acquire(entry)
        try:
            self._verify(entry, link, urgent=urgent, awaited=awaited)
        finally:
            with retention.lock:
                self.current = None
                retention.holds.release(entry)

    def _verify(self, entry: Entry, link: Path | None, *, urgent: bool, awaited: bool) -> None:
        retention = self._kept
        often = (
            entry.present
            and entry.path in retention.overwrites
            and not retention.holds.is_exclusive(entry)
        )
        try:
            copy = self._copy(entry) if (often and not urgent) or entry.state == COPIED else None
        except (StoreError, InterruptedError):
            return  # overwritten during the copy
        with retention.lock:
            if entry.state not in (FOUND, COPIED):
                return
            path, seen = entry.path, entry.stamp
        link = link if copy is None else None
        source = str(copy or link or path)
        try:
            verdict = self.process.verify(
                source, entry.bytes, entry.python, urgent=urgent or awaited
            )
        except InterruptedError:
            with retention.lock:
                if entry is not self._handed_over:
                    retention.release(entry)
            return
        unread = verdict.ok is None and verdict.findings is None and entry.id not in self._tried
        with retention.lock:
            if retention.closed.is_set():
                return
            changed = discovery.stamp_files(path) != seen
            linked = copy is not None and retention.link and discovery.stamp_files(source) != seen
            if link is None:
                failed = linked or (changed and (copy is None or not verdict.ok))
            else:  # the job may have been adding files to a directory
                failed = changed and not verdict.ok and len(seen) > 1
                failed = failed or not retention.holds.is_intact(entry, seen)
            if failed:
                retention.release(entry, overwritten=True)  # it may have been read half written
                return
            if unread:  # out of memory or time: a second try may succeed
                self._tried.add(entry.id)
            if unread or entry.state not in (FOUND, COPIED):
                retention.release(entry)
                return
            _describe(entry, verdict)
        if verdict.ok and not self._pin(entry, verdict.environment, link, copied=copy is not None):
            return
        with retention.lock:
            lost = (now := discovery.stamp_files(path)) != seen and not entry.pinned
            lost = lost and (verdict.ok is True or link is None)
            if lost or entry.state != COPIED:
                retention.release(entry, overwritten=lost)
                return
            entry.state = VERDICT_STATES[verdict.ok]
            retention.overwrites.on_verdict(path, overwritten=now not in (seen, None))
            retention.write()  # before the report: an adopting supervisor must know it too
            self._notifications.report_verdict(entry, verdict.ok)
        if copy is not None and not verdict.ok:
            retention.pins.drop(entry)

    def _copy(self, entry: Entry) -> Path | None:
        """Copy an entry before its verification; None: it must be verified in place.

        From the first copied byte on, the next save is another entry.

        Raises:
            StoreError: it was overwritten meanwhile. InterruptedError: see `PinStore.copy`.
        """
        retention = self._kept
        try:
            with retention.disk:
                if entry.state == COPIED and (copy := retention.pins.unverified(entry)) is not None:
                    return copy  # handed over
                if not retention.has_room(entry):
                    return None
                with retention.lock:
                    entry.state = COPIED if entry.state == FOUND else entry.state
                return retention.pins.copy(entry)
        except (StoreError, OSError) as error:
            with retention.lock:
                retention.release(entry, overwritten=isinstance(error, StoreError))
            if isinstance(error, (StoreError, InterruptedError)):
                raise
            if entry.state == FOUND:
                self._notifications.queue_note(f"checkpoints cannot be pinned: {error}", once="pin")
            return None

    def _pin(
        self, entry: Entry, environment: Environment, link: Path | None, *, copied: bool
    ) -> bool:
        """Pin a good checkpoint. False: it changed or there was no time; verify it again.

        A good checkpoint that cannot be pinned stays good until the job changes its files.

        Args:
            link: path of its hold, if held. copied: a copy was verified; it becomes the pin.
        """
        retention = self._kept
        exclusive = link is not None and retention.holds.is_exclusive(entry)  # no copy is needed
        try:
            with retention.disk:
                if not (copied or exclusive or retention.has_room(entry)):
                    return True
                if copied:
                    retention.pins.commit_staged_copy(entry)
                else:
                    retention.pins.pin(entry, link, link=exclusive)
                with retention.lock:
                    entry.pinned = True
                inputs = registry.hash_files(self._data, self._cwd)
                for name in (name for name, sha in inputs.items() if sha is None):
                    self._notifications.queue_note(
                        f"job.manifest: {name} cannot be read below {self._cwd}: the manifests of "
                        "this run's checkpoints lack its hash",
                        once=f"manifest {name}",
                    )
                content = registry.build_manifest(
                    entry, self._facts, self._code(), environment, inputs
                )
                text = json.dumps(msgspec.to_builtins(content, enc_hook=str), indent=1) + "\n"
                path = retention.pins.folder(entry) / "manifest.json"
                files.replace_file(path, text.encode(), durable=True)
        except (StoreError, InterruptedError) as error:
            with retention.lock:
                retention.release(entry, overwritten=isinstance(error, StoreError))
            return False
        except OSError as error:
            self._notifications.queue_note(f"checkpoints cannot be pinned: {error}", once="pin")
        return True

    def retest_newest_pin(self) -> None:
        """Verify the newest pinned copy again, as a test of a restore."""
        retention = self._kept
        with retention.lock:
            pinned = [e for e in retention.register.entries if e.pinned and e.state == VERIFIED]
        if not pinned:
            return
        entry = pinned[-1]
        try:
            verdict = self.process.verify(
                str(retention.pins.data(entry)), entry.bytes, entry.python
            )
        except InterruptedError:
            return
        found_files = {} if verdict.findings is None else verdict.findings.files
        digests = {name: file.sha256 for name, file in found_files.items()}
        with retention.lock:
            if retention.closed.is_set() or not entry.pinned:
                return
            if verdict.ok is False or (digests and digests != entry.hashes):
                problems = verdict.problems or ("its files are not those that were verified",)
                entry.state = BAD
                entry.problems = [f"the pinned copy: {problem}" for problem in problems]
            elif verdict.ok:
                entry.verified = system.wall_time()
            retention.write()
            if entry.state == BAD:
                self._notifications.report_bad(entry)
