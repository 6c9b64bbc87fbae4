"""Makes the runs of a drill suite; what was kept of an interrupted one is not made again."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import system
from ..errors import StoreError, UsageError
from ..store import files
from ..store.run_directory import RunDir
from .arm_run import ArmOutcome, ArmSpec, run_arm
from .drill_findings import Drill
from .judgement import filled

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


def by_default(faults: Iterable[str]) -> list[str]:
    """Return the faults that a suite tries without being asked for any."""
    return [name for name in faults if name not in ASKED_FOR]


def waves(
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


def without_refused(refused: Mapping[str, str], planned: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs whose fault was not refused."""
    return [run for run in planned if run.drill is None or run.drill.text not in refused]


def clashes(drills: Iterable[Drill]) -> list[str]:
    """Return the faults whose files would be called like those of one before them."""
    names: dict[str, str] = {}
    clashing = []
    for drill in drills:
        name = PlannedRun(drill, 1, acting=False).name
        if names.setdefault(name, drill.text) != drill.text:
            clashing.append(drill.text)
    return clashing


OUTCOMES = "outcomes"
INTERRUPTED = 130  # exit code after SIGINT
SLOWER, AT_LEAST_S = 4.0, 120.0  # than the slowest healthy run; a pause or a hang ends there


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


def make(
    settings: SuiteSettings, planned: Iterable[PlannedRun], limit_s: float | None
) -> Iterator[tuple[PlannedRun, ArmOutcome, bool]]:
    """Yield each run with its outcome as it ends, and whether it is a new one.

    A new one is made again by a suite that goes on, unless its outcome was kept: see `keep`.

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


def keep(settings: SuiteSettings, run: PlannedRun, outcome: ArmOutcome) -> None:
    """Keep the outcome of a run: it is not made again. Raises StoreError."""
    about = {"code": outcome.code, "seconds": outcome.seconds, "outside": outcome.outside}
    path = _outcome_path(settings, run)
    try:
        path.parent.mkdir(exist_ok=True)
        files.replace(path, json.dumps(about).encode(), durable=True)
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
        outcome.outside += previous["outside"]
        return outcome, False
    out = settings.scratch / run.name
    for remains in (path, out):  # of a suite that was interrupted
        shutil.rmtree(remains, ignore_errors=True)
    drill = [] if run.drill is None else ["--drill", f"{run.drill.text}@{settings.fault_step}"]
    spec = ArmSpec(
        name=run.name,
        argv=filled(settings.argv, str(out), run.seed, settings.steps),
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
    if outcome.code == INTERRUPTED:  # Ctrl-C reaches the whole group, and perhaps a run before us
        raise UsageError(
            f"{run.name} was interrupted", hint="the same --dir goes on with the suite"
        )
    return outcome, True
