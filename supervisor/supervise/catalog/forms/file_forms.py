"""The files that people write, as dataclasses: fields are keys, type hints say what is valid.

The JSON Schemas and the tables of the READMEs are generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...core.model.interfaces import Seconds, Steps, Unit
from ...core.model.state_machine import STATES
from ..schema.dataclass_types import type_of
from ..schema.field_types import AtLeast, Deferred, Doc, Pattern
from ..yaml_document import Node
from .job_form import Count, JobForm, SavepointsForm, SomeSteps
from .part_types import NotifiersType
from .runbook_form import RunbookFile as RunbookFile
from .runbook_form import RunbookForm as RunbookForm
from .runbook_form import RunbookName, Version
from .scenario_form import ScenarioForm

VERSION = "supervise/v1"

WORD = "[A-Za-z_][A-Za-z0-9_]{0,63}"  # also a file name, and those have an end
Local = Annotated[str, Pattern(WORD, "a name of letters, digits and _")]
Name = Annotated[str, Pattern(rf"{WORD}(\.{WORD})?", "a name of letters, digits and _")]
Severity = Literal["SEV0", "SEV1", "SEV2"]
Mode = Literal["observe", "shadow", "approve", "enforce"]
State = Annotated[str, type_of(Literal[STATES])]


SeverityOrOff = Literal["SEV0", "SEV1", "SEV2", "off"]


@dataclass(frozen=True)
class PhasesForm:
    """What a rule counts for in a phase of the run, where that is not `sev`."""

    early: Annotated[
        SeverityOrOff | None, Doc("while the learning rate warms up, and for `warmup` frames")
    ] = None
    steady: Annotated[SeverityOrOff | None, Doc("after that, and where nothing is known")] = None
    late: Annotated[
        SeverityOrOff | None, Doc("from where a decay has halved the learning rate")
    ] = None


@dataclass(frozen=True)
class RuleForm:
    """Detectors joined by and/or/not, with a severity and a runbook."""

    id: Annotated[Name, Doc("name of the rule; from outside a pack it is pack.id")]
    when: Annotated[str, Doc("detector names joined by and, or, not, ( )")]
    sev: Annotated[Severity, Doc("SEV0 dead or garbage, SEV1 contain quickly, SEV2 look into it")]
    title: Annotated[str, Doc("what it finds, a few words for people")] = ""
    run: Annotated[RunbookName | None, Doc("runbook, or hold; without it people are notified")] = (
        None
    )
    see: Annotated[
        RunbookName | None, Doc("runbook for people; default `run`, else that of its severity")
    ] = None
    for_: Annotated[SomeSteps, Doc("consecutive breaching rows, or steps, before it fires")] = 1
    keep: Annotated[Steps, Doc("minimum rows, or steps, that it keeps firing")] = 0
    unit: Annotated[
        Unit, Doc("of `for` and `keep`: frames or logged rows, or the job's steps between them")
    ] = "rows"
    cooldown: Annotated[
        Steps, Doc("rows after its runbook in which a new breach escalates instead")
    ] = 0
    unknown: Annotated[Literal["hold", "breach", "ok", "ignore"], Doc("how UNKNOWN is treated")] = (
        "hold"
    )
    mode: Annotated[Mode | None, Doc("weaker than the policy's, to try the rule out")] = None
    phases: Annotated[
        PhasesForm | None, Doc("another severity, or off, in phases of the run; same runbook")
    ] = None


@dataclass(frozen=True)
class InhibitForm:
    """While a rule fires, or in certain states of the run, other rules do not act."""

    mute: Annotated[
        tuple[Name, ...],
        Doc(
            "rules that do not act; never SEV0, or what is worse, or acts where `by_rule` does not"
        ),
    ]
    by_rule: Annotated[Name | None, Doc("while this rule fires")] = None
    by_state: Annotated[tuple[State, ...], Doc("while the run is in one of these states")] = ()


DeferredDetector = Annotated[Node, Deferred("detector")]
DeferredRule = Annotated[Node, Deferred("rule")]
DeferredInhibition = Annotated[Node, Deferred("inhibition")]
DeferredRunbook = Annotated[Node, Deferred("runbook")]
DeferredChange = Annotated[Node, Deferred("override")]


@dataclass(frozen=True)
class BudgetForm:
    """How often actions of a class may start; an action counts when it is planned."""

    max: Annotated[int, AtLeast(0), Doc("maximum number of starts")]
    per: Annotated[
        SomeSteps | Seconds | None, Doc("window: steps, or a time; default: the whole run")
    ] = None


@dataclass(frozen=True)
class ApprovalForm:
    """Approval by a person before the job is touched."""

    timeout: Annotated[Seconds, Doc("how long the request is valid")] = 900.0
    on_timeout: Annotated[
        Literal["deny", "allow"], Doc("the answer after the timeout; deny holds the run")
    ] = "deny"
    unless: Annotated[
        Severity | None, Doc("in mode enforce no approval for incidents of this severity or above")
    ] = None


@dataclass(frozen=True)
class BaselineForm:
    """Baseline of detectors that compare with recent values; each may set its own."""

    window: Annotated[SomeSteps, Doc("steps in the baseline")] = 128
    min: Annotated[
        SomeSteps | None,
        Doc("samples before a detector answers; default: 64, or the window if smaller"),
    ] = None

    @property
    def least(self) -> int:
        """Return `min`; by default 64, or the window if that is smaller."""
        return min(64, self.window) if self.min is None else self.min

    def check(self) -> list[tuple[str, str]]:
        if self.least > self.window:
            return [("min", f"is larger than the window of {self.window}")]
        return []


@dataclass(frozen=True)
class EscalateForm:
    """Escalation levels; a relapse or a failed verification goes one level up."""

    ladder: Annotated[tuple[RunbookName, ...], Doc("runbooks from mild to strong, or hold")] = ()
    reset_after: Annotated[
        Steps, Doc("clean steps after which it starts at the first level again")
    ] = 5000


@dataclass(frozen=True)
class SamplingForm:
    """Steps between two samples of metrics that are not taken at each step; 0 is never."""

    attention: Annotated[Steps | None, Doc("logits and entropy of attention")] = None
    activations: Annotated[Steps | None, Doc("outputs of blocks, and output logits")] = None
    routing: Annotated[Steps | None, Doc("routers of experts")] = None
    weights: Annotated[Steps | None, Doc("copies of a few matrices")] = None
    gradients: Annotated[Steps | None, Doc("metrics that need a pass over the gradients")] = None


@dataclass(frozen=True)
class SkipNonfinite:
    """Skip an update whose gradients are not finite, before the weights change."""

    max: Annotated[Count, Doc("maximum skips before the rules take over")]
    per: Annotated[SomeSteps, Doc("steps in which they are counted")]


@dataclass(frozen=True)
class ZeroNonfinite:
    """Set non-finite gradient entries to zero, and apply the step with the rest."""

    max: Annotated[Count, Doc("maximum steps repaired before the rules take over")] = 3
    per: Annotated[SomeSteps, Doc("steps in which they are counted")] = 128


@dataclass(frozen=True)
class SkipOutliersForm:
    """Skip the update of a batch far out of its band; asks `job.probe_batch` before the third."""

    max: Annotated[Count, Doc("maximum skips before updates are made as they come")] = 32
    per: Annotated[SomeSteps, Doc("steps in which they are counted")] = 2000
    spreads: Annotated[
        float, AtLeast(1), Doc("how far the loss is above its level, in spreads of its past")
    ] = 6.0
    rise: Annotated[float, AtLeast(0), Doc("and as a share of the level")] = 0.15


@dataclass(frozen=True)
class UpdateClipForm:
    """Scale down updates above mean + sigma deviations of recent ones; copies all weights."""

    window: Annotated[Steps, AtLeast(2), Doc("steps whose update norms are the reference")] = 128
    sigma: Annotated[float, AtLeast(0), Doc("standard deviations above their mean")] = 2.0
    max_gb: Annotated[float, AtLeast(0), Doc("maximum memory for the copies, in GB")] = 4.0


@dataclass(frozen=True)
class SafeguardsForm:
    """Reactions inside the probe: an outside process would be one step too late."""

    skip_nonfinite: Annotated[SkipNonfinite | None, Doc("skip updates that are not finite")] = None
    zero_nonfinite: Annotated[
        ZeroNonfinite | None, Doc("set non-finite gradient entries to zero; also on devices")
    ] = None
    skip_outliers: Annotated[
        SkipOutliersForm | None, Doc("skip updates of batches that are far out of their band")
    ] = None
    update_clip: Annotated[
        UpdateClipForm | None, Doc("scale down updates that are much larger than usual")
    ] = None


@dataclass(frozen=True)
class BlindForm:
    """When a rule that stays UNKNOWN becomes an incident of its own."""

    steps: Annotated[SomeSteps, Doc("steps it may stay UNKNOWN")] = 256
    time: Annotated[Seconds, Doc("time it may stay UNKNOWN")] = 300.0


@dataclass(frozen=True)
class JournalForm:
    """The record of all events, from which decisions can be computed again."""

    max_gb: Annotated[
        float,
        AtLeast(0.001),
        Doc(
            "above it the frames of the oldest part are removed, of parts that an incident refers "
            "to last; such a run can be neither replayed in full nor adopted"
        ),
    ]


@dataclass(frozen=True)
class PlannedForm:
    """An announced change: its effect on the loss opens no incident. SEV0 still fires."""

    from_: Annotated[Steps, Doc("first step of it")]
    to: Annotated[Steps, Doc("last step of it")]
    what: Annotated[str, Doc("what changes, in words or a metric")]
    expect: Annotated[
        Literal["up", "down", "either"],
        Doc("direction of the loss; the other one is still a breach"),
    ] = "either"

    def check(self) -> list[tuple[str, str]]:
        return [("to", f"comes before from: {self.from_}")] if self.to < self.from_ else []


@dataclass(frozen=True)
class PackFile:
    """policies/packs/<name>.yaml: detectors and rules that policies use."""

    version: Version
    pack: Annotated[Local, Doc("the file's name; the prefix of its detectors and rules")]
    summary: Annotated[str, Doc("one line")]
    status: Annotated[
        Literal["experimental", "canary", "stable"], Doc("how far it has been validated")
    ]
    source: Annotated[tuple[str, ...], Doc("where the thresholds come from")]
    false_alarms: Annotated[tuple[str, ...], Doc("healthy situations in which it fires")]
    detectors: Annotated[Mapping[Local, DeferredDetector], Doc("name: {kind: ..., its keys}")]
    rules: Annotated[tuple[DeferredRule, ...], Doc("see the keys of a rule")]
    inhibit: Annotated[
        tuple[DeferredInhibition, ...], Doc("rules that are muted while another fires")
    ] = ()
    scenarios: Annotated[tuple[ScenarioForm, ...], Doc("series, and the expected decisions")] = ()


@dataclass(frozen=True)
class PolicyFile:
    """policies/<name>.yaml"""

    version: Version
    policy: Annotated[str | None, Doc("name; default: the file's name")] = None
    summary: Annotated[str, Doc("one line")] = ""
    extends: Annotated[
        str | None, Doc("the policy it changes: name of a shipped one, or path from this file on")
    ] = None
    remove: Annotated[
        tuple[Name, ...], Doc("rules, and of a base also packs and detectors, that are taken out")
    ] = ()
    mode: Annotated[Mode, Doc("what it may do; new policies start in shadow")] = "shadow"
    cites: Annotated[
        tuple[str, ...],
        Doc("audit logs of drill suites and canary trials of it; paths from this file on"),
    ] = ()
    use: Annotated[tuple[Local, ...], Doc("packs to use")] = ()
    override: Annotated[
        Mapping[Name, Annotated[Node, Deferred("override")]],
        Doc("pack.detector or pack.rule: keys to change"),
    ] = field(default_factory=dict)
    baseline: Annotated[
        BaselineForm, Doc("default baseline of detectors that compare with recent values")
    ] = field(default_factory=BaselineForm)
    detectors: Annotated[Mapping[Name, DeferredDetector], Doc("name: {kind: ..., its keys}")] = (
        field(default_factory=dict)
    )
    rules: Annotated[tuple[DeferredRule, ...], Doc("see the keys of a rule")] = ()
    inhibit: Annotated[
        tuple[DeferredInhibition, ...], Doc("rules that are muted while another fires")
    ] = ()
    objective: Annotated[
        Literal["descends", "none"],
        Doc("`none`: a higher loss is not worse (GAN, RL): rules on its height are SEV2 notices"),
    ] = "descends"
    planned: Annotated[
        tuple[PlannedForm, ...],
        Doc("announced changes: {from, to, what, expect: up|down|either}; rules on them are muted"),
    ] = ()
    budgets: Annotated[
        Mapping[str, BudgetForm], Doc("class of action: maximum number of starts")
    ] = field(default_factory=dict)
    approvals: Annotated[
        Mapping[str, ApprovalForm], Doc("verb, runbook or `all`: a person approves before it runs")
    ] = field(default_factory=dict)
    escalate: Annotated[EscalateForm, Doc("escalation levels")] = field(
        default_factory=EscalateForm
    )
    runbooks: Annotated[
        Mapping[RunbookName, DeferredRunbook],
        Doc("name: a list of steps, or a runbook as in its own file"),
    ] = field(default_factory=dict)
    machine: Annotated[
        Mapping[str, Mapping[str, str]] | None, Doc("state: {event: state}; replaces the default")
    ] = None
    savepoints: Annotated[
        SavepointsForm | None, Doc("model state kept in the job's process, for rollbacks")
    ] = None
    sampling: Annotated[
        SamplingForm | None,
        Doc("how often the probe takes metrics that it does not take at each step"),
    ] = None
    safeguards: Annotated[
        SafeguardsForm, Doc("reactions inside the probe, where the supervisor would be too late")
    ] = field(default_factory=SafeguardsForm)
    job: Annotated[JobForm, Doc("properties of the job that the policy relies on")] = field(
        default_factory=JobForm
    )
    notify: Annotated[
        Mapping[str, Mapping[str, Any]],
        NotifiersType(),
        Doc("who is notified, from which severity"),
    ] = field(default_factory=dict)
    warmup: Annotated[Steps, Doc("frames before the run is nominal")] = 64
    probation: Annotated[Steps, Doc("steps that a contained incident stays open")] = 100
    blind_after: Annotated[
        BlindForm, Doc("how long a rule may be UNKNOWN before it is an incident")
    ] = field(default_factory=BlindForm)
    give_up: Annotated[
        Literal["page", "stop", "stop_sev0"],
        Doc(
            "when no remedy is left for what should have one: a SEV0, repeated; stop: the job ends "
            "too, with evidence and exit code 78, unless it recovers within 20 steps; stop_sev0: "
            "only where a rule of SEV0 fires then, so that the weights are lost and not just ill"
        ),
    ] = "page"
    journal: Annotated[JournalForm | None, Doc("limit of the journal of a run; default: none")] = (
        None
    )
    hold_reminder: Annotated[Seconds, Doc("time between two reminders of a hold")] = 14400.0
    repeat: Annotated[
        Seconds,
        Doc("time after which an open SEV0 or SEV1 that nobody acknowledged is told again"),
    ] = 14400.0


@dataclass(frozen=True)
class ScenarioFile:
    """policies/tests/<name>.yaml: scenarios for a whole policy."""

    version: Version
    policy: Annotated[
        str, Doc("the policy: a path relative to this file, else the name of a shipped one")
    ]
    tests: Annotated[tuple[ScenarioForm, ...], Doc("series, and the expected decisions")]
    use: Annotated[
        tuple[str, ...], Doc("other test files, by path: their scenarios run here too")
    ] = ()
    summary: Annotated[str, Doc("one line")] = ""
    mode: Annotated[Mode | None, Doc("replaces the policy's mode")] = None
