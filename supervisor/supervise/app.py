"""The supervisor of one run: builds the parts, owns the loop, decides nothing.

    event -> journal -> core.engine.step -> audit log -> performer, outbox

One queue, one order, one thread. Actions run on the performer's thread and messages on the
outbox's; both answer through queues that the loop reads. Once the job runs, nothing here may end
it: a fault of ours is reported, and the loop shrinks to waiting for the job.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .core import engine, machine, runner
from .core.rule import Policy
from .core.values import (
    Announced,
    Decision,
    Event,
    Exited,
    Finished,
    Frame,
    Launched,
    Noticed,
    Tick,
    Told,
)
from .errors import SegmentError, StoreError
from .inputs import clock, hardware
from .inputs.company import Company
from .inputs.hardware import Hardware
from .inputs.segment import Segments
from .inputs.words import Words
from .job.control import Control
from .job.process import Process, exit_code
from .outputs import live
from .outputs.evidence import Evidence
from .outputs.outbox import Outbox, Result, message_of
from .outputs.performer import Performer
from .store.policies import Reloader
from .store.recorder import Recorder
from .store.rundir import RunDir

TICK_NS = 1_000_000_000
UNEASY = (machine.SUSPECT, machine.ACTING, machine.PROBATION)  # the probes sample more densely
PROBE_DEADLINE_S = (
    120.0  # a first compiled step may take 77 s on a CPU (injection.md, field note 13)
)
WINDOW_FRAMES = 512  # newest frames that go into an evidence bundle


@dataclass
class Settings:
    """What a run is started with.

    Attributes:
        reloader: loads another policy when an operator asks for it.
        tier, tier_reason: the forecast of `job.environment.tier`.
        facts: what goes into the audit log's `run_start` beside the command and the policy.
        tell: shows a line to the person at the terminal.
    """

    argv: Sequence[str]
    policy: Policy
    reloader: Reloader
    run: RunDir
    shm: Path
    tier: str
    tier_reason: str | None
    tell: Callable[[str], None]
    facts: Mapping[str, Any] = field(default_factory=dict)


class App:
    """Watches one job until it ends; a test can start it too."""

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.recorder = recorder
        self.state = engine.start(self.policy)
        self.tier = settings.tier
        self.control: Control | None = None
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._window: deque[tuple[Sequence[str], Frame]] = deque(maxlen=WINDOW_FRAMES)
        self._names: dict[int, tuple[str, ...]] = {}
        self._last: Decision | None = None
        self._tick_ns = 0
        self._launched_ns = 0
        self._probe_told = False
        self._suspended_ns = 0
        self._words = Words(settings.run.path, clock.monotonic_ns)
        self._nap = threading.Event()  # never set: its wait is a sleep that a signal may cut short

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def run(self, process: Process, outbox: Outbox) -> int:
        """Watch `process` to its end and return the exit code to pass on."""
        try:
            self._watch(process, outbox)
        except Exception:
            # The first law: our own fault must not cost the job anything.
            self.settings.tell("supervise: internal error; the job goes on unwatched")
            self.settings.tell(traceback.format_exc())
            while process.poll() is None:
                process.wait(0.5)
        if self.control is not None and self.control.exit_code is not None:
            return self.control.exit_code
        return exit_code(process.wait() or 0)

    def _watch(self, process: Process, outbox: Outbox) -> None:
        run, shm = self.settings.run, self.settings.shm
        segments = Segments(shm, run.marks_path, clock.monotonic_ns)
        evidence = Evidence(
            run.incidents_path, run.marks_path, lambda: list(self._window),
            onset=lambda: self.state.incident, directory=Path.cwd(),
        )  # fmt: skip
        control = Control(process, segments, evidence.collect)
        performer = Performer(control)
        self.control, self._performer, self._outbox = control, performer, outbox
        self._machine = Hardware(process.tree.members, Path.cwd(), hardware.driver())
        self._company = Company(self._machine.newest)
        self._machine.start()
        self._launched_ns = clock.monotonic_ns()
        self.recorder.note("run_start", -1, "the job was started", self._started(process))
        self.take(Launched(self._launched_ns, process.pid, 0))
        while process.poll() is None:
            self._round(segments, control, performer)
            if clock.monotonic_ns() >= self._tick_ns:
                self._second(process, segments, control)
            self._nap.wait(segments.interval_s())
        self._end(process, segments, control, performer)

    def _round(self, segments: Segments, control: Control, performer: Performer) -> int:
        """Take what is there now; return how many events the segments had."""
        events = segments.poll()
        for event in events:
            for completed in self._company.complete(event):
                self.take(completed)
        control.pump(clock.monotonic_ns())
        for sentence in (*control.late(), *self._machine.troubles()):
            self.take(Noticed(clock.monotonic_ns(), "note", sentence))
        for told in self._words.poll():
            self.take(told)
            if told.word == "reload":
                self._reload(told)
        finished = performer.poll()
        if finished is not None:
            self.take(finished)
        self._take_results()
        return len(events)

    def _second(self, process: Process, segments: Segments, control: Control) -> None:
        """Once a second: time, heartbeat, status, and the question where the probe is."""
        now_ns = clock.monotonic_ns()
        self._tick_ns = now_ns + TICK_NS
        suspended_s = (process.suspended_ns - self._suspended_ns) / 1e9
        if suspended_s > 0:
            self._suspended_ns = process.suspended_ns
            told = f"stopped and continued from the terminal after {suspended_s:.0f} s"
            self.take(Noticed(now_ns, "suspended", told))
        beats = []
        for segment in segments.ranks.values():
            try:
                segment.stamp(now_ns)
                beats.append(segment.beat())
            except SegmentError:
                continue  # the next poll tells it, once
        self.take(Tick(now_ns, tuple(beats)))
        changed = segments.tighten(self.state.machine in UNEASY, now_ns)
        if changed is not None:
            self.recorder.note("sampling", self.state.step, changed, {})
        waited = now_ns - self._launched_ns > PROBE_DEADLINE_S * 1e9
        known = self.settings.tier == "T0" and now_ns - self._launched_ns > TICK_NS
        if not self._probe_told and not self._names and (waited or known):
            self._no_probe(now_ns)
        self._status(control, now_ns)

    def _end(
        self, process: Process, segments: Segments, control: Control, performer: Performer
    ) -> None:
        while self._round(segments, control, performer):
            pass  # a last burst may be longer than one poll takes
        while self.state.stopping and performer.running is not None:
            self._nap.wait(0.01)  # at most its own deadline: a stop ends stragglers
            self._round(segments, control, performer)
        self._machine.close()
        now_ns = clock.monotonic_ns()
        if not self._names and not self._probe_told:
            self._no_probe(now_ns)
        self.take(Exited(now_ns, process.returncode or 0))
        self._status(control, now_ns)

    # ── write, then act ───────────────────────────────────────────────────────────────────────────

    def take(self, event: Event) -> None:
        """Number and write an event, judge it, write the decisions, then carry them out."""
        number = self.recorder.event(event)
        if isinstance(event, Announced):
            self._names[event.rank] = event.names
        elif isinstance(event, Frame):
            self._window.append((self._names.get(event.rank, ()), event))
        self.state, decisions = engine.step(self.policy, self.state, event)
        written = [self.recorder.decision(made, number, event.at_ns) for made in decisions]
        for decision, seq in zip(decisions, written, strict=True):
            self._last = decision
            if decision.kind == "intent":
                self._start(decision.data["action"])
            elif decision.kind == "notify_intent":
                self._post(decision, seq)

    def _reload(self, told: Told) -> None:
        """Let another policy take over between two events, or say why it cannot."""
        self.policy, events = self.settings.reloader.reload(told, self.policy, self.state)
        for event in events:
            self.take(event)

    def _start(self, action: Mapping[str, Any]) -> None:
        trouble = self.recorder.trouble
        if trouble is not None:
            # Law 2: a decision that is not on disk must not be acted on.
            self.take(Finished(clock.monotonic_ns(), action["id"], False, {}, trouble))
            return
        key = f"{self.settings.run.id}:{action['id']}"
        self._performer.start(action["id"], runner.awaited(self.state), action["args"], key=key)

    def _post(self, decision: Decision, seq: int | None) -> None:
        run = self.settings.run.id
        number = decision.step if seq is None else seq
        self._outbox.post(message_of(decision, run, self.recorder.head), key=f"{run}:{number}")

    def delivered(self, result: Result) -> None:
        """For the outbox's threads: a message was delivered, or given up."""
        self._results.put(result)

    def _take_results(self) -> None:
        while not self._results.empty():
            result = self._results.get_nowait()
            data = {"ok": result.ok, "keys": list(result.keys), "tries": result.tries}
            reason = f"{result.channel}: {result.detail}"
            self.recorder.note("notify_result", self.state.step, reason, data)

    # ── what is not a decision ────────────────────────────────────────────────────────────────────

    def _started(self, process: Process) -> dict[str, Any]:
        return {
            "argv": list(self.settings.argv),
            "pid": process.pid,
            "policy": self.policy.name,
            "policy_digest": self.policy.digest,
            "mode": self.policy.mode,
            "tier": self.settings.tier,
            **self.settings.facts,
        }

    def _no_probe(self, now_ns: int) -> None:
        """Say why nothing was seen."""
        self._probe_told = True
        self.tier = "T0"
        marks = {path.name.partition(".")[0] for path in self.settings.run.marks_path.glob("*")}
        message = live.no_probe(marks, self.settings.tier_reason)
        if message is not None:
            self.take(Noticed(now_ns, "no-probe", message))

    def _status(self, control: Control, now_ns: int) -> None:
        try:
            ranks = control.ranks()
        except SegmentError:
            ranks = {}
        found = live.snapshot(
            self.policy,
            self.state,
            ranks,
            wall=clock.wall(),
            now_ns=now_ns,
            tier="T1" if self._names else self.tier,
            last=self._last,
            trouble=self.recorder.trouble,
        )
        try:
            self.settings.run.write_json("state.json", found)
        except StoreError as error:
            self.recorder.failed(error)

    def close(self, outbox: Outbox, code: int) -> None:
        """Let messages out, write the last record, and close what was opened."""
        outbox.close()
        self._take_results()
        data = {"exit_code": code, "head": self.recorder.head}
        self.recorder.note("run_end", self.state.step, f"exit code {code}", data)
        self.recorder.close()
