"""Report of one incident: the class of `incident.json`, which every view is made from.

A version stays as it is: another meaning, or a key that is gone, needs the next one. New keys may
come. `make docs` writes the schema to `policies/incident.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct, field

from ..core.model import decisions
from ..core.model.decisions import PlannedStep, ShadowStep, json_document, plain_json
from ..core.model.failure import Failure
from ..core.model.interfaces import Step
from ..core.model.payload import Payload, Rewarm
from ..core.model.verdicts import BandRange, Verdict
from ..json_schemas import published_schema
from ..store.run_directory import RunDescription

VERSION: Literal["supervise/incident/v1"] = "supervise/incident/v1"


Code = Literal["OK", "UNKNOWN", "BREACH"]


class Status(StrEnum):
    """Status of an incident."""

    OPEN = "OPEN"
    ACTING = "ACTING"
    WATCHING = "WATCHING"
    WAITING = "APPROVAL PENDING"
    HELD = "HELD"
    RECOVERED = "RECOVERED"
    DIFFERS = "STARTED AGAIN, NOT AS BEFORE"
    CLEARED = "CLEARED"
    DONE = "DONE"
    NOT_RECOVERED = "NOT RECOVERED"
    WITHDRAWN = "WITHDRAWN"
    RELEASED = "RELEASED"
    STOPPED = "STOPPED"
    DOWN = "JOB DOWN"
    ASKED = "ENDED AS ASKED"
    JOB_ENDED = "JOB FINISHED"
    UNRECOVERED = "JOB FINISHED, NOT RECOVERED"
    SESSION_ENDED = "SESSION ENDED"
    SUPERSEDED = "SUPERSEDED"


MEANINGS = {
    Status.OPEN: "it goes on; no action is under way",
    Status.ACTING: "an action is under way, or its effect is being verified",
    Status.WATCHING: "the actions helped so far; a relapse is watched for",
    Status.WAITING: "a person is asked whether the actions may run",
    Status.HELD: "automatic actions are off; a person is needed",
    Status.RECOVERED: "verified: the actions helped and it did not come back",
    Status.DIFFERS: "the job runs again, and something is not as it was before its end",
    Status.CLEARED: (
        "its rules are not in breach any more; nothing was done about it, or nothing verified"
    ),
    Status.DONE: "an operator's order was carried out, and no rule fired in the time after it",
    Status.NOT_RECOVERED: (
        "its rules took the new level for their baseline; the old one did not come back"
    ),
    Status.WITHDRAWN: "its reason was over before an action came to change the job",
    Status.RELEASED: "a person ended the hold",
    Status.STOPPED: "the job was stopped because of it",
    Status.DOWN: "the job ended, and is not started again",
    Status.ASKED: "a person or a scheduler ended the job before it was over",
    Status.JOB_ENDED: "the job finished before it was over",
    Status.UNRECOVERED: "the job ended as a finished one does, with a loss that had not come back",
    Status.SESSION_ENDED: "the training that it was about ended",
    Status.SUPERSEDED: (
        "an incident of the training began; what this one was about may go on beside it"
    ),
}


class Moment(Struct, frozen=True):
    """When and where a record was made.

    Attributes:
        record: number of the audit record
        step: newest step then, -1 before the first
        wall: UTC, ISO-8601
    """

    record: int
    step: int
    attempt: int
    wall: str | None


class Closing(Moment, frozen=True):
    """When and why it closed."""

    text: str


class FiredRule(decisions.RuleFired, frozen=True, kw_only=True, omit_defaults=False):
    """A rule that fired.

    Attributes:
        record: number of the audit record
        step: newest step then, -1 before the first
        wall: UTC, ISO-8601
        when: its expression
        location: file:line:column
        runbook: what it runs
    """

    record: int
    step: int
    attempt: int
    wall: str | None
    rule: str
    title: str
    severity: str
    location: str = field(name="where")
    runbook: str | None


# It is the decision, so that a new field of that is one of the report, too, behind those that are
# published in this order; without those that other parts of a report have.
_RULE_KEYS = (
    *("record", "step", "attempt", "wall", "rule", "title", "severity", "rank"),
    *("when", "where", "runbook"),
)
_ELSEWHERE = ("reason", "incident", "numbers", "phase", "alongside")


def _rule_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fields[key] for key in (*_RULE_KEYS, *fields) if key not in _ELSEWHERE}


class Past(Struct, frozen=True):
    """How near a metric was to its limit in so many frames before."""

    measured: float
    step: int
    frames: int = field(name="steps")


class Condition(Struct, frozen=True):
    """The reading of a detector when its rule fired.

    Attributes:
        severity: of the rule
        step: when the rule fired
        metric: id; null for detectors of several or of time
        value: of the metric
        measure: what is compared with the limit: value, z, ratio, ...
        measured: that number; negative, as the limit, of a sum of falls
        limit: threshold
        baseline: level before
        text: the reading in words
        past: how near it was to the limit before; null: not known
    """

    detector: str
    rule: str
    severity: str
    step: int
    is_breach: bool = field(name="breach")
    code: Code
    metric: str | None
    value: float | None
    measure: str
    measured: float | str | None
    limit: float | str | None
    baseline: float | None
    signal: str | None
    nonfinite: Sequence[str]
    module: str = field(name="of")
    text: str
    past: Past | None


class Shard(Struct, frozen=True):
    """A shard of the data."""

    name: str = ""


class ActionArgs(Struct, frozen=True):
    """Arguments of actions that a report looks at; each action has a few of them.

    Attributes:
        step: of a checkpoint. limit: of a rate, `harmful` is that which did harm; lift: it ends.
        rewarm_steps: over which a rate that was scaled comes back. add: shards that are left out.
    """

    step: int | None = None
    value: float | None = None
    limit: float | None = None
    harmful: float = 0.0
    lift: bool = False
    count: int = 0
    rewarm: Rewarm | None = None
    rewarm_steps: int = 0
    add: Sequence[Shard] = ()


class ActionEffect(Struct, frozen=True):
    """Observed effects of actions that a report looks at.

    Attributes:
        step: to which the weights went back; from_step: from where.
        rate_limit: of a learning rate. held_s: how long a pause lasted.
        start_ended: how a process that was started ended before its first step.
        standstill: which rank holds the job up, and where. standstill_ranks: those.
        path, sha256, files, missing: of an evidence bundle.
    """

    ack_step: int | None = None
    step: int | None = None
    from_step: int | None = None
    paused_step: int | None = None
    rate_limit: float | None = None
    held_s: float | None = None
    resumed: bool = True
    start_ended: str = ""
    standstill: str = ""
    standstill_ranks: Sequence[int] = ()
    loss: float | None = None
    path: str = ""
    sha256: str = ""
    files: Sequence[str] = ()
    missing: Sequence[str] = ()


class Action(Moment, frozen=True, omit_defaults=True):
    """An action that was intended.

    Attributes:
        is_undo: it takes an earlier one back
        ok: null: no outcome on record, so its effect is unknown
        result: what was observed, never what was intended
        took_s: seconds
        error: of one that failed
    """

    id: str
    verb: str
    runbook: str
    args: Payload
    touches_job: bool
    is_undo: bool = field(name="undo")
    outcome: str
    ok: bool | None
    result: Payload
    took_s: float | None
    outcome_record: int | None
    error: str = ""

    @property
    def order(self) -> ActionArgs:
        """Its arguments."""
        return self.args.read(ActionArgs)

    @property
    def effect(self) -> ActionEffect:
        """Observed effects."""
        return self.result.read(ActionEffect)


class Check(Moment, frozen=True):
    """A step of the verification, a refusal or a withdrawal; `kind` says which.

    Attributes:
        remedy: what to do about it
    """

    kind: str = field(name="what")
    text: str
    remedy: str = ""


class Suppression(Moment, frozen=True):
    """An action that was not taken, and its reason; in modes that do not act, the plan."""

    rule: str
    text: str
    suppressed_by: str = field(name="by")
    runbook: str
    plan: Sequence[ShadowStep] = field(name="would")


class Approval(Moment, frozen=True):
    """The newest request to a person.

    Attributes:
        plan: verbs and arguments
        args_sha256: the digest of these, which `approve --sha` is compared with
        answer: null: none yet
        operator: who answered, "" where nobody did
        took_s: seconds until then
    """

    id: str
    runbook: str
    plan: Sequence[PlannedStep]
    timeout_s: float
    on_timeout: str
    answer: str | None
    answer_text: str
    args_sha256: str = ""
    operator: str = ""
    took_s: float | None = None


class Delivery(Struct, frozen=True):
    """The outcome of a message at one channel.

    Attributes:
        tries: attempts
    """

    ok: bool
    tries: int | None
    text: str


class SentMessage(Moment, frozen=True):
    """A message to people.

    Attributes:
        delivered: per channel
    """

    severity: str
    title: str
    next: str
    delivered: Sequence[Delivery]


class TimelineEntry(Moment, frozen=True):
    """One record of the incident."""

    kind: str
    since_s: float
    text: str


class Series(Struct, frozen=True):
    """A few signals around the beginning of the incident.

    Attributes:
        steps: step of each point, in the order of the frames
        attempts: attempt of each point; it grows at a rollback or restart
        opened_at: index of the first point after the incident opened
        stride: frames that a point long after that stands for, the worst of them
        window: first and last step
        signals: metric id -> one value per point; null is absent
    """

    rank: int
    steps: Sequence[int]
    attempts: Sequence[int]
    opened_at: int
    stride: int
    window: Sequence[int]
    signals: Mapping[str, Sequence[float | None]]


class Move(Struct, frozen=True):
    """A signal that left its course around the first breach, beyond its own noise.

    Attributes:
        level: healthy value just before
        peak: farthest value since, or the first that is not finite
        first_step: first step off its course
        ratio: peak / before
        earliest_step: first step that may have been the first
        latest_step: last step that may have been the first
    """

    metric: str
    level: float = field(name="before")
    peak: float
    peak_step: int
    first_step: int
    ratio: float | None
    earliest_step: int
    latest_step: int


class Onset(Struct, frozen=True):
    """Where the trouble began: the change of the signal that moved first.

    Attributes:
        step: the most likely
        earliest: the first that may be it
        latest: the last that may be it
        metric: the signal; null: the first breach of a rule, no signal was off its course
    """

    step: int
    earliest: int
    latest: int
    metric: str | None


class Observation(Struct, frozen=True):
    """What was observed.

    Attributes:
        text: one sentence
        moves: signals that left their course, the first one first
        band: `level` of the loss before, `limit` to be back
        onset: where it began
    """

    text: str
    moves: Sequence[Move]
    band: BandRange | None
    onset: Onset


class Candidate(Struct, frozen=True, omit_defaults=True):
    """Something on record that may have caused it.

    Attributes:
        kind: drill, operator, standstill, error, data, rate, attention, ranks, wiring, ...
        text: with its evidence
        step: when; null: of no step
        move: the signal that shows it; null: it is a record
        rule: the one that fires for a fault of the job's wiring
        tensors: names of a few of those that it is about
    """

    kind: str
    text: str
    step: int | None
    move: Move | None
    rule: str = ""
    tensors: Sequence[str] = ()


class UnchangedArea(Struct, frozen=True):
    """An area whose metrics stayed on their course, so that it is no cause."""

    area: str
    metrics: Sequence[str]


class Cause(Struct, frozen=True):
    """Why it happened, as far as that is on record.

    Attributes:
        text: one sentence; it begins with `unknown` and why where nothing is on record
        kind: of `order` only what moved first is known
        candidates: what may have caused it, the likeliest first
        unchanged: what stayed as before
    """

    text: str
    kind: Literal["drill", "error", "standstill", "operator", "diagnosis", "order", "unknown"]
    is_known: bool = field(name="known")
    candidates: Sequence[Candidate]
    unchanged: Sequence[UnchangedArea]


class Response(Struct, frozen=True):
    """What was done.

    Attributes:
        text: one sentence
        acted: whether the job was changed; null: in doubt
    """

    text: str
    acted: bool | None


class Estimate(Struct, frozen=True):
    """What would have come of doing nothing, and why that is to be expected."""

    text: str
    reason: str


class Cost(Struct, frozen=True):
    """What it cost.

    Attributes:
        text: one sentence
        unaided: what nothing would have cost; null: not known
        steps_repeated: undone, to be made again
        steps_lost: whose progress is gone: the job's loop went on
        skipped: updates
        budgets: name -> used/limit at the last action
    """

    text: str
    steps_repeated: int
    steps_lost: int
    paused_s: float
    skipped: int
    relaunches: int
    budgets: Mapping[str, str]
    unaided: Estimate | None = None


class Proof(Struct, frozen=True):
    """What shows that it is over.

    Attributes:
        verified: the actions were verified, and it did not come back
        rejoined_step: first step with the loss back in its band; null: it never left it, too
        text: one sentence
        good_steps: without trouble since the actions helped; null: they are not known to have
        required_steps: without trouble that are required of it
        remaining: what is otherwise than before, and stays so
    """

    verified: bool
    rejoined_step: int | None
    text: str
    good_steps: int | None
    required_steps: int | None
    remaining: Sequence[str]


class NextStep(Struct, frozen=True):
    """The next steps of a person, also in one line."""

    text: str
    steps: Sequence[Step]


class Loss(Struct, frozen=True):
    """The loss in one line of text; ⟲ is a rollback or restart."""

    metric: str
    spark: str

    @property
    def legend(self) -> str:
        """What the marks in it mean."""
        marks = {"!": "! NaN or Inf", "⟲": "⟲ went back"}
        texts = [text for mark, text in marks.items() if mark in self.spark]
        return f" ({', '.join(texts)})" if texts else ""


class Bundle(Struct, frozen=True):
    """An evidence bundle.

    Attributes:
        path: relative to the run
        sha256: of its manifest
        files: names
        missing: what could not be read
    """

    path: str
    sha256: str
    files: Sequence[str]
    missing: Sequence[str]


class Evidence(Struct, frozen=True):
    """Evidence that was saved, one bundle per snapshot."""

    directory: str
    bundles: Sequence[Bundle]


class Replay(Struct, frozen=True):
    """Commands.

    Attributes:
        decisions: proves the decisions from the journal
        why_not: explains the rule at that step
    """

    decisions: str
    why_not: str

    @property
    def commands(self) -> list[str]:
        """The commands that there are."""
        return [command for command in (self.decisions, self.why_not) if command]


class Scope(Struct, frozen=True):
    """What it is about.

    Attributes:
        rank: null: not known, or of none
        shards: of data, left out or suspect
        module: module or place that a detector names
    """

    rank: int | None
    shards: Sequence[str]
    module: str | None = field(name="place")


class RunOrigin(Struct, frozen=True):
    """The run.

    Attributes:
        command: of the job, without secrets
        phase: whether the run is in progress, as a sentence
    """

    id: str
    directory: str
    host: str
    command: Sequence[str]
    policy: str
    policy_digest: str
    mode: str
    phase: str

    @classmethod
    def from_description(cls, description: RunDescription, directory: str, phase: str) -> RunOrigin:
        """Return what `run.json` says; `directory`: as commands name it."""
        return cls(
            id=description.run,
            directory=directory,
            host=description.host,
            command=description.argv,
            policy=description.policy,
            policy_digest="",
            mode=description.mode,
            phase=phase,
        )


class IncidentReport(Struct, frozen=True):
    """An incident, while it is open, when it closes, and years later.

    Attributes:
        id: inc-1, inc-2, ... of its run
        title: what it is, in words
        final: it is closed: nothing here changes any more
        opened: when it opened
        breach_step: first step that may be part of it
        closed: when and why it closed
        updated: newest record in it
        rules: in the order in which they fired
        series: null: no frame is known
        conditions: detectors of the rules, breaches first
        diagnosis: class of the loss, advice, answers
        actions: in order
        approval: newest request to a person
        verification: what was verified, refused or withdrawn
        suppressed: what was not done, and what kept it
        failures: how processes ended, the cause first
        messages: what people were sent
        timeline: all its records
    """

    schema: Literal["supervise/incident/v1"]
    id: str
    severity: Literal["SEV0", "SEV1", "SEV2"]
    title: str
    status: Status = field(name="state")
    status_meaning: str = field(name="state_means")
    final: bool
    run: RunOrigin
    opened: Moment
    breach_step: int
    closed: Closing | None
    updated: Moment
    rules: Sequence[FiredRule]
    scope: Scope
    observation: Observation = field(name="what")
    cause: Cause
    response: Response = field(name="did")
    cost: Cost
    proof: Proof
    next: NextStep
    loss: Loss
    series: Series | None
    conditions: Sequence[Condition]
    diagnosis: Verdict | None
    actions: Sequence[Action]
    approval: Approval | None
    verification: Sequence[Check]
    suppressed: Sequence[Suppression]
    failures: Sequence[Failure]
    messages: Sequence[SentMessage]
    timeline: Sequence[TimelineEntry]
    evidence: Evidence
    replay: Replay

    @property
    def is_of_rule(self) -> bool:
        """Whether a rule opened it."""
        return bool(self.replay.why_not)

    @property
    def sentences(self) -> list[tuple[str, str]]:
        """The sentences of the card with their heads, but for what is next."""
        return [
            ("What", self.observation.text),
            ("Cause", self.cause.text),
            ("Did", self.response.text),
            ("Cost", self.cost.text),
            ("Proof", self.proof.text),
        ]

    def encode(self, indent: int | None = None) -> str:
        """Return it as JSON: "NaN" and the like for numbers that are not finite."""
        fields = plain_json(self)
        for failure, row in zip(self.failures, fields["failures"], strict=True):
            row["text"] = failure.text
        fields["rules"] = list(map(_rule_fields, fields["rules"]))
        return json_document(fields, indent=indent)


class IncidentSummary(Struct, frozen=True):
    """An incident in a list of several: its first and its newest step."""

    id: str
    severity: str
    title: str
    status: Status
    steps: tuple[int, int]
    wall: str | None


def incident_schema() -> dict[str, Any]:
    """Return the JSON Schema of `incident.json`."""
    document = published_schema(IncidentReport, "An incident of supervise")
    failure = document["definitions"]["Failure"]
    failure["properties"]["text"] = {"type": "string"}
    failure["required"] = ["text", "type", "cls", "traceback"]
    rule = document["definitions"]["FiredRule"]
    required = rule["required"]
    rule["properties"] = _rule_fields(rule["properties"])
    rule["required"] = [key for key in rule["properties"] if key in required]
    return document
