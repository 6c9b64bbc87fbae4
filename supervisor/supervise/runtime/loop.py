"""The life of one run: builds the parts, owns the loop, decides nothing.

One queue, one order, one thread: everything that happens becomes an event, and the event processor
handles it. Once the job runs, nothing here may end it: an error of the supervisor is reported, and
the loop only waits for the job. The loop also tells the checkpoint service where the run is, what
was saved and what is needed.

The loop writes to the disk, which may hang. So it has a thread of its own, and the main thread, see
`foreground`, does what must not wait: `control_job`, and the signals.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from .. import system
from ..checkpoints.registry import RunFacts
from ..checkpoints.service import VERIFY_NOW_S, CheckpointService
from ..checkpoints.tracker import RunPosition
from ..checkpoints.verification import OVERTAKEN, TOO_LATE
from ..core import action_planning, checkpoint_wait, rule_scope, withdrawal
from ..core.job_lifecycle import ASKED, MEANT
from ..core.model.decisions import ACTING_MODES
from ..core.model.events import Event, Exited, Frame, Launched, Notice, Tick
from ..core.model.payload import Payload, Save
from ..core.model.policy import Policy
from ..core.run_state import State
from ..errors import ActionError, SegmentError
from ..notifiers.outbox import DRAIN_S, Outbox
from ..store import files
from ..store.quarantine_list import Quarantine
from ..store.recorder import Recorder
from ..store.run_directory import RUNS, RunDir
from ..system import Thread
from . import hardware, late_messages, status, watches
from .adoption import Adoption, OrphanWatch
from .controller import Control
from .evidence import Evidence
from .frame_enrichment import FrameEnricher
from .hardware import Hardware
from .host import available_bytes
from .idleness import Looks, Phases
from .late_messages import Courier
from .launcher import Launch, Launcher
from .mechanisms import MechanismMonitor
from .preemptor import Preemptor
from .process import Process, exit_code
from .processor import EventProcessor, Performer
from .relauncher import Relauncher, exit_code_by_policy, health_gate
from .segments import Segments
from .settings import RecoveredRun, Settings
from .signals import SignalForwarder, Wakeup, ctrl_c_notice
from .status_writer import TICK_NS, StatusWriter
from .watches import ControlInbox, FileWatch, PolicyWatch, Target, checkpoint_targets

LISTED = 8  # checkpoints of one kind in a line
FIRST_NS, EVERY_NS = 2_000_000_000, 10_000_000_000  # between two lines of progress; our choice
RANKS = 64  # of more, each counts on as the one that saved: the register must stay small
Window = Iterable[tuple[Sequence[str], Frame]]


def checkpoint_service(settings: Settings, processor: EventProcessor) -> CheckpointService:
    """Return the checkpoint service of the policy that the job was started with.

    Raises:
        StoreError: the register of this run cannot be read.
    """
    policy = settings.policy
    facts = RunFacts(list(settings.argv), policy.name, policy.digest)
    service = CheckpointService(
        policy.job.checkpoints,
        settings.run.path,
        Path.cwd(),
        lambda: run_position(processor),
        facts=facts,
        code=settings.identity.code,
        data=policy.job.manifest,
        runs=RUNS,
    )
    if policy.job.evaluate is not None and policy.job.evaluate.every is not None:
        service.add_evaluator(policy.job.evaluate, Path.cwd(), available_bytes)
    return service


def forward_saves(
    checkpoints: CheckpointService, events: Sequence[Event], processor: EventProcessor
) -> None:
    """Pass on the saves among processed events: ranks are read in turn, now all counted as far."""
    for event in events:
        forward_save(checkpoints, event, processor.window)


def forward_save(checkpoints: CheckpointService, event: Event, window: Window) -> None:
    """Pass a save that a probe reported to the checkpoint service.

    Args:
        window: the newest frames, each with its names, oldest first.
    """
    if isinstance(event, Notice) and event.kind == "checkpoint-saved":
        checkpoints.on_save(_with_counters(event, window))


def _with_counters(event: Notice, window: Window) -> Notice:
    """Return the notice with what `checkpoints.registry.Entry` has as `counters` and `values`.

    The rank that saved reports its own counters. Another one's are those of its newest frame by
    then, plus what the rank that saved has counted since that step.
    """
    reported = event.data.read(Save).counters
    saver = {
        name: count
        for name, count in reported.items()
        if isinstance(count, int | float) and not isinstance(count, bool)
    }
    counted = {
        (frame.rank, frame.step): dict(zip(names, frame.values, strict=False))
        for names, frame in (window if saver else ())
        if frame.step < (event.step or 0)
    }
    newest = {rank: step for rank, step in counted if rank != event.rank}
    by_rank = {"all": saver} if saver else {}
    for rank, step in newest.items() if len(newest) < RANKS else ():
        counters, was = counted[rank, step], counted.get((event.rank or 0, step), saver)
        pairs = {name: (counters.get(name), was.get(name)) for name in saver}
        ahead = {
            n: current - its
            for n, (current, its) in pairs.items()
            if current is not None and its is not None
        }
        if any(ahead.values()):
            by_rank[str(rank)] = {n: count + ahead.get(n, 0.0) for n, count in saver.items()}
    previous = counted.get((event.rank or 0, (event.step or 0) - 1), {})
    values = {name: value for name, value in previous.items() if value is not None}
    return replace(event, data=event.data.extended(counters=by_rank, values=values))


def start_verifying_awaited(checkpoints: CheckpointService, processor: EventProcessor) -> None:
    """Have the checkpoint verified now that a refused relaunch waits for, if one does.

    The engine is told when the number of those that it may be changes.
    """
    before_step = checkpoint_wait.awaited_checkpoint_bound(processor.policy, processor.state)
    if before_step is None:
        return
    remaining = checkpoints.count_unverified(before_step)
    for event in checkpoints.poll():  # the last verdict comes before "none is left"
        processor.process(event)
    if (awaited := checkpoint_wait.awaited_checkpoint(processor.policy, processor.state)) is None:
        return
    if remaining is not None and remaining != awaited.candidates:
        text = f"{remaining} checkpoints from before step {before_step} are to be verified"
        data = Payload({"candidates": remaining})
        processor.process(Notice(system.monotonic_ns(), "checkpoint-search", text, data=data))
    checkpoints.verify_awaited(before_step)


class FinalVerification:
    """Has the guard verify at once what a process of the job left, once per process."""

    def __init__(
        self,
        checkpoints: CheckpointService,
        processor: EventProcessor,
        print_line: Callable[[str], object],
    ) -> None:
        self._checkpoints, self._processor, self._print_line = checkpoints, processor, print_line
        self._process: Process | None = None  # the newest whose checkpoints were looked at
        self._next_ns = self._began_ns = 0
        self._evaluated: Process | None = None  # the newest whose evaluations have an end

    def verify_after_exit(self, process: Process) -> bool:
        """Begin with what a process left that has ended; False: that was done, or must not be.

        A job that may come back needs a good checkpoint; of another one the newest is verified,
        because nobody would look at it before it is needed. Whoever asked for the end, or has set
        a time for it, does not wait.
        """
        state, job = self._processor.state, self._processor.state.job
        is_ordered = job.stopping and job.stopped_by != "policy"
        if process is self._process or job.end_requested or job.preempted or is_ordered:
            return False
        self._process = process
        back = may_come_back(self._processor.policy, state, process.returncode or 0)
        self._checkpoints.verify_now(patient=back, newest=not back)
        self._began_ns = system.monotonic_ns()
        self._next_ns = self._began_ns + FIRST_NS
        return True

    def evaluate_after_exit(self, process: Process) -> bool:
        """Return whether the newest checkpoint of a job that succeeded is still being evaluated.

        Whoever asked for the end does not wait.
        """
        evaluator, job = self._checkpoints.evaluator, self._processor.state.job
        is_deliberate = job.end_requested or job.preempted or job.stopping
        if evaluator is None or process.returncode or is_deliberate:
            return False
        if process is not self._evaluated:
            self._evaluated = process
            evaluator.finish()
            self._began_ns = system.monotonic_ns()
            self._next_ns = self._began_ns + FIRST_NS
        return evaluator.awaits_newest_evaluation()

    def on_relaunch(self) -> None:
        """Evaluate as of a job that runs: an end that a process before it had set is no more."""
        self._evaluated = None
        if self._checkpoints.evaluator is not None:
            self._checkpoints.evaluator.on_relaunch()

    def start_verifying_candidates(
        self, process: Process, between_steps: tuple[int, int], limit_s: float
    ) -> None:
        """Begin with what a relaunch may go back to: between these steps, both exclusive."""
        if process is not self._process:
            self._process = process
            limit_s = min(VERIFY_NOW_S, limit_s)
            self._checkpoints.verify_now(limit_s, above=between_steps[0], below=between_steps[1])

    def show_if_under_way(self, now_ns: int) -> bool:
        """Return whether it is under way; if so, tell people now and then how far it is."""
        under_way, work = self._checkpoints.is_verifying_now, "verified"
        name = self._checkpoints.label_under_verification() if under_way else ""
        evaluator = self._checkpoints.evaluator if self._evaluated is not None else None
        if evaluator is not None and not under_way and evaluator.awaits_newest_evaluation():
            under_way, work = True, "evaluated"
            name = evaluator.current.label if evaluator.current is not None else ""
        if under_way and now_ns >= self._next_ns and name:
            self._next_ns = now_ns + EVERY_NS
            since_s = (now_ns - self._began_ns) / 1e9
            self._print_line(
                f"supervise: the job has ended; {name} is being {work}, for {since_s:.0f} s "
                "until now; Ctrl-C ends that"
            )
        return under_way

    def show_unevaluated(self, run: Path) -> None:
        """Tell people which checkpoints were not evaluated, and the command for the newest."""
        evaluator = self._checkpoints.evaluator
        if evaluator is None or not (by_reason := evaluator.list_missing_metrics()):
            return
        total = evaluator.count + sum(map(len, by_reason.values()))
        lists = "; ".join(f"{reason}: {_listed(ids)}" for reason, ids in by_reason.items())
        able = [*by_reason.get(OVERTAKEN, ()), *by_reason.get(TOO_LATE, ())]
        command = f"; supervise checkpoint eval {able[-1]} --run {run}" if able else ""
        self._print_line(
            f"supervise: {evaluator.count} of {total} checkpoints were evaluated; {lists}{command}"
        )


def _listed(ids: Sequence[str]) -> str:
    """Return ids for people, the newest ones where there are many."""
    older = len(ids) - LISTED
    return ", ".join(ids) if older <= 0 else f"{older} older ones, {', '.join(ids[-LISTED:])}"


def may_come_back(policy: Policy, state: State, returncode: int) -> bool:
    """Whether a job that ended with this code may be started again by the policy's `on_crash`.

    The engine decides that once it knows of the end; here it is only about being in time.
    """
    job = state.job
    able = policy.mode in ACTING_MODES and "relaunch" not in job.unavailable
    if not returncode or policy.job.on_crash is None or not able:
        return False
    is_deliberate = job.stopping or job.end_requested or returncode in (*ASKED, *MEANT)
    is_held = state.incident is not None and state.incident.is_held
    return not (is_deliberate or is_held or state.step in job.restarts.crashes)


def resume_checkpoint_service(checkpoints: CheckpointService, past: RecoveredRun) -> None:
    """Resume the checkpoint service of a supervisor that died."""
    checkpoints.resume_after_crash(past.checkpoints)
    for notice in past.saves.values():
        forward_save(checkpoints, notice, past.window)


def run_position(processor: EventProcessor) -> RunPosition:
    """Return where the run is."""
    state = processor.state
    leader = state.leader()
    newest = next((row for row in reversed(processor.window) if row[1].rank == leader), None)
    values = {}
    if newest is not None:
        names, frame = newest
        pairs = zip(names, frame.values, strict=False)
        values = {name: value for name, value in pairs if value is not None}
    checkpoints = state.checkpoints
    undone = () if leader is None else state.monitors[leader].undone
    return RunPosition(
        state.step,
        state.attempt,
        values,
        checkpoints.suspects(),
        state.job.world_size,
        checkpoints.on_trial(),
        {attempt: last_step + 1 for attempt, last_step in undone},
    )


_log = logging.getLogger(__name__)
BUSY_S = 0.02  # longest sleep while an action, an answer or the end of a process is awaited
STALLED_S = 5.0  # longer than any round takes while the disk answers; project default


class App:
    """Watches one job until it ends for good; a test can start it too.

    Attributes:
        processor: judges events. control: the job as actions see it, None before it runs.
        closed: the last record is written.
        wakeup: wakes the loop.
    """

    def __init__(
        self, settings: Settings, launcher: Launcher, forwarder: SignalForwarder, recorder: Recorder
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        recorder.redact(settings.redactor)
        self.wakeup = Wakeup()
        self.processor = EventProcessor(settings, recorder, self.wakeup.set)
        self.control: Control | None = None
        self.closed = False
        self._launcher = launcher
        self._hardware: Hardware
        self._forwarder = forwarder
        read_cursor = None if settings.past is None else settings.past.taken
        self._segments = Segments(
            settings.shm, settings.run.marks_path, system.monotonic_ns, read_cursor
        )
        forwarder.keep = self._segments.defer_job_signals
        self._status = StatusWriter(settings, self.processor, recorder, launcher.oom_counters)
        self._checkpoints = checkpoint_service(settings, self.processor)
        self._mechanisms = MechanismMonitor(settings.policy.mechanisms, settings.shm)
        self._last_look = FinalVerification(self._checkpoints, self.processor, settings.print_line)
        self._phases = Phases(
            lambda: () if self.control is None else self.control.processes(),
            lambda: self._hardware.device_share,
        )
        self._tick_ns = self._suspended_ns = 0
        self._policy_watch: PolicyWatch | None = None
        self._preemptor = Preemptor(forwarder, self.processor, settings.run.path, os.environ)
        self._orphans = OrphanWatch(self._segments, settings.run.marks_path, self.processor)
        self._ended_process: Process | None = None  # the newest that the engine knows has ended
        self._is_cancelled = False  # a relaunch, by a signal that ends the job
        received = () if settings.past is None else settings.past.received
        self._inbox = ControlInbox(settings.run.path, system.monotonic_ns, received)
        self._courier = Courier(os.environ, self.processor.report_late_message, settings.print_line)
        self._starting = threading.Lock()  # held while the job is started again
        self._pending_events = 0  # read and not processed yet
        self._last_round = 0, 0  # time of the newest round, and our time suspended until then

    def run(self, process: Process, outbox: Outbox) -> int:
        """Watch the job to its end, under whatever process; return the exit code to pass on."""
        self._courier.start()
        try:
            self._watch(process, outbox)
        except Exception as error:
            # The first law: our own fault must not cost the job anything.
            _log.exception("internal error; the job continues without supervision")
            self.settings.print_line(
                "supervise: internal error; the job continues without supervision"
            )
            self.settings.print_line(traceback.format_exc())
            self.processor.end_protection(outbox, error, traceback.format_exc())
        process = self.process(process)
        while process.wait(0.5) is None:
            self.processor.mark_progress()
        return self.exit_code(process)

    def process(self, first: Process) -> Process:
        """Return the job's newest process. Any thread."""
        return first if self.control is None else self.control.process

    def open_incident(self) -> str | None:
        """Return the id of the open incident, None without one. Any thread."""
        incident = self.processor.state.incident
        return None if incident is None else incident.id

    def exit_code(self, process: Process) -> int:
        """Return the exit code to pass on for a process that has ended. Any thread."""
        state, policy = self.processor.state, self.processor.policy
        is_exit_of_job = self._is_cancelled or self._orphans.left or self._orphans.ended_well
        by_policy = None if is_exit_of_job else exit_code_by_policy(self.control, state, policy)
        returncode = process.returncode or 0
        if process.unknown and state.job.returncode is not None:
            returncode = state.job.returncode  # a supervisor before us saw it
        return exit_code(returncode) if by_policy is None else by_policy

    def close(self, outbox: Outbox, code: int) -> None:
        """Let messages out, write the last record, and close what was opened."""
        self._launcher.close_output()
        undelivered = self.deliver(outbox)
        self.processor.record_results()
        for late in self._forwarder.take_notices():
            about = {"what": "signal", "details": dict(late.data)}
            self.recorder.note("note", self.processor.state.step, late.message, about)
        data = {
            "exit_code": code,
            "probe_share": status.probe_overhead(self.processor.state),
            **({"undelivered": msgspec.to_builtins(undelivered)} if undelivered else {}),
            "head": self.recorder.head,
            "journal": self.recorder.journal,
        }
        self.recorder.note("run_end", self.processor.state.step, f"exit code {code}", data)
        if self.recorder.trouble is None:  # else `adopt` may have to complete the run
            self.settings.run.remove_secrets()
        self.processor.incident_files.close()
        self.recorder.close()
        self.closed = True
        self.processor.mark_progress()

    def deliver(self, outbox: Outbox, within_s: float = DRAIN_S) -> list[late_messages.Summary]:
        """Let messages out; write those that were not delivered into the run, and return them.

        Also called on a thread of its own, where the disk of the run hangs.
        """
        self.processor.mark_progress()
        # None, unless the disk of the run hangs.
        self.processor.views.make(
            "messages that wait", self.processor.send_messages, recorded=False
        )
        self._courier.stop()
        outbox.close(within_s)
        self.processor.mark_progress()
        settings = self.settings
        undelivered = late_messages.write_undelivered(
            settings.run, outbox.undelivered(), settings.policy.notify, settings.print_line
        )
        self.processor.mark_progress()
        return undelivered

    # ── for the main thread ───────────────────────────────────────────────────────────────────────

    def control_job(self, first: Process) -> Process:
        """Do job control and collect orphans; return the newest process. Never waits for a disk."""
        # An old tree would take a process that is just being started for an orphan.
        if not self._starting.acquire(blocking=False):
            return self.process(first)
        try:
            process = self.process(first)
            process.poll()
        finally:
            self._starting.release()
        return process

    def count_unrecorded(self, process: Process) -> tuple[int, int]:
        """Return how many events and decisions are not on disk, as far as we know of them."""
        events, decisions = self.processor.unwritten
        is_exit_recorded = self._ended_process is process  # its end is one more event
        waiting = self._pending_events + self._segments.unread() + self._forwarder.notices_waiting
        return events + waiting + (not is_exit_recorded), decisions

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def _watch(self, process: Process, outbox: Outbox) -> None:
        run, processor = self.settings.run, self.processor
        evidence = Evidence(
            run.incidents_path,
            run.marks_path,
            lambda: list(processor.window),
            onset=lambda: processor.state.incident,
            failures=lambda: processor.state.job.failures_by_cause,
            directory=Path.cwd(),
            logs=self.settings.outputs,
            redactor=self.settings.redactor,
        )
        evidence.views = processor.incident_files.views
        environ, machine = self._launcher.environ, lambda: self._hardware
        gate = health_gate(lambda: processor.policy, environ, machine)
        relaunch = Relauncher(run, self._checkpoints, self, gate, processor.process)
        edges = (evidence.collect, relaunch, Quarantine(run.quarantine_path))
        looks = Looks(evidence.main_stack, lambda: self._hardware.device_share)
        control = Control(process, self._segments, *edges, wake=self.wakeup.set, looks=looks)
        self.control = control
        processor.open(Performer(control, self.wakeup.set), outbox)
        driver, disks = (
            hardware.nvidia_driver(),
            lambda: (run.path, self._checkpoints.folder() or run.path),
        )
        self._hardware = Hardware(control.processes, Path.cwd(), driver, disks=disks)
        self._enricher = FrameEnricher(
            self._added_values,
            lambda: control.process.now(),
            lambda: (processor.policy, processor.state),
        )
        self._hardware.start()
        if self.settings.past is not None:
            self._adopt(self.settings.past, process, outbox)
        else:
            self._launcher.record_launch()
            with suppress(RuntimeError, OSError):  # without it a power cut may cost the record
                Thread(target=run.make_durable, name="sync", daemon=True).start()
            self._status.on_start(process.pid)
            self._on_launch(process, 0)
        self._checkpoints.start()
        self._watch_files(run)
        self._last_round = process.now()
        while not self._is_over(control):
            self._run_round(control)
            if not self._was_stalled(control) and system.monotonic_ns() >= self._tick_ns:
                self._run_second(control)
            self.wakeup.wait(self._pause_s(control), control.process)
        processor.send_messages()
        self._mechanisms.close()
        system.end_tools()
        self._file_watch.close()
        if self._policy_watch is not None:
            self._policy_watch.close()
        self._hardware.close()
        self._last_look.show_unevaluated(run.path)
        self._checkpoints.close()
        self._status.write(control, system.monotonic_ns(), over=True)

    def _watch_files(self, run: RunDir) -> None:
        """Let commands, checkpoints and edits of the policy wake who waits for them."""
        control = run.path / watches.DIRECTORY
        with suppress(OSError):  # then it is made with the first command
            files.make_directory(control)
        patterns = self.settings.policy.job.checkpoints.glob
        targets = [
            Target(control, self.wakeup.set),
            *checkpoint_targets(patterns, Path.cwd(), self._checkpoints.scan_soon),
        ]
        if self.settings.watch_policy:
            current, show = lambda: self.processor.policy, self.settings.print_line
            self._policy_watch = PolicyWatch(run.path, self.settings.reloader, current, show)
            self._policy_watch.start()
            targets += self._policy_watch.targets()
        self._file_watch = FileWatch(targets)
        self._file_watch.start()

    def _pause_s(self, control: Control) -> float:
        """Return how long to sleep unless something happens that wakes the loop."""
        until_second_s = (self._tick_ns - system.monotonic_ns()) / 1e9
        ended = control.process.returncode is not None
        if ended or control.busy or self.processor.performing or self._checkpoints.is_verifying_now:
            return min(BUSY_S, until_second_s)
        pause_s = self._segments.interval_s()
        # One round for both where they are near each other: each costs half a millisecond.
        return until_second_s if until_second_s < 1.5 * pause_s else pause_s

    def _is_over(self, control: Control) -> bool:
        """Whether the process has ended, the engine knows it, and nothing will start it again."""
        process = control.process
        if process.wait(0.0) is None:
            return False
        if process is not self._ended_process:
            if self._is_outlived(process):
                return False
            is_verifying_now = self._checkpoints.is_verifying_now
            while self._run_round(control) and not self._orphans.left:
                pass  # a last burst may be longer than one poll takes
            performing = self.processor.performing
            if control.process is not process or performing == "stop":
                return False  # another one runs; or what the stop comes to is told before the end
            waits = self._forwarder.final is None and performing != "relaunch"
            waits = waits and not self._orphans.left
            if waits and (is_verifying_now or self._last_look.verify_after_exit(process)):
                return False  # what it left is verified before anybody chooses from it
            if waits and self._last_look.evaluate_after_exit(process):
                return False  # what is measured of its last weights is judged
            if process is not self._ended_process:  # else it was reported for a relaunch
                self._on_exit(process)
        if self._forwarder.final is None:
            return self.processor.state.job.over
        if self.processor.performing == "relaunch":
            self._run_round(control)  # the engine may not know of it yet
            self._is_cancelled = True
        return True

    def _is_outlived(self, process: Process) -> bool:
        """Whether others of the job train on without its first process, and nobody ends them."""
        processor = self.processor
        if processor.performing in ("relaunch", "stop"):
            return False
        back = may_come_back(processor.policy, processor.state, process.returncode or 0)
        return self._orphans.must_watch_orphans(process, self._forwarder.final, comes_back=back)

    def _run_round(self, control: Control) -> int:
        """Take what is there now; return how many events the segments had."""
        self.processor.mark_progress()
        processor, event_count = self.processor, self._read()
        if control.has_unpaused():  # its notice of that was lost
            self._process(
                [Notice(system.monotonic_ns(), withdrawal.ENDED, "the job is not paused")]
            )
        control.run_pending_work(
            system.monotonic_ns(),
            withdrawn=self._withdrawn(),
            standstill=withdrawal.answers_stall(processor.state),
        )
        for sentence in (*control.late_answers(), *self._hardware.troubles()):
            processor.process(Notice(system.monotonic_ns(), "note", sentence))
        for event in self._checkpoints.poll():
            processor.process(event)
        self._preemptor.run_round(control, ended=control.process.returncode is not None)
        for command in self._inbox.poll():
            processor.take_command(command)
        processor.collect_results()
        self._segments.retain_savepoint_before(
            action_planning.savepoint_retention_bound(processor.policy, processor.state),
            system.monotonic_ns(),
        )
        return event_count

    def _withdrawn(self) -> str:
        return withdrawal.explain_withdrawal(self.processor.policy, self.processor.state)

    def _read(self) -> int:
        """Take what the segments have; return how many events that were."""
        events = self._segments.poll()
        if self.control:
            self.control.file_acks()
        self._process(events, sends=True)
        return len(events)

    def _process(self, events: Sequence[Event], *, sends: bool = False) -> None:
        """Judge events; with `sends`, orders of actions go out between them."""
        for self._pending_events, event in zip(range(len(events) - 1, -1, -1), events, strict=True):
            for completed in self._enricher.complete(event):
                self.processor.process(completed, more=True)
            self._preemptor.observe(event)
            if self.control and isinstance(event, Notice) and event.kind == withdrawal.ENDED:
                self.control.on_pause_ended()
            if sends and self.control and self.control.has_unsent_commands:
                self.control.send_commands(self._withdrawn())
        self.processor.flush()
        forward_saves(self._checkpoints, events, self.processor)

    def _added_values(self, pid: int, leads: bool) -> dict[str, float]:
        """Return what joins the next frame of this process: its machine, and a checkpoint."""
        return self._hardware.newest(pid, leads) | (
            self._checkpoints.frame_values() if leads else {}
        )

    def _was_stalled(self, control: Control) -> bool:
        """Whether the newest round took long: what came meanwhile is read before time is told."""
        previous_ns, suspended_before = self._last_round
        now_ns, suspended_ns = self._last_round = control.process.now()
        stalled_s = (now_ns - previous_ns - max(0, suspended_ns - suspended_before)) / 1e9
        if stalled_s > STALLED_S:
            cause = "the disk or this machine did not respond"
            text = f"supervisor stalled for {stalled_s:.0f} s: {cause}"
            self.processor.process(Notice(now_ns, "note", text))
        return stalled_s > STALLED_S

    def _run_second(self, control: Control) -> None:
        """Once a second: time, heartbeat, status, and the question where the probe is."""
        processor = self.processor
        now_ns, suspended_ns = control.process.now()
        self._tick_ns = now_ns + TICK_NS
        suspended_s = (suspended_ns - self._suspended_ns) / 1e9
        if suspended_s > 0:
            self._suspended_ns = suspended_ns
            text = f"stopped and continued from the terminal after {suspended_s:.0f} s"
            processor.process(Notice(now_ns, "suspended", text))
        beats = []
        for segment in self._segments.ranks.values():
            with suppress(SegmentError):  # the next poll tells it, once
                segment.write_heartbeat(now_ns)
                beats.append((segment.pid, segment.beat()))
        # Failures are forgotten when a rank comes in their place.
        self._status.check_probe(now_ns, self._phases.is_using_resources)
        # The silence of a job that has ended means nothing.
        if not self._last_look.show_if_under_way(now_ns):
            lives = control.process.returncode is None
            dead = self._segments.dead_ranks() if lives else ()
            beat_events, notices = self._phases.adjust_beats(beats, now_ns, dead)
            for notice in notices:
                processor.process(notice)
            self._enricher.on_beats(beat_events, processor.state.job.failures, now_ns)
            processor.process(Tick(now_ns, beat_events))
        for event in self._mechanisms.poll(now_ns):
            processor.process(event)
        self._preemptor.run_every_second(control)
        start_verifying_awaited(self._checkpoints, processor)
        dense = rule_scope.needs_dense_sampling(processor.policy, processor.state)
        changed = self._segments.sample_densely(dense, now_ns)
        if changed is not None:
            self.recorder.note("sampling", processor.state.step, changed, {})
        processor.check_space()
        self._status.write(control, now_ns)

    # ── the life of a process ─────────────────────────────────────────────────────────────────────

    def _on_launch(self, process: Process, attempt: int) -> None:
        """The job is this process from now on."""
        now_ns = system.monotonic_ns()
        self._status.on_launch(now_ns)
        self._suspended_ns = 0
        self.processor.names.clear()
        self.processor.process(Launched(now_ns, process.pid, attempt))

    def _adopt(self, past: RecoveredRun, process: Process, outbox: Outbox) -> None:
        """The job is this process, and a supervisor before us watched it until it died itself."""
        assert self.control is not None
        adoption = Adoption(
            past, self.settings.run, self.processor, self.recorder, self.control, self._segments
        )
        if past.launched is not None:
            self._status.on_launch(past.launched.at_ns, reported=past.blind)
            self._ended_process = process if past.exited else None
        events = adoption.take_over(self._enricher, outbox)
        if past.launched is None:
            self._on_launch(process, 0)
        resume_checkpoint_service(self._checkpoints, past)
        self._preemptor.adopt(process)
        self._process(events)

    # ── for a relaunch, in a round, with all processes of the job dead ────────────────────────────

    def verify_candidates(self, within_s: float) -> bool:
        """Let the guard verify what the relaunch may go back to, unless that is settled."""
        assert self.control is not None
        steps = self.processor.candidate_steps()
        if steps is not None:
            self._last_look.start_verifying_candidates(self.control.process, steps, within_s)
        return steps is not None

    def choose_relaunch_checkpoint(self) -> Payload:
        """Let the engine choose the checkpoint; return the arguments of the relaunch under way."""
        self._read_to_end()
        for event in self._checkpoints.poll():
            self.processor.process(event)
        return self.processor.choose_checkpoint()

    def restart(self, launch: Launch) -> int:
        """Start the job; return its pid."""
        control, forwarder = self.control, self._forwarder
        assert control is not None
        self._read_to_end()
        self._segments.forget()
        forwarder.detach()
        if forwarder.final is not None:
            control.exit_code = None
            raise ActionError(f"not started again after {forwarder.final}")
        self.processor.raise_if_stopped()
        self._checkpoints.end_urgent_verifications()
        with self._starting:
            process = self._launcher.start(self.processor.policy, launch)
            forwarder.attach(process)
            control.replace(process)
        self._launcher.record_launch()
        self._last_look.on_relaunch()
        self._hardware.reset()
        self._enricher.on_relaunch(self.processor.state.job.failures)
        # Else an earlier supervisor reported it.
        if self.processor.state.job.launched != launch.attempt:
            self._on_launch(process, launch.attempt)
        return process.pid

    def _read_to_end(self) -> None:
        """Take all that the old process had to say, its end too."""
        assert self.control is not None
        while self._read():
            pass
        process = self.control.process
        if process.returncode is not None and process is not self._ended_process:
            self._on_exit(process)

    def _on_exit(self, process: Process) -> None:
        """Tell the end of a process that was read to its end."""
        self._ended_process = process
        now_ns = system.monotonic_ns()
        self._status.report_job_end(
            process.pid, process.returncode or 0, now_ns, self._segments.ends()
        )
        if process.interrupted:
            self.processor.process(ctrl_c_notice(now_ns))
        if process.unknown:
            text = f"how the job ended cannot be known: {process.returncode} stands for its code"
            self.processor.process(Notice(now_ns, "note", text))
        self.processor.process(Exited(now_ns, process.returncode or 0))
