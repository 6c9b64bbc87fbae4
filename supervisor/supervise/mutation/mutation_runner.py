"""Do the scenarios notice? Every mutant of a file is played until one scenario fails."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from ..catalog import scenario_subject as subjects
from ..catalog.document.diagnostics import Problem, Problems
from ..catalog.forms.scenario_form import ScenarioForm
from ..catalog.forms.series_notation import count
from ..catalog.scenario_subject import Subject
from ..policytest import assertions, scenario_runner
from ..policytest.scenario_result import ScenarioResult
from .mutants import Mutant, mutants

LEAST_S = 4.0  # of work for each further process; below that starting one takes longer


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario, played."""

    form: ScenarioForm
    where: str
    played: ScenarioResult
    failures: tuple[tuple[str, str], ...]  # (file:line:col, sentence)


@dataclass(frozen=True, slots=True)
class MutationReport:
    """What became of the mutants of a file."""

    total: int
    survivors: tuple[tuple[str, str], ...]  # (file:line:col, what was changed)


def load(path: Path, warnings: list[Problem] | None = None) -> Subject:
    """Read a pack or a file of tests; what is odd about its scenarios goes to `warnings`.

    Raises:
        PolicyErrors: it, or something that it names, is wrong.
        InputError: it cannot be read.
    """
    problems = Problems()
    root = subjects.read(path, problems)
    if root is None:
        problems.stop()
    assert root is not None
    sort = subjects.sort_of(root)
    if sort == subjects.TESTS:
        subject = subjects.of_tests(root, path, problems)
    else:
        subject = subjects.of_pack(root, path, problems)
    if warnings is not None:
        warnings += problems.warnings
    return subject


def run(subject: Subject) -> list[Outcome]:
    """Play all scenarios of a file."""
    found = []
    for form, node in subject.scenarios:
        played = scenario_runner.play(subject.policy, form)
        failures = []
        for failure in assertions.judge(form, played, subject.names):
            place = assertions.place(node, failure)
            where = f"{place.source.label}:{place.line}:{place.col}"
            failures.append((where, failure.message))
        where = f"{node.source.label}:{node.line}:{node.col}"
        found.append(Outcome(form, where, played, tuple(failures)))
    return found


def hunt(path: Path, jobs: int = 0) -> MutationReport:
    """Play every mutant of a file; `jobs` are processes, 0 for as many as help.

    Raises:
        PolicyErrors, InputError: as `load`.
    """
    subject = load(path)
    found = mutants(subject)
    began = time.perf_counter()
    run(subject)
    work_s = (time.perf_counter() - began) * len(found)
    jobs = jobs or max(1, min(_cores(), int(work_s / LEAST_S)))
    if jobs <= 1:
        alive = _alive(subject, found, range(len(found)))
    else:
        parts = [range(start, len(found), jobs * 4) for start in range(jobs * 4)]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            alive = [i for part in pool.map(_part, [str(path)] * len(parts), parts) for i in part]
    survivors = tuple((found[i].where, found[i].what) for i in sorted(alive))
    return MutationReport(len(found), survivors)


def _part(path: str, part: Sequence[int]) -> list[int]:
    subject = load(Path(path))
    return _alive(subject, mutants(subject), part)


def _alive(subject: Subject, found: Sequence[Mutant], part: Iterable[int]) -> list[int]:
    scenarios = sorted((form for form, _ in subject.scenarios), key=_frames)
    alive = []
    for i in part:
        by = _noticed(subject, found[i], scenarios)
        if by is None:
            alive.append(i)
        else:  # its neighbours are probably noticed by the same scenario
            scenarios.insert(0, scenarios.pop(by))
    return alive


def _frames(form: ScenarioForm) -> int:
    return max(map(count, form.series.values()), default=0)


def _metrics(form: ScenarioForm) -> set[str]:
    return {name for series in (form.series, *form.sequels) for name in series}


def _noticed(subject: Subject, mutant: Mutant, scenarios: Sequence[ScenarioForm]) -> int | None:
    """Return the index of a scenario that fails under the mutant, None when all pass."""
    policy = mutant.build()
    for i, form in enumerate(scenarios):
        if mutant.metrics and mutant.metrics.isdisjoint(_metrics(form)):
            continue  # nothing can be different in it
        try:
            played = scenario_runner.play(policy, form)
        except Exception:  # the mutant does not even run
            return i
        if assertions.judge(form, played, subject.names):
            return i
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
