"""One trouble, from its first breach to its verified recovery, and its runbook in progress.

There is at most one open incident: whatever fires meanwhile joins it, so that a hundred detectors
tripping in one step are one page and one runbook.

An action that can be undone leaves its opposite in `Recovery.undos` when it is committed. The
opposite goes when it was carried out, whether by us or by a later step (`resume` after `pause`).
What did not help is taken back before anything else is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from .frames import BrokenForward
from .model import formats
from .model.action import Action
from .model.decisions import SEVERITIES, PlannedStep
from .model.events import OperatorCommand
from .model.interfaces import yaml_name
from .model.payload import NOTHING, Outcome, Payload, RateArgs, RelaunchArgs, RollbackArgs
from .model.policy import Runbook
from .model.verdicts import ContextEvent, SlowStep, Verdict
from .notices import Cause
from .reasons import AckLapsed
from .run_phase import RateCause, RateJump
from .trends import Band

OVERDUE_S = 30.0  # past an action's own deadline, its outcome is in doubt


@dataclass(slots=True)
class Intent:
    """What is being performed, or was last.

    Attributes:
        action_id: id of the action whose outcome is awaited, None when none is.
        action: the action itself. verb, args: its name, and its absolute arguments.
        deadline_ns: when the outcome is in doubt.
    """

    action_id: str | None = None
    action: Action | None = None
    verb: str = ""
    args: Payload = NOTHING
    deadline_ns: int = 0

    def awaits_outcome(self, verb: str) -> bool:
        """Return whether the outcome of such an action is awaited."""
        return self.action_id is not None and self.verb == verb


@dataclass(slots=True)
class OperatorRequest:
    """Who asked for it, and from where it goes on.

    Attributes:
        operator: "" when a rule asked for it.
        before_step: the step that the operator goes back to before.
    """

    operator: str = ""
    before_step: int | None = None


@dataclass(slots=True)
class RunbookFailure:
    """What becomes of a runbook that cannot go on.

    Attributes:
        reason: why it failed, while it is being compensated; None: it has not.
        pending_undos: compensations still to do.
        ineffective: it did not help: what is undone, and then the next level.
        exhausted: nothing else may be tried: no budget, or an undo failed.
        refused: the job refused its step, and nothing was touched.
        withdrawn_at: step at which its reason was gone before it acted: nothing is tried instead.
        pause_ended: why the job is not paused any more, though this runbook relies on it.
        ranks_differ: some ranks did a step and others did not: no other command may follow.
    """

    reason: Cause | None = None
    pending_undos: list[Action] = field(default_factory=list)
    ineffective: bool = False
    exhausted: bool = False
    refused: bool = False
    withdrawn_at: int | None = None
    pause_ended: str = ""
    ranks_differ: bool = False


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a runbook was started, as far as that can go away (see `withdrawal`).

    Attributes:
        rules: ids of the rules that asked for it.
        frames: for a standstill, rank -> frames that it had sent by then; None for other reasons.
    """

    rules: tuple[str, ...]
    frames: dict[int, int] | None = None


@dataclass(slots=True)
class StartTerms:
    """How a runbook came to be started.

    Attributes:
        reason: None: a person's order, or nothing that can go away.
        escalated: it was not asked for: what is below it on the ladder was tried.
        substitute: it stands in for one that could not work here.
        entry_level: the incident's level before it was started.
        reduced_reason: why only evidence is taken and people are told.
        repeated: that was known before, and told.
        approved: verbs and arguments that were allowed.
        waits: it only pauses the job while a checkpoint is verified.
    """

    reason: Reason | None = None
    escalated: bool = False
    substitute: bool = False
    entry_level: int = -1
    reduced_reason: str = ""
    repeated: bool = False
    approved: list[PlannedStep] | None = None
    waits: bool = False


class AwaitedEffect(NamedTuple):
    """An action that was done, whose effect no frame has shown yet.

    Attributes:
        step_index: of its step in the runbook. seen_attempt: attempt of the frames before it.
    """

    step_index: int
    verb: str
    args: Payload
    result: Payload
    seen_attempt: int


@dataclass(slots=True)
class VerificationProgress:
    """What the frames after a runbook have shown.

    Attributes:
        deadline_frame: frame count at which it has failed, None before it is verified.
        frame_ns: when the newest frame to verify by came.
        effects: actions that have shown none so far.
        clear_steps: frames in a row without trouble. last_trouble: what stood against it.
        seen_clear: (rule of SEV0, rank) that was clear meanwhile.
        rejected: what the job says against it: it does not go on as it should.
    """

    deadline_frame: int | None = None
    frame_ns: int = 0
    effects: list[AwaitedEffect] = field(default_factory=list)
    clear_steps: int = 0
    last_trouble: Cause | None = None
    seen_clear: set[tuple[str, int]] = field(default_factory=set)
    rejected: str = ""


@dataclass(slots=True)
class RunbookExecution:
    """A runbook in progress.

    Attributes:
        number: of the runbooks of its incident, from 1. severity: of that when it was started.
        index: the step that waits, is performed, or is verified.
        committed: indices of steps that were committed.
        standstill: why the job stands still, as its evidence says; "" where it does not.
        intent, requested, terms, verification, failure: see their classes.
    """

    number: int
    runbook: Runbook
    severity: str
    index: int = 0
    committed: list[int] = field(default_factory=list)
    standstill: str = ""
    intent: Intent = field(default_factory=Intent)
    requested: OperatorRequest = field(default_factory=OperatorRequest)
    terms: StartTerms = field(default_factory=StartTerms)
    verification: VerificationProgress = field(default_factory=VerificationProgress)
    failure: RunbookFailure = field(default_factory=RunbookFailure)

    def is_busy(self) -> bool:
        """Return whether a step is being performed, or taken back."""
        return self.intent.action_id is not None or self.failure.reason is not None


@dataclass(slots=True)
class Excursion:
    """How the frames since the onset looked.

    Attributes:
        peak: the largest loss. outliers: frames whose loss was far out of the band.
        nonfinite: first step whose loss, gradient or update was not finite. skipped: first and last
            one of those that were skipped, and so kept from the weights.
        lasting: the newest frame is not finite either, and was not skipped.
        bad_losses: how many of the newest losses in a row are not finite, skipped or not.
        came_back: it was not finite again in the attempt after a rollback.
        unseen: steps of it that have no frame.
        largest_update: from the step before the onset on, before any rollback.
    """

    peak: float | None = None
    outliers: int = 0
    nonfinite: int | None = None
    lasting: bool = False
    skipped: tuple[int, ...] = ()
    bad_losses: int = 0
    came_back: bool = False
    unseen: int = 0
    largest_update: float | None = None

    @property
    def is_nonfinite(self) -> bool:
        """Whether any loss, gradient or update was not finite, skipped or not."""
        return bool(self.skipped) or self.nonfinite is not None


@dataclass(slots=True)
class LossCase:
    """The question how the loss is, and its answer.

    Attributes:
        rank: whose frames are asked; `attempt` of its newest one, `last_step` its step.
        first_step: first step that counts as after the onset: of the new attempt after a rollback.
        since_frame: frame count from which the loss has time to come back; `opened_at_frame` never
            changes.
        band: that the loss was in before the onset. loss_before: its healthy value just before.
        norms: metric -> median before it.
        rate: what is known of the learning rate as a cause, None for nothing.
        context: what else happened around the onset.
        rolled_back: it was taken back since. exhausted: it came back after the last level.
        data_returned: the step from which on the losses are of data that came back, None for none.
        verdict: the class that it was given while it is open.
        other_peak: the highest loss by the time that two losses told that other data came in than
            those of the probe batch, None where they did not.
    """

    rank: int = 0
    attempt: int = 0
    last_step: int = -1
    first_step: int = 0
    since_frame: int = 0
    opened_at_frame: int = 0
    band: Band | None = None
    loss_before: float | None = None
    norms: dict[str, float] = field(default_factory=dict)
    rate: RateCause | None = None
    jump: RateJump | None = None
    context: list[ContextEvent] = field(default_factory=list)
    excursion: Excursion = field(default_factory=Excursion)
    rolled_back: bool = False
    exhausted: bool = False
    data_returned: int | None = None
    verdict: Verdict | None = None
    other_peak: float | None = None


class RollbackFailure(StrEnum):
    """How a rollback that was sent came to nothing that is known."""

    FAILED = "a rollback failed"
    IN_DOUBT = "a rollback may have happened (then its attempt is a new one)"


@dataclass(slots=True)
class Recovery:
    """The way back from a failure.

    Attributes:
        undos: (number of the runbook, the action that reverses one of its actions), oldest first.
        outstanding: there were some when the process ended.
        rolled_back_to: the attempt that the job was last rolled back to; older frames are stale.
        restored_step: the step that it was taken back to, None before that.
        loop_kept: by a rollback: the loop, and the step numbers, went on.
        must_pass, probation_step: after a rollback: the first breach, a step that a recovery must
            have passed, and the step before which its probation does not end. A crash has neither:
            it may lie far ahead, and the count of crashes judges it.
        crashed: the first breach, if that is the end of the process.
        suspect_from: attempt -> step from which its checkpoints are suspect because of this.
        rate_limits: what the learning rate was held at as the cause, oldest first.
        out_of_reach: the job refused to go back, as where no savepoint is old enough.
        rollback_failure: how the newest rollback failed, None where it did not.
        relapse_step: where the trouble came back after a verified recovery, None where it did not.
        rewarm_start: the factor of the learning rate behind the newest rollback.
    """

    undos: list[tuple[int, Action]] = field(default_factory=list)
    outstanding: bool = False
    rolled_back_to: int = 0
    restored_step: int | None = None
    loop_kept: bool = False
    must_pass: int = -1
    probation_step: int = -1
    crashed: int = -1
    suspect_from: dict[int, int] = field(default_factory=dict)
    rate_limits: list[float] = field(default_factory=list)
    out_of_reach: bool = False
    rollback_failure: RollbackFailure | None = None
    relapse_step: int | None = None
    rewarm_start: float = 1.0


@dataclass(slots=True)
class Onset:
    """The newest begin of a trouble that its shards were blamed for, and what came of it.

    Attributes:
        attempt, breach: where it began, -1 before any. advisory: only rules of SEV2 told of it.
        last_step: newest step of it whose batch is known to be part of the trouble.
        frame_count, step: of the newest frame in which a rule of the incident was in breach.
        lull: the last step in breach before `QUIET_STEPS` without, when there were as many since.
        batches: fingerprints of the steps up to it, and of those in breach.
    """

    attempt: int = -1
    breach: int = -1
    advisory: bool = False
    last_step: int = -1
    frame_count: int = 0
    step: int = -1
    lull: int | None = None
    batches: tuple[int, ...] = ()


@dataclass(slots=True)
class WithdrawnRunbook:
    """A runbook that was withdrawn since the weights were good.

    Attributes:
        name, level, escalated: it, as it was started.
        step: of the decision. retry_frame: frame count from which new evidence may start it again.
        waits: steps until then.
        loss: of the probe batch with these weights, the lowest one. good: it said that they are.
        data_event: how it is known that the data changed, and are learned, "" where it is not.
        changed: they did, as far as their tokens show.
        loss_before: of the probe batch before the first breach, 0.0 where nobody knows.
        other_data: two losses told that other data came in than those of the probe batch.
        is_good_now: this very answer said that the weights are good. attempt: in which it came.
        loss_level: that of the job at the first of the good answers in a row, None for this one.
    """

    name: str
    level: int
    escalated: bool
    step: int
    retry_frame: int
    waits: int
    loss: float
    good: bool
    data_event: str
    changed: bool = False
    loss_before: float = 0.0
    other_data: bool = False
    is_good_now: bool = False
    attempt: int = 0
    loss_level: float | None = None


class RunbookStart(NamedTuple):
    """A runbook, its level on the ladder (-1: on none), and why it is started."""

    runbook: str
    level: int
    reason: Cause
    is_escalated: bool


@dataclass(slots=True)
class AwaitedCheckpoint:
    """A runbook that was refused for want of a good checkpoint.

    Attributes:
        number: of the newest run then. name, reason, escalated: the runbook, as it was started.
        since_ns: when that was.
        candidates: checkpoints without a verdict that may do, None until they were looked for.
        pauses: the job was asked to pause until there is a verdict.
    """

    number: int
    name: str
    reason: Cause
    escalated: bool
    since_ns: int
    candidates: int | None = None
    pauses: bool = False


@dataclass(slots=True)
class Deferred:
    """What is done later.

    Attributes:
        rules: ids of rules to be answered then; see `rule_fired`.
        commands: those of operators; see `operator_commands`.
        retry: to be requested again; see `runbook_runner`.
        awaiting_checkpoint: what was refused for want of one; see `checkpoint_wait`.
        weights_check: what was withdrawn since the weights were good; see `weights_check`.
        session_end: the last step of its training session, where that has ended, so that it is
            closed; see `job_end`.
    """

    rules: list[str] = field(default_factory=list)
    commands: list[OperatorCommand] = field(default_factory=list)
    retry: RunbookStart | None = None
    awaiting_checkpoint: AwaitedCheckpoint | None = None
    weights_check: WithdrawnRunbook | None = None
    session_end: int | None = None


@dataclass(slots=True)
class Ending:
    """How long an incident has been quiet, and must be.

    Attributes:
        probation_until: frame count at which its probation has passed.
        quiet_since: frame count since which no rule has fired, None while one does.
        rebaselined: a detector behind it took the new level for its baseline.
    """

    probation_until: int = 0
    quiet_since: int | None = None
    rebaselined: bool = False


@dataclass(slots=True)
class Escalation:
    """What was tried about an incident; kept by `runbook_runner`.

    Attributes:
        level: of the ladder, -1 before any. runs: how many runbooks were started.
        called_off: how many of them changed nothing, since their reason was over.
        shadowed: runbooks that shadow mode only wrote down.
        exhausted: (frame count, ns) since when nothing that is left can help, the time also of the
            newest reminder; None: something can.
    """

    level: int = -1
    runs: int = 0
    called_off: int = 0
    shadowed: list[str] = field(default_factory=list)
    exhausted: tuple[int, int] | None = None


@dataclass(slots=True)
class Trigger:
    """What asked for the newest runbook; kept by `withdrawal`.

    Attributes:
        asked_by: id of the rule. still: because the job stood still.
        asks: a rule in mode `approve` began it, so that all that it leads to is asked for.
    """

    asked_by: str = ""
    still: bool = False
    asks: bool = False


OPEN, ACTING, PROBATION, HELD, CLOSED = "open", "acting", "probation", "held", "closed"
# An incident that nobody acted on is over after so many steps without a firing rule. What begins
# behind as many in one that is still open would have been an incident of its own.
QUIET_STEPS = 20


NEAR = 5  # steps in which the gravest rule of a trouble follows its first one; project default


@dataclass(slots=True)
class Incident:
    """An open incident.

    Attributes:
        opened_step: newest step then. breach_step: the first that may be part of the trouble.
        rules: ids of those that joined it. headline: what it is about, one line.
        slow: since when steps take longer, where it is that. forward: what broke running
            statistics, by the first rule about them. run: the runbook in progress.
        is_held: acting stopped, until somebody releases it; a runbook may run in the meantime.
        acknowledged_by: the operator who acknowledged it, as severe as it is. lapsed_ack: of one
            as less severe, until a message says so. denied_by: who denied a request of it.
        ordered_by: the operator whose order opened it.
        reported_ns: when people were last told of it, 0 for never.
        trigger, escalation, case, onset, recovery, deferred, ending: see their classes.
    """

    id: str
    opened_step: int
    breach_step: int
    severity: str
    rules: list[str]
    headline: str = ""
    phase: str = OPEN
    slow: SlowStep | None = None
    forward: BrokenForward | None = None
    run: RunbookExecution | None = None
    is_held: bool = False
    acknowledged_by: str = ""
    lapsed_ack: AckLapsed | None = None
    denied_by: str = ""
    ordered_by: str = ""
    reported_ns: int = 0
    trigger: Trigger = field(default_factory=Trigger)
    escalation: Escalation = field(default_factory=Escalation)
    case: LossCase = field(default_factory=LossCase)
    onset: Onset = field(default_factory=Onset)
    recovery: Recovery = field(default_factory=Recovery)
    deferred: Deferred = field(default_factory=Deferred)
    ending: Ending = field(default_factory=Ending)

    def join(self, rule: str, severity: str) -> bool:
        """Add a rule that fires; return True when it raised the incident's severity."""
        self.ending.quiet_since = None
        if rule not in self.rules:
            self.rules.append(rule)
        return self.raise_severity(severity)

    def raise_severity(self, severity: str) -> bool:
        """Make it as severe as `severity`; return whether it was less so.

        Who acknowledged it decided about less: what waits for nobody then goes on.
        """
        if SEVERITIES.index(severity) >= SEVERITIES.index(self.severity):
            return False
        if self.acknowledged_by:
            self.lapsed_ack = AckLapsed(operator=self.acknowledged_by, acked=self.severity)
        self.severity, self.acknowledged_by = severity, ""
        return True

    @property
    def is_rolled_back(self) -> bool:
        """Whether the job was taken back since it began, also where no frame has shown it yet."""
        return self.case.rolled_back or self.recovery.rolled_back_to > self.case.attempt

    @property
    def onset_step(self) -> int:
        """The step at which it began, as people are told."""
        is_near = 0 <= self.breach_step - self.opened_step <= NEAR
        return min(self.breach_step, self.opened_step) if is_near else self.breach_step

    @property
    def untrusted_from(self) -> int:
        """The step from which on no checkpoint is to be used."""
        is_crash = self.breach_step == self.recovery.crashed
        return self.breach_step if is_crash else self.onset_step

    @property
    def steps_held(self) -> int:
        """For how many steps a recovery held before a relapse, 0 where there was none."""
        relapse_step = self.recovery.relapse_step
        is_known = relapse_step is not None and self.case.rolled_back
        return max(0, (relapse_step or 0) - self.case.first_step) if is_known else 0

    @property
    def is_order(self) -> bool:
        """Whether it is an operator's order only, and no rule fired in it."""
        return bool(self.ordered_by) and not self.rules

    def hold(self) -> None:
        """Nothing of its own is started any more; what is being performed comes to its end."""
        self.phase, self.is_held, self.deferred.retry = HELD, True, None
        if self.run is not None and not self.run.is_busy():
            self.run = None

    def reopen(self) -> None:
        """Nothing is under way: it is held as before, or watched until it was quiet long enough."""
        self.phase, self.ending.quiet_since = HELD if self.is_held else OPEN, None


def verb_of(action: Action) -> str:
    """Return the YAML name of an action."""
    return yaml_name(type(action))


def format_arguments(args: Payload, *, observed: bool = False) -> str:
    """Return arguments, or `observed` effects, in one line; what is empty is left out."""
    return formats.inline(args, counted=observed)[:160]


WAY_BACK_VERBS = ("rollback", "relaunch")
# It limits what comes next, whatever that is: without it what is tried would meet the jump again.
STANDING_VERBS = ("hold_rate",)
LIMITING_VERBS = (*STANDING_VERBS, "lr_scale", "clip", "update_clip")  # they mend no harm
# When a training is over: its data is no better for the next one, and what trains is not paused.
LASTING_UNDOS = ("unquarantine", "resume")


def is_limiting_runbook(book: Runbook) -> bool:
    """Return whether a runbook limits what comes next, and mends nothing."""
    verbs = set(book.verbs)
    return bool(verbs & {*LIMITING_VERBS}) and not verbs & {*WAY_BACK_VERBS}


def remedy_strength(book: Runbook) -> int:
    """Return 0 for a runbook that makes steps smaller, 1 for one that holds the rate, else 2."""
    if not is_limiting_runbook(book):
        return 2
    return int(not {*STANDING_VERBS}.isdisjoint(book.verbs))


def record_committed(
    incident: Incident, run: RunbookExecution, action: Action, verb: str, outcome: Outcome
) -> None:
    """Take note of an action that was done. What a person asked for is not ours to take back."""
    recovery = incident.recovery
    recovery.rolled_back_to = max(recovery.rolled_back_to, outcome.attempt or 0)
    if verb in WAY_BACK_VERBS:
        recovery.restored_step = outcome.step
        if verb == "relaunch" and outcome.step is None:
            recovery.restored_step = run.intent.args.parse(RelaunchArgs).step
        recovery.loop_kept = verb == "rollback"
        recovery.rollback_failure = recovery.relapse_step = None
        rewarm = run.intent.args.read(RollbackArgs).rewarm
        recovery.rewarm_start = 1.0 if rewarm is None else rewarm.start
    if verb == "hold_rate" and (limit := run.intent.args.parse(RateArgs).limit) is not None:
        recovery.rate_limits.append(limit)
    forget_undo(recovery, verb)
    opposite = action.undo()
    if opposite is not None and not run.requested.operator:
        recovery.undos.append((run.number, opposite))
    led = bool(incident.rules) and incident.breach_step != recovery.crashed  # by a rule
    if verb in WAY_BACK_VERBS and led and not run.requested.operator:
        recovery.must_pass = max(recovery.must_pass, incident.breach_step)
        recovery.probation_step = recovery.must_pass + run.runbook.verification.clear_for


def note_rollback_failure(recovery: Recovery, verb: str, failure: RollbackFailure) -> None:
    """Take note of how an action came to nothing that is known, if it was a rollback."""
    if verb == "rollback":
        recovery.rollback_failure = failure


def forget_undo(recovery: Recovery, verb: str) -> None:
    """The opposite `verb` of what was done was carried out otherwise."""
    recovery.undos = [(n, undo) for n, undo in recovery.undos if verb_of(undo) != verb]


def remove_undo(recovery: Recovery, action: Action) -> None:
    """Take note of an undo that was carried out, or failed: it is not tried again."""
    recovery.undos = [pair for pair in recovery.undos if pair[1] is not action]


def undo_actions(recovery: Recovery) -> list[Action]:
    """Return what takes back all that stands, newest first."""
    return [undo for _, undo in reversed(recovery.undos)]


def record_uncertain(recovery: Recovery, run: RunbookExecution) -> None:
    """Take note of an action that may have been done: its outcome went with its training."""
    action, failure = run.intent.action, run.failure
    if action is None or run.requested.operator or failure.pending_undos or failure.refused:
        return
    opposite = action.undo()
    if opposite is not None and opposite not in undo_actions(recovery):
        recovery.undos.append((run.number, opposite))


def escalation_undos(recovery: Recovery, *, rate_stands: bool) -> list[Action]:
    """Return what takes back all that the next level is not to find, newest first."""
    stand = STANDING_VERBS if rate_stands else ()
    return [undo for undo in undo_actions(recovery) if verb_of(undo) not in stand]


def session_undos(recovery: Recovery) -> list[Action]:
    """Return what takes back all that would act on the next training, newest first."""
    return [undo for undo in undo_actions(recovery) if verb_of(undo) not in LASTING_UNDOS]


def undos_after_failure(
    recovery: Recovery, run: RunbookExecution, sent_index: int | None
) -> list[Action]:
    """Return what takes back this runbook's own steps, newest first.

    Args:
        sent_index: index of a step that failed after it was asked for, and may have half happened.
    """
    undos = [u for n, u in recovery.undos if n == run.number and verb_of(u) not in STANDING_VERBS]
    if sent_index is not None:
        undos = [undo for undo in undos if verb_of(undo) != run.runbook.verbs[sent_index]]
        opposite = run.runbook.steps[sent_index].undo()
        undos += [] if opposite is None or run.requested.operator else [opposite]
    return undos[::-1]
