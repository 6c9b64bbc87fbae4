"""The files people write, as dataclasses: fields are keys, hints say what fits, defaults are here.

Nothing is resolved in this file. `json_schema` and the READMEs' tables are generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...core.model.interfaces import Seconds, Steps
from ...core.model.state_machine import STATES
from ..document.nodes import Node
from ..schema.dataclass_types import type_of
from ..schema.field_types import AtLeast, Deferred, Doc, Pattern
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


@dataclass(frozen=True)
class RuleForm:
    """Detectors joined by and/or/not, with a severity and what to run."""

    id: Annotated[Name, Doc("name of the rule; from outside a pack it is pack.id")]
    when: Annotated[str, Doc("detector names joined by and, or, not, ( )")]
    sev: Annotated[Severity, Doc("SEV0 dead or garbage, SEV1 contain quickly, SEV2 look into it")]
    run: Annotated[RunbookName | None, Doc("runbook, or hold; without it people are told")] = None
    see: Annotated[
        RunbookName | None, Doc("runbook that people read; else `run`, else that of its severity")
    ] = None
    for_: Annotated[SomeSteps, Doc("consecutive true steps before it fires")] = 1
    keep: Annotated[Steps, Doc("least number of steps it keeps firing")] = 0
    cooldown: Annotated[
        Steps, Doc("steps after its runbook in which a new breach climbs the ladder instead")
    ] = 0
    unknown: Annotated[Literal["hold", "breach", "ok", "ignore"], Doc("what UNKNOWN counts as")] = (
        "hold"
    )
    mode: Annotated[Mode | None, Doc("weaker than the policy's, to try one rule out")] = None


@dataclass(frozen=True)
class InhibitForm:
    """While a rule fires, or in a state of the run, other rules do not act."""

    mute: Annotated[tuple[Name, ...], Doc("rules that do not act; SEV0 cannot be muted")]
    by_rule: Annotated[Name | None, Doc("while this rule fires")] = None
    by_state: Annotated[tuple[State, ...], Doc("while the run is in one of these states")] = ()


DeferredDetector = Annotated[Node, Deferred("detector")]
DeferredRule = Annotated[Node, Deferred("rule")]
DeferredInhibition = Annotated[Node, Deferred("inhibition")]
DeferredRunbook = Annotated[Node, Deferred("runbook")]
DeferredChange = Annotated[Node, Deferred("override")]


@dataclass(frozen=True)
class BudgetForm:
    """How often a class of action may be started; counted when it is intended."""

    max: Annotated[int, AtLeast(0), Doc("most starts")]
    per: Annotated[SomeSteps | Seconds | None, Doc("window: steps, or a time; none: the run")] = (
        None
    )


@dataclass(frozen=True)
class ApprovalForm:
    """How people are asked before the job is touched."""

    timeout: Annotated[Seconds, Doc("how long the request stands")] = 900.0
    on_timeout: Annotated[
        Literal["deny", "allow"], Doc("what silence means; deny holds the run")
    ] = "deny"
    unless: Annotated[
        Severity | None, Doc("incidents this severe, or more, are not asked for in mode enforce")
    ] = None


@dataclass(frozen=True)
class BaselineForm:
    """Baseline of detectors that compare with a recent past; each may have its own."""

    window: Annotated[SomeSteps, Doc("steps it looks back")] = 128
    min: Annotated[SomeSteps | None, Doc("samples before it answers; none: 64, or window")] = None

    @property
    def least(self) -> int:
        """Return `min`; where it is not said 64, or the window when that is smaller."""
        return min(64, self.window) if self.min is None else self.min

    def check(self) -> list[tuple[str, str]]:
        if self.least > self.window:
            return [("min", f"is larger than the window of {self.window}")]
        return []


@dataclass(frozen=True)
class EscalateForm:
    """Rungs of rising force; a relapse or a failed verification climbs one."""

    ladder: Annotated[tuple[RunbookName, ...], Doc("runbooks in rising force, or hold")] = ()
    reset_after: Annotated[Steps, Doc("clean steps after which it starts below again")] = 5000


@dataclass(frozen=True)
class SamplingForm:
    """Steps between two samples of what is not looked at in each step; 0 is never."""

    attention: Annotated[Steps | None, Doc("logits and entropy of attention")] = None
    activations: Annotated[Steps | None, Doc("outputs of blocks, and output logits")] = None
    routing: Annotated[Steps | None, Doc("routers of experts")] = None
    weights: Annotated[Steps | None, Doc("copies of a few matrices")] = None
    gradients: Annotated[Steps | None, Doc("what a pass over the gradients costs")] = None


@dataclass(frozen=True)
class SkipNonfinite:
    """Skip an update whose gradients are not finite, before a weight is touched."""

    max: Annotated[Count, Doc("skips before it is left to the rules")]
    per: Annotated[SomeSteps, Doc("window of steps they are counted in")]


@dataclass(frozen=True)
class ZeroNonfinite:
    """Set what is not finite in the gradients to zero, and make the step with the rest."""

    max: Annotated[Count, Doc("steps so mended before it is left to the rules")] = 3
    per: Annotated[SomeSteps, Doc("window of steps they are counted in")] = 128


@dataclass(frozen=True)
class UpdateClipForm:
    """Shorten updates above mean + sigma deviations of the newest ones; copies all weights."""

    window: Annotated[Steps, AtLeast(2), Doc("steps whose update norms are usual")] = 128
    sigma: Annotated[float, AtLeast(0), Doc("standard deviations above their mean")] = 2.0
    max_gb: Annotated[float, AtLeast(0), Doc("most memory for the copies, in GB")] = 4.0


@dataclass(frozen=True)
class StandingOrdersForm:
    """Reflexes inside the probe: an outside process would come a step too late."""

    skip_nonfinite: Annotated[SkipNonfinite | None, Doc("skip updates that are not finite")] = None
    zero_nonfinite: Annotated[
        ZeroNonfinite | None, Doc("zero what is not finite in the gradients; also on devices")
    ] = None
    update_clip: Annotated[
        UpdateClipForm | None, Doc("shorten updates that are much larger than usual")
    ] = None


@dataclass(frozen=True)
class BlindForm:
    """When a rule that stays UNKNOWN becomes an incident of its own."""

    steps: Annotated[SomeSteps, Doc("steps it may stay UNKNOWN")] = 256
    time: Annotated[Seconds, Doc("time it may stay UNKNOWN")] = 300.0


@dataclass(frozen=True)
class PlannedForm:
    """A change that was announced: what it does to the loss is no trouble. SEV0 still speaks."""

    from_: Annotated[Steps, Doc("first step of it")]
    to: Annotated[Steps, Doc("last step of it")]
    what: Annotated[str, Doc("what changes, for people")]
    expect: Annotated[
        Literal["up", "down", "either"], Doc("where the loss goes; the other way is trouble")
    ] = "either"

    def check(self) -> list[tuple[str, str]]:
        return [("to", f"comes before from: {self.from_}")] if self.to < self.from_ else []


@dataclass(frozen=True)
class PackFile:
    """policies/packs/<name>.yaml: detectors and rules to be used by policies."""

    version: Version
    pack: Annotated[Local, Doc("the file's own name, in front of its detectors and rules")]
    summary: Annotated[str, Doc("one line")]
    status: Annotated[
        Literal["experimental", "canary", "stable"], Doc("how far it has been proven")
    ]
    source: Annotated[tuple[str, ...], Doc("where the thresholds come from")]
    false_alarms: Annotated[tuple[str, ...], Doc("what sets it off without trouble")]
    detectors: Annotated[Mapping[Local, DeferredDetector], Doc("name: {kind: ..., its keys}")]
    rules: Annotated[tuple[DeferredRule, ...], Doc("see the keys of a rule")]
    inhibit: Annotated[
        tuple[DeferredInhibition, ...], Doc("which rules stay quiet while another fires")
    ] = ()
    scenarios: Annotated[tuple[ScenarioForm, ...], Doc("series, and what must come of them")] = ()


@dataclass(frozen=True)
class PolicyFile:
    """policies/<name>.yaml"""

    version: Version
    policy: Annotated[str | None, Doc("name; the file's own when left out")] = None
    summary: Annotated[str, Doc("one line")] = ""
    mode: Annotated[Mode, Doc("how much it may do; new policies start in shadow")] = "shadow"
    use: Annotated[tuple[Local, ...], Doc("packs to use")] = ()
    override: Annotated[
        Mapping[Name, Annotated[Node, Deferred("override")]],
        Doc("pack.detector or pack.rule: keys to change in it"),
    ] = field(default_factory=dict)
    baseline: Annotated[
        BaselineForm, Doc("for detectors that compare with a recent past and do not say more")
    ] = field(default_factory=BaselineForm)
    detectors: Annotated[Mapping[Name, DeferredDetector], Doc("name: {kind: ..., its keys}")] = (
        field(default_factory=dict)
    )
    rules: Annotated[tuple[DeferredRule, ...], Doc("see the keys of a rule")] = ()
    inhibit: Annotated[
        tuple[DeferredInhibition, ...], Doc("which rules stay quiet while another fires")
    ] = ()
    planned: Annotated[
        tuple[PlannedForm, ...],
        Doc(
            "announced changes: {from, to, what, expect: up|down|either}; they mute what they move"
        ),
    ] = ()
    budgets: Annotated[Mapping[str, BudgetForm], Doc("class of action: how often at most")] = field(
        default_factory=dict
    )
    approvals: Annotated[
        Mapping[str, ApprovalForm], Doc("verb, runbook or `all`: people are asked before it runs")
    ] = field(default_factory=dict)
    escalate: Annotated[EscalateForm, Doc("runbooks in rising force")] = field(
        default_factory=EscalateForm
    )
    runbooks: Annotated[
        Mapping[RunbookName, DeferredRunbook],
        Doc("name: a list of steps, or the form of a runbook"),
    ] = field(default_factory=dict)
    machine: Annotated[
        Mapping[str, Mapping[str, str]] | None, Doc("state: {event: state}; replaces the default")
    ] = None
    savepoints: Annotated[
        SavepointsForm | None, Doc("model state kept in the job's process, for a rollback")
    ] = None
    sampling: Annotated[
        SamplingForm | None, Doc("how often the probe takes what it does not take in each step")
    ] = None
    standing_orders: Annotated[
        StandingOrdersForm, Doc("reflexes inside the probe, where the supervisor would be late")
    ] = field(default_factory=StandingOrdersForm)
    job: Annotated[JobForm, Doc("what may be relied on in the job")] = field(
        default_factory=JobForm
    )
    notify: Annotated[
        Mapping[str, Mapping[str, Any]], NotifiersType(), Doc("who is told, and of what")
    ] = field(default_factory=dict)
    warmup: Annotated[Steps, Doc("frames before the run counts as nominal")] = 64
    probation: Annotated[Steps, Doc("steps a contained incident is watched")] = 100
    blind_after: Annotated[
        BlindForm, Doc("how long a rule may be UNKNOWN before that is an incident")
    ] = field(default_factory=BlindForm)
    hold_max: Annotated[
        Seconds, Doc("how often people are reminded of a hold that nobody ended")
    ] = 14400.0


@dataclass(frozen=True)
class ScenarioFile:
    """policies/tests/<name>.yaml: scenarios for a whole policy."""

    version: Version
    policy: Annotated[str, Doc("the policy: a path from this file on, else a shipped one's name")]
    tests: Annotated[tuple[ScenarioForm, ...], Doc("series, and what must come of them")]
    use: Annotated[
        tuple[str, ...], Doc("other files of tests, by their paths: theirs are played here too")
    ] = ()
    summary: Annotated[str, Doc("one line")] = ""
    mode: Annotated[Mode | None, Doc("takes the place of the policy's own")] = None
