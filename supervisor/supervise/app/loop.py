"""The life of one run: builds the parts, owns the loop, decides nothing.

One queue, one order, one thread: whatever happens becomes an event that the desk takes. Once the
job runs, nothing here may end it: a fault of ours is reported, and the loop shrinks to waiting for
the job.

The loop writes to the disk, which may hang. So it has a thread of its own, and the main thread, see
`foreground`, does what must not wait: `serve`, and the signals.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import children
from ..checkpoints.service import VERIFY_NOW_S
from ..core.incidents import pausing, sampling_rate, savepoint_retention, withdrawal
from ..core.model.events import Event, Exited, Launched, Notice, Tick
from ..errors import ActionError, SegmentError
from ..inputs import clock, control_inbox, hardware
from ..inputs.control_inbox import ControlInbox
from ..inputs.frame_enrichment import FrameEnricher
from ..inputs.hardware import Hardware
from ..inputs.segment import Segments
from ..job.controller import Control
from ..job.phase_inference import Phases
from ..job.process import Process, exit_code
from ..job.signals import Forwarder, typed
from ..job.wakeup import Wakeup
from ..outputs.action_performer import Performer
from ..outputs.evidence import Evidence
from ..outputs.outbox import DRAIN_S, Outbox
from ..store import files
from ..store.quarantine_list import Quarantine
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from . import checkpoint_wiring
from .adoption import Adoption
from .event_processor import EventProcessor
from .file_watch import FileWatch, Target, checkpoint_targets
from .late_page_delivery import Courier, keep
from .launcher import Launch, Launcher
from .orphans import Orphans
from .policy_watch import PolicyWatch
from .relauncher import Relauncher, ends_with
from .run_recovery import RecoveredRun
from .run_status import TICK_NS, Status
from .settings import Settings

_log = logging.getLogger(__name__)
BUSY_S = 0.02  # longest sleep while an action, an answer or the end of a process is awaited
STILL_S = 5.0  # longer than any round takes while the disk answers; project default


class App:
    """Watches one job until it ends for good; a test can start it too.

    Attributes:
        desk: judges events. control: the job as actions see it, None before it runs.
        closed: the last record is written.
        wakeup: wakes the loop.
    """

    def __init__(
        self, settings: Settings, launcher: Launcher, forwarder: Forwarder, recorder: Recorder
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        recorder.redact(settings.redactor)
        self.wakeup = Wakeup()
        self.desk = EventProcessor(settings, recorder, self.wakeup.set)
        self.control: Control | None = None
        self.closed = False
        self._launcher = launcher
        self._forwarder = forwarder
        taken = None if settings.past is None else settings.past.taken
        self._segments = Segments(settings.shm, settings.run.marks_path, clock.monotonic_ns, taken)
        self._status = Status(settings, self.desk, recorder)
        self._guard = checkpoint_wiring.guard(settings, self.desk)
        self._phases = Phases(lambda: () if self.control is None else self.control.processes())
        self._tick_ns = self._suspended_ns = 0
        self._policy_watch: PolicyWatch | None = None
        self._orphans = Orphans(self._segments, settings.run.marks_path, self.desk)
        self._gone: Process | None = None  # the newest one whose end the engine knows of
        self._looked_after: Process | None = None  # the newest one for which the guard hurried
        self._called_off = False  # a relaunch, by who asked for the end: no policy ends the run
        heard = () if settings.past is None else settings.past.heard
        self._words = ControlInbox(settings.run.path, clock.monotonic_ns, heard)
        self._courier = Courier(settings.run.id, os.environ, self.desk.late, settings.tell)
        self._starting = threading.Lock()  # held while the job is started again
        self._left = 0  # events that were read and are not judged yet
        self._newest = 0, 0  # round: when, and for how long we had been suspended by then

    def run(self, process: Process, outbox: Outbox) -> int:
        """Watch the job to its end, under whatever process; return the exit code to pass on."""
        self._courier.start()
        try:
            self._watch(process, outbox)
        except Exception:
            # The first law: our own fault must not cost the job anything.
            _log.exception("internal error; the job continues without supervision")
            self.settings.tell("supervise: internal error; the job continues without supervision")
            self.settings.tell(traceback.format_exc())
        process = self.process(process)
        while process.wait(0.5) is None:
            self.desk.moved()
        return self.exit_code(process)

    def process(self, first: Process) -> Process:
        """Return the job's newest process. Any thread."""
        return first if self.control is None else self.control.process

    def open_incident(self) -> str | None:
        """Return the id of the open incident, None without one. Any thread."""
        incident = self.desk.state.incident
        return None if incident is None else incident.id

    def exit_code(self, process: Process) -> int:
        """Return the exit code to pass on for a process that has ended. Any thread."""
        state, policy = self.desk.state, self.desk.policy
        own = self._called_off or self._orphans.left or self._orphans.ended_well
        by_policy = None if own else ends_with(self.control, state, policy)
        returncode = process.returncode or 0
        if process.unknown and state.job.returncode is not None:
            returncode = state.job.returncode  # a supervisor before us saw it
        return exit_code(returncode) if by_policy is None else by_policy

    def close(self, outbox: Outbox, code: int) -> None:
        """Let messages out, write the last record, and close what was opened."""
        kept = self.deliver(outbox)
        self.desk.take_results()
        for late in self._forwarder.notices():
            about = {"what": "signal", "details": dict(late.data)}
            self.recorder.note("note", self.desk.state.step, late.message, about)
        told = {"head": self.recorder.head, "journal": self.recorder.journal}
        data = {"exit_code": code, **told, **kept}
        self.recorder.note("run_end", self.desk.state.step, f"exit code {code}", data)
        self.recorder.close()
        self.closed = True
        self.desk.moved()

    def deliver(self, outbox: Outbox, within_s: float = DRAIN_S) -> dict[str, Any]:
        """Let messages out, and keep pages that nobody got; return what the record says of them.

        Also called on a thread of its own, where the disk of the run hangs.
        """
        self.desk.moved()
        self._courier.stop()
        outbox.close(within_s)
        self.desk.moved()
        settings = self.settings
        kept = keep(outbox.undelivered(), settings.policy.notify, os.environ, settings.tell)
        self.desk.moved()
        return kept

    # ── for the main thread ───────────────────────────────────────────────────────────────────────

    def serve(self, first: Process) -> Process:
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

    def unrecorded(self, process: Process) -> tuple[int, int]:
        """Return how many events and decisions are not on disk, as far as we know of them."""
        events, decisions = self.desk.unwritten
        told = self._gone is process  # its end is one more event
        known = self._left + self._segments.unread() + self._forwarder.waiting
        return events + known + (not told), decisions

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────

    def _watch(self, process: Process, outbox: Outbox) -> None:
        run, desk = self.settings.run, self.desk
        evidence = Evidence(
            run.incidents_path,
            run.marks_path,
            lambda: list(desk.window),
            onset=lambda: desk.state.incident,
            directory=Path.cwd(),
            redactor=self.settings.redactor,
        )
        relaunch = Relauncher(run, self._guard, self)
        control = self.control = Control(
            process,
            self._segments,
            evidence.collect,
            relaunch,
            Quarantine(run.quarantine_path),
            wake=self.wakeup.set,
        )
        desk.open(Performer(control, self.wakeup.set), outbox)
        self._machine = Hardware(control.processes, Path.cwd(), hardware.driver())
        self._company = FrameEnricher(self._beside)
        self._machine.start()
        if self.settings.past is not None:
            self._take_over(self.settings.past, process, outbox)
        else:
            self._launcher.write_down()
            self._status.started(process.pid)
            self._launched(process, 0)
        self._guard.start()
        self._watch_files(run)
        self._newest = process.moment()
        while not self._over(control):
            self._round(control)
            if not self._stood_still(control) and clock.monotonic_ns() >= self._tick_ns:
                self._second(control)
            self.wakeup.wait(self._pause_s(control), control.process)
        children.end_all()
        self._close_files()
        self._machine.close()
        self._guard.close()
        self._status.write(control, clock.monotonic_ns())

    def _watch_files(self, run: RunDir) -> None:
        """Let commands, checkpoints and edits of the policy wake who waits for them."""
        control = run.path / control_inbox.DIRECTORY
        with suppress(OSError):  # then it is made with the first command
            files.make_directory(control)
        patterns = self.settings.policy.job["checkpoints"]["glob"]
        targets = [
            Target(control, self.wakeup.set),
            *checkpoint_targets(patterns, Path.cwd(), self._guard.scan_soon),
        ]
        if self.settings.watch_policy:
            self._policy_watch = PolicyWatch(
                run.path, self.settings.reloader, lambda: self.desk.policy, self.settings.tell
            )
            self._policy_watch.start()
            targets += self._policy_watch.targets()
        self._file_watch = FileWatch(targets)
        self._file_watch.start()

    def _close_files(self) -> None:
        self._file_watch.close()
        if self._policy_watch is not None:
            self._policy_watch.close()

    def _pause_s(self, control: Control) -> float:
        """Return how long to sleep unless something happens that wakes the loop."""
        pause_s = self._segments.interval_s()
        ended = control.process.returncode is not None
        if ended or control.busy or self.desk.performing or self._guard.is_verifying_now:
            pause_s = min(pause_s, BUSY_S)
        return min(pause_s, (self._tick_ns - clock.monotonic_ns()) / 1e9)

    def _over(self, control: Control) -> bool:
        """Whether the process has ended, the engine knows it, and nothing will start it again."""
        process = control.process
        if process.wait(0.0) is None:
            return False
        if process is not self._gone and self._outlived(process):
            return False
        if process is not self._gone:
            is_verifying_now = self._guard.is_verifying_now
            while self._round(control) and not self._orphans.left:
                pass  # a last burst may be longer than one poll takes
            performing = self.desk.performing
            if control.process is not process or performing == "stop":
                return False  # another one runs; or what the stop comes to is told before the end
            looked_at = performing == "relaunch" or not (is_verifying_now or self._hurries(process))
            if self._forwarder.final is None and not looked_at:
                return False  # what it left is verified before anybody chooses from it
            if process is not self._gone:  # else it was told for a relaunch
                self._ended(process)
        final = self._forwarder.final is not None
        if final and self.desk.performing == "relaunch":
            self._round(control)  # the engine may not have heard of it yet
            self._called_off = True
        return final or self.desk.state.job.over

    def _outlived(self, process: Process) -> bool:
        """Whether others of the job train on without its first process, and nobody ends them."""
        desk = self.desk
        if desk.performing in ("relaunch", "stop"):
            return False
        back = checkpoint_wiring.may_come_back(desk.policy, desk.state, process.returncode or 0)
        return self._orphans.go_on(process, self._forwarder.final, comes_back=back)

    def _hurries(self, process: Process) -> bool:
        """Let the guard look at once at what a job left that may come back; False: it did."""
        desk, code = self.desk, process.returncode or 0
        comes_back = checkpoint_wiring.may_come_back(desk.policy, desk.state, code)
        if process is self._looked_after or not comes_back:
            return False
        self._looked_after = process
        self._guard.verify_now()
        return True

    def _round(self, control: Control) -> int:
        """Take what is there now; return how many events the segments had."""
        self.desk.moved()
        desk, found = self.desk, self._read()
        if control.unpaused():  # what it said of that was lost
            self._judge([Notice(clock.monotonic_ns(), pausing.ENDED, "the job is not paused")])
        control.pump(
            clock.monotonic_ns(),
            withdrawn=withdrawal.withdrawn(desk.policy, desk.state),
            standstill=withdrawal.answers_stall(desk.state),
        )
        for sentence in (*control.late(), *self._machine.troubles()):
            desk.take(Notice(clock.monotonic_ns(), "note", sentence))
        for event in self._guard.poll():
            desk.take(event)
        for event in self._forwarder.notices():
            desk.take(event)
        for told in self._words.poll():
            desk.told(told)
        desk.returns()
        self._segments.spare(
            savepoint_retention.retain_before(desk.policy, desk.state), clock.monotonic_ns()
        )
        return found

    def _read(self) -> int:
        """Take what the segments have; return how many events that were."""
        events = self._segments.poll()
        self._judge(events)
        return len(events)

    def _judge(self, events: Sequence[Event]) -> None:
        for self._left, event in zip(range(len(events) - 1, -1, -1), events, strict=True):
            for completed in self._company.complete(event):
                self.desk.take(completed)
            checkpoint_wiring.hear(self._guard, event, self.desk.policy)
            if self.control and isinstance(event, Notice) and event.kind == pausing.ENDED:
                self.control.go_on()

    def _beside(self, pid: int, leads: bool) -> dict[str, float]:
        """Return what joins the next frame of this process: its machine, and a checkpoint."""
        return self._machine.newest(pid, leads) | (self._guard.frame_values() if leads else {})

    def _stood_still(self, control: Control) -> bool:
        """Whether the newest round took long: what came meanwhile is read before time is told."""
        before, suspended_before = self._newest
        now_ns, suspended_ns = self._newest = control.process.moment()
        still_s = (now_ns - before - max(0, suspended_ns - suspended_before)) / 1e9
        if still_s > STILL_S:
            text = f"stood still for {still_s:.0f} s: the disk, or this machine, did not answer"
            self.desk.take(Notice(now_ns, "note", text))
        return still_s > STILL_S

    def _second(self, control: Control) -> None:
        """Once a second: time, heartbeat, status, and the question where the probe is."""
        desk = self.desk
        now_ns, suspended_ns = control.process.moment()
        self._tick_ns = now_ns + TICK_NS
        suspended_s = (suspended_ns - self._suspended_ns) / 1e9
        if suspended_s > 0:
            self._suspended_ns = suspended_ns
            told = f"stopped and continued from the terminal after {suspended_s:.0f} s"
            desk.take(Notice(now_ns, "suspended", told))
        beats = []
        for segment in self._segments.ranks.values():
            with suppress(SegmentError):  # the next poll tells it, once
                segment.stamp(now_ns)
                beats.append((segment.pid, segment.beat()))
        if not self._guard.is_verifying_now:  # the silence of a job that has ended means nothing
            judged, notices = self._phases.seen(beats, now_ns)
            for notice in notices:
                desk.take(notice)
            desk.take(Tick(now_ns, judged))
        checkpoint_wiring.seek(self._guard, desk.policy, desk.state)
        changed = self._segments.tighten(
            sampling_rate.needs_dense_sampling(desk.policy, desk.state), now_ns
        )
        if changed is not None:
            self.recorder.note("sampling", desk.state.step, changed, {})
        self._status.look_for_probe(now_ns)
        self._status.write(control, now_ns)

    # ── the life of a process ─────────────────────────────────────────────────────────────────────

    def _launched(self, process: Process, attempt: int) -> None:
        """The job is this process from now on."""
        now_ns = clock.monotonic_ns()
        self._status.launched(now_ns)
        self._suspended_ns = 0
        self.desk.names.clear()
        self.desk.take(Launched(now_ns, process.pid, attempt))

    def _take_over(self, past: RecoveredRun, process: Process, outbox: Outbox) -> None:
        """The job is this process, and a supervisor before us watched it until it died itself."""
        assert self.control is not None
        adoption = Adoption(
            past, self.settings.run, self.desk, self.recorder, self.control, self._segments
        )
        if past.launched is not None:
            self._status.launched(past.launched.at_ns, told=past.blind)
            self._gone = process if past.exited else None
        events = adoption.begin(self._company, outbox)
        if past.launched is None:
            self._launched(process, 0)
        checkpoint_wiring.take_up(self._guard, past, self.desk.policy)
        self._judge(events)

    # ── for a relaunch, in a round, with all processes of the job dead ────────────────────────────

    def look_after(self, within_s: float) -> bool:
        """Let the guard verify what the relaunch may go back to, unless that is settled."""
        assert self.control is not None
        process, steps = self.control.process, self.desk.range()
        if steps is not None and process is not self._looked_after:
            self._looked_after = process
            self._guard.verify_now(min(VERIFY_NOW_S, within_s), above=steps[0], before=steps[1])
        return steps is not None

    def choose(self) -> Mapping[str, Any]:
        """Let the engine choose the checkpoint; return the arguments of the relaunch under way."""
        self._last_words()
        for event in self._guard.poll():
            self.desk.take(event)
        return self.desk.choose()

    def start_again(self, launch: Launch) -> int:
        """Start the job; return its pid."""
        control, forwarder = self.control, self._forwarder
        assert control is not None
        self._last_words()
        self._segments.forget()
        forwarder.detach()
        if forwarder.final is not None:
            control.exit_code = None
            raise ActionError(f"not started again after {forwarder.final}")
        self.desk.may_start()
        self._guard.lower_priority()
        with self._starting:
            process = self._launcher.start(self.desk.policy, launch)
            forwarder.attach(process)
            control.replace(process)
        self._launcher.write_down()
        self._machine.begin_anew()
        if self.desk.state.job.launched != launch.attempt:  # else a supervisor before us told it
            self._launched(process, launch.attempt)
        return process.pid

    def _last_words(self) -> None:
        """Take all that the old process had to say, its end too."""
        assert self.control is not None
        while self._read():
            pass
        process = self.control.process
        if process.returncode is not None and process is not self._gone:
            self._ended(process)

    def _ended(self, process: Process) -> None:
        """Tell the end of a process that was read to its end."""
        self._gone = process
        now_ns = clock.monotonic_ns()
        self._status.look_for_probe(now_ns, last=True)
        if process.interrupted:
            self.desk.take(typed(now_ns))
        if process.unknown:
            text = f"how the job ended cannot be known: {process.returncode} stands for its code"
            self.desk.take(Notice(now_ns, "note", text))
        self.desk.take(Exited(now_ns, process.returncode or 0))
