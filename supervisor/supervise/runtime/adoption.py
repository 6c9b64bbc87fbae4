"""Takeovers: of a run whose supervisor died, and of processes whose launcher ended.

A new supervisor writes the decisions that were not written, restores the state of every part, and
performs an action that was in progress again under its key, so that the job changes at most once.
Messages without a result are posted again under their keys. Only then it reads and judges what
happened since: the effect of an action is looked for in the first frame after it. An intent on
disk, receivers that know a repeated order, and a check of the effect are each needed for one effect
per order.

Processes that train on after the job's first process has ended (a launcher that was killed, a shell
that did not wait) are the run, for as long as `job.orphans.watch` says: they are judged as before,
and signals go to them. The supervisor never ends them for having lost their parent. After that time
the remaining ones are reported, with the command that ends them, and keep their segments. A process
counts that writes a segment, or that has loaded torch under the probe and may soon; one that has
just started has a moment to show it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import psutil

from .. import system
from ..actions.job_control import HUMAN
from ..core import withdrawal
from ..core.incident import verb_of
from ..core.model.decisions import Notified, decision_from_record
from ..core.model.events import Adopted, Event, Finished, Notice
from ..core.model.payload import EndArgs, Json, Payload, RelaunchArgs
from ..core.runbook_runner import awaited_action
from ..errors import StoreError
from ..notifiers.outbox import Outbox
from ..store import audit
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from .controller import Control
from .fencing import describe_ending
from .frame_enrichment import FrameEnricher
from .process import Process
from .processor import EventProcessor
from .relauncher import was_stopped_for
from .segments import Segments
from .settings import RecoveredRun

GRACE_S = 1.0  # ranks may end a moment after their launcher: no news
IMPORT_S = 30.0  # a Python that is older than this and has not loaded torch trains nothing
FORK_S = 2.0  # a process that is older than this is what it is
LOOK_S = 0.5  # between two looks


class OrphanWatch:
    """Says how long to watch on without the first process. For the main loop.

    Args:
        marks: directory of the probe's marks, which tell how far a Python got.

    Attributes:
        left: processes were left running. ended_well: those that went on ended with code 0.
    """

    def __init__(self, segments: Segments, marks: Path, processor: EventProcessor) -> None:
        self.left = self.ended_well = False
        self._segments = segments
        self._marks = marks
        self._processor = processor
        self._process: Process | None = None  # whose orphans these are
        self._since_s = self._look_s = 0.0
        self._is_reported = self._over = False

    def must_watch_orphans(
        self, process: Process, final_signal: str | None, *, comes_back: bool
    ) -> bool:
        """Whether others train on after `process` has ended, and are to be watched.

        Args:
            final_signal: of whoever asked for the end of the job, if one did: it was meant for all.
            comes_back: the policy may start the job again, which ends all of it first. That waits
                for a launcher's ranks, not for those that a dead rank keeps waiting.
        """
        now_s = time.monotonic()
        if process is not self._process:
            self._process, self._since_s, self._look_s = process, now_s, 0.0
            self._is_reported = self._over = self.left = self.ended_well = False
            self._over = comes_back and self._segments.is_newest_process(process.pid)
        if self._over or now_s < self._look_s:
            return not self._over
        self._look_s = now_s + LOOK_S
        trains, may = self._look(process)
        watch_s = self._processor.policy.job.orphans.watch
        if trains and now_s - self._since_s >= min(watch_s, GRACE_S):
            if now_s - self._since_s >= watch_s:
                self._leave(process, trains)
            elif not self._is_reported:
                self._report_orphans(process, trains, watch_s)
        elif not trains and not (may and watch_s):
            self._over = True
            if self._is_reported and self._segments.all_exited_cleanly():
                self.ended_well = True
                self._report("relaunch-unavailable", "the processes that went on ended with code 0")
        if not self._over and not process.outlived:
            process.outlived = True
            if final_signal is not None:
                process.signal(Signals[final_signal])
        process.outlived = not self._over
        if self._over:
            process.tree.reap(every_s=0.0)
        return not self._over

    def _look(self, process: Process) -> tuple[dict[int, int | None], bool]:
        """Return who trains, pid to rank if that is known, and whether others may yet."""
        trains: dict[int, int | None] = dict(self._segments.living())
        may = False
        for member in process.tree.members():
            if member.pid in trains:
                continue
            with suppress(psutil.Error):
                age_s = time.time() - member.create_time()
                if self._marked("armed", member.pid) and not self._marked("off", member.pid):
                    trains[member.pid] = None
                else:
                    booted = self._marked("boot", member.pid)
                    may |= age_s < (IMPORT_S if booted else FORK_S)
        return trains, may

    def _marked(self, mark: str, pid: int) -> bool:
        return (self._marks / f"{mark}.{pid}").exists()

    def _report_orphans(
        self, process: Process, trains: Mapping[int, int | None], watch_s: float
    ) -> None:
        self._is_reported = True
        message = (
            f"the job's first process ended ({describe_ending(process.returncode or 0)}), and "
        )
        message += f"{_named(trains)} without it"
        verdict = f"the run goes on with what is left, for at most {watch_s / 60:g} minutes"
        self._report("orphans", message, trains, verdict=verdict)

    def _leave(self, process: Process, trains: Mapping[int, int | None]) -> None:
        self._over = self.left = True
        message = f"left running: {_named(trains)} without the job's first process"
        verdict = "nobody watches them any more, and the job is not started again"
        self._report("orphans-left", message, trains, verdict=verdict)

    def _report(
        self, kind: str, message: str, trains: Mapping[int, int | None] | None = None, **facts: str
    ) -> None:
        data: dict[str, Json] = dict(facts)
        if trains:
            data["processes"] = {str(pid): rank for pid, rank in trains.items()}
            data["end"] = " ".join(["kill", *map(str, sorted(trains))])
        self._processor.process(Notice(system.monotonic_ns(), kind, message, data=Payload(data)))


def _named(trains: Mapping[int, int | None]) -> str:
    names = [
        f"process {pid}" + ("" if rank is None else f" (rank {rank})")
        for pid, rank in sorted(trains.items())
    ]
    return f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} on"


ANSWER_S = 2.0  # for an answer that already lies there to come round


@dataclass(frozen=True)
class Adoption:
    """Puts the parts of a supervisor where the one before it stood.

    Attributes:
        past: of the run. The other parts are new, and nothing has gone through them.
    """

    past: RecoveredRun
    run: RunDir
    processor: EventProcessor
    recorder: Recorder
    control: Control
    segments: Segments

    def take_over(self, enricher: FrameEnricher, outbox: Outbox) -> list[Event]:
        """Take over; return what the segments have had to say since, to be judged now."""
        past, processor = self.past, self.processor
        processor.resume(past)
        for announced in past.announced.values():
            enricher.recall(announced)
        for number, at_ns, decision in past.unwritten:
            self.recorder.record_decision(decision, number, at_ns)
        repeated = self._repeat(outbox)
        events = self.segments.poll()
        alive = self.control.process.returncode is None
        code = HUMAN if self._stopped(alive=alive) else past.exit_code
        self.control.resume_after_crash(past.paused_until_ns, code)
        facts = {
            "pid": os.getpid(),
            "late": len(past.unwritten),
            "messages": repeated,
            "channels": outbox.channels,
            "journal": self.recorder.journal,
        }
        self.recorder.note("recovered", processor.state.step, "another supervisor took over", facts)
        now_ns = system.monotonic_ns()
        processor.process(Adopted(now_ns, os.getpid(), alive, max(0, now_ns - past.state.at_ns)))
        self._perform_again(events)
        if past.asked is not None:
            processor.reload(past.asked)
        return events

    def _stopped(self, *, alive: bool) -> bool:
        """Whether the job was stopped for a relaunch that has not started it again.

        The mark of the start may be missing, so its launch counts too.
        """
        order, launched = self.past.relaunch, self.past.launched
        if order is None:
            return False
        if launched is not None and launched.attempt >= order.args.parse(RelaunchArgs).attempt:
            return False
        try:
            return was_stopped_for(self.run, self.processor.action_key(order.id))
        except StoreError:  # a relaunch did begin: who finds the job dead should look
            return not alive

    def _repeat(self, outbox: Outbox) -> int:
        """Post again what no channel has answered for; return how many messages that were."""
        posted: list[tuple[Notified, str, float]] = []
        settled: dict[str, set[str]] = {}
        for record in audit.read_audit(self.run.audit_path):
            self.processor.mark_progress()  # a long log takes its time
            data = record.get("data") or {}
            for channel in data.get("channels") or ():
                settled.setdefault(channel, set())
            if record["kind"] == "notify_intent":
                key = f"{self.run.id}:{record['seq']}"
                decision = decision_from_record(record)
                assert isinstance(decision, Notified)
                posted.append((decision, key, record["mono_ns"] / 1e9))
            elif record["kind"] == "notify_result":
                settled.setdefault(data["channel"], set()).update(data["keys"])
        messages = [(self.processor.message(notified), key, at_s) for notified, key, at_s in posted]
        return outbox.resume(messages, settled)

    def _perform_again(self, events: list[Event]) -> None:
        """Go on with the action under way; what the job says meanwhile joins the events."""
        run = self.processor.state.run()
        if run is None or run.intent.action_id is None:
            return
        verb = verb_of(awaited_action(self.processor.state))
        answered = self.control.is_answered(self.processor.action_key(run.intent.action_id))
        withdrawn = withdrawal.explain_withdrawal(self.processor.policy, self.processor.state)
        if withdrawn and not answered:
            lost = f"{withdrawn}, and so is who asked for it"
            self.processor.process(
                Finished(system.monotonic_ns(), run.intent.action_id, False, error=lost)
            )
            return
        reason = f"{run.intent.action_id} was under way: performed again under its key"
        action = {"id": run.intent.action_id, "verb": verb}
        self.recorder.note("recovered", self.processor.state.step, reason, {"action": action})
        if verb == "stop" and self.control.process.returncode is not None:
            # It ended in the middle of our stop: that this was by chance cannot be shown.
            self.control.exit_code = run.intent.args.parse(EndArgs).exit_code
        self.processor.resume_action()
        until = time.monotonic() + ANSWER_S
        # What follows it waits for what the job has said since: a pause may have ended by itself.
        while answered and run.intent.action_id == action["id"] and time.monotonic() < until:
            events += self.segments.poll()  # and acks: ranks may stand at a fence
            self.control.run_pending_work(system.monotonic_ns())
            self.processor.collect_results()
            time.sleep(0.005)
