"""Play a scenario: the engine that runs live, fed with a story instead of a job.

Time is made of the scenario's own frames and of a tick a second. Every intent is performed on a
`FakeJob` and comes back as `Finished` after `delay`. A crash drops the engine's state and folds the
events again, as a supervisor that was killed does; it must come to the same decisions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..catalog.forms.scenario_form import InjectForm, ScenarioForm
from ..core import engine
from ..core.incidents import pausing
from ..core.model import state_machine
from ..core.model.action import Action
from ..core.model.decisions import Decision
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
from ..core.model.policy import Policy
from ..core.runbooks import steps
from ..core.state.run_state import State
from ..errors import ActionError
from .fake_job import FakeJob
from .scenario_result import ScenarioResult, TransitionCoverage
from .series_samples import Track

RATE, SKIPPED, CLIP = "learning_rate", "update_skipped", "clip_bound"  # our own actions show here
NAN = float("nan")
SECOND = 1_000_000_000  # ns
FOREVER = 1 << 60
MAX_FRAMES = 1_000_000  # sequels that roll back for ever end here


def play(policy: Policy, form: ScenarioForm) -> ScenarioResult:
    """Play a scenario under a policy; the same arguments give the same story."""
    return ScenarioRunner(policy, form).play()


class ScenarioRunner:
    """One scenario under way."""

    def __init__(self, policy: Policy, form: ScenarioForm) -> None:
        self.form = form
        self.table = TransitionCoverage(policy.machine or state_machine.DEFAULT)
        self.policy = replace(policy, machine=self.table)
        self.track = Track(form.series, form.sequels)
        self.job = FakeJob(policy.savepoints, form.ranks)
        self.state: State = engine.start(self.policy)
        self.played = ScenarioResult()
        self.events: list[Event] = []
        self.now, self.slot, self.rolled, self.launches = 0, 0, 0, 1
        self.pid = 1
        self.every = round(form.every * SECOND)
        self.delay = round(form.delay * SECOND)
        self.pending: tuple[int, str, Action, dict[str, Any]] | None = None
        self.chances = [random.Random(form.seed)]
        self.chances += [random.Random(f"{form.seed}/{rank}") for rank in range(1, form.ranks)]
        self.heard = [0] * form.ranks
        self.sums = [0] * form.ranks  # frames sent, by rank
        self.lost = self.gap = 0
        self.crash: str | None = None
        self.failing: dict[tuple[str, bool], int] = {}  # (verb, its outcome is lost) -> how often
        self.nan: dict[str, int] = {}  # metric -> frame up to which it is NaN
        self.phase, self.phase_until = "step", FOREVER
        self.silent: dict[int, int] = {}
        self.evils: dict[int, list[InjectForm]] = {}
        for inject in form.inject:
            self.evils.setdefault(inject.at, []).append(inject)

    def play(self) -> ScenarioResult:
        self.send(Launched(0, self.pid, 0))
        self.announce()
        while not self.track.over and self.slot < MAX_FRAMES and self.alive():
            self.frame()
        if self.pending is not None and self.alive():
            self.advance(self.now + self.delay + 1)
        bank = next(iter(self.state.banks.values()), None)
        rules = enumerate(self.policy.rules)
        self.played.active = {rule.id for r, rule in rules if bank is not None and bank.active(r)}
        self.played.visited = self.table.seen
        self.played.spent[self.played.last] = self.usage()
        return self.played

    def alive(self) -> bool:
        return self.job.returncode is None

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def frame(self) -> None:
        """One frame's time, and the frames of all ranks at its end."""
        for evil in self.evils.get(self.slot, ()):
            inject(self, evil)
        self.advance(self.now + self.every)
        while self.job.paused_until is not None and self.alive():
            self.tick()
            self.advance(self.now + SECOND)
            if self.job.paused_until is not None and self.now >= self.job.paused_until:
                self.job.paused_until = None  # it may be renewed no longer
                self.send(Notice(self.now, pausing.ENDED, "the job goes on by itself"))
        if self.alive():
            self.frames()
            self.tick()
        self.played.states.append(self.state.machine)
        if any(e.budget is not None and e.at == self.slot for e in self.form.expect):
            self.played.spent[self.slot] = self.usage()
        self.slot += 1

    def advance(self, target: int) -> None:
        """Let time pass up to `target`, with the ticks and outcomes before it."""
        while self.now < target and self.alive():
            due = FOREVER if self.pending is None else self.pending[0]
            second = (self.now // SECOND + 1) * SECOND
            self.now = min(second, due, target)
            self.deliver()
            if self.now < target:
                self.tick()

    def tick(self) -> None:
        if self.now % SECOND or not self.alive():
            return
        phase = self.phase if self.job.paused_until is None else "paused"
        speaking = [r for r in range(self.form.ranks) if self.slot >= self.silent.get(r, 0)]
        beats = tuple(Beat(rank, self.heard[rank], phase) for rank in speaking)
        self.send(Tick(self.now, beats))

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def announce(self) -> None:
        for rank in range(self.form.ranks):
            names = self.track.names
            self.send(Announced(self.now, rank, self.form.ranks, self.pid + rank, names))

    def frames(self) -> None:
        if self.slot >= self.phase_until:
            self.phase, self.phase_until = "step", FOREVER
        step, attempt = self.job.next_step, self.job.attempt
        base = self.track.take(step)
        rate, skipping = self.job.rate(), self.job.skipping > 0
        sent = list(self.noisy(base, rate, skipping))
        self.job.made()
        if all(value is None for value in base):
            return
        if self.lost:
            self.lost -= 1
            self.gap += 1
            self.heard = [self.now] * self.form.ranks
            return
        for rank, values in enumerate(sent):
            if self.slot < self.silent.get(rank, 0):
                continue
            if self.gap:
                self.send(Gap(self.now, rank, self.sums[rank], self.gap))
                self.sums[rank] += self.gap
            self.heard[rank] = self.now
            self.sums[rank] += 1
            if self.alive():
                self.send(Frame(self.now, rank, attempt, step, values))
        self.gap = 0

    def noisy(
        self, base: list[float | None], rate: float, skipping: bool
    ) -> Iterator[tuple[float | None, ...]]:
        """Yield each rank's values: the series, its own noise, and what actions do to them."""
        noise, names = self.form.noise, self.track.names
        for chance in self.chances:
            values = []
            for name, mean in zip(names, base, strict=True):
                value = mean
                if value is not None:
                    value = chance.gauss(value, noise.get(name, 0))
                    if self.slot < self.nan.get(name, 0):
                        value = NAN
                    elif name == RATE and rate != 1.0:
                        value *= rate
                    elif name == SKIPPED and skipping:
                        value = 1.0
                    elif name == CLIP and self.job.clip_bound is not None:
                        value = self.job.clip_bound
                values.append(value)
            yield tuple(values)

    # ── events and actions ────────────────────────────────────────────────────────────────────────

    def send(self, event: Event) -> None:
        self.events.append(event)
        self.job.now_ns = self.now
        self.state, made = engine.step(self.policy, self.state, event)
        self.played.log += [(self.slot, decision) for decision in made]
        for decision in made:
            if decision.kind == "intent":
                action = steps.awaited(self.state)
                intent = decision.data["action"]
                self.pending = (self.now + self.delay, intent["id"], action, intent)
        if self.crash is not None and any(d.kind == self.crash for d in made):
            self.crash = None
            self.restart()
        self.deliver()

    def deliver(self) -> None:
        """Perform what is due; its outcome may lead to the next action."""
        if self.pending is None or self.pending[0] > self.now:
            return
        _, ident, action, intent = self.pending
        self.pending = None
        verb = intent["verb"]
        if self.spoilt(verb, lost=True):
            return
        if self.spoilt(verb, lost=False):
            self.send(Finished(self.now, ident, False, {"retryable": False}, "failed on purpose"))
            return
        try:
            result = action.perform(self.job, intent["args"], key=ident)
        except ActionError as error:
            self.send(Finished(self.now, ident, False, {"retryable": error.retryable}, str(error)))
            return
        except Exception as error:  # a bug of ours; live, it is an outcome like any other
            text = f"internal error: {type(error).__name__}: {error}"
            self.send(Finished(self.now, ident, False, {"retryable": False}, text))
            return
        if self.job.rollbacks > self.rolled:
            self.rolled = self.job.rollbacks
            self.track.rolled_back(self.rolled)
        if self.job.launches > self.launches:
            self.launches, self.pid = self.job.launches, self.pid + 1000
            self.send(Launched(self.now, self.pid, self.job.attempt))
            self.announce()
        ended = self.job.returncode
        self.send(Finished(self.now, ident, True, result))
        if ended is not None:
            self.send(Exited(self.now, ended))

    def spoilt(self, verb: str, *, lost: bool) -> bool:
        left = self.failing.get((verb, lost), 0)
        self.failing[verb, lost] = max(0, left - 1)
        return left > 0

    def restart(self) -> None:
        """The supervisor died; the next one folds the journal and must decide the same."""
        state, again = engine.start(self.policy), list[Decision]()
        for event in self.events:
            state, made = engine.step(self.policy, state, event)
            again += made
        was = [repr(decision) for _, decision in self.played.log]
        for n, (old, new) in enumerate(zip(was, map(repr, again), strict=False)):
            if old != new:
                self.played.parted.append(f"decision {n} was {old[:200]}, is {new[:200]}")
                break
        if len(was) != len(again):
            self.played.parted.append(f"{len(was)} decisions became {len(again)}")
        self.state = state

    def usage(self) -> dict[str, int]:
        """Return the intents that each budget counts now."""
        ledger, state = self.state.ledger, self.state
        told = ledger.usage(self.policy.budgets, state.pace, state.at_ns)
        used = {name: int(text.partition("/")[0]) for name, text in told.items()}
        return {"all": len(ledger.spent.get("all", ())), **used}


# ── what a scenario does to the run, or to its supervisor (`inject` in the form) ──────────────────


def inject(player: ScenarioRunner, evil: InjectForm) -> None:
    """Do it, before the frame that comes."""
    until = FOREVER if evil.for_ is None else player.slot + evil.for_
    if evil.gap is not None:
        player.lost = evil.gap
    for name in evil.nan or ():
        player.nan[name] = player.slot + (evil.for_ or 1)
    if evil.clock_jump is not None:
        player.now += round(evil.clock_jump * SECOND)
    if evil.phase is not None:
        player.phase, player.phase_until = evil.phase, until
    if evil.fail_action is not None:
        player.failing[evil.fail_action, False] = evil.count
    if evil.lose_action is not None:
        player.failing[evil.lose_action, True] = evil.count
    if evil.crash_after is not None:
        player.crash = evil.crash_after
    if evil.silent_rank is not None:
        player.silent[evil.silent_rank] = until
    if evil.step is not None:
        player.job.next_step = evil.step
    if evil.checkpoint is not None:
        _checkpoint(player, evil.checkpoint)
    if evil.probe_restart:
        player.pid += 1000
        player.announce()
    if evil.told is not None:
        player.send(OperatorCommand(player.now, "operator", evil.told, evil.args or {}))
    if evil.notice is not None:
        player.send(Notice(player.now, evil.notice, f"{evil.notice}, on purpose"))
    if evil.exit is not None:
        player.job.returncode = evil.exit
        player.send(Exited(player.now, evil.exit))


def _checkpoint(player: ScenarioRunner, step: int) -> None:
    """The guard verified a checkpoint of this step."""
    name = f"ckpt-{step}"
    data = {"id": name, "step": step, "attempt": player.job.attempt, "path": name, "ok": True}
    player.send(Notice(player.now, "checkpoint", f"{name} was verified", data=data))
