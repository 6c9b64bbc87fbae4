"""Runs of a trial: one arm, started, followed and ended; and all runs of a drill suite.

An arm is a job of some hundred steps under `supervise`. It runs under a reaper (`system.Child`), so
that none of its processes outlives the gate. Nothing of an interrupted suite is made twice.

The audit log of a trial has its plan, its runs, each look, and the verdict. It is a log as that of
a run: hash-chained, so that a verdict can be cited by the number of its records and their head.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, field

from .. import system
from ..core.model.decisions import plain_json
from ..core.model.payload import Payload
from ..errors import StoreError, UsageError
from ..store import audit, files, run_records
from ..store.audit import Audit
from ..store.run_directory import RunDir
from ..system import Child
from .arms import RunCitation
from .drill_findings import Drill
from .judgement import fill_placeholders

# Sources: the environment variables of wandb, huggingface_hub, datasets, transformers, MLflow,
# neptune and ClearML, as each of them documents its offline mode.
OFFLINE = {
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
}
# What would make an arm go on with a tracked run, or count as a part of a watched job.
RESUMING = (
    *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "MLFLOW_RUN_ID", "COMET_EXPERIMENT_KEY"),
    *("NEPTUNE_CUSTOM_RUN_ID", "SUPERVISE_PROBE", "SUPERVISE_LAUNCH"),
)
POLL_S = 0.2
LEAST_S = 5.0  # a shorter time shows no CPU time per step: it is off by `POLL_S` at each end
GRACE_S = 20.0  # between two signals that ask for the end; the third one kills
FIRST_S = 1800.0  # for a job to make its first step; then it is asked to end
TAIL = 12  # lines of an arm's output that are shown where it failed
# Not by default, as a few hundred steps of one process show nothing of them, or end in the middle.
ASKED_FOR = {
    "bad_checkpoint": "a checkpoint is only read by a run that resumes",
    "blackout": "nothing happens to the job",
    "crash": "the run is not started again in a suite",
    "hang": "the run stands still until it is ended",
    "memory_creep": "growth is measured over minutes",
    "same_batch": "it needs several ranks",
}
UNATTENDED, ACTING, HEALTHY = "unattended", "acting", "healthy"
OUTCOMES = "outcomes"
INTERRUPTED = 130  # exit code after SIGINT
SLOWER, AT_LEAST_S = 4.0, 120.0  # than the slowest healthy run; a pause or a hang ends there


def arm_environment(environ: Mapping[str, str], out: Path) -> dict[str, str]:
    """Return the environment of an arm that writes to `out`."""
    inherited = {name: value for name, value in environ.items() if name not in RESUMING}
    own_variables = {"WANDB_DIR": str(out), "MLFLOW_TRACKING_URI": (out / "mlruns").as_uri()}
    return {**inherited, **OFFLINE, **own_variables}


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """What is to be run.

    Attributes:
        name: of the arm, "candidate-2"; its files are called so.
        argv: without placeholders.
        cwd: its working directory. out: where it writes, removed at its end unless `keep`.
        steps, warmup: planned length, and the steps before CPU time is measured.
        policy: file of the policy under which it runs.
        options: more options of `supervise run`, as a mode and a drill.
        limit_s: after which it is asked to end; None: never.
    """

    name: str
    argv: Sequence[str]
    cwd: Path
    out: Path
    steps: int
    warmup: int
    policy: str
    keep: bool = False
    options: Sequence[str] = ()
    limit_s: float | None = None


@dataclass(slots=True)
class ArmOutcome:
    """What came of an arm.

    Attributes:
        run: its run directory.
        code: exit code of its supervisor, which is the job's.
        seconds: from start to end.
        cpu_s: CPU seconds per step after the warm-up, None where that is too short to tell.
    """

    run: RunDir
    code: int
    seconds: float
    cpu_s: float | None


def run_arm(
    spec: ArmSpec,
    directory: Path,
    environ: Mapping[str, str],
    cancelled: Callable[[], bool] = lambda: False,
    observe: Callable[[int, float | None], None] = lambda step, loss: None,
) -> ArmOutcome:
    """Run an arm to its end, or until it goes on after its steps.

    Args:
        directory: gets the run directory `NAME` and the output `NAME.log`.
        cancelled: asked again and again; once it says so, all processes are killed.
        observe: called with the newest step and its loss.

    Raises:
        UsageError: the job could not be started.
        OSError: no process can be started, or a directory not be made.
        KeyboardInterrupt: the arm was interrupted.
    """
    path = directory / spec.name
    spec.out.mkdir(parents=True)
    env = arm_environment(environ, spec.out)
    start = time.monotonic()
    watch = ["-m", "supervise", "run", "--policy", spec.policy, "--run-dir", str(path), "-q"]
    log = directory / f"{spec.name}.log"
    with log.open("wb") as output:
        child = Child(
            [sys.executable, *watch, *spec.options, "--", *spec.argv],
            env=env,
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            follower = _Follower(spec, path, cancelled, observe)
            code = follower.follow(child)
        finally:
            child.end()
    if code == INTERRUPTED:  # Ctrl-C reaches the whole group, and perhaps an arm before us
        raise KeyboardInterrupt
    if not spec.keep:
        shutil.rmtree(spec.out, ignore_errors=True)
    try:
        run = RunDir.open(path)
    except StoreError:
        reason = last_lines(log, 1).removeprefix("supervise: ")
        raise UsageError(f"{spec.name} could not be started: {reason}") from None
    return ArmOutcome(run, code, time.monotonic() - start, follower.cpu_s)


def last_lines(log: Path, count: int = TAIL) -> str:
    """Return the last lines of what an arm printed."""
    lines = log.read_bytes()[-10_000:].decode("utf-8", "replace").rstrip().splitlines()
    return "\n".join(lines[-count:])


class _Follower:
    """Looks at an arm again and again: its step and its CPU time."""

    def __init__(
        self,
        spec: ArmSpec,
        path: Path,
        cancelled: Callable[[], bool],
        observe: Callable[[int, float | None], None],
    ) -> None:
        self._spec = spec
        self._path = path
        self._cancelled = cancelled
        self._observe = observe
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._step = -1
        self._samples: list[tuple[int, float, float]] = []  # step, CPU seconds, time: two at most
        self._asked_at = -math.inf
        self._end = math.inf if spec.limit_s is None else time.monotonic() + spec.limit_s

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds per step between the first and the last sample."""
        if len(self._samples) < 2 or self._samples[1][2] - self._samples[0][2] < LEAST_S:
            return None
        (step, cpu, _), (last_step, end, _) = self._samples
        return (end - cpu) / (last_step - step)

    def follow(self, child: Child) -> int:
        """Return the exit code once the arm has ended."""
        while True:
            try:
                code = child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if self._cancelled():
                    child.end()
                    continue
                if time.monotonic() > self._end or self._is_mute():
                    self._stop(child)
                self._look(child)
                continue
            return code if code >= 0 else 128 - code

    def _is_mute(self) -> bool:
        """Whether the job runs for long and has made no step that was seen."""
        return self._step < 0 and time.monotonic() - self._started > FIRST_S

    def _look(self, child: Child) -> None:
        job = self._job()
        if job is None:
            return
        step = self._newest_step()
        if step is None:
            return
        steps = self._count_steps(step)
        if step != self._step and steps >= self._spec.warmup:
            sample = step, _cpu_seconds(job), time.monotonic()
            self._samples = [*self._samples[:1], sample]
        self._step = step
        if steps > self._spec.steps:  # not sooner: one that ends there may still crash
            self._stop(child)

    def _job(self) -> list[psutil.Process] | None:
        """Return the processes of the job, None before there are any."""
        with suppress(OSError, ValueError, KeyError, StoreError, psutil.Error):
            launch = RunDir.open(self._path).read_json("launch.json")
            main_process = psutil.Process(int(launch["pid"]))
            return [main_process, *main_process.children(recursive=True)]
        return None

    def _newest_step(self) -> int | None:
        with suppress(OSError, ValueError, TypeError, KeyError, StoreError):
            state: Any = RunDir.open(self._path).read_json("state.json")
            step, loss = state.get("step"), state["training"]["loss"]
            if step is None or step < 0:
                return None
            self._observe(int(step), loss if isinstance(loss, float) else None)
            return int(step)
        return None

    def _count_steps(self, step: int) -> int:
        """Return how many steps were made; the first one is read once."""
        if self._first_step is None:
            with suppress(StoreError):
                row = next(run_records.read_rows(RunDir.open(self._path)), None)
                self._first_step = None if row is None else row.step
        return 0 if self._first_step is None else step + 1 - self._first_step

    def _stop(self, child: Child) -> None:
        """Ask for the end: a job without an own limit has made the steps that are needed."""
        if time.monotonic() - self._asked_at < GRACE_S:
            return
        self._asked_at = time.monotonic()
        with suppress(psutil.Error):
            for supervisor in psutil.Process(child.pid).children():
                supervisor.send_signal(signal.SIGTERM)


def _cpu_seconds(job: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in job:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a suite. `drill` is None for a healthy one; `acting`: the policy may act."""

    drill: Drill | None
    seed: int
    acting: bool

    @property
    def name(self) -> str:
        """A name for its files, another one for each run of a suite."""
        if self.drill is None:
            return f"{HEALTHY}-{self.seed}"
        safe = re.sub(r"[^A-Za-z0-9_.=]+", "-", self.drill.text)
        return f"{safe}-{self.seed}-{ACTING if self.acting else UNATTENDED}"


def default_faults(faults: Iterable[str]) -> list[str]:
    """Return the faults that a suite tries without being asked for any."""
    return [name for name in faults if name not in ASKED_FOR]


def plan_waves(
    drills: Iterable[Drill], seeds: int, healthy: int, acts: bool
) -> tuple[list[PlannedRun], list[PlannedRun], list[PlannedRun]]:
    """Return the runs in three waves.

    The healthy ones show how long a run takes, the first seed which faults cannot act on the job.

    Args:
        healthy: healthy runs, one per seed from 1 on; at least `seeds`.
        acts: whether the policy may act; then a healthy run shows false actions, too.
    """
    drills = list(drills)
    healthy_runs = [PlannedRun(None, seed, acts) for seed in range(1, max(seeds, healthy) + 1)]
    second = [PlannedRun(drill, 1, False) for drill in drills]
    third = [PlannedRun(drill, 1, True) for drill in drills] if acts else []
    for seed in range(2, seeds + 1):
        for drill in drills:
            third.append(PlannedRun(drill, seed, False))
            third += [PlannedRun(drill, seed, True)] if acts else []
    return healthy_runs, second, third


def drop_refused(refused: Mapping[str, str], planned: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs whose fault was not refused."""
    return [run for run in planned if run.drill is None or run.drill.text not in refused]


def find_clashes(drills: Iterable[Drill]) -> list[str]:
    """Return the faults whose files would be called like those of one before them."""
    names: dict[str, str] = {}
    clashing = []
    for drill in drills:
        name = PlannedRun(drill, 1, acting=False).name
        if names.setdefault(name, drill.text) != drill.text:
            clashing.append(drill.text)
    return clashing


@dataclass(frozen=True, slots=True)
class SuiteSettings:
    """Where and how the runs are made.

    Attributes:
        directory: of the suite; `scratch` below it gets what the runs write.
        argv: the job's command, with placeholders. cwd: where it is started.
        policy: file of the policy.
        fault_step: step of the fault. steps: of a whole run.
        jobs: runs at the same time. keep: what runs write to {out} stays.
    """

    directory: Path
    scratch: Path
    argv: Sequence[str]
    cwd: Path
    policy: Path
    fault_step: int
    steps: int
    jobs: int
    keep: bool


def make_runs(
    settings: SuiteSettings, planned: Iterable[PlannedRun], limit_s: float | None
) -> Iterator[tuple[PlannedRun, ArmOutcome, bool]]:
    """Yield each run with its outcome as it ends, and whether it is a new one.

    A suite that goes on makes a new one again, unless `store_outcome` kept its outcome.

    Args:
        limit_s: after which a run is asked to end; None: never.

    Raises:
        UsageError: the job could not be started; OSError: no process or file can be made.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(settings.jobs) as pool:
        waiting = {pool.submit(_run, settings, run, limit_s, stopping): run for run in planned}
        try:
            for future in as_completed(waiting):
                result = future.result()
                if result is not None:
                    yield waiting[future], *result
        finally:  # also where the caller stops, or was interrupted
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if not all(future.done() for future in waiting):
                system.end_tools()


def store_outcome(settings: SuiteSettings, run: PlannedRun, outcome: ArmOutcome) -> None:
    """Keep the outcome of a run: it is not made again. Raises StoreError."""
    about = {"code": outcome.code, "seconds": outcome.seconds}
    path = _outcome_path(settings, run)
    try:
        path.parent.mkdir(exist_ok=True)
        files.replace_file(path, json.dumps(about).encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def limit_of(seconds: Iterable[float]) -> float:
    """Return after how long a run with a fault is asked to end, by the times of healthy ones."""
    return max(AT_LEAST_S, SLOWER * max(seconds, default=0.0))


def _outcome_path(settings: SuiteSettings, run: PlannedRun) -> Path:
    return settings.directory / OUTCOMES / f"{run.name}.json"


def _run(
    settings: SuiteSettings, run: PlannedRun, limit_s: float | None, stopping: threading.Event
) -> tuple[ArmOutcome, bool] | None:
    """Make a run, or read what was kept of it; None where the suite is stopping."""
    path = settings.directory / run.name
    with suppress(OSError, ValueError, KeyError, StoreError):  # else it is made again
        previous = json.loads(_outcome_path(settings, run).read_bytes())
        outcome = ArmOutcome(RunDir.open(path), previous["code"], previous["seconds"], None)
        return outcome, False
    out = settings.scratch / run.name
    for remains in (path, out):  # of a suite that was interrupted
        shutil.rmtree(remains, ignore_errors=True)
    drill = [] if run.drill is None else ["--drill", f"{run.drill.text}@{settings.fault_step}"]
    spec = ArmSpec(
        name=run.name,
        argv=fill_placeholders(settings.argv, str(out), run.seed, settings.steps),
        cwd=settings.cwd,
        out=out,
        steps=settings.steps,
        warmup=0,
        policy=str(settings.policy),
        keep=settings.keep,
        options=["--mode", "enforce" if run.acting else "observe", *drill],
        limit_s=limit_s,
    )
    outcome = run_arm(spec, settings.directory, os.environ, stopping.is_set)
    if stopping.is_set():
        return None
    return outcome, True


VERDICT_LOG, RESULT = "canary_verdict", "suite_result"
CANARY, SUITE_LOG = "canary", "suite"  # what a trial is for; its records are called so
LOG = "audit.log"
CITED = {  # what a citation takes of a result
    VERDICT_LOG: ("verdict", "effect", "margin", "runs"),
    RESULT: ("document", "sha256", "policy", "healthy", "faults", "monitors"),
}


class TrialPolicy(Struct, frozen=True):
    """The policy of a trial; `without`: its parts that could reach others and were left out."""

    name: str
    digest: str
    without: Sequence[str]


class CanaryPlan(Struct, frozen=True):
    """`canary_plan`: what is to be compared, and how."""

    steps: int
    seeds: int
    policy: TrialPolicy
    margin: float
    alpha: float
    warmup: int


class CanaryLook(Struct, frozen=True):
    """`canary_look`: the verdict so far, and the mean of the differences."""

    verdict: str
    mean: float | None


class SuiteRun(RunCitation, frozen=True, kw_only=True):
    """`suite_run`: a run with a fault or without one."""

    exit_code: int
    seconds: float


class CanaryArm(SuiteRun, frozen=True, kw_only=True):
    """`canary_arm`: a run of one program."""

    steps: int
    cpu_s: float | None


class SuitePlan(Struct, frozen=True, kw_only=True):
    """`suite_plan`: what must be the same where a suite goes on."""

    supervise: str
    command: Sequence[str]
    cwd: str
    policy: str
    faults: Sequence[str]
    seeds: int
    healthy: int
    steps: int
    fault_step: int = field(name="at")
    metric: str
    acts: bool


class MonitorResult(Struct, frozen=True):
    """What a rule with this digest has shown; see `drill_findings.Monitor`."""

    digest: str
    delays: Mapping[str, Sequence[int]]
    leads: Mapping[str, Sequence[int]]
    false_alarms: int


class SuiteResult(Struct, frozen=True):
    """`suite_result`; faults: how many runs of each were judged."""

    document: str
    sha256: str
    policy: TrialPolicy
    healthy: int
    faults: Mapping[str, int]
    monitors: Mapping[str, MonitorResult]


class TrialLog:
    """The writer; get one from `opened`."""

    def __init__(self, log: Audit, trial: str) -> None:
        self.trial = trial
        self._log = log

    def note(self, kind: str, reason: str, data: Struct | Payload) -> None:
        """Add a record, which is on disk before this returns. Raises StoreError."""
        now = system.monotonic_ns(), system.wall_time()
        self._log.append(
            kind,
            actor="trial",
            at_ns=now[0],
            wall=now[1],
            step=-1,
            body={"reason": reason, "data": plain_json(data)},
            sync=True,
        )


@contextmanager
def open_log(path: Path, sort: str = CANARY) -> Iterator[TrialLog]:
    """Yield the log at a path, a new one or one that further trials are added to.

    Raises:
        StoreError: it cannot be written, or is the log of a run; TamperError: it was changed.
    """
    wall = system.wall_time()
    trial = f"{sort}-{wall[:19].replace('-', '').replace(':', '').replace('T', '-')}"
    trial += f"-{secrets.token_hex(3)}"
    if path.exists() and (first_record := next(iter(audit.read_audit(path)), None)) is not None:
        if not str(first_record["kind"]).startswith((f"{CANARY}_", f"{SUITE_LOG}_")):
            raise StoreError(f"{path} is the log of a run", hint="name another file")
        trial = str(first_record["run"])
    log = Audit.open(path, trial, at_ns=system.monotonic_ns(), wall=wall)
    try:
        yield TrialLog(log, trial)
    finally:
        log.close()


def cite_trial(path: Path) -> Payload:
    """Return what a record may cite of the newest trial in a log, or in the directory of one.

    Raises:
        StoreError: the log cannot be read, or has no result, or the document beside it was
            changed; TamperError: the log was changed.
    """
    log = path / LOG if path.is_dir() else path
    newest = None
    for record in audit.read_audit(log):
        if record["kind"] in (VERDICT_LOG, RESULT):
            newest = record
    if newest is None:
        hint = "name the audit.log of a drill suite or a canary trial"
        raise StoreError(f"{log} has no result of a trial", hint=hint)
    report = audit.verify_audit(log)
    data = newest["data"]
    lacking = [name for name in CITED[newest["kind"]] if name not in data]
    if lacking:
        raise StoreError(f"{log} is of another version: its result has no {lacking[0]}")
    document = log.parent / str(data.get("document", ""))
    if document.is_file() and hashlib.sha256(document.read_bytes()).hexdigest() != data["sha256"]:
        raise StoreError(f"{document} is not the one that {log} names")
    return Payload(
        {
            "file": str(log.absolute()),
            "trial": str(newest["run"]),
            "record": newest["seq"],
            "made": str(newest["wall"]),
            "result": str(newest["reason"]),
            **{name: data[name] for name in CITED[newest["kind"]]},
            "records": report.records,
            "head": report.head,
        }
    )
