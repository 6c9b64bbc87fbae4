"""Mutation testing: run every mutant of a file until one of its scenarios fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from ..catalog.forms.scenario_form import ScenarioForm, count
from ..catalog.scenario_subject import Subject
from ..policytest import assertions, scenario_runner, suite
from .mutants import Mutant, mutants

LEAST_S = 4.0  # of work per process; below that a process costs more than it saves


@dataclass(frozen=True, slots=True)
class MutationReport:
    """The mutants of a file, and those that no scenario detected."""

    total: int
    survivors: tuple[tuple[str, str], ...]  # (file:line:col, what was changed)


def run(
    path: Path, jobs: int = 0, progress: Callable[[int, int], None] = lambda done, total: None
) -> MutationReport:
    """Run every mutant of a file.

    Args:
        jobs: processes; 0 for as many as are useful.
        progress: called with how many mutants are done, of how many.

    Raises:
        PolicyErrors, InputError: as `suite.load`.
    """
    subject = suite.load(path)
    found = mutants(subject)
    start = time.perf_counter()
    suite.run(subject)
    work_s = (time.perf_counter() - start) * len(found)
    jobs = jobs or max(1, min(_cores(), int(work_s / LEAST_S)))
    if jobs <= 1:
        alive = _undetected(subject, found, range(len(found)), progress)
    else:
        parts = [range(start, len(found), jobs * 4) for start in range(jobs * 4)]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            alive, done = [], 0
            for part, left in zip(
                parts, pool.map(_part, [str(path)] * len(parts), parts), strict=True
            ):
                alive += left
                done += len(part)
                progress(done, len(found))
    survivors = tuple((found[i].where, found[i].what) for i in sorted(alive))
    return MutationReport(len(found), survivors)


def _part(path: str, part: Sequence[int]) -> list[int]:
    subject = suite.load(Path(path))
    return _undetected(subject, mutants(subject), part, lambda done, total: None)


def _undetected(
    subject: Subject,
    found: Sequence[Mutant],
    part: Sequence[int],
    progress: Callable[[int, int], None],
) -> list[int]:
    scenarios = sorted((form for form, _ in subject.scenarios), key=_frames)
    alive = []
    for done, i in enumerate(part):
        progress(done, len(part))
        by = _detected_by(subject, found[i], scenarios)
        if by is None:
            alive.append(i)
        else:  # the same scenario probably detects the next mutants
            scenarios.insert(0, scenarios.pop(by))
    return alive


def _frames(form: ScenarioForm) -> int:
    return max(map(count, form.series.values()), default=0)


def _detected_by(subject: Subject, mutant: Mutant, scenarios: Sequence[ScenarioForm]) -> int | None:
    """Return the index of a scenario that fails under the mutant, None when all pass."""
    policy = mutant.build()
    for i, form in enumerate(scenarios):
        if mutant.metrics and mutant.metrics.isdisjoint(set().union(form.series, *form.sequels)):
            continue  # it cannot differ in this scenario
        try:
            result = scenario_runner.run(policy, form)
        except Exception:  # the mutant does not run at all
            return i
        if assertions.failures(form, result, subject.names):
            return i
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
