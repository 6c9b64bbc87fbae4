"""A new supervisor takes the place of a dead one, and goes on as if nothing had happened.

In this order: what was decided and not written down is written; the state of every part is put in
place; an action that was under way is performed again under the key that it has had, so that the
job changes at most once; messages without a result are posted again, under their keys too. What
happened since is read and judged only then: the effect of an action is looked for in the first
frame after it.

An intent that is on disk, receivers that know a repeated order, and probing for the effect are each
needed for one effect per order.
"""

from __future__ import annotations

import os
import time

from ..actions.stop import HUMAN
from ..core.incidents import withdrawal
from ..core.model.decisions import Notified, decision_from_record
from ..core.model.events import Adopted, Event, Finished
from ..core.runbooks.steps import awaited_action
from ..core.state.incident import verb_of
from ..errors import StoreError
from ..inputs import clock
from ..inputs.frame_enrichment import FrameEnricher
from ..inputs.segment.directory import Segments
from ..job.controller import Control
from ..outputs.outbox import Outbox
from ..store import audit
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from .event_processor import EventProcessor
from .relauncher import stopped_for
from .run_recovery import RecoveredRun

ANSWER_S = 2.0  # for an answer that already lies there to come round


class Adoption:
    """Puts the parts of a supervisor where the one before it stood.

    Args:
        past: of the run. The other parts are new, and nothing has gone through them.
    """

    def __init__(
        self,
        past: RecoveredRun,
        run: RunDir,
        processor: EventProcessor,
        recorder: Recorder,
        control: Control,
        segments: Segments,
    ) -> None:
        self._past = past
        self._run = run
        self._processor = processor
        self._recorder = recorder
        self._control = control
        self._segments = segments

    def begin(self, enricher: FrameEnricher, outbox: Outbox) -> list[Event]:
        """Take over; return what the segments have had to say since, to be judged now."""
        past, processor = self._past, self._processor
        processor.resume(past)
        for announced in past.announced.values():
            enricher.recall(announced)
        for number, at_ns, decision in past.unwritten:
            self._recorder.decision(decision, number, at_ns)
        repeated = self._repeat(outbox)
        events = self._segments.poll()
        alive = self._control.process.returncode is None
        code = HUMAN if self._stopped(alive=alive) else past.exit_code
        self._control.resume(past.paused_until_ns, code)
        told = {
            "pid": os.getpid(),
            "late": len(past.unwritten),
            "messages": repeated,
            "channels": outbox.channels,
            "journal": self._recorder.journal,
        }
        self._recorder.note("recovered", processor.state.step, "another supervisor took over", told)
        now_ns = clock.monotonic_ns()
        processor.process(Adopted(now_ns, os.getpid(), alive, max(0, now_ns - past.state.at_ns)))
        self._perform_again()
        if past.asked is not None:
            processor.reload(past.asked)
        return events

    def _stopped(self, *, alive: bool) -> bool:
        """Whether the job was stopped for a relaunch that has not started it again.

        The mark of the start may be missing, so its launch counts too.
        """
        order, launched = self._past.relaunch, self._past.launched
        if order is None:
            return False
        if launched is not None and launched.attempt >= order.args["attempt"]:
            return False
        try:
            return stopped_for(self._run, self._processor.action_key(order.id))
        except StoreError:  # a relaunch did begin: who finds the job dead should look
            return not alive

    def _repeat(self, outbox: Outbox) -> int:
        """Post again what no channel has answered for; return how many messages that were."""
        posted: list[tuple[Notified, str, float]] = []
        settled: dict[str, set[str]] = {}
        for record in audit.read(self._run.audit_path):
            self._processor.mark_progress()  # a long log takes its time
            data = record.get("data") or {}
            for channel in data.get("channels") or ():
                settled.setdefault(channel, set())
            if record["kind"] == "notify_intent":
                key = f"{self._run.id}:{record['seq']}"
                decision = decision_from_record(record)
                assert isinstance(decision, Notified)
                posted.append((decision, key, record["mono_ns"] / 1e9))
            elif record["kind"] == "notify_result":
                settled.setdefault(data["channel"], set()).update(data["keys"])
        messages = [(self._processor.message(said), key, at_s) for said, key, at_s in posted]
        return outbox.resume(messages, settled)

    def _perform_again(self) -> None:
        run = self._processor.state.run()
        if run is None or run.intent.action_id is None:
            return
        verb = verb_of(awaited_action(self._processor.state))
        answered = self._control.answered(self._processor.action_key(run.intent.action_id))
        gone = withdrawal.withdrawn(self._processor.policy, self._processor.state)
        if gone and not answered:
            lost = f"{gone}, and so is who asked for it"
            self._processor.process(
                Finished(clock.monotonic_ns(), run.intent.action_id, False, {}, lost)
            )
            return
        why = f"{run.intent.action_id} was under way: performed again under its key"
        action = {"id": run.intent.action_id, "verb": verb}
        self._recorder.note("recovered", self._processor.state.step, why, {"action": action})
        if verb == "stop" and self._control.process.returncode is not None:
            # It ended in the middle of our stop: that this was by chance cannot be shown.
            self._control.exit_code = run.intent.args["exit_code"]
        self._processor.resume_action()
        until = time.monotonic() + ANSWER_S
        # What follows it waits for what the job has said since: a pause may have ended by itself.
        while answered and run.intent.action_id == action["id"] and time.monotonic() < until:
            self._control.pump(clock.monotonic_ns())
            self._processor.collect_results()
            time.sleep(0.005)
