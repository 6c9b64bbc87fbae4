"""Processing of events into decisions: write, then act.

    event -> journal -> core.engine.step -> audit log -> performer, outbox

Actions run on the performer's thread and messages on the outbox's; their outcomes return as events
and notes of later rounds.

The performer runs one action at a time, with a deadline. The main loop calls `start` once an intent
is on disk, and `poll` in each iteration, which returns exactly one `Finished` per start. An action
that overruns its deadline is reported as failed; its thread is abandoned (a daemon, so that it
cannot delay the exit) and its later result is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import shlex
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

import msgspec

from .. import system
from ..actions.recovery import Relaunch
from ..core import approvals, engine, job_lifecycle, runbook_runner
from ..core.incident import RunbookExecution, verb_of
from ..core.model.action import Action, Job
from ..core.model.decisions import ACTING_MODES, ActionPlanned, Decision, MessageText, Notified
from ..core.model.events import Announced, Event, Finished, Frame, Notice, OperatorCommand
from ..core.model.interfaces import Message
from ..core.model.payload import Json, Payload, RelaunchArgs
from ..core.model.policy import Policy
from ..errors import ActionError, StoreError, Views, named_error
from ..notifiers import PAGE
from ..notifiers.delivery import Backlog
from ..notifiers.outbox import Outbox, Result, Trouble, message_of
from ..notifiers.page import page_link
from ..report.incident_files import IncidentFiles
from ..store.recorder import Recorder
from ..system import Thread
from .late_messages import LateMessage, Summary
from .settings import WINDOW_FRAMES, RecoveredRun, Settings
from .status import TrainingProgress, end_protection

_log = logging.getLogger(__name__)
METRICS, PROGRESS = "metrics for Prometheus", "progress of the training"  # two views
# Beyond its deadline an action reports its own failure; a fence waits 10 s for what was decided on.
SLACK_S = 12.0
# Of an action, in which it needs the main loop: until its first letter, and most; project defaults.
LETTER_NS, HURRY_NS = 50_000_000, 1_000_000_000


class Performer:
    """Performs actions on `job`. All methods are for the main loop's thread."""

    def __init__(self, job: Job, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` makes the main loop call `poll` at once."""
        self._wake = wake
        self._job = job
        self._running: str | None = None
        self._done: SimpleQueue[Finished] = SimpleQueue()
        self._deadline_ns = 0
        self._deadline_s = 0.0

    @property
    def running(self) -> str | None:
        """Id of the action under way, None if there is none."""
        return self._running

    def start(self, action_id: str, action: Action, args: Payload, *, key: str) -> None:
        """Start `action.perform(job, args, key=key)` on a thread of its own.

        Raises:
            RuntimeError: another action is running; the engine never does that.
        """
        if self._running is not None:
            raise RuntimeError(f"{action_id} was started while {self._running} is running")
        self._running = action_id
        self._deadline_s = action.limit_s(args)
        self._deadline_ns = time.monotonic_ns() + int((self._deadline_s + SLACK_S) * 1e9)
        # A new queue: the late result of an abandoned thread goes into one that is never read.
        self._done = SimpleQueue()
        thread = Thread(
            target=_perform,
            args=(self._job, action_id, action, args, key, self._done, self._wake),
            name=f"action {action_id}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            text, retry = f"no thread for the action: {error}", Payload({"retryable": True})
            self._done.put(Finished(time.monotonic_ns(), action_id, False, retry, text))

    def poll(self) -> Finished | None:
        """Return the result of the action once it has finished or overrun its deadline."""
        if self._running is None:
            return None
        try:
            finished = self._done.get_nowait()
        except Empty:
            now_ns = time.monotonic_ns()
            if now_ns < self._deadline_ns:
                return None
            error = f"did not finish within {self._deadline_s:g} s; its effect is unknown"
            finished = Finished(now_ns, self._running, ok=False, error=error)
        self._running = None
        return finished


def _perform(
    job: Job,
    action_id: str,
    action: Action,
    args: Payload,
    key: str,
    results: SimpleQueue[Finished],
    wake: Callable[[], None],
) -> None:
    try:
        result = action.perform(job, args, key=key)
    except ActionError as error:
        facts: dict[str, Json] = {"retryable": error.retryable}
        if error.refused:
            facts["refused"] = True
        if error.inconsistent:
            facts["inconsistent"] = True
        if error.unfenceable:
            facts["unfenceable"] = error.unfenceable
        if error.no_space:
            facts["no_space"] = True
        if error.job_ended:
            facts["job_ended"] = True
        if error.hint:
            facts["hint"] = error.hint
        finished = Finished(time.monotonic_ns(), action_id, False, Payload(facts), str(error))
    except Exception as error:  # a bug of ours must not leave the incident without an outcome
        _log.exception("action %s failed with an internal error", action_id)
        facts = {"retryable": False, "traceback": traceback.format_exc()}
        text = f"internal error: {type(error).__name__}: {error}"
        finished = Finished(time.monotonic_ns(), action_id, False, Payload(facts), text)
    else:
        finished = Finished(time.monotonic_ns(), action_id, True, Payload(result))
    results.put(finished)
    wake()


class EventProcessor:
    """Judges one event after another.

    Attributes:
        policy: the one in force.
        state: the engine's.
        last: the newest decision.
        names: per rank, its newest table of metric names.
        window: the newest frames, each with its names.
        training: what these and all frames before them show of the progress of the training.
        performing: verb of the action that is under way, "" when there is none.
        views: makes what people read and nothing follows from.
        incident_files: what people read of the newest incident.
        lost_to: the error of ours that ended the protection of the run, "" while there is none.
        progress_ns: when something was last begun or done here; older while the disk hangs.
    """

    def __init__(
        self, settings: Settings, recorder: Recorder, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`wake` lets the loop come to `collect_results` at once."""
        self._wake = wake
        self.policy = settings.policy
        self.recorder = recorder
        self.state = engine.initial_state(self.policy)
        self.last: Decision | None = None
        self.names: dict[int, tuple[str, ...]] = {}
        self.window: deque[tuple[Sequence[str], Frame]] = deque(maxlen=WINDOW_FRAMES)
        self.views = Views()
        self.views.report = self._report_view
        self.training = TrainingProgress(settings.argv)
        self.performing = self.lost_to = ""
        self.progress_ns = system.monotonic_ns()
        self._unwritten = (0, 0)
        self._is_short = self._is_unprotected = False  # of space, without a record; as was told
        self._performing_ns = 0  # when that began
        self._unsent: list[tuple[Notified, int | None]] = []  # messages that wait for `flush`
        self._watching: tuple[Policy, Policy] | None = None  # the policy, and that with no action
        self._settings, self._run = settings, settings.run
        self._job = shlex.join(settings.argv)
        self._redactor = settings.redactor
        self.incident_files = IncidentFiles(
            settings.run, lambda: self.policy, lambda: tuple(self.window), self.views
        )
        recorder.on_record = self.incident_files.on_record
        self._metrics = settings.metrics
        self._reloader = settings.reloader
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._late: queue.SimpleQueue[LateMessage] = queue.SimpleQueue()

    def open(self, performer: Performer, outbox: Outbox) -> None:
        """Let decisions be carried out by these from now on."""
        self.performer, self._outbox = performer, outbox

    def resume(self, past: RecoveredRun) -> None:
        """Go on where the records of the run end."""
        self.policy, self.state, self.last = past.policy, past.state, past.last
        self.names.update(past.names)
        self.window.extend(past.window)
        for names, frame in past.window:
            self.training.add_frame(names, frame)
        if past.state.incident is not None:
            self.incident_files.resume()

    def process(self, event: Event, *, more: bool = False) -> None:
        """Number and write an event, judge it, write the decisions, then carry them out.

        What the job said in it loses its secrets first: what is judged is what is on record, and
        replay comes to the same.

        Args:
            more: others come at once, and `flush` behind them: they are written together unless
                something follows from one. Nothing is decided by what is not on disk.
        """
        self.mark_progress()
        self._unwritten = (1, 0)
        event = self._redactor.event(event)
        number = self.recorder.record_event(event, more_follow=more)
        self._unwritten = (0, 0)
        if isinstance(event, Announced):
            self.names[event.rank] = event.names
        elif isinstance(event, Frame):
            names = self.names.get(event.rank, ())
            self.incident_files.on_frame(event, names)
            self.window.append((names, event))
            self.views.make(PROGRESS, self.training.add_frame, names, event)
        self.state, decisions = engine.step(self._judging_policy(), self.state, event)
        numbers: list[int | None] = []
        for new_decision in decisions:
            self._unwritten = (0, len(decisions) - len(numbers))
            numbers.append(self.recorder.record_decision(new_decision, number, event.at_ns))
        self._unwritten = (0, 0)
        if self._metrics is not None:
            names = self.names.get(event.rank, ()) if isinstance(event, Frame) else ()
            self.views.make(METRICS, self._metrics.observe, event, names, decisions)
        for decision, seq in zip(decisions, numbers, strict=True):
            self.last = decision
            if isinstance(decision, ActionPlanned):
                self._perform(decision.action.id, decision.action.verb, decision.action.args)
            elif isinstance(decision, Notified):
                # Its texts take longer than several steps, which a rollback would lose.
                if self._unsent or any(isinstance(other, ActionPlanned) for other in decisions):
                    self._unsent.append((decision, seq))
                else:
                    self._notify(decision, seq)
        self._report_unprotected()

    def flush(self) -> None:
        """Write the events that were processed with `more`."""
        self.recorder.flush()
        self._report_unprotected()

    @property
    def unwritten(self) -> tuple[int, int]:
        """How many events, and decisions, wait for the disk right now. Any thread."""
        events, decisions = self._unwritten
        return max(events, self.recorder.unwritten), decisions

    def _judging_policy(self) -> Policy:
        """Return the policy in force; where nothing can be done, no rule says that it would be."""
        if not self.recorder.has_journal_ended or self.policy.mode not in ACTING_MODES:
            return self.policy
        if self._watching is None or self._watching[0] is not self.policy:
            self._watching = self.policy, replace(self.policy, mode="observe")
        return self._watching[1]

    def check_space(self) -> None:
        """Renew the record's reserve; say when it comes into use, and when it is whole again."""
        self.recorder.check_space(self._run.path)
        shortage = self.recorder.no_space
        if bool(shortage) != self._is_short and not self.recorder.has_journal_ended:
            self._is_short = bool(shortage)
            self._report_space(job_lifecycle.SHORT if shortage else job_lifecycle.ENOUGH, shortage)

    def _report_unprotected(self) -> None:
        """Say once, at once, that the record ended before the run."""
        if self.recorder.has_journal_ended and not self._is_unprotected:
            self._is_unprotected = True
            self._report_space(job_lifecycle.UNPROTECTED, self.recorder.trouble or "")

    def _report_space(self, kind: str, shortage: str) -> None:
        text = f"the disk of {self._run.path}: {shortage or 'it has space again'}"
        space = self.recorder.shortage(self._run.path)
        data = Payload(None if space is None else msgspec.to_builtins(space))
        data = data.extended(acts=self.policy.mode in ACTING_MODES)
        self.process(Notice(system.monotonic_ns(), kind, text, data=data))

    def end_protection(self, outbox: Outbox, error: Exception, trace: str) -> None:
        """An error of ours has ended the supervision: tell every channel, and put it on record.

        Not by way of the engine, which may be what failed.
        """
        self.lost_to = f"an error of supervise: {self._redactor.text(named_error(error))}"
        while self._unsent:
            self.views.make("messages that wait", self.send_messages)
        self.views.make("message of the end", self._post_unwatched, outbox)
        about = {"what": job_lifecycle.UNPROTECTED, "traceback": trace}
        self.recorder.note("note", self.state.step, f"not watched any more: {self.lost_to}", about)
        self.recorder.record_failure(StoreError(self.lost_to), "nothing is watched any more")
        self.views.make("status", end_protection, self._run, self.lost_to)

    def _post_unwatched(self, outbox: Outbox) -> None:
        acts = self.policy.mode in ACTING_MODES
        draft = job_lifecycle.supervision_ended_message(self.lost_to, acts=acts, pid=os.getpid())
        message = self.message(draft.decision(draft.kind, self.state.step, self.state.attempt))
        outbox.post(message, key=f"{self._run.id}:{job_lifecycle.UNPROTECTED}")

    def _report_view(self, view: str, error: str) -> None:
        text = f"the {view} cannot be made: {error}"
        if not self.recorder.concluded:  # nothing follows the record of the end
            text += "; the run stays protected"
            about = {"what": "view-failed", "view": view}
            self.recorder.note("note", self.state.step, text, about)
        self._settings.print_line(f"supervise: {text}; see supervisor.log in {self._run.path}")

    def mark_progress(self) -> None:
        """Something was begun or done, so nothing hangs."""
        self.progress_ns = system.monotonic_ns()

    def take_command(self, command: OperatorCommand) -> None:
        """Process an operator's command; a valid `reload` puts another policy in force."""
        self.process(command)
        if command.command == "reload":
            self.reload(command)

    def reload(self, command: OperatorCommand) -> None:
        """Let another policy take over, or tell why it cannot."""
        self.policy, events = self._reloader.reload(command, self.policy, self.state)
        for event in events:
            self.process(event)

    def collect_results(self) -> None:
        """Take what actions and messages came to since the last call."""
        finished = self.performer.poll()
        if finished is not None:
            self.performing = ""
            self.process(finished)
        self.record_results()
        if not self._is_hurried(LETTER_NS):
            self.send_messages()
        if not self._is_hurried(HURRY_NS):
            self.incident_files.flush(system.monotonic_ns())
        self.recorder.limit_journal(self.policy.journal_bytes)

    def _is_hurried(self, within_ns: int) -> bool:
        """Whether an action has just begun: its commands need the main loop."""
        return bool(self.performing) and system.monotonic_ns() - self._performing_ns < within_ns

    def record_results(self) -> None:
        """Write down what became of messages."""
        while not self._results.empty():
            result = self._results.get_nowait()
            if self._outbox.reaches_people(result):  # first: after a crash it is sent once more
                self._delivered(result.request, f"by {result.channel}")
            data = {
                "channel": result.channel,
                "ok": result.ok,
                "keys": list(result.keys),
                "tries": result.tries,
            }
            if self._metrics is not None:
                self.views.make(METRICS, self._metrics.delivered, result.channel, ok=result.ok)
            reason = f"{result.channel}: {result.detail}"
            self.recorder.note("notify_result", self.state.step, reason, data)
        while not self._late.empty():
            late = self._late.get_nowait()
            data = {"what": "late-message", "outcome": late.state}
            data |= msgspec.to_builtins(Summary.from_message(late))
            self.recorder.note("note", self.state.step, late.text, data)

    def report_late_message(self, late: LateMessage) -> None:
        """For any thread: a message of an earlier run was delivered or refused."""
        self._late.put(late)
        self._wake()

    def on_result(self, result: Result) -> None:
        """For the outbox's threads: a message was delivered, or given up."""
        self._results.put(result)
        self._wake()

    def broken_channels(self) -> list[Trouble]:
        """Return which channels do not deliver; people are told of each once, on the others."""
        return self._outbox.check_channels()

    def waiting_messages(self) -> dict[str, Backlog]:
        """Return how many messages wait for each channel, where any do."""
        return {name: n for name, n in self._outbox.backlog().items() if n.waiting or n.held}

    def relaunch_execution(self) -> RunbookExecution:
        """Return the runbook whose relaunch is under way.

        Raises:
            ActionError: nobody waits for it any more.
        """
        run = self.state.run()
        if run is None or not run.intent.awaits_outcome("relaunch"):
            raise ActionError("nobody waits for the relaunch any more")
        return run

    def candidate_steps(self) -> tuple[int, int] | None:
        """Return between which steps that relaunch may find a better checkpoint; both are left out.

        None where people approved the one that was ordered. Raises ActionError, see `relauncher`.
        """
        run, incident = self.relaunch_execution(), self.state.incident
        action = run.intent.action
        if run.terms.approved is not None or incident is None or not isinstance(action, Relaunch):
            return None
        breach_step = (
            incident.breach_step if run.requested.before_step is None else run.requested.before_step
        )
        return run.intent.args.parse(RelaunchArgs).step, action.before(breach_step)

    def choose_checkpoint(self) -> Payload:
        """Let the engine aim the relaunch under way again; return its arguments.

        Raises:
            ActionError: nobody waits for it any more, or the choice is not on disk.
        """
        if self.recorder.trouble is None:
            text = "the job was stopped, and what it left was looked at"
            self.process(Notice(system.monotonic_ns(), "checkpoint-choice", text))
        if self.recorder.trouble is not None:
            raise ActionError(self.recorder.trouble)
        return self.relaunch_execution().intent.args

    def raise_if_stopped(self) -> None:
        """Raise ActionError when an operator said `stop` while the job was dead."""
        incident = self.state.incident
        for command in incident.deferred.commands if incident is not None else ():
            if command.command == "stop":
                raise ActionError(f"not started again: {command.operator} said stop")

    def resume_action(self) -> None:
        """Perform the action that waits for its outcome, which somebody else began."""
        incident = self.state.incident
        assert incident is not None
        assert incident.run is not None
        verb = verb_of(runbook_runner.awaited_action(self.state))
        intent = incident.run.intent
        assert intent.action_id is not None
        self._perform(intent.action_id, verb, intent.args)

    def message(self, decision: Notified, *, carded: bool = True) -> Message:
        """Return what people are told by a decision to notify them; a card reads the run's disk."""
        directory = str(self._run.path.absolute())
        message = replace(
            message_of(decision, self._run.id, self.recorder.head, directory, self._job),
            host=socket.gethostname(),
            job=self._job,
            policy=self.policy.name,
            mode=self.policy.mode,
            facts=(*self._deadline(decision), *self._page_link(decision.incident)),
            at=system.wall_time(),
        )
        return self._redactor.message(self.incident_files.add_card(message) if carded else message)

    def _deadline(self, decision: Notified) -> tuple[tuple[str, str], ...]:
        """Return until when a request can be answered, where it is one that waits."""
        pending = self.state.approvals.pending
        if pending is None or decision.message.request != pending.id:
            return ()
        until = system.wall_time(-pending.timeout_s)[:16].replace("T", " ")
        minutes = f"{pending.timeout_s / 60:g} min"
        return (("answer by", f"{until} UTC, or {minutes} after a later delivery"),)

    def _page_link(self, incident: str | None) -> tuple[tuple[str, str], ...]:
        """Return where the page shows what a message is about, if the policy says where that is."""
        keys = self.policy.notify.get(PAGE)
        return () if not keys else (("page", page_link(keys, self._run.path.name, incident)),)

    def action_key(self, action_id: str) -> str:
        """Return the key under which the job knows an action, whoever performs it."""
        return f"{self._run.id}:{action_id}"

    def _perform(self, action_id: str, verb: str, args: Payload) -> None:
        trouble = self.recorder.trouble
        if trouble is not None and verb != "resume":
            # Law 2: a decision that is not on disk must not be acted on. But nothing of ours may
            # keep the job from going on because a disk is full: that law comes first.
            self.process(Finished(system.monotonic_ns(), action_id, False, error=trouble))
            return
        if self.performer.running is not None:  # an error of ours must not end the watching
            error = f"{self.performer.running} is under way"
            self.process(Finished(system.monotonic_ns(), action_id, False, error=error))
            return
        self.performing, self._performing_ns = verb, system.monotonic_ns()
        action_awaited, key = runbook_runner.awaited_action(self.state), self.action_key(action_id)
        self.performer.start(action_id, action_awaited, args, key=key)

    def send_messages(self, *, recorded: bool = True) -> None:
        """Post the messages that wait for the action of their event to begin.

        Args:
            recorded: the disk responds, so their texts are put on record.
        """
        while self._unsent:
            decision, seq = self._unsent.pop(0)
            self._notify(decision, seq, recorded=recorded)

    def _notify(self, decision: Notified, seq: int | None, *, recorded: bool = True) -> None:
        number = decision.step if seq is None else seq
        message = self.message(decision, carded=recorded)
        is_posted = self._outbox.post(message, key=f"{self._run.id}:{number}")
        if not recorded:
            return
        self._record_text(message, decision.message, number)
        if not is_posted and message.request:
            self._delivered(message.request, "nowhere: no channel takes it")

    def _record_text(self, message: Message, text: MessageText, number: int) -> None:
        """Write down what people are sent, where that is more than what the engine has decided."""
        if (message.title, message.verdict) != (text.title, text.verdict) or message.card:
            data = {"message": number, "title": message.title, "verdict": message.verdict}
            data |= {"why": message.why, "next": message.next.text, "card": list(message.card)}
            self.recorder.note("notify_text", self.state.step, message.title, data)

    def _delivered(self, request: str, channel: str) -> None:
        """Let the time to answer a request begin."""
        pending = self.state.approvals.pending
        if pending is not None and pending.id == request and not pending.delivered:
            timeout = f"it waits for {pending.timeout_s:.0f} s from now"
            text = f"{request} was delivered {channel}; {timeout}"
            at_ns = system.monotonic_ns()
            self.process(Notice(at_ns, approvals.DELIVERED, text, data=Payload({"id": request})))
