"""Fold recordings through the live engine and collect what a policy would have done.

Policies run in `shadow` mode: the engine decides and records the runbooks that it would have run. A
recording has no heartbeats, so detectors on the clock are not evaluated; a run directory has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TypeVar

from ..catalog import load_policy
from ..core import engine, rank_monitor
from ..core.model.decisions import (
    SEVERITIES,
    Decision,
    IncidentOpened,
    IncidentRaised,
    Notified,
    RuleFired,
    RuleGrew,
    RuleJoined,
    Suppressed,
)
from ..core.model.events import (
    Announced,
    Event,
    Exited,
    Finished,
    Frame,
    Launched,
    OperatorCommand,
    Tick,
)
from ..core.model.interfaces import Clockwork
from ..core.model.policy import HOLD, Ledger, Policy
from ..core.rank_monitor import RankMonitor
from ..core.run_state import State
from ..errors import InputError, StoreError
from ..recordings import (
    READERS,
    NoStepsError,
    Reader,
    Recording,
    Source,
    Table,
    find_recordings,
    split_into_runs,
)
from ..store import journal
from ..store.run_directory import RunDir
from .score import Alarm, BacktestOutcome, ScoredAction

TICK_ROWS = 64  # rows between two ticks; live they come once a second
SECOND = 1_000_000_000  # ns; a step, where the recording has no step time
MOST_S = 86_400.0  # a longer step time is a mistake in the recording
MISSING_AFTER = 4  # times its longest absence; project default
PID = 1
RUN = "run"  # the reader of run directories


def _claims_run(path: Path) -> bool:
    return path.is_dir() and (path / "run.json").is_file()


def _refuse_run(path: Path) -> Table:
    raise AssertionError("a journal holds events, not a table")


# Claims run directories; `events_of_run` reads them, since they hold more than a table.
RUN_READER = Reader(_claims_run, _refuse_run)


def events_of_run(path: Path) -> Iterator[Event]:
    """Yield the journal of a run, without action outcomes and operator commands.

    Those responded to the policy of that time. The effect of its actions on the metrics remains.

    Raises:
        InputError: the journal is missing or damaged.
    """
    try:
        for _, event in journal.read_journal(RunDir.open(path).journal_path):
            if not isinstance(event, (Finished, OperatorCommand)):
                yield event
    except StoreError as error:
        raise InputError(str(error), hint=error.hint) from error


def make_events(piece: Recording) -> Iterator[Event]:
    """Yield a piece of a recording as the events of a run that was launched for it.

    The clock is the step time where there is one, else one second per row. Rows keep their steps,
    however far apart: what counts rows counts these.
    """
    at_ns, pending = 1, False
    world = 1 + max(row[1] for row in piece.rows)
    time_at = piece.names.index("step_time") if "step_time" in piece.names else None
    sampled: Sampled | None = None  # created at the first tick with an absent value
    yield Launched(at_ns, PID, piece.rows[0][2])
    for rank in sorted({row[1] for row in piece.rows}):
        yield Announced(at_ns, rank, world, PID + rank, piece.names)
    for number, (step, rank, attempt, values) in enumerate(piece.rows, 1):
        at_ns += SECOND if time_at is None else _duration_ns(values[time_at])
        yield Frame(at_ns, rank, attempt, step, values)
        if number % TICK_ROWS == 0:
            pending = True
            if sampled is None and None in values:
                sampled = Sampled(piece, number - 1)
        if (sampled is None or sampled.is_complete(number, values)) and pending:
            pending = False
            yield Tick(at_ns)
    yield Exited(at_ns, 0)


def _duration_ns(seconds: float | None) -> int:
    """Return a step time in nanoseconds; an implausible value counts as one second."""
    is_plausible = seconds is not None and 0.0 <= seconds <= MOST_S
    return int(seconds * SECOND) if is_plausible and seconds is not None else SECOND


class Sampled:
    """Separates a column that is logged every few rows from one that went missing.

    Ticks are placed at rows that hold every column except the missing ones. A column is missing
    once it was absent for MISSING_AFTER times its longest gap so far.
    """

    def __init__(self, piece: Recording, row_count: int) -> None:
        """Process the first `seen` rows."""
        columns = zip(*(row[3] for row in piece.rows), strict=True)
        self.gaps = {j: 0 for j, column in enumerate(columns) if None in column}
        self.seen = dict.fromkeys(self.gaps, 0)
        for number, row in enumerate(piece.rows[:row_count], 1):
            self.is_complete(number, row[3])

    def is_complete(self, number: int, values: Sequence[float | None]) -> bool:
        """Process a row; return whether it holds all columns but the missing ones."""
        is_complete_row = True
        for j, gap in self.gaps.items():
            since = number - self.seen[j]
            if values[j] is not None:
                if self.seen[j]:
                    self.gaps[j] = max(gap, since)
                self.seen[j] = number
            elif not 0 < gap * MISSING_AFTER < since:
                is_complete_row = False
        return is_complete_row


def load_in_shadow_mode(name_or_path: str | Path) -> Policy:
    """Load a policy in shadow mode; one in observe mode stays in it.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    policy = load_policy(name_or_path)
    return policy if policy.mode == "observe" else replace(policy, mode="shadow")


def backtest_source(
    source: Source, policies: Sequence[Policy], extra: Mapping[str, str] | None = None
) -> list[list[BacktestOutcome]]:
    """Return, for every run of a source, the outcome of each policy in turn.

    Raises:
        InputError: the source cannot be read.
    """
    if source.reader == RUN:
        return [[_of_run(source, policy) for policy in policies]]
    by_run: dict[str, list[Recording]] = {}
    for piece in split_into_runs(READERS[source.reader].read(source.path), extra):
        by_run.setdefault(piece.run, []).append(piece)
    return [
        [_of_pieces(_name(source, run), pieces, policy) for policy in policies]
        for run, pieces in by_run.items()
    ]


def _name(source: Source, run: str) -> str:
    """Return the run's own name where a file holds several, else that of the source."""
    return f"{source.name}{run}" if run.startswith(":") else run or source.name


def _of_pieces(name: str, pieces: Sequence[Recording], policy: Policy) -> BacktestOutcome:
    outcome = BacktestOutcome(
        name, policy.name, notes=list(dict.fromkeys(n for p in pieces for n in p.notes))
    )
    names: set[str] = set()
    opened_count, monitors = 0, list[RankMonitor]()
    for piece in pieces:
        names.update(piece.names)
        state = _fold(policy, make_events(piece), outcome, opened_count)
        opened_count += state.history.opened
        monitors += state.monitors.values()
        leader = min(row[1] for row in piece.rows)
        steps = [row[0] for row in piece.rows if row[1] == leader]
        outcome.pieces.append((min(steps), max(steps), len(steps)))
    outcome.no_heartbeat = [
        rule.id
        for rule in policy.rules
        if any(
            isinstance(policy.detectors[d].start(), Clockwork) for d in policy.detectors_of(rule)
        )
    ]
    return _finished(outcome, policy, names, monitors)


def _of_run(source: Source, policy: Policy) -> BacktestOutcome:
    outcome = BacktestOutcome(source.name, policy.name)
    names: set[str] = set()
    span = [0, -1, 0]

    def observed() -> Iterator[Event]:
        for event in events_of_run(source.path):
            if isinstance(event, Announced):
                names.update(event.names)
            elif isinstance(event, Frame) and event.rank == 0:
                first_step = event.step if span[2] == 0 else min(span[0], event.step)
                span[:] = first_step, max(span[1], event.step), span[2] + 1
            yield event

    state = _fold(policy, observed(), outcome, 0)
    if span[2]:
        outcome.pieces.append((span[0], span[1], span[2]))
    return _finished(outcome, policy, names, list(state.monitors.values()))


def _finished(
    outcome: BacktestOutcome, policy: Policy, names: set[str], monitors: Sequence[RankMonitor]
) -> BacktestOutcome:
    outcome.rows = sum(count for *_, count in outcome.pieces)
    spans = [((end - start) / (n - 1), n) for start, end, n in outcome.pieces if n > 1]
    if spans:
        outcome.spacing = max(1.0, sorted(spans)[len(spans) // 2][0])
    outcome.probation = policy.probation_steps
    for rule in policy.rules:
        if not rank_monitor.can_fire(policy, rule, names.__contains__):
            outcome.inactive.append(rule.id)
    lacking = _lacking(policy, monitors, int(outcome.spacing))
    for rule in policy.rules:
        can_fire = rank_monitor.can_fire(policy, rule, names.__contains__, lacking)
        if not can_fire and rule.id not in outcome.inactive:
            reasons = dict.fromkeys(lacking[d] for d in policy.detectors_of(rule) if d in lacking)
            outcome.unjudged[rule.id] = "; ".join(reasons)
    return outcome


def _lacking(policy: Policy, monitors: Sequence[RankMonitor], spacing: int) -> dict[str, str]:
    """Return which detectors judged nothing in any piece, and why in the longest one."""
    lacking = {}
    longest = max(monitors, key=lambda monitor: monitor.frames, default=None)
    for i, name in enumerate(policy.detectors):
        if longest and all(monitor.watches[i].lacks(spacing) for monitor in monitors):
            lacking[name] = longest.watches[i].lacks(spacing)
    return lacking


ALARMS = (IncidentOpened, IncidentRaised, RuleJoined, RuleGrew)


def _fold(
    policy: Policy, events: Iterable[Event], outcome: BacktestOutcome, opened_count: int
) -> State:
    """Step through all events; add to the outcome. `before`: incidents of earlier pieces."""
    state, step, ledger = engine.initial_state(policy), engine.step, Ledger()
    passed = sum(count for *_, count in outcome.pieces)
    for event in events:
        state, decisions = step(policy, state, event)
        row, before_event = passed + state.frame_count, len(outcome.alarms)
        for decision in decisions:
            if isinstance(decision, ALARMS):
                _add_alarm(decision, outcome, opened_count, row)
            elif isinstance(decision, Suppressed):
                _add_action(decision, policy, outcome, opened_count, row)
                _charge(decision, policy, outcome, ledger, state)
            elif isinstance(decision, RuleFired):
                rule = str(decision.rule)
                outcome.firings[rule] = outcome.firings.get(rule, 0) + 1
            elif isinstance(decision, Notified):  # after the others of its event
                new = outcome.alarms[before_event:]
                if new and decision.severity in SEVERITIES:
                    min(new, key=lambda alarm: SEVERITIES.index(alarm.severity)).notified = True
    return state


def _incident(decision: Decision, opened_count: int) -> str:
    """Return the incident's id, numbered across the pieces of a run."""
    prefix, _, number = str(decision.incident).rpartition("-")
    return (
        f"{prefix}-{int(number) + opened_count}"
        if opened_count and number.isdecimal()
        else str(decision.incident)
    )


def _add_alarm(decision: Decision, outcome: BacktestOutcome, opened_count: int, row: int) -> None:
    if decision.severity is not None:
        incident = _incident(decision, opened_count)
        outcome.alarms.append(
            Alarm(
                decision.step,
                decision.severity,
                str(decision.rule),
                incident,
                decision.WHAT,
                decision.reason,
                row,
            )
        )


def _shadowed_runbook(decision: Suppressed) -> str | None:
    """Return the runbook that did not run only because of the mode."""
    shadow = decision.cause == "mode" and decision.runbook != HOLD
    return (decision.runbook or None) if shadow else None


def _add_action(
    decision: Suppressed, policy: Policy, outcome: BacktestOutcome, opened_count: int, row: int
) -> None:
    name = _shadowed_runbook(decision)
    if name is None:
        return
    book = policy.runbooks[name]
    outcome.actions.append(
        ScoredAction(
            decision.step,
            str(decision.severity),
            str(decision.rule),
            _incident(decision, opened_count),
            name,
            any(action.touches_job for action in book.steps),
            any(action.destructive for action in book.steps),
            "stop" in book.verbs,
            row,
        )
    )


def _charge(
    decision: Suppressed, policy: Policy, outcome: BacktestOutcome, ledger: Ledger, state: State
) -> None:
    """Charge what a runbook would have cost to its budgets; count what they would have refused."""
    name = _shadowed_runbook(decision)
    if name is None:
        return
    for action in policy.runbooks[name].steps:
        kind = action.budget_class
        if kind is None:
            continue
        spent = ledger.exhausted(policy.budgets, kind, state.frame_count, state.at_ns)
        if spent is None:
            ledger.spend(kind, state.frame_count, state.at_ns)
        else:
            outcome.budgets.setdefault(spent[0], [0, spent[1].max, 0])[2] += 1
    for kind, used in ledger.used(policy.budgets, state.frame_count, state.at_ns).items():
        if used:
            entry = outcome.budgets.setdefault(kind, [0, policy.budgets[kind].max, 0])
            entry[0] = max(entry[0], used)


Part = TypeVar("Part")

LEAST_BYTES = 1 << 20  # per process; below that a process costs more than it saves

_policies: list[Policy] = []  # per worker: a policy holds closures and cannot be pickled
_extra: dict[str, str] = {}


def run_backtest(
    paths: Sequence[Path],
    policies: Sequence[str],
    extra: Mapping[str, str],
    jobs: int,
    left_out: list[str],
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> list[list[BacktestOutcome]]:
    """Return, for every run below `paths`, the outcome of each policy, in order of the paths.

    Args:
        policies: names or files.
        extra: column -> metric id, in addition to the known aliases.
        jobs: processes; 0: as many as are useful.
        left_out: files in searched folders that are no recordings are appended here.
        progress: called with how many recordings are done, of how many; on any thread.

    Raises:
        InputError: a policy or a recording cannot be read.
    """
    loaded = [
        load_in_shadow_mode(policy) for policy in policies
    ]  # a mistake is reported before the work starts
    work = find_recordings(paths, {RUN: RUN_READER})
    jobs = min(jobs or _useful_jobs(work), len(work))
    if jobs <= 1:
        _init_worker(policies, extra, loaded)
        outcomes_by_source = [
            _work(source) for source in report_parts_done(work, len(work), progress)
        ]
    else:
        outcomes_by_source = _spread(work, jobs, policies, extra, progress)
    for source, several in zip(work, outcomes_by_source, strict=True):
        if several is None:
            left_out.append(f"{source.path}: no column of steps")
    outcomes_by_run = [outcome for several in outcomes_by_source for outcome in several or ()]
    if not outcomes_by_run:
        raise InputError("no recording among these files", hint="; ".join(left_out[:3]))
    return outcomes_by_run


def _spread(
    work: Sequence[Source],
    jobs: int,
    policies: Sequence[str],
    extra: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> list[list[list[BacktestOutcome]] | None]:
    # Largest first, so that the last process does not finish long after the others.
    order = sorted(range(len(work)), key=lambda i: -_size_bytes(work[i]))
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_init_worker, initargs=(policies, extra)
    ) as pool:
        futures = {i: pool.submit(_work, work[i]) for i in order}
        completed = count(1)
        for future in futures.values():
            future.add_done_callback(lambda _: progress(next(completed), len(work)))
        try:
            return [futures[i].result() for i in range(len(work))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def report_parts_done(
    parts: Iterable[Part], total: int, progress: Callable[[int, int], None]
) -> Iterator[Part]:
    """Yield the parts of a work, and report before each, and after the last, how many are done."""
    progress(0, total)
    for completed, part in enumerate(parts, 1):
        yield part
        progress(completed, total)


def _init_worker(
    policies: Sequence[str], extra: Mapping[str, str], loaded: Sequence[Policy] | None = None
) -> None:
    if (parent := parent_process()) is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()
    _policies[:] = loaded or [load_in_shadow_mode(policy) for policy in policies]
    _extra.clear()
    _extra.update(extra)


def _end_with(parent: BaseProcess) -> None:
    """End this worker once its parent is gone: one that was killed told nobody."""
    parent.join()
    os._exit(1)


def _work(source: Source) -> list[list[BacktestOutcome]] | None:
    """Return a source's outcomes; None for a table found in a folder that has no steps."""
    try:
        return backtest_source(source, _policies, _extra)
    except NoStepsError:
        if source.named:
            raise
        return None
    except OSError as error:
        location = error.filename or source.path
        raise InputError(f"{location}: cannot be read: {error.strerror}") from error


def _useful_jobs(work: Sequence[Source]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, sum(map(_size_bytes, work)) // LEAST_BYTES))


def _size_bytes(source: Source) -> int:
    path = source.path
    files = [path] if path.is_file() else path.rglob("*")
    try:
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:  # unreadable in part; its reader reports that
        return 0
