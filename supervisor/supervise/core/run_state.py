"""State of the engine between events, and its output during one: decisions and messages.

`State` is a cache: folding the journal gives it back. `StepContext` lives for one event only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from .attempt_overlap import RepeatedSteps
from .frames import JobFrames
from .incident import Incident, RunbookExecution
from .model import state_machine
from .model.checkpoint_registry import Checkpoints
from .model.decisions import (
    SEVERITIES,
    ActionFinished,
    Decision,
    IncidentOpened,
    MessageText,
    NoticeTaken,
    Notified,
    PlannedStep,
    RuleCleared,
    RuleFired,
    StateChanged,
    Suppressed,
    Suppressor,
)
from .model.events import Event
from .model.failure import Failure, sort_by_cause
from .model.interfaces import ACTION, APPROVAL, CLOSED, FINISHED, OPENED, UPDATED, WATCHER, Advice
from .model.payload import NOTHING, Drill, Payload, WiringFacts
from .model.policy import Ledger, Planned, Policy
from .notices import NO_ADVICE, Cause, Notice
from .rank_monitor import RankMonitor
from .run_phase import RunPhase
from .shard_attribution import ShardAttribution
from .trends import DataLevel, TaskAlternation

RANKS = (*SEVERITIES, "INFO")
WEIGHTS = (FINISHED, CLOSED, APPROVAL, ACTION, UPDATED, WATCHER)  # the first one names a message


@dataclass(slots=True)
class MessageDraft:
    """What is to be told about an incident, or about none.

    Attributes:
        next: what happens now, or what a person should do.
        request: id of the approval that is asked for, "" for none.
        acknowledged_by: the operator who has just acknowledged the incident, "" for nobody.
        to_all: it goes to every channel, whatever its least severity.
        explanation: a rule of the same event about what the model is given, with its numbers; and
            that an acknowledgement was of less.
    """

    incident: Incident | None
    kind: str
    severity: str
    title: str
    verdict: str = ""
    reason: str = ""
    next: Advice = NO_ADVICE
    request: str = ""
    acknowledged_by: str = ""
    to_all: bool = False
    explanation: str = ""
    form: str = ""
    facts: Payload = NOTHING

    @classmethod
    def of(cls, notice: Notice, incident: Incident | None = None) -> MessageDraft:
        """Return the draft of a typed fact, about `incident` alone."""
        texts = notice.title, notice.verdict, notice.reason, notice.next
        form = type(notice).__name__
        return cls(incident, notice.KIND, notice.severity, *texts, form=form, facts=notice.facts)

    def merge(self, other_draft: MessageDraft, *, replace: bool) -> None:
        """Take over another one: the worst severity, the weightiest kind, and its `next`.

        The texts stand unless they are empty or `replace` is set; what takes their place and is
        good news pages for nothing that it has made void.
        """
        is_void = replace and other_draft.severity == RANKS[-1]
        is_lighter = WEIGHTS.index(other_draft.kind) > WEIGHTS.index(APPROVAL)
        keeps_question = self.kind == APPROVAL and is_lighter and not replace
        worst = min(self.severity, other_draft.severity, key=RANKS.index)
        self.severity = other_draft.severity if is_void else worst
        self.kind = min(self.kind, other_draft.kind, key=WEIGHTS.index)
        if replace:
            self.title = other_draft.title
        if other_draft.verdict and (replace or not self.verdict):
            self.verdict = other_draft.verdict
        if other_draft.reason and (replace or not self.reason):
            self.reason = other_draft.reason
        # Where to look is worth less than any advice, and more than none; how to answer a request,
        # more than any.
        both = other_draft.next, self.next
        if not (keeps_question and self.next):
            self.next = max(both, key=lambda advice: (bool(advice), bool(advice.text)))
        self.request = other_draft.request or self.request
        self.acknowledged_by = other_draft.acknowledged_by or self.acknowledged_by
        self.to_all |= other_draft.to_all
        if replace:
            self.form, self.facts = other_draft.form, other_draft.facts
        self.explanation = self.explanation or other_draft.explanation

    def decision(self, kind: str, step: int, attempt: int) -> Notified:
        """Return the message as a record for the audit log."""
        incident = self.incident
        same = incident is not None and incident.severity == self.severity
        message = MessageText(
            kind=kind,
            severity=self.severity,
            title=self.title,
            verdict="; ".join(filter(None, (self.verdict, self.explanation))),
            why=self.reason,
            lead=self.next.lead,
            steps=self.next.steps,
            live_steps=self.next.live,
            next=self.next.text,
            step=step,
            rules=() if incident is None else tuple(incident.rules),
            request=self.request,
            acknowledged_by=self.acknowledged_by,
            incident_severity="" if incident is None or same else incident.severity,
            to_all=self.to_all,
            form=self.form,
            facts=self.facts,
        )
        return Notified(
            step=step,
            attempt=attempt,
            reason=self.title,
            incident=None if incident is None else incident.id,
            severity=self.severity,
            message=message,
        )


class MessageDrafts:
    """The messages of one event, in the order in which they were begun."""

    __slots__ = ("_drafts",)

    def __init__(self) -> None:
        self._drafts: dict[str | None, MessageDraft] = {}

    def add(self, draft: MessageDraft, *, replace: bool, subject: str | None = None) -> None:
        """Take a message, and merge it into an earlier one about the same incident, or subject."""
        key = subject if draft.incident is None else draft.incident.id
        if key in self._drafts:
            self._drafts[key].merge(draft, replace=replace)
        else:
            self._drafts[key] = draft

    def explain(self, incident: Incident, text: str) -> None:
        """Add an explanation to the message about an incident, where there is one."""
        if incident.id in self._drafts:
            draft = self._drafts[incident.id]
            draft.explanation = "; ".join(filter(None, (text, draft.explanation)))

    def drop(self, incident: Incident) -> None:
        """Tell nothing of an incident."""
        self._drafts.pop(incident.id, None)

    def decisions(
        self, decisions_before: Iterable[Decision], step: int, attempt: int
    ) -> Iterator[Decision]:
        """Yield each message; `decisions_before`: what else was decided in the event.

        The first message about an incident that was opened in the event is its opening.
        """
        new = {
            decision.incident
            for decision in decisions_before
            if isinstance(decision, IncidentOpened)
        }
        for key, draft in self._drafts.items():
            opens = key in new and draft.kind in (ACTION, UPDATED)
            yield draft.decision(OPENED if opens else draft.kind, step, attempt)


@dataclass(slots=True)
class Reported:
    """What people last heard of a rule: of which incident, at which frame count, how far it was.

    Attributes:
        peaks: metric in breach -> how far it was off; see `notices`.
    """

    incident: str
    reported_frame: int
    peaks: dict[str, float]


@dataclass(slots=True)
class NoteMemory:
    """The newest note of a detector that is on record.

    Attributes:
        frame_count: then. records: how many there are. unrecorded: notes since then.
    """

    frame_count: int = 0
    records: int = 0
    unrecorded: int = 0


@dataclass(slots=True)
class RuleMemory:
    """Which rules flap, are muted or are silenced, and what people were told of them.

    Attributes:
        flips: (rule id, rank) -> frame counts of its last changes, to tell flapping.
        flapping: ids of the rules that flap.
        heights: (rule id, rank, metric) -> (frame count, how far off it was) of its last firings,
            each higher than the one before.
        noted: (detector, kind) -> its newest note.
        muted: rule id -> what muted it; such a rule is offered again when that is gone.
        silenced: rule id -> (frame_count until which it is silent, operator).
        reported: rule id -> what people last heard of it. growing: -> what they are to hear.
        wiring: metric -> what is known of that fault of the job's wiring. wiring_reported: metric
            -> step at which people got the message about its kind.
    """

    flips: dict[tuple[str, int], deque[int]] = field(default_factory=dict)
    flapping: set[str] = field(default_factory=set)
    heights: dict[tuple[str, int, str], list[tuple[int, float]]] = field(default_factory=dict)
    noted: dict[tuple[str, str], NoteMemory] = field(default_factory=dict)
    muted: dict[str, Suppressor] = field(default_factory=dict)
    silenced: dict[str, tuple[int, str]] = field(default_factory=dict)
    reported: dict[str, Reported] = field(default_factory=dict)
    growing: dict[str, str] = field(default_factory=dict)
    wiring: dict[str, WiringFacts] = field(default_factory=dict)
    wiring_reported: dict[str, int] = field(default_factory=dict)

    def silence(self, rule: str, frame_count: int) -> str | None:
        """Return the name of who silenced a rule that is still to be silent, else None."""
        until, operator = self.silenced.get(rule, (0, ""))
        return operator if frame_count < until else None

    def muted_by(self, rule: str) -> str:
        """Return the cause of the mute of a rule, "" for none."""
        muted = self.muted.get(rule)
        return "" if muted is None else muted.cause

    def unmute_cleared(self, firing: Collection[str]) -> None:
        """Forget what muted a rule that does not fire any more."""
        self.muted = {rule: cause for rule, cause in self.muted.items() if rule in firing}

    def forget_unknown(self, rule_ids: Collection[str]) -> None:
        """Forget the rules that the policy does not have any more."""
        self.flips = {key: counts for key, counts in self.flips.items() if key[0] in rule_ids}
        self.flapping.intersection_update(rule_ids)
        self.heights = {key: rise for key, rise in self.heights.items() if key[0] in rule_ids}
        self.reported = {rule: report for rule, report in self.reported.items() if rule in rule_ids}
        self.growing = {rule: text for rule, text in self.growing.items() if rule in rule_ids}


END_REQUESTED = "the end of the job was requested"  # why it is not started again


@dataclass(slots=True)
class Restarts:
    """The steps at which the job was started again, since it last went beyond all of them.

    Attributes:
        crashes: because it ended by itself. hangs: because it stood still.
        classes: of the failures that it was started again after, in the whole run.
        cause: what ended the newest of them, None where that is not known.
    """

    crashes: list[int] = field(default_factory=list)
    hangs: list[int] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    cause: Failure | None = None

    @staticmethod
    def farthest_or_clear(steps: list[int], step: int) -> int:
        """Return the farthest of `steps`, -1 for none; a run that is beyond it forgets them."""
        farthest = max(steps, default=-1)
        if step > farthest:
            steps.clear()
        return farthest


@dataclass(slots=True)
class EpochProgress:
    """Where in which epoch the steps of one attempt are, from its first to its newest.

    Attributes:
        in_parts: the library counts parts of epochs, too.
    """

    attempt: int = -1
    first_step: int = 0
    first_epoch: float = 0.0
    step: int = 0
    epoch: float = 0.0
    in_parts: bool = False

    def begin(self, attempt: int, step: int, epoch: float) -> None:
        """Its first step."""
        self.attempt, self.first_step, self.step = attempt, step, step
        self.first_epoch = self.epoch = epoch
        self.in_parts = not epoch.is_integer()


@dataclass(slots=True)
class JobLife:
    """How it is with the job's processes.

    Attributes:
        world_size: how many ranks it has, as they say.
        launched: first attempt of the newest launch; frames of older ones are of the past.
        returncode: how the job ended, None while it runs. ended: nobody has answered that yet.
        seen_ended: an action found that it has ended; how follows.
        ended_ns: when it ended last, 0 for never. over: nothing will run any more.
        paused: it was asked to pause, and not seen to go on by our word since.
        stopping: an action of ours ends it. stopped_by: who asked for that.
        end_requested: `end_signal` asked for its end. interrupted: that was typed at its terminal.
        preempted: what asked for its end, and whether the job wrote a checkpoint for that.
        held_signals: names of those that wait for a checkpoint. signalled: any signal came.
        shortfall: how many steps its library made of those planned, "" where it made all or was
            asked to stop, None where no library reported an end.
        epochs: where in which epoch its steps are. drill_signal: by which a drill ends a process.
        unfit_host: why it cannot be started again on this host, "" while it may.
        host_doubts: what people know could not be decided of the health of this host.
        no_restart_reason: why it is not started again. restarts: where it was, up to now.
        restarted_with: what the newest start was given to go on from a checkpoint.
        pids: of its first process, and of those that trained since its launch.
        failures: what its processes recorded of their ends, of the newest launch.
        unavailable: verb -> why the probe says that this job does not allow it.
        lost: the verbs that people know to be unavailable; None before they heard what can be done.
    """

    world_size: int = 1
    launched: int = 0
    returncode: int | None = None
    ended: bool = False
    seen_ended: bool = False
    ended_ns: int = 0
    over: bool = False
    paused: bool = False
    stopping: bool = False
    stopped_by: str = "policy"
    end_requested: bool = False
    end_signal: str = ""
    interrupted: bool = False
    preempted: str = ""
    held_signals: tuple[str, ...] = ()
    signalled: bool = False
    shortfall: str | None = None
    epochs: EpochProgress = field(default_factory=EpochProgress)
    unfit_host: str = ""
    host_doubts: str = ""
    no_restart_reason: Cause | None = None
    restarted_with: str = ""
    restarts: Restarts = field(default_factory=Restarts)
    pids: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    drill_signal: str = ""
    unavailable: dict[str, str] = field(default_factory=dict)
    lost: frozenset[str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.returncode is not None or self.seen_ended

    @property
    def cause(self) -> Failure | None:
        """Why it ended, None where it ended well or nothing was recorded of it."""
        return next(iter(self.failures_by_cause), None) if self.returncode else None

    @property
    def failures_by_cause(self) -> list[Failure]:
        """How its processes ended, the one that the others follow from first."""
        return sort_by_cause(self.failures, self.ended_ns)


@dataclass(slots=True)
class IncidentHistory:
    """How many incidents there were, and what was tried about them.

    Attributes:
        opened: incidents of the run so far, the open one included.
        session_start: frame count at which the newest training session started.
        last_level: (level, frame count) of the last incident that acted; the next one starts no
            lower.
        cooldown: rule id -> (frame count, level) of its last runbook.
        tried_runbooks: runbook -> whether it was verified, or needed no verification, at its
            newest run.
    """

    opened: int = 0
    session_start: int = 0
    last_level: tuple[int, int] | None = None
    cooldown: dict[str, tuple[int, int]] = field(default_factory=dict)
    tried_runbooks: dict[str, bool] = field(default_factory=dict)

    def start_session(self, frame_count: int) -> None:
        """Forget what was tried in the training before; incidents are counted on."""
        self.session_start, self.last_level = frame_count, None
        self.cooldown.clear()
        self.tried_runbooks.clear()

    def renumber(self, level: Callable[[int], int]) -> None:
        """Give every level that is remembered the number that `level` returns for it."""
        self.cooldown = {
            name: (frame_count, level(old_level))
            for name, (frame_count, old_level) in self.cooldown.items()
        }
        if self.last_level is not None:
            self.last_level = (level(self.last_level[0]), self.last_level[1])


class Happened(NamedTuple):
    """Something that may explain an excursion of the loss.

    Attributes:
        incident: that it was done about, "" for none.
    """

    step: int
    attempt: int
    kind: str
    text: str
    incident: str = ""


@dataclass(slots=True)
class LossContext:
    """What happened in the run, how often the loss went astray, and on which data.

    Attributes:
        happened: what may explain an excursion of the loss.
        onsets: frame counts at which the newest excursions were noticed.
        attribution: which shards troubles began in.
        planned: changes that operators announced, beside those of the policy.
        data_levels: stretches of other data that incidents were about. data_returned: the frame
            count at which a rule was last muted as such data came back, -1 for never.
        task_turn: the newest stretch of another task, by the two losses; None for none.
        takes_turns: optimizers of different parameters do, so that losses of several models follow
            one another.
    """

    happened: deque[Happened] = field(default_factory=lambda: deque(maxlen=64))
    onsets: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    attribution: ShardAttribution = field(default_factory=ShardAttribution)
    planned: tuple[Planned, ...] = ()
    data_levels: deque[DataLevel] = field(default_factory=lambda: deque(maxlen=8))
    data_returned: int = -1
    task_turn: TaskAlternation | None = None
    takes_turns: bool = False


@dataclass(slots=True)
class ApprovalRequest:
    """A request that waits. The first fields are those with which the runbook is started.

    Attributes:
        plan: every step that touches the job.
        sha: sha256 of the plan. policy: digest of the policy that wants it.
        requested_ns, timeout_s: the deadline counts from the delivery; see `start_answer_timeout`.
        delivered: it has reached people, so that the deadline stands.
        granted: who allowed it, while the evidence is still being taken.
        unneeded: people know that the loss came back without it.
    """

    id: str
    incident: str
    runbook: str
    level: int
    reason: Cause
    escalated: bool
    severity: str
    plan: list[PlannedStep]
    sha: str
    policy: str
    requested_ns: int
    timeout_s: float
    deadline_ns: int
    on_timeout: str
    delivered: bool = False
    granted: str = ""
    unneeded: bool = False


KEPT_REQUESTS = 64  # settled requests that a late word is told about


@dataclass(slots=True)
class ApprovalLog:
    """What people were asked.

    Attributes:
        pending: the request that waits. request_count: how many there were.
        settled: id -> `approved`, `denied`, ... and the text, of the newest ones.
    """

    pending: ApprovalRequest | None = None
    request_count: int = 0
    settled: dict[str, tuple[str, str]] = field(default_factory=dict)

    def settle(self, pending: ApprovalRequest, outcome: str, text: str) -> None:
        """End the request that waits, and remember what became of it."""
        self.pending = None
        self.settled[pending.id] = outcome, text
        while len(self.settled) > KEPT_REQUESTS:
            del self.settled[next(iter(self.settled))]


# Kinds of decisions, and of notes, that may explain a loss, and what question 4 calls them.
EXPLAINS = {
    **dict.fromkeys(("gap", "collector-off", "probe-off", "segment-fault"), "logging"),
    "commit": "action",
    "operator": "operator",
    "drill": "drill",
    "safeguard": "reflex",
    "suspended": "suspended",
    "note": "note",
}


@dataclass(slots=True)
class State:
    """Everything that can change a decision.

    Attributes:
        frame_count: frames of the leading rank since launch; unlike `step` it never goes back.
        held_ns: since when the run is held, or people were last reminded of it; None: it is not.
        monitors: what is known of each rank, in order of the ranks.
        ranks: frames of several ranks that are not judged yet.
        incident: the open one. ledger: what was spent of the budgets.
        checkpoints: those of the job that the guard told of. repeated: steps that are made again.
        phase, rules, history, job, approvals, context: see their classes.
    """

    machine: str = state_machine.LAUNCHING
    held_ns: int | None = None
    at_ns: int = 0
    step: int = -1
    attempt: int = 0
    frame_count: int = 0
    monitors: dict[int, RankMonitor] = field(default_factory=dict)
    ranks: JobFrames = field(default_factory=JobFrames)
    repeated: RepeatedSteps = field(default_factory=RepeatedSteps)
    incident: Incident | None = None
    ledger: Ledger = field(default_factory=Ledger)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    phase: RunPhase = field(default_factory=RunPhase)
    rules: RuleMemory = field(default_factory=RuleMemory)
    history: IncidentHistory = field(default_factory=IncidentHistory)
    job: JobLife = field(default_factory=JobLife)
    approvals: ApprovalLog = field(default_factory=ApprovalLog)
    context: LossContext = field(default_factory=LossContext)

    def run(self) -> RunbookExecution | None:
        """Return the runbook in progress."""
        incident = self.incident
        return incident.run if incident is not None else None

    def firing(self, policy: Policy) -> list[str]:
        """Return the ids of all rules that fire, or are blind, on any rank, in policy order."""
        return [
            rule.id
            for r, rule in enumerate(policy.rules)
            if any(b.rules[r].firing or b.rules[r].blind for b in self.monitors.values())
        ]

    def silence(self, rule: str) -> str | None:
        """Return the name of who silenced a rule that is still to be silent, else None."""
        return self.rules.silence(rule, self.frame_count)

    def leader(self) -> int | None:
        """Return the lowest rank that has sent a frame: its frames are counted."""
        return next((rank for rank, monitor in self.monitors.items() if monitor.frames), None)


class StepContext:
    """One event being judged: collects the decisions, and the messages to people."""

    __slots__ = ("decisions", "event", "messages", "policy", "state")

    def __init__(self, policy: Policy, state: State, event: Event) -> None:
        self.policy = policy
        self.state = state
        self.event = event
        self.decisions: list[Decision] = []
        self.messages = MessageDrafts()

    def record(self, decision: Decision) -> None:
        """Append a decision about the open incident, unless it stands beside that."""
        state, incident = self.state, self.state.incident
        beside = isinstance(decision, RuleFired | RuleCleared | Suppressed) and decision.alongside
        subject = None if incident is None or beside else incident.id
        self._remember(decision)
        self.decisions.append(
            structs.replace(decision, step=state.step, attempt=state.attempt, incident=subject)
        )

    def _remember(self, decision: Decision) -> None:
        """Keep what may explain a loss: question 4 asks for what happened near an onset."""
        step, state = None, self.state
        kind = decision.WHAT or decision.KIND if decision.KIND == "note" else decision.KIND
        if isinstance(decision, NoticeTaken):
            kind, step = decision.what, decision.at_step
            if kind == "drill" and not decision.details.read(Drill).moves_training:
                return
        if kind in EXPLAINS:
            acted = isinstance(decision, ActionFinished) and state.incident is not None
            incident = state.incident.id if acted and state.incident is not None else ""
            state.context.happened.append(
                Happened(
                    state.step if step is None else step,
                    state.attempt,
                    EXPLAINS[kind],
                    decision.reason,
                    incident,
                )
            )

    def move(self, event: str, reason: str) -> None:
        """Let the machine take `event`; a pair without a move is audited and changes nothing."""
        state = self.state
        target = state_machine.next_state(
            self.policy.machine or state_machine.DEFAULT_TRANSITIONS, state.machine, event
        )
        if target is None:
            text = f"{event} has no move in {state.machine}"
            self.record(StateChanged(reason=text, event=event))
        elif target != state.machine:
            previous_state, state.machine = state.machine, target
            state.held_ns = state.at_ns if target == state_machine.HOLDING else None
            self.record(
                StateChanged(reason=reason, event=event, before=previous_state, after=target)
            )

    def send(
        self, notice: Notice, *, replace: bool = False, incident: Incident | None = None
    ) -> None:
        """Notify people, at most once per event about each incident.

        The first title stands, unless a later call has `replace`. A message without a kind is
        UPDATED while an incident is open, else WATCHER. One of the kind WATCHER is about no
        incident, and FINISHED about the one given.

        Args:
            incident: the open one, unless another one is given.
        """
        kind = notice.KIND
        if incident is None and kind not in (WATCHER, FINISHED):
            incident = self.state.incident
        draft = MessageDraft.of(notice, incident)
        draft.kind = kind or (WATCHER if incident is None else UPDATED)
        pending = self.state.approvals.pending if kind == APPROVAL else None
        draft.request = pending.id if pending is not None else ""
        if incident is not None:
            incident.reported_ns = self.state.at_ns
            if incident.lapsed_ack is not None and notice.severity == incident.severity:
                draft.explanation, incident.lapsed_ack = incident.lapsed_ack.text, None
        self.messages.add(draft, replace=replace)

    def close(self) -> list[Decision]:
        """Return the decisions, the messages to people last."""
        state, decisions = self.state, self.decisions
        return [*decisions, *self.messages.decisions(decisions, state.step, state.attempt)]
