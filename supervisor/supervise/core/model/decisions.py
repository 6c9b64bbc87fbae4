"""Decisions: all that leaves the engine, one class per kind, and their form as audit records.

An audit record holds `kind`, the fields of `Decision` and, under `data`, those of the class; a
field that has its default is left out there. Where one kind has several classes, `data.what` tells
them apart: `WHAT` of a class, or its field `what`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import Struct

from .events import PolicyChanges
from .interfaces import Advice, AdviceSteps, Lead, Reading, sentences
from .payload import NOTHING, Json, Payload
from .verdicts import BandRange, MechanismSigns, ShardAccount, SlowStep, Verdict

# A reading is three-valued. The order makes Kleene logic plain arithmetic: and = min, or = max,
# not = 2 - x.
OK = 0
UNKNOWN = 1
BREACH = 2
CODE_NAMES = ("OK", "UNKNOWN", "BREACH")

SEVERITIES = ("SEV0", "SEV1", "SEV2")  # most severe first
MODES = ("observe", "shadow", "approve", "enforce")  # least powerful first
ACTING_MODES = ("approve", "enforce")  # those in which a rule may touch the job


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One statement of the engine; each becomes one audit record, in this order.

    Attributes:
        step: newest step when it was decided, -1 before the first frame; attempt: likewise.
        reason: one sentence with the numbers in it.
        incident: the open one, unless it stands beside that. rule, severity: None for none.
    """

    KIND: ClassVar[str] = ""
    WHAT: ClassVar[str] = ""

    step: int = -1
    attempt: int = 0
    reason: str
    incident: str | None = None
    rule: str | None = None
    severity: str | None = None

    @property
    def kind(self) -> str:
        """Kind of the audit record."""
        return self.KIND

    @property
    def data(self) -> dict[str, Json]:
        """The fields of the class, as the audit record has them but for non-finite floats."""
        fields: dict[str, Json] = msgspec.to_builtins(self, str_keys=True, enc_hook=dict)
        for name in HEAD:
            fields.pop(name, None)
        return {"what": self.WHAT, **fields} if self.WHAT else fields


HEAD = ("step", "reason", "attempt", "incident", "rule", "severity")


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


class RuleFired(Decision, frozen=True, kw_only=True):
    """A rule began to fire on a rank.

    Attributes:
        when: its expression. numbers: detector -> its reading.
        phase: of the run, where the rule depends on it.
        alongside: the incident that it stands beside, "" for none.
        measured_step: that of a late frame; None: of the newest step.
    """

    KIND, WHAT = "rule", "fired"
    when: str
    rank: int
    numbers: Mapping[str, Reading]
    phase: str = ""
    alongside: str = ""
    measured_step: int | None = None


class RuleCleared(Decision, frozen=True, kw_only=True):
    """A rule stopped firing on a rank."""

    KIND, WHAT = "rule", "cleared"
    rank: int
    alongside: str = ""


class RuleBlind(Decision, frozen=True, kw_only=True):
    """A rule cannot be evaluated any more: a metric that was there went missing."""

    KIND = "blind"
    rank: int


class RuleFlaps(Decision, frozen=True, kw_only=True):
    """A rule changes so often that people hear of it once."""

    KIND, WHAT = "note", "flapping"


class RuleSettled(Decision, frozen=True, kw_only=True):
    """A rule flaps no more, and fires."""

    KIND, WHAT = "note", "settled"


class Suppressor(NamedTuple):
    """What keeps a rule or a runbook from being answered; on record as `<cause>:<name>`.

    Attributes:
        cause: `mode`, `budget`, `phase`, `silence`, `inhibit`, `planned`, `incident`, `acting`, ...
        name: of the mode, budget, ...; "" for a cause alone.
    """

    cause: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.cause}:{self.name}" if self.name else self.cause

    @classmethod
    def from_record(cls, code: str) -> Suppressor:
        """Return the one of which that is the form on record."""
        cause, _, name = code.partition(":")
        return cls(cause, name)


class Suppressed(Decision, frozen=True, kw_only=True):
    """A rule, or a runbook, that is not answered.

    Attributes:
        suppressed_by: the form on record of the `Suppressor`.
        runbook: that would have run; would: its steps, in shadow mode.
        verb, used, max: of an action whose budget is spent.
    """

    KIND = "suppressed"
    suppressed_by: str
    runbook: str = ""
    would: Sequence[ShadowStep] | None = None
    verb: str = ""
    used: int | None = None
    max: int | None = None
    alongside: str = ""

    @property
    def cause(self) -> str:
        """Cause of the `Suppressor`."""
        return Suppressor.from_record(self.suppressed_by).cause


class PlannedStep(Struct, frozen=True):
    """A step of a runbook with the arguments that it would have now."""

    verb: str
    args: Payload


class ShadowStep(Struct, frozen=True, omit_defaults=True):
    """A step that enforce would have carried out, or the reason why it could not have been."""

    verb: str
    args: Payload | None = None
    refused: str = ""


class NearMiss(Decision, frozen=True, kw_only=True):
    """A coupling of detectors that nearly matched."""

    KIND = "near_miss"
    detector: str
    details: Payload


class Rebaselined(Decision, frozen=True, kw_only=True):
    """A detector took the new level for its baseline.

    Attributes:
        unrecorded: how often it did since the record before, when that was soon after.
    """

    KIND = "rebaseline"
    detector: str
    details: Payload
    unrecorded: int = 0


# ── incidents ─────────────────────────────────────────────────────────────────────────────────────


class IncidentOpened(Decision, frozen=True, kw_only=True):
    """An incident began.

    Attributes:
        headline: the numbers of its rule, or what else it is about.
        failure: the error that ended the job, "" for none or of an incident of a rule.
        runbook: for people, "" for none. breach_step: the first step that may be part of it.
        band: of the loss before it. slow_step: since when steps take longer.
        highest_rate: of the run, where the frames just before it do not show that.
        mechanisms: which of attention, routers and step size moved first, and what stayed.
        requested_by: the operator whose order opened it; verb: that order.
    """

    KIND, WHAT = "incident", "opened"
    headline: str
    failure: str = ""
    runbook: str
    breach_step: int
    band: BandRange | None
    slow_step: SlowStep | None = None
    highest_rate: float | None = None
    mechanisms: MechanismSigns | None = None
    requested_by: str = ""
    verb: str = ""


class RuleJoined(Decision, frozen=True, kw_only=True):
    """A rule joined the open incident; `breach_step`: where that begins from now on."""

    KIND, WHAT = "incident", "joined"
    runbook: str
    breach_step: int | None = None


class IncidentRaised(Decision, frozen=True, kw_only=True):
    """An incident became more severe, by a rule or by a crash; `headline`: its numbers, or that."""

    KIND, WHAT = "incident", "raised"
    headline: str
    runbook: str
    breach_step: int | None = None


class RuleGrew(Decision, frozen=True, kw_only=True):
    """A rule of the incident grew far beyond what people know."""

    KIND, WHAT = "incident", "grew"


class IncidentClassified(Decision, frozen=True, kw_only=True):
    """The class of an incident that has been open for long enough."""

    KIND, WHAT = "incident", "classified"
    spike: Verdict


class IncidentHeld(Decision, frozen=True, kw_only=True):
    """Automatic actions stopped, for a cause; a person is needed."""

    KIND, WHAT = "incident", "held"
    cause: str
    spike: Verdict | None = None


# How an incident ended.
RECOVERED, CLEARED, REBASELINED = "recovered", "cleared", "rebaselined"
RELEASED, SUPERSEDED = "released", "superseded"
SESSION_ENDED, JOB_ENDED = "session_ended", "job_ended"


class IncidentClosed(Decision, frozen=True, kw_only=True):
    """An incident is over.

    Attributes:
        outcome: RECOVERED, CLEARED, REBASELINED, RELEASED, SUPERSEDED, SESSION_ENDED or JOB_ENDED.
        acted: a runbook was started. superseded_by: the rule that began another incident.
        ordered: it was an operator's order. clear_steps: without a relapse, where that ended it.
        released_by: the operator who ended the hold. session_end: last step of its training.
        returncode: of the job, None while it runs. asked: a person or a scheduler ended it.
        restarted_with: what a start was given that ended before its first step.
        not_restarted: why the job is not started again.
    """

    KIND, WHAT = "incident", "closed"
    acted: bool
    opened_step: int
    breach_step: int
    rules: Sequence[str]
    spike: Verdict | None = None
    outcome: str
    ordered: bool = False
    clear_steps: int | None = None
    superseded_by: str = ""
    released_by: str = ""
    session_end: int | None = None
    returncode: int | None = None
    asked: bool = False
    restarted_with: str = ""
    not_restarted: str = ""


class StateChanged(Decision, frozen=True, kw_only=True):
    """The state machine took an event; one without a move has neither `before` nor `after`."""

    KIND = "state"
    event: str
    before: str = ""
    after: str = ""


# ── actions and approvals ─────────────────────────────────────────────────────────────────────────


class ActionOrder(Struct, frozen=True, kw_only=True):
    """An action with its absolute arguments, as it is performed."""

    id: str
    verb: str
    runbook: str
    args: Payload
    destructive: bool
    touches_job: bool


class ActionRef(Struct, frozen=True):
    """An action that was planned before."""

    id: str


class ActionPlanned(Decision, frozen=True, kw_only=True):
    """The intent of an action: on disk before it is performed. `budget`: class -> "used/max"."""

    KIND = "intent"
    action: ActionOrder
    budget: Mapping[str, str]


class ActionFinished(Decision, frozen=True, kw_only=True):
    """An action was carried out; `result`: observed effects."""

    KIND = "commit"
    action: ActionRef
    result: Payload


class ActionFailed(Decision, frozen=True, kw_only=True):
    """An action was not carried out."""

    KIND = "abort"
    action: ActionRef
    result: Payload | None = None
    error: str = ""


class ActionInDoubt(Decision, frozen=True, kw_only=True):
    """The outcome of an action did not come before its deadline."""

    KIND = "in_doubt"
    action: ActionRef


class RunbookRefused(Decision, frozen=True, kw_only=True):
    """A runbook, or a step of one, that cannot work here; `substitute`: what runs instead."""

    KIND, WHAT = "abort", "refused"
    runbook: str = ""
    substitute: str = ""
    verb: str = ""


class RunbookWithdrawn(Decision, frozen=True, kw_only=True):
    """A runbook whose reason is gone; `action`, `result`: of the step that was under way."""

    KIND, WHAT = "abort", "withdrawn"
    runbook: str
    cause: str = ""  # in records of before
    action: ActionRef | None = None
    result: Payload | None = None


class PauseEnded(Decision, frozen=True, kw_only=True):
    """The pause that a runbook relied on ended by itself."""

    KIND, WHAT = "abort", "pause-ended"


class ActionReplanned(Decision, frozen=True, kw_only=True):
    """A relaunch under way goes back to another checkpoint."""

    KIND, WHAT = "note", "replanned"
    action: ReplannedAction


class ReplannedAction(Struct, frozen=True):
    """An action under way with its new arguments."""

    id: str | None
    verb: str
    args: Payload


class LateOutcome(Decision, frozen=True, kw_only=True):
    """The outcome of an action that nothing waits for any more; `result`: observed effects."""

    KIND, WHAT = "note", "late-outcome"
    ok: bool
    action: ActionRef | None = None  # in records of before: no more than its text
    result: Payload = NOTHING


class BudgetOverridden(Decision, frozen=True, kw_only=True):
    """An operator's order exceeds a budget."""

    KIND = "override"
    verb: str
    operator: str
    budget: str
    used: int
    max: int


class ApprovalRequested(Decision, frozen=True, kw_only=True):
    """People are asked about a runbook; `verb` and `args`: its steps that touch the job."""

    KIND = "approval_requested"
    id: str
    verb: str
    args: Sequence[PlannedStep]
    args_sha256: str
    policy: str
    runbook: str
    deadline_ns: int
    timeout_s: float
    on_timeout: str


class ApprovalSettled(Decision, frozen=True, kw_only=True):
    """A request ended: `what` is `approved`, `denied`, `expired` or `withdrawn`."""

    KIND = "approval"
    what: str
    id: str
    operator: str
    args_sha256: str
    policy: str
    runbook: str


# ── verification ──────────────────────────────────────────────────────────────────────────────────


class VerificationStarted(Decision, frozen=True, kw_only=True):
    """The frames after a runbook are watched for recovery."""

    KIND, WHAT = "verify", "started"


class VerificationPassed(Decision, frozen=True, kw_only=True):
    """A runbook helped."""

    KIND, WHAT = "verify", "passed"


class VerificationFailed(Decision, frozen=True, kw_only=True):
    """A runbook did not help, or the job that it restarted ended at once.

    Attributes:
        start_ended: how that ended, before its first step; "" for a runbook that did not help.
    """

    KIND, WHAT = "verify", "failed"
    clear_steps: int | None = None
    start_ended: str = ""


class RunbookPreempted(Decision, frozen=True, kw_only=True):
    """A runbook that was being verified gave way to something worse, or to an order."""

    KIND, WHAT = "verify", "preempted"


class WeightsRestored(Decision, frozen=True, kw_only=True):
    """The size of the first update after a rollback."""

    KIND, WHAT = "verify", "weights"


class RateBlamed(Decision, frozen=True, kw_only=True):
    """The learning rate is the cause: the trouble came back at it."""

    KIND, WHAT = "verify", "rate"


class StepDiffers(Decision, frozen=True, kw_only=True):
    """A repeated step is not as before: `differs`, or `as-seeded` where a loader is shuffled.

    Attributes:
        remedy: what a person can do about it.
    """

    KIND = "verify"
    what: str
    remedy: str = ""


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


class MessageText(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people are told.

    Attributes:
        kind: one of `interfaces.KINDS`. step: newest one. rules: of the incident.
        lead, steps, live_steps: what comes next; see `Advice`. next: the same in one line.
        request: id of the approval that is asked for. acknowledged_by: an operator.
        incident_severity: where it is another than that of the message.
        to_all: it goes to every channel, whatever its least severity.
        form, facts: the class of the newest notice in it, and its fields; see `notices`.
    """

    kind: str
    severity: str
    title: str
    verdict: str
    why: str
    next: str
    step: int
    rules: Sequence[str]
    request: str = ""
    acknowledged_by: str = ""
    incident_severity: str = ""
    to_all: bool = False
    lead: Lead | None = None
    steps: AdviceSteps | None = None  # None: of a record that has them in `next` alone
    live_steps: AdviceSteps = ()
    form: str = ""
    facts: Payload = NOTHING

    @property
    def advice(self) -> Advice:
        """What comes next."""
        steps = sentences(self.next) if self.steps is None else self.steps
        return Advice(self.lead, steps, self.live_steps)


class Notified(Decision, frozen=True, kw_only=True):
    """A message to people."""

    KIND = "notify_intent"
    message: MessageText


# ── the job and its supervision ───────────────────────────────────────────────────────────────────


class FramesMissing(Decision, frozen=True, kw_only=True):
    """Frames that were overwritten (`first_seq`, `count`), or steps that have none."""

    KIND = "gap"
    rank: int
    first_seq: int | None = None
    count: int | None = None
    first_step: int | None = None
    last_step: int | None = None


class NoticeTaken(Decision, frozen=True, kw_only=True):
    """A notice of the probe or of the supervisor; `what`: its kind."""

    KIND = "note"
    what: str
    rank: int | None
    at_step: int | None
    details: Payload


class JobLaunched(Decision, frozen=True, kw_only=True):
    """The job was started again."""

    KIND, WHAT = "note", "launched"
    pid: int


class JobRelaunching(Decision, frozen=True, kw_only=True):
    """The job ended because it is being started again."""

    KIND, WHAT = "note", "relaunching"


class RunAdopted(Decision, frozen=True, kw_only=True):
    """Another supervisor took over; `alive`: the job still ran."""

    KIND, WHAT = "note", "adopted"
    alive: bool


class ProgramReplaced(Decision, frozen=True, kw_only=True):
    """Another program of a rank started in the same launch."""

    KIND, WHAT = "note", "program-replaced"
    rank: int
    pid: int
    last_step: int


class LaunchAccepted(Decision, frozen=True, kw_only=True):
    """An operator takes a launch as it is that did not go on from its checkpoint."""

    KIND, WHAT = "note", "launch-accepted"


class ShardsSuspected(Decision, frozen=True, kw_only=True):
    """Shards in which incidents keep starting."""

    KIND, WHAT = "note", "shard-suspects"
    suspects: Mapping[str, ShardAccount]


class CommandAnswered(Decision, frozen=True, kw_only=True):
    """The answer to an operator's command; of `reload` it is the policy that follows.

    Attributes:
        command_id: as the sender knows it. action: id of the action that follows.
    """

    KIND, WHAT = "note", "operator"
    args: Payload
    command: str
    command_id: str | None
    answer: str
    ok: bool
    action: str | None


class ReloadRequested(Decision, frozen=True, kw_only=True):
    """An operator asked for another policy."""

    KIND, WHAT = "note", "operator"
    args: Payload


class PolicyRefused(Decision, frozen=True, kw_only=True):
    """Another policy was not loaded."""

    KIND, WHAT = "policy_load", "refused"
    operator: str
    before: str


class PolicyReloaded(Decision, frozen=True, kw_only=True):
    """Another policy is in force.

    Attributes:
        policy, mode: its own. before, after: digests. budget: class -> "used/max".
        changes: what differs. reset: detectors and rules that start anew.
    """

    KIND, WHAT = "policy_load", "reloaded"
    operator: str
    policy: str
    mode: str
    before: str
    after: str
    changes: PolicyChanges
    reset: Mapping[str, Sequence[str]]
    budget: Mapping[str, str]


class HoldsIfFailed(Decision, frozen=True, kw_only=True):
    """The runbook that was to follow a failure no longer exists: a hold follows."""

    KIND, WHAT = "note", "if-it-fails"
    runbook: str


CLASSES: tuple[type[Decision], ...] = (
    *(RuleFired, RuleCleared, RuleBlind, RuleFlaps, RuleSettled, Suppressed, NearMiss, Rebaselined),
    *(IncidentOpened, RuleJoined, IncidentRaised, RuleGrew, IncidentClassified, IncidentHeld),
    *(IncidentClosed, StateChanged, ActionPlanned, ActionFinished, ActionFailed, ActionInDoubt),
    *(RunbookRefused, RunbookWithdrawn, PauseEnded, ActionReplanned, LateOutcome, BudgetOverridden),
    *(ApprovalRequested, ApprovalSettled, VerificationStarted, VerificationPassed),
    *(VerificationFailed, RunbookPreempted, WeightsRestored, RateBlamed, StepDiffers, Notified),
    *(FramesMissing, NoticeTaken, JobLaunched, JobRelaunching, RunAdopted, ProgramReplaced),
    *(LaunchAccepted, ShardsSuspected, ReloadRequested, CommandAnswered, PolicyRefused),
    *(PolicyReloaded, HoldsIfFailed),
)
_BY_WHAT = {(decision.KIND, decision.WHAT): decision for decision in CLASSES}
IN_REASON = {IncidentOpened: "headline", IncidentRaised: "headline", IncidentHeld: "cause"}


_PLAIN = frozenset((str, int, bool, type(None)))


def plain_json(value: Any) -> Any:
    """Return `value` as JSON holds it: lists for tuples, "NaN" "+Inf" "-Inf" for non-finite."""
    if type(value) in _PLAIN:  # most are
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return (
        plain_json(msgspec.to_builtins(value, enc_hook=dict))
        if isinstance(value, Struct)
        else value
    )


def json_document(value: Any, **form: Any) -> str:
    """Return data as JSON that any terminal and any file can hold; `form` is for `json.dumps`.

    What does not print is escaped; so is half of a surrogate pair, which is no Unicode.
    """
    text = json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False, **form)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def decision_record(decision: Decision) -> dict[str, Json]:
    """Return a decision as its audit record holds it."""
    return {
        "kind": decision.KIND,
        **{name: getattr(decision, name) for name in HEAD},
        "data": plain_json(decision.data),
    }


NON_FINITE = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}


def decision_from_record(record: Mapping[str, Json]) -> Decision:
    """Return the decision that an audit record of the engine holds.

    Raises:
        ValueError: it is no decision, or of another version.
    """
    fields = record.get("data")
    data = fields if isinstance(fields, Mapping) else {}
    kind, tag = str(record.get("kind")), str(data.get("what", ""))
    form = _BY_WHAT.get((kind, tag)) or _BY_WHAT.get((kind, ""))
    if kind == "note" and "details" in data:
        form = NoticeTaken
    if form is CommandAnswered and "answer" not in data:
        form = ReloadRequested
    if form is None:
        raise ValueError(f"no decision of the engine is of the kind {kind!r} {tag!r}")
    head = {name: record.get(name) for name in HEAD}
    if (name := IN_REASON.get(form, "")) and name not in data:  # a record of before
        data = {**data, name: record.get("reason")}
    try:
        return msgspec.convert({**data, **head}, form, dec_hook=_payload)
    except msgspec.ValidationError:  # a number may be in it that JSON has no form for
        return msgspec.convert({**decode_numbers(data), **head}, form, dec_hook=_payload)


def _payload(form: type[Payload], value: Mapping[str, Json]) -> Payload:
    return form(value)


def decode_numbers(value: Any) -> Any:
    """Return `value` with "NaN", "+Inf" and "-Inf" as floats."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: decode_numbers(item) for key, item in value.items()}
    return [decode_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value
