"""Fold recordings through the live engine and collect what a policy would have done.

Policies run in `shadow` mode: the engine decides and records the runbooks that it would have run. A
recording has no heartbeats, so detectors on the clock are not evaluated; a run directory has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..catalog import load_policy
from ..core import engine
from ..core.detection import rank_monitor
from ..core.detection.rank_monitor import RankMonitor
from ..core.model.budgets import Ledger
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
from ..core.model.events import Announced, Event, Frame
from ..core.model.interfaces import Clockwork
from ..core.model.policy import HOLD, Policy
from ..core.state.run_state import State
from ..recordings.find import Source, readers
from ..recordings.table import Recording, recordings
from .playback import RUN, events_of, events_of_run
from .score import Act, Alarm, Outcome


def shadowed(name_or_path: str | Path) -> Policy:
    """Load a policy in shadow mode; one in observe mode stays in it.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    policy = load_policy(name_or_path)
    return policy if policy.mode == "observe" else replace(policy, mode="shadow")


def outcomes(
    source: Source, policies: Sequence[Policy], extra: Mapping[str, str] | None = None
) -> list[list[Outcome]]:
    """Return, for every run of a source, the outcome of each policy in turn.

    Raises:
        InputError: the source cannot be read.
    """
    if source.reader == RUN:
        return [[_of_run(source, policy) for policy in policies]]
    by_run: dict[str, list[Recording]] = {}
    for piece in recordings(readers()[source.reader].read(source.path), extra):
        by_run.setdefault(piece.run, []).append(piece)
    return [
        [_of_pieces(_name(source, run), pieces, policy) for policy in policies]
        for run, pieces in by_run.items()
    ]


def _name(source: Source, run: str) -> str:
    """Return the run's own name where a file holds several, else that of the source."""
    return f"{source.name}{run}" if run.startswith(":") else run or source.name


def _of_pieces(name: str, pieces: Sequence[Recording], policy: Policy) -> Outcome:
    outcome = Outcome(
        name, policy.name, notes=list(dict.fromkeys(n for p in pieces for n in p.notes))
    )
    names: set[str] = set()
    before, monitors = 0, list[RankMonitor]()
    for piece in pieces:
        names.update(piece.names)
        state = _fold(policy, events_of(piece), outcome, before)
        before += state.history.opened
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


def _of_run(source: Source, policy: Policy) -> Outcome:
    outcome = Outcome(source.name, policy.name)
    names: set[str] = set()
    span = [0, -1, 0]

    def observed() -> Iterator[Event]:
        for event in events_of_run(source.path):
            if isinstance(event, Announced):
                names.update(event.names)
            elif isinstance(event, Frame) and event.rank == 0:
                first = event.step if span[2] == 0 else min(span[0], event.step)
                span[:] = first, max(span[1], event.step), span[2] + 1
            yield event

    state = _fold(policy, observed(), outcome, 0)
    if span[2]:
        outcome.pieces.append((span[0], span[1], span[2]))
    return _finished(outcome, policy, names, list(state.monitors.values()))


def _finished(
    outcome: Outcome, policy: Policy, names: set[str], monitors: Sequence[RankMonitor]
) -> Outcome:
    outcome.rows = sum(count for *_, count in outcome.pieces)
    spans = [((last - first) / (n - 1), n) for first, last, n in outcome.pieces if n > 1]
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
            why = dict.fromkeys(lacking[d] for d in policy.detectors_of(rule) if d in lacking)
            outcome.unjudged[rule.id] = "; ".join(why)
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


def _fold(policy: Policy, events: Iterable[Event], outcome: Outcome, before: int) -> State:
    """Step through all events; add to the outcome. `before`: incidents of earlier pieces."""
    state, step, ledger = engine.start(policy), engine.step, Ledger()
    passed = sum(count for *_, count in outcome.pieces)
    for event in events:
        state, decisions = step(policy, state, event)
        row, before_event = passed + state.frame_count, len(outcome.alarms)
        for decision in decisions:
            if isinstance(decision, ALARMS):
                _add_alarm(decision, outcome, before, row)
            elif isinstance(decision, Suppressed):
                _add_action(decision, policy, outcome, before, row)
                _charge(decision, policy, outcome, ledger, state)
            elif isinstance(decision, RuleFired):
                rule = str(decision.rule)
                outcome.fired[rule] = outcome.fired.get(rule, 0) + 1
            elif isinstance(decision, Notified):  # after the others of its event
                new = outcome.alarms[before_event:]
                if new and decision.severity in SEVERITIES:
                    min(new, key=lambda alarm: SEVERITIES.index(alarm.severity)).notified = True
    return state


def _incident(decision: Decision, before: int) -> str:
    """Return the incident's id, numbered across the pieces of a run."""
    prefix, _, number = str(decision.incident).rpartition("-")
    return (
        f"{prefix}-{int(number) + before}"
        if before and number.isdecimal()
        else str(decision.incident)
    )


def _add_alarm(decision: Decision, outcome: Outcome, before: int, row: int) -> None:
    if decision.severity is not None:
        incident = _incident(decision, before)
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
    decision: Suppressed, policy: Policy, outcome: Outcome, before: int, row: int
) -> None:
    name = _shadowed_runbook(decision)
    if name is None:
        return
    book = policy.runbooks[name]
    outcome.actions.append(
        Act(
            decision.step,
            str(decision.severity),
            str(decision.rule),
            _incident(decision, before),
            name,
            any(action.touches_job for action in book.steps),
            any(action.destructive for action in book.steps),
            "stop" in book.verbs,
            row,
        )
    )


def _charge(
    decision: Suppressed, policy: Policy, outcome: Outcome, ledger: Ledger, state: State
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
    for kind, used in ledger.usage(policy.budgets, state.frame_count, state.at_ns).items():
        now, most = (int(part) for part in used.split("/"))
        if now:
            entry = outcome.budgets.setdefault(kind, [0, most, 0])
            entry[0] = max(entry[0], now)
