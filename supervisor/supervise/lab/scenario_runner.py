"""Scenarios of a pack or a file of tests: load them, run them, report what failed and where.

Run a scenario: the live engine on scripted metrics instead of a job.

The clock advances by the scenario's frames, with a tick every second. Every intent is performed on
a `FakeJob` and its outcome returns as `Finished` after `delay`. A crash drops the engine's state
and replays the events, as a restarted supervisor does; the decisions must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..catalog import scenario_subject as subjects
from ..catalog.diagnostics import Problem, Problems
from ..catalog.scenario_subject import Subject
from ..catalog.scenarios import PIECE, Injection, Scenario
from ..core import approvals, engine, runbook_runner, withdrawal
from ..core.model import state_machine
from ..core.model.action import Action
from ..core.model.decisions import ActionOrder, ActionPlanned, ApprovalRequested, Decision
from ..core.model.events import (
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    Launched,
    Notice,
    OperatorCommand,
    Tick,
)
from ..core.model.payload import Json, Payload
from ..core.model.policy import Policy
from ..core.run_state import State
from ..errors import ActionError
from . import assertions
from .assertions import ScenarioResult, TransitionCoverage
from .fake_job import FakeJob

Columns = Mapping[str, Sequence[float | None]]


def parse_series(series: str) -> list[float | None]:
    """Return the samples of a series; None is absent.

    Raises:
        ValueError: a piece cannot be parsed; the loader rejects such text before.
    """
    samples: list[float | None] = []
    for piece in series.split():
        match = PIECE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r}: invalid piece of a series")
        literal, start, operator, change, times = match.groups()
        count = int(times or 1)
        if literal == "_":
            samples += [None] * count
        elif literal is not None:
            samples += [float(literal)] * count
        elif operator == "*":
            samples += [_geometric(float(start), float(change), i) for i in range(count)]
        else:
            slope = float(change or 0.0) * (-1.0 if operator == "-" else 1.0)
            samples += [float(start) + i * slope for i in range(count)]
    return samples


def _geometric(start: float, factor: float, times: int) -> float:
    try:
        return float(start * factor**times)
    except OverflowError:
        return start * float("inf")


class MetricSeries:
    """The series of a scenario: the first set, then one after each rollback.

    Attributes:
        names: ids of the metrics, in the order in which they are announced.
    """

    def __init__(
        self, series: Mapping[str, str], sequels: Sequence[Mapping[str, str]] = ()
    ) -> None:
        self._first: Columns = {name: parse_series(text) for name, text in series.items()}
        self._sequels: list[Columns] = [
            {name: parse_series(text) for name, text in sequel.items()} for sequel in sequels
        ]
        self.names = tuple(dict.fromkeys([*self._first, *(n for s in self._sequels for n in s)]))
        self._now: Columns = self._first
        self._at = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether all samples were used."""
        return all(self._at >= len(column) for column in self._now.values())

    def next_sample(self, step: int) -> list[float | None]:
        """Return the next sample of every metric.

        After a rollback, a metric without a sequel repeats its value of this `step`.
        """
        at_ns, self._at = self._at, self._at + 1
        events = []
        for name in self.names:
            column = self._now.get(name)
            if column is None:
                column, index = self._first.get(name, ()), step
            else:
                index = at_ns
            events.append(column[index] if 0 <= index < len(column) else None)
        return events

    def rolled_back(self, times: int) -> None:
        """Switch to the series after the `times`-th rollback, if there is one."""
        if self._sequels:
            self._now, self._at = self._sequels[min(times, len(self._sequels)) - 1], 0


RATE, SKIPPED, CLIP = "learning_rate", "update_skipped", "clip_bound"  # changed by our own actions
NAN = float("nan")
SECOND = 1_000_000_000  # ns
FOREVER = 1 << 60
MAX_FRAMES = 1_000_000  # bounds sequels that never stop rolling back


def run_scenario(policy: Policy, form: Scenario) -> ScenarioResult:
    """Run a scenario under a policy; the same arguments give the same result."""
    return ScenarioRunner(policy, form).run()


def delivered_notice(at_ns: int, name: str) -> Notice:
    """Return that a request has reached people."""
    return Notice(at_ns, approvals.DELIVERED, f"{name} was delivered", data=Payload({"id": name}))


class ScenarioRunner:
    """One scenario in progress."""

    def __init__(self, policy: Policy, form: Scenario) -> None:
        self.form = form
        self.table = TransitionCoverage(policy.machine or state_machine.DEFAULT_TRANSITIONS)
        self.policy = replace(policy, machine=self.table)
        self.track = MetricSeries(form.series, form.sequels)
        self.job = FakeJob(policy.savepoints, form.ranks)
        self.state: State = engine.initial_state(self.policy)
        self.result = ScenarioResult()
        self.events: list[Event] = []
        self.now_ns, self.index, self.rollbacks, self.launches = 0, 0, 0, 1
        self.pid = 1
        self.frame_ns = round(form.every * SECOND)
        self.delay_ns = round(form.delay * SECOND)
        self.pending: tuple[int, Action, ActionOrder] | None = None
        self.rngs = [random.Random(form.seed)]
        self.rngs += [random.Random(f"{form.seed}/{rank}") for rank in range(1, form.ranks)]
        self.last_beat_ns = [0] * form.ranks
        self.next_seq = [0] * form.ranks  # frames sent, by rank
        self.frames_to_lose = self.gap = 0
        self.crash: str | None = None
        self.failing: dict[tuple[str, bool], int] = {}  # (verb, outcome lost) -> times
        self.nan_until: dict[str, int] = {}  # metric -> frame up to which it is NaN
        self.phase, self.phase_until = "step", FOREVER
        self.silent_until: dict[int, int] = {}
        self.injections: dict[int, list[Injection]] = {}
        for inject in form.inject:
            self.injections.setdefault(inject.at, []).append(inject)

    def run(self) -> ScenarioResult:
        self.send(Launched(0, self.pid, 0))
        self.announce()
        while not self.track.is_exhausted and self.index < MAX_FRAMES and self.alive():
            self.step()
        if self.pending is not None and self.alive():
            self.advance(self.now_ns + self.delay_ns + 1)
        monitor = next(iter(self.state.monitors.values()), None)
        rules = enumerate(self.policy.rules)
        self.result.active = {
            rule.id for r, rule in rules if monitor is not None and monitor.has_needed_metrics(r)
        }
        self.result.visited = self.table.seen
        self.result.spent[self.result.last_frame] = self.usage()
        return self.result

    def alive(self) -> bool:
        return self.job.returncode is None

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Advance by one frame interval and send the frames of all ranks."""
        for injection in self.injections.get(self.index, ()):
            apply_injection(self, injection)
        self.advance(self.now_ns + self.frame_ns)
        while self.job.paused_until is not None and self.alive():
            self.tick()
            self.advance(self.now_ns + SECOND)
            if self.job.paused_until is not None and self.now_ns >= self.job.paused_until:
                self.job.paused_until = None  # the lease ran out
                self.send(Notice(self.now_ns, withdrawal.ENDED, "the job goes on by itself"))
        if self.alive():
            self.send_frames()
            self.tick()
        self.result.states.append(self.state.machine)
        if any(e.budget is not None and e.at == self.index for e in self.form.expect):
            self.result.spent[self.index] = self.usage()
        self.index += 1

    def advance(self, target: int) -> None:
        """Advance the clock to `target`; send the ticks and outcomes that are due before."""
        while self.now_ns < target and self.alive():
            due = FOREVER if self.pending is None else self.pending[0]
            second = (self.now_ns // SECOND + 1) * SECOND
            self.now_ns = min(second, due, target)
            self.deliver()
            if self.now_ns < target:
                self.tick()

    def tick(self) -> None:
        if self.now_ns % SECOND or not self.alive():
            return
        phase = self.phase if self.job.paused_until is None else "paused"
        reporting = [r for r in range(self.form.ranks) if self.index >= self.silent_until.get(r, 0)]
        beats = tuple(Beat(rank, self.last_beat_ns[rank], phase) for rank in reporting)
        self.send(Tick(self.now_ns, beats))

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def announce(self) -> None:
        for rank in range(self.form.ranks):
            names = self.track.names
            self.send(Announced(self.now_ns, rank, self.form.ranks, self.pid + rank, names))

    def send_frames(self) -> None:
        if self.index >= self.phase_until:
            self.phase, self.phase_until = "step", FOREVER
        step, attempt = self.job.next_step, self.job.attempt
        base = self.track.next_sample(step)
        rate, skipping = self.job.lr_factor(), self.job.skipping > 0
        rank_values = list(self.values_of_ranks(base, rate, skipping))
        self.job.finish_step()
        if all(value is None for value in base):
            return
        if self.frames_to_lose:
            self.frames_to_lose -= 1
            self.gap += 1
            self.last_beat_ns = [self.now_ns] * self.form.ranks
            return
        for rank, values in enumerate(rank_values):
            if self.index < self.silent_until.get(rank, 0):
                continue
            if self.gap:
                self.send(Gap(self.now_ns, rank, self.next_seq[rank], self.gap))
                self.next_seq[rank] += self.gap
            self.last_beat_ns[rank] = self.now_ns
            self.next_seq[rank] += 1
            if self.alive():
                self.send(Frame(self.now_ns, rank, attempt, step, values))
        self.gap = 0

    def values_of_ranks(
        self, base: list[float | None], rate: float, skipping: bool
    ) -> Iterator[tuple[float | None, ...]]:
        """Yield each rank's values: the series plus noise, changed by injections and actions."""
        noise, names = self.form.noise, self.track.names
        due = {name: self.index and not self.index % n for name, n in self.form.sampled.items()}
        for rng in self.rngs:
            values = []
            for name, mean in zip(names, base, strict=True):
                value = mean if due.get(name, True) else None
                if value is not None:
                    value = rng.gauss(value, noise.get(name, 0))
                    if self.index < self.nan_until.get(name, 0):
                        value = NAN
                    elif name == RATE:
                        self.job.rates[self.job.next_step] = value
                        limit = self.job.rate_limit
                        value = rate * (value if limit is None else min(value, limit))
                    elif name == SKIPPED and skipping:
                        value = 1.0
                    elif name == CLIP and self.job.clip_bound is not None:
                        value = self.job.clip_bound
                values.append(value)
            yield tuple(values)

    # ── events and actions ────────────────────────────────────────────────────────────────────────

    def send(self, event: Event) -> None:
        self.events.append(event)
        self.job.now_ns = self.now_ns
        self.state, decisions = engine.step(self.policy, self.state, event)
        self.result.log += [(self.index, decision) for decision in decisions]
        for decision in decisions:
            if isinstance(decision, ApprovalRequested):
                self.send(delivered_notice(self.now_ns, decision.id))
            if isinstance(decision, ActionPlanned):
                action, order = runbook_runner.awaited_action(self.state), decision.action
                self.pending = self.now_ns + self.delay_ns, action, order
        if self.crash is not None and any(d.kind == self.crash for d in decisions):
            self.crash = None
            self.restart()
        self.deliver()

    def deliver(self) -> None:
        """Perform the pending action if it is due; its outcome may start the next one."""
        if self.pending is None or self.pending[0] > self.now_ns:
            return
        _, action, order = self.pending
        self.pending, ident, verb = None, order.id, order.verb
        if self.takes_failure(verb, lost=True):
            return
        if self.takes_failure(verb, lost=False):
            self.send(
                Finished(
                    self.now_ns, ident, False, Payload({"retryable": False}), "failed on purpose"
                )
            )
            return
        try:
            result = action.perform(self.job, order.args, key=ident)
        except ActionError as error:
            self.send(
                Finished(
                    self.now_ns, ident, False, Payload({"retryable": error.retryable}), str(error)
                )
            )
            return
        except (
            Exception
        ) as error:  # a bug in an action; the live performer handles it in the same way
            text = f"internal error: {type(error).__name__}: {error}"
            self.send(Finished(self.now_ns, ident, False, Payload({"retryable": False}), text))
            return
        if self.job.rollbacks > self.rollbacks:
            self.rollbacks = self.job.rollbacks
            self.track.rolled_back(self.rollbacks)
        if self.job.launches > self.launches:
            self.launches, self.pid = self.job.launches, self.pid + 1000
            self.send(Launched(self.now_ns, self.pid, self.job.attempt))
            self.announce()
        ended = self.job.returncode
        self.send(Finished(self.now_ns, ident, True, Payload(result)))
        if ended is not None:
            self.send(Exited(self.now_ns, ended))

    def takes_failure(self, verb: str, *, lost: bool) -> bool:
        remaining = self.failing.get((verb, lost), 0)
        self.failing[verb, lost] = max(0, remaining - 1)
        return remaining > 0

    def restart(self) -> None:
        """Restart the supervisor: replay the events and compare the decisions."""
        state, again = engine.initial_state(self.policy), list[Decision]()
        for event in self.events:
            state, decisions = engine.step(self.policy, state, event)
            again += decisions
        was = [repr(decision) for _, decision in self.result.log]
        for n, (old, new) in enumerate(zip(was, map(repr, again), strict=False)):
            if old != new:
                self.result.replay_differences.append(
                    f"decision {n} was {old[:200]}, is {new[:200]}"
                )
                break
        if len(was) != len(again):
            self.result.replay_differences.append(f"{len(was)} decisions became {len(again)}")
        self.state = state

    def usage(self) -> dict[str, int]:
        """Return the intents counted by each budget now."""
        ledger, state = self.state.ledger, self.state
        used = ledger.used(self.policy.budgets, state.frame_count, state.at_ns)
        return {"all": len(ledger.spent.get("all", ())), **used}


# ── injections (`inject` in the form) ─────────────────────────────────────────────────────────────


def apply_injection(runner: ScenarioRunner, injection: Injection) -> None:
    """Apply an injection before the next frame."""
    until = FOREVER if injection.for_ is None else runner.index + injection.for_
    if injection.gap is not None:
        runner.frames_to_lose = injection.gap
    for name in injection.nan or ():
        runner.nan_until[name] = runner.index + (injection.for_ or 1)
    if injection.clock_jump is not None:
        runner.now_ns += round(injection.clock_jump * SECOND)
    if injection.phase is not None:
        runner.phase, runner.phase_until = injection.phase, until
    if injection.fail_action is not None:
        runner.failing[injection.fail_action, False] = injection.count
    if injection.lose_action is not None:
        runner.failing[injection.lose_action, True] = injection.count
    if injection.crash_after is not None:
        runner.crash = injection.crash_after
    if injection.silent_rank is not None:
        runner.silent_until[injection.silent_rank] = until
    if injection.step is not None:
        runner.job.next_step = injection.step
    if injection.checkpoint is not None:
        _checkpoint(runner, injection.checkpoint)
    if injection.probe_restart:
        runner.pid += 1000
        runner.announce()
    if injection.command is not None:
        runner.send(
            OperatorCommand(runner.now_ns, "operator", injection.command, Payload(injection.args))
        )
    if injection.notice is not None:
        runner.send(Notice(runner.now_ns, injection.notice, f"{injection.notice}, on purpose"))
    if injection.exit is not None:
        runner.job.returncode = injection.exit
        runner.send(Exited(runner.now_ns, injection.exit))


def _checkpoint(runner: ScenarioRunner, step: int) -> None:
    """Send the notice that a checkpoint of this step was verified."""
    name = f"ckpt-{step}"
    data: dict[str, Json] = {"id": name, "step": step, "attempt": runner.job.attempt}
    data |= {"path": name, "ok": True}
    runner.send(Notice(runner.now_ns, "checkpoint", f"{name} was verified", data=Payload(data)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario after its run."""

    form: Scenario
    location: str
    result: ScenarioResult
    failures: tuple[tuple[str, str], ...]  # (file:line:col, sentence)


def load_suite(path: Path, warnings: list[Problem] | None = None) -> Subject:
    """Load a pack or a file of tests; warnings about its scenarios are appended to `warnings`.

    Raises:
        PolicyErrors: it, or something that it names, is wrong.
        InputError: it cannot be read.
    """
    problems = Problems()
    root = subjects.read_subject(path, problems)
    if root is None:
        problems.raise_if_any()
    assert root is not None
    build = (
        subjects.subject_of_tests
        if subjects.file_kind(root) == subjects.TESTS
        else subjects.subject_of_pack
    )
    subject = build(root, path, problems)
    if warnings is not None:
        warnings += problems.warnings
    return subject


def run_suite(subject: Subject) -> list[Outcome]:
    """Run all scenarios of a file."""
    outcomes = []
    for form, node in subject.scenarios:
        result = run_scenario(subject.policy, form)
        failures = []
        for failure in assertions.failed_expectations(form, result, subject.names):
            location = assertions.node_of(node, failure)
            position = f"{location.source.label}:{location.line}:{location.col}"
            failures.append((position, failure.message))
        position = f"{node.source.label}:{node.line}:{node.col}"
        outcomes.append(Outcome(form, position, result, tuple(failures)))
    return outcomes


# Transitions that need a person, a command, or a second training session: no scenario makes them.
EXCLUDED = ("ask", "given_up", "session_started")


@dataclass(slots=True)
class Coverage:
    """Counts over any number of files.

    Attributes:
        rules: id -> [scenarios in which it fires, in which it could and does not].
        where: id -> file:line:col.
        moves: policy -> (state, event) -> scenarios.
        budgets: policy -> class -> scenarios in which it held an action back.
    """

    rules: dict[str, list[int]] = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    moves: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    budgets: dict[str, dict[str, int]] = field(default_factory=dict)

    def require(self, policy: Policy, *, complete: bool = True) -> None:
        """Add everything that a policy has to what should be covered.

        `whole`: also its transitions and budgets, which a pack alone does not have.
        """
        for rule in policy.rules:
            self.rules.setdefault(rule.id, [0, 0])
            self.locations[rule.id] = rule.location
        if complete:
            moves = self.moves.setdefault(policy.name, {})
            for pair in possible_transitions(policy.machine or state_machine.DEFAULT_TRANSITIONS):
                moves.setdefault(pair, 0)
            budgets = self.budgets.setdefault(policy.name, {})
            for name in policy.budgets:
                budgets.setdefault(name, 0)

    def add(self, subject: Subject, results: Iterable[ScenarioResult]) -> None:
        """Count what the scenarios of a file cover; a pack alone has rules only."""
        policy, results = subject.policy, list(results)
        is_complete = not subject.names.scope
        self.require(policy, complete=is_complete)
        for rule in policy.rules:
            counts = self.rules[rule.id]
            for result in results:
                has_fired = bool(result.changes(rule.id, "fired"))
                counts[0] += has_fired
                counts[1] += not has_fired and rule.id in result.active
        if not is_complete:
            return
        moves, budgets = self.moves[policy.name], self.budgets[policy.name]
        for pair in moves:
            moves[pair] += sum(pair in result.visited for result in results)
        for name in budgets:
            budgets[name] += sum(bool(result.suppressed(f"budget:{name}")) for result in results)

    def missing(self) -> Iterator[str]:
        """Yield what no scenario covers, a sentence each."""
        for rule, (firings, quiet) in self.rules.items():
            if not firings:
                yield f"{self.locations[rule]}: {rule} never fires"
            if not quiet:
                start = f"{self.locations[rule]}: {rule}"
                yield f"{start} never stays quiet while its metrics are present"
        for policy, moves in self.moves.items():
            for (state, event), visits in moves.items():
                if not visits:
                    yield f"{policy}: {event!r} never occurs in {state}"
        for policy, budgets in self.budgets.items():
            for name, hit in budgets.items():
                if not hit:
                    yield f"{policy}: budget {name} is never used up"

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return, per category, how many are covered of how many."""
        fired_count = sum(bool(counts[0]) for counts in self.rules.values())
        quiet = sum(bool(counts[1]) for counts in self.rules.values())
        coverage = {
            "rules fire": (fired_count, len(self.rules)),
            "rules stay quiet": (quiet, len(self.rules)),
            "moves": _covered(self.moves),
            "budgets": _covered(self.budgets),
        }
        return {name: counts for name, counts in coverage.items() if counts[1]}

    def percent(self) -> float:
        """Return the share that is covered, 0 to 100."""
        covered = sum(part[0] for part in self.parts().values())
        total = sum(part[1] for part in self.parts().values())
        return 100.0 * covered / total if total else 100.0


def _covered(table: Mapping[str, Mapping[Any, int]]) -> tuple[int, int]:
    counts = [count for row in table.values() for count in row.values()]
    return sum(map(bool, counts)), len(counts)


def possible_transitions(table: state_machine.Table) -> list[tuple[str, str]]:
    """Return every pair of state and event with a transition that a scenario can make."""
    return [
        (state, event)
        for state in state_machine.STATES
        for event in state_machine.EVENTS
        if event not in EXCLUDED
        and state != state_machine.HALTED
        and state_machine.next_state(table, state, event) is not None
    ]
