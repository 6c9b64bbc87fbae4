"""Makes the runs of a drill suite; what has ended is not made again."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .. import children
from ..canary.trial_plan import filled
from ..fault_suite.choice import Wanted
from ..store import files
from ..store.run_directory import RunDir
from .arm_run import ArmOutcome, ArmSpec, run_arm

OUTCOMES = "outcomes"
SLOWER, AT_LEAST_S = 4.0, 120.0  # than the slowest healthy run; a pause or a hang ends there


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where and how the runs are made.

    Attributes:
        directory: of the suite; `scratch` below it gets what the runs write.
        argv: the job's command, with placeholders. cwd: where it is started.
        policy: file of the policy.
        at: step of the fault. steps: of a whole run.
        jobs: runs at the same time. keep: what runs write to {out} stays.
    """

    directory: Path
    scratch: Path
    argv: Sequence[str]
    cwd: Path
    policy: Path
    at: int
    steps: int
    jobs: int
    keep: bool


def made(
    shop: Workshop, wanted: Iterable[Wanted], limit_s: float | None
) -> Iterator[tuple[Wanted, ArmOutcome, bool]]:
    """Yield each run with its outcome as it ends, and whether it was made now.

    Args:
        limit_s: after which a run is asked to end; None: never.

    Raises:
        UsageError: the job could not be started; OSError: no process or file can be made.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(shop.jobs) as pool:
        waiting = {pool.submit(_one, shop, one, limit_s, stopping): one for one in wanted}
        try:
            for future in as_completed(waiting):
                found = future.result()
                if found is not None:
                    yield waiting[future], *found
        finally:  # also where the caller stops, or was interrupted
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if not all(future.done() for future in waiting):
                children.end_all()


def _one(
    shop: Workshop, wanted: Wanted, limit_s: float | None, stopping: threading.Event
) -> tuple[ArmOutcome, bool] | None:
    """Make a run, or read what came of it before; None where the suite is stopping."""
    path = shop.directory / wanted.name
    kept = shop.directory / OUTCOMES / f"{wanted.name}.json"
    if kept.exists():
        known = json.loads(kept.read_bytes())
        outcome = ArmOutcome(RunDir.open(path), known["code"], known["seconds"], None)
        outcome.outside += known["outside"]
        return outcome, False
    if stopping.is_set():
        return None
    for left in (path, shop.scratch / wanted.name):  # of a suite that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    out = shop.scratch / wanted.name
    drill = [] if wanted.drill is None else ["--drill", f"{wanted.drill.text}@{shop.at}"]
    spec = ArmSpec(
        name=wanted.name,
        argv=filled(shop.argv, str(out), wanted.seed, shop.steps),
        cwd=shop.cwd,
        out=out,
        steps=shop.steps,
        warmup=0,
        policy=str(shop.policy),
        keep=shop.keep,
        options=["--mode", "enforce" if wanted.acting else "observe", *drill],
        limit_s=limit_s,
    )
    outcome = run_arm(spec, shop.directory, os.environ)
    if stopping.is_set():
        return None
    about = {"code": outcome.code, "seconds": outcome.seconds, "outside": outcome.outside}
    kept.parent.mkdir(exist_ok=True)
    files.replace(kept, json.dumps(about).encode(), durable=False)
    return outcome, True


def limit_of(seconds: Iterable[float]) -> float:
    """Return after how long a run with a fault is asked to end, by the times of healthy ones."""
    return max(AT_LEAST_S, SLOWER * max(seconds, default=0.0))
