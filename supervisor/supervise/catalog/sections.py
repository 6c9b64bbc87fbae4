"""The files that people write: policies, packs, runbooks and tests, as sections.

Sections that the engine reads as they are stand in `core.model.policy`. A part that is `Any`
here is read when its surroundings are known: packs give it a name, and overrides change it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..core.model.action import Action
from ..core.model.failure import FailureClass
from ..core.model.interfaces import Detector
from ..core.model.policy import (
    Approval,
    Budget,
    JobSettings,
    Ladder,
    Local,
    Mechanisms,
    Name,
    Planned,
    ProbeSettings,
    Safeguards,
    Sampling,
    Savepoints,
)
from ..core.model.values import (
    OPEN,
    Parsed,
    RunbookName,
    Schema,
    Seconds,
    Section,
    Severity,
    SomeSteps,
    Steps,
    Unit,
    closed_object_schema,
    describe_key,
)
from ..notifiers import Settings
from . import discover, validation
from .diagnostics import Place, Problems
from .scenarios import Scenario
from .schema import (
    BAD,
    convert_section,
    find_mistakes,
    json_schema,
    keys_of,
    plain_section,
    read_section,
)
from .yaml_document import MapNode, Node, Scalar, first_text

VERSION_NUMBER = 1
VERSION = f"supervise/v{VERSION_NUMBER}"
METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_./:@-]{0,127}")
METRIC_WORDS = "a letter or _, then letters, digits and _ . / : @ -"
BASELINE_KEYS = ("window", "min")  # a detector that has both keeps a baseline
WINDOWS = ("window", "slow", "ref")  # samples that a detector looks back on; `freeze` is in them


def read_detector(
    node: Node,
    problems: Problems,
    label: str,
    *,
    baseline: Mapping[str, int] | None = None,
    overridden: Mapping[str, Place] | None = None,
) -> Any:
    """Return the detector that a mapping `{kind: robust_z, metric: ..., gt: 6}` describes, or BAD.

    Args:
        baseline: the policy's `window` and `min`, for detectors that keep a baseline.
        overridden: see `schema.read_section`.
    """
    form = _form(node)
    if form is None:
        validation.validate_node(_kind_schema(), node, problems, label)
        return BAD
    assert isinstance(node, MapNode)
    keys = node.without("kind")
    defaults = _defaults(form, node, baseline or {})
    detector = read_section(form, keys, problems, label, defaults=defaults, overridden=overridden)
    wrong = [] if detector is BAD else [m for m in detector.metrics if not METRIC.fullmatch(m)]
    for metric in wrong:
        location = first_text(node, metric) if metric else node.locate("metric")
        problems.add(location, f"{label}: {metric!r} is no name of a metric", METRIC_WORDS)
    return BAD if wrong else detector


def read_valid_keys(node: Node) -> Any:
    """Return a detector of those keys that are right by themselves, or BAD; notes nothing."""
    form = _form(node)
    if form is None or not isinstance(node, MapNode):
        return BAD
    wrong = find_mistakes(form, node.without("kind"), Problems(), "")
    return read_detector(node.without(*wrong), Problems(), "")


def write_detector(detector: Detector) -> dict[str, Any]:
    """Return a detector as plain data."""
    return {"kind": discover.yaml_name_of(detector), **plain_section(detector)}


def _form(node: Node) -> type[Detector] | None:
    kind = node.get("kind") if isinstance(node, MapNode) else None
    is_text = isinstance(kind, Scalar) and isinstance(kind.value, str)
    return (
        discover.detector_classes().get(kind.text) if is_text and isinstance(kind, Scalar) else None
    )


@cache
def _kind_schema() -> Schema:
    kind = {"title": "kind of detector", "enum": list(discover.detector_classes())}
    return {**OPEN, "required": ["kind"], "properties": {"kind": kind}}


def _defaults(form: type, node: MapNode, baseline: Mapping[str, int]) -> dict[str, int]:
    """Return the defaults of a detector: the baseline, and bounds that fit in it."""
    keys = keys_of(form)
    defaults = dict(baseline) if all(key in keys for key in BASELINE_KEYS) else {}
    sizes = [node.get(key) for key in WINDOWS if key in keys]
    values = [size.value for size in sizes if isinstance(size, Scalar)]
    window = next((value for value in values if type(value) is int), defaults.get("window"))
    for key in ("min", "freeze") if window is not None else ():
        if key in keys and window is not None:
            defaults[key] = max(1, min(window, defaults.get(key, keys[key].default)))
    return defaults


def first_sentence(form: type) -> str:
    """Return the first sentence of a class's docstring, on one line."""
    text = " ".join((form.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z`])", text)[0].rstrip(".") + "."


def part_mark(name: str) -> Meta:
    """Return the mark of a part whose schema is the definition of this name, see `docs`."""
    return Meta(extra_json_schema={"$ref": f"#/definitions/{name}"})


AnyDetector = Annotated[Any, part_mark("detector")]
AnyRule = Annotated[Any, part_mark("rule")]
AnyInhibition = Annotated[Any, part_mark("inhibition")]
AnyRunbook = Annotated[Any, part_mark("runbook")]
AnyChange = Annotated[Any, part_mark("override")]

if TYPE_CHECKING:
    Step = Action
    VerifyKeys = Action
    Channels = Mapping[str, Settings]
else:

    class Step(metaclass=Parsed):
        """`pause`, or `rollback: {at_least: 10}`: a verb alone, or a verb with its keys."""

        @staticmethod
        def decode(value):
            verb, keys = value, None
            if isinstance(value, dict) and len(value) == 1:
                ((verb, keys),) = value.items()
            form = discover.action_classes().get(verb) if isinstance(verb, str) else None
            if form is None:
                raise ValueError("no action")
            return convert_section({} if keys is None else keys, form)

        @staticmethod
        def encode(value):
            keys = plain_section(value)
            return {discover.yaml_name_of(value): keys} if keys else discover.yaml_name_of(value)

        @staticmethod
        def schema():
            keyed = {
                verb: {"description": first_sentence(form), **_nullable(json_schema(form))}
                for verb, form in discover.action_classes().items()
            }
            alone = [verb for verb, form in keyed.items() if "required" not in form]
            mapping = closed_object_schema(keyed, minProperties=1, maxProperties=1)
            return {"anyOf": [{"title": "action", "enum": alone}, {"title": "action", **mapping}]}

    class VerifyKeys(metaclass=Parsed):
        """The keys of the action `verify`, without its verb."""

        @staticmethod
        def decode(value):
            return convert_section(value, discover.action_classes()["verify"])

        encode = staticmethod(plain_section)

        @staticmethod
        def schema():
            return json_schema(discover.action_classes()["verify"])

    class Channels(metaclass=Parsed):
        """`{slack: {url_env: SLACK_URL}}`: notifiers by name; the console is always one of them."""

        @staticmethod
        def decode(value):
            if (
                not isinstance(value, dict)
                or not value.keys() <= discover.notifier_classes().keys()
            ):
                raise ValueError("no notifier")
            return {
                name: convert_section(keys, discover.notifier_classes()[name])
                for name, keys in value.items()
            }

        @staticmethod
        def encode(value):
            return {name: plain_section(settings) for name, settings in value.items()}

        @staticmethod
        def schema():
            keyed = {name: json_schema(form) for name, form in discover.notifier_classes().items()}
            return {"title": "notifier", **closed_object_schema(keyed)}


def _nullable(schema: Schema) -> Schema:
    """An action without required keys may be written as `pause:`."""
    return schema if "required" in schema else {**schema, "type": ["object", "null"]}


Version = Annotated[Literal["supervise/v1"], describe_key("of the language")]
Lines = tuple[str, ...]


class Localize(Section, frozen=True):
    """Four areas where a cause can be; each list begins with the cheapest check."""

    optimization: Annotated[
        Lines, describe_key("learning rate, batch size, moments, precision")
    ] = ()
    model: Annotated[Lines, describe_key("attention, activations, routing")] = ()
    data: Annotated[Lines, describe_key("batches, mixture, order, tokenizer")] = ()
    hardware: Annotated[Lines, describe_key("devices, network, storage, the machine")] = ()

    def lists(self) -> Mapping[str, Lines]:
        """Return the lists that are not empty, by area."""
        return {area: lines for area, lines in msgspec.structs.asdict(self).items() if lines}


Meaning = Annotated[str, describe_key("what has happened when this runs")]
Impact = Annotated[str, describe_key("what it costs the run")]
Diagnose = Annotated[Lines, describe_key("questions for the person on call, in this order")]


class WrittenRunbook(Section, frozen=True, kw_only=True):
    """A runbook inside a policy."""

    meaning: Meaning = ""
    impact: Impact = ""
    handles: Annotated[Lines, describe_key("ids of the metrics that it is for")] = ()
    evidence: Annotated[Lines, describe_key("what to look at in the evidence bundle")] = ()
    containment: Annotated[
        Lines, describe_key("what keeps it from getting worse until the cause is known")
    ] = ()
    steps: Annotated[tuple[Step, ...], describe_key("actions, in order")]
    verify: Annotated[
        VerifyKeys | None, describe_key("the last step: how the effect is verified")
    ] = None
    probe_replay: Annotated[Lines, describe_key("how to reproduce it, away from the run")] = ()
    over_when: Annotated[Lines, describe_key("what must be true before a person closes it")] = ()
    if_it_fails: Annotated[
        RunbookName, describe_key("runbook to run when a step fails, or hold")
    ] = "hold"
    if_refused: Annotated[
        RunbookName | None, describe_key("runbook that runs instead when a step is refused")
    ] = None
    diagnose: Diagnose = ()
    localize: Annotated[Localize, describe_key("where to look, in each of four areas")] = Localize()


class RunbookFile(WrittenRunbook, frozen=True, kw_only=True):
    """runbooks/<name>.yaml: the same, explained."""

    version: Version
    runbook: Annotated[RunbookName, describe_key("the file's own name")]
    meaning: Meaning
    impact: Impact
    diagnose: Diagnose


Mode = Literal["observe", "shadow", "approve", "enforce"]
SeverityOrOff = Literal["SEV0", "SEV1", "SEV2", "off"]


class Phases(Section, frozen=True):
    """What a rule counts for in a phase of the run, where that is not `sev`."""

    early: Annotated[
        SeverityOrOff | None,
        describe_key("while the learning rate warms up, and for `warmup` frames"),
    ] = None
    steady: Annotated[
        SeverityOrOff | None, describe_key("after that, and where nothing is known")
    ] = None
    late: Annotated[
        SeverityOrOff | None, describe_key("from where a decay has halved the learning rate")
    ] = None


class WrittenRule(Section, frozen=True):
    """Detectors joined by and/or/not, with a severity and a runbook."""

    id: Annotated[Name, describe_key("name of the rule; from outside a pack it is pack.id")]
    when: Annotated[str, describe_key("detector names joined by and, or, not, ( )")]
    sev: Annotated[
        Severity, describe_key("SEV0 dead or garbage, SEV1 contain quickly, SEV2 look into it")
    ]
    title: Annotated[str, describe_key("what it finds, a few words for people")] = ""
    run: Annotated[
        RunbookName | None, describe_key("runbook, or hold; without it people are notified")
    ] = None
    see: Annotated[
        RunbookName | None,
        describe_key("runbook for people; default `run`, else that of its severity"),
    ] = None
    for_: Annotated[
        SomeSteps, describe_key("consecutive breaching rows, or steps, before it fires")
    ] = msgspec.field(name="for", default=1)
    keep: Annotated[Steps, describe_key("minimum rows, or steps, that it keeps firing")] = 0
    unit: Annotated[
        Unit,
        describe_key("of `for` and `keep`: frames or logged rows, or the job's steps between them"),
    ] = "rows"
    cooldown: Annotated[
        Steps, describe_key("rows after its runbook in which a new breach escalates instead")
    ] = 0
    unknown: Annotated[
        Literal["hold", "breach", "ok", "ignore"], describe_key("how UNKNOWN is treated")
    ] = "hold"
    mode: Annotated[Mode | None, describe_key("weaker than the policy's, to try the rule out")] = (
        None
    )
    phases: Annotated[
        Phases | None, describe_key("another severity, or off, in phases of the run; same runbook")
    ] = None


class Baseline(Section, frozen=True):
    """Baseline of detectors that compare with recent values; each may set its own."""

    window: Annotated[SomeSteps, describe_key("steps in the baseline")] = 128
    min: Annotated[
        SomeSteps | None,
        describe_key("samples before a detector answers; default: 64, or the window if smaller"),
    ] = None

    @property
    def least(self) -> int:
        """Return `min`; by default 64, or the window if that is smaller."""
        return min(64, self.window) if self.min is None else self.min

    def find_errors(self) -> list[tuple[str, str]]:
        if self.least > self.window:
            return [("min", f"is larger than the window of {self.window}")]
        return []


class BlindAfter(Section, frozen=True):
    """When a rule that stays UNKNOWN becomes an incident of its own."""

    steps: Annotated[SomeSteps, describe_key("steps it may stay UNKNOWN")] = 256
    time: Annotated[Seconds, describe_key("time it may stay UNKNOWN")] = 300.0


class JournalLimit(Section, frozen=True):
    """The record of all events, from which decisions can be computed again."""

    max_gb: Annotated[
        float,
        Meta(ge=0.001),
        describe_key(
            "above it the frames of the oldest part are removed, of parts that an incident refers "
            "to last; such a run can be neither replayed in full nor adopted"
        ),
    ]


class PackFile(Section, frozen=True):
    """policies/packs/<name>.yaml: detectors and rules that policies use."""

    version: Version
    pack: Annotated[Local, describe_key("the file's name; the prefix of its detectors and rules")]
    summary: Annotated[str, describe_key("one line")]
    status: Annotated[
        Literal["experimental", "canary", "stable"], describe_key("how far it has been validated")
    ]
    source: Annotated[tuple[str, ...], describe_key("where the thresholds come from")]
    false_alarms: Annotated[tuple[str, ...], describe_key("healthy situations in which it fires")]
    detectors: Annotated[Mapping[Local, AnyDetector], describe_key("name: {kind: ..., its keys}")]
    rules: Annotated[tuple[AnyRule, ...], describe_key("see the keys of a rule")]
    inhibit: Annotated[
        tuple[AnyInhibition, ...], describe_key("rules that are muted while another fires")
    ] = ()
    scenarios: Annotated[
        tuple[Scenario, ...], describe_key("series, and the expected decisions")
    ] = ()


class PolicyFile(Section, frozen=True):
    """policies/<name>.yaml"""

    version: Version
    policy: Annotated[str | None, describe_key("name; default: the file's name")] = None
    summary: Annotated[str, describe_key("one line")] = ""
    extends: Annotated[
        str | None,
        describe_key("the policy it changes: name of a shipped one, or path from this file on"),
    ] = None
    remove: Annotated[
        tuple[Name, ...],
        describe_key("rules, and of a base also packs and detectors, that are taken out"),
    ] = ()
    mode: Annotated[Mode, describe_key("what it may do; new policies start in shadow")] = "shadow"
    cites: Annotated[
        tuple[str, ...],
        describe_key("audit logs of drill suites and canary trials of it; paths from this file on"),
    ] = ()
    use: Annotated[tuple[Local, ...], describe_key("packs to use")] = ()
    override: Annotated[
        Mapping[Name, AnyChange], describe_key("pack.detector or pack.rule: keys to change")
    ] = msgspec.field(default_factory=dict)
    baseline: Annotated[
        Baseline, describe_key("default baseline of detectors that compare with recent values")
    ] = Baseline()
    detectors: Annotated[
        Mapping[Name, AnyDetector], describe_key("name: {kind: ..., its keys}")
    ] = msgspec.field(default_factory=dict)
    rules: Annotated[tuple[AnyRule, ...], describe_key("see the keys of a rule")] = ()
    inhibit: Annotated[
        tuple[AnyInhibition, ...], describe_key("rules that are muted while another fires")
    ] = ()
    objective: Annotated[
        Literal["descends", "none"],
        describe_key(
            "`none`: a higher loss is not worse (GAN, RL): rules on its height are SEV2 notices"
        ),
    ] = "descends"
    planned: Annotated[
        tuple[Planned, ...],
        describe_key(
            "announced changes: {from, to, what, expect: up|down|either}; rules on them are muted"
        ),
    ] = ()
    budgets: Annotated[
        Mapping[str, Budget], describe_key("class of action: maximum number of starts")
    ] = msgspec.field(default_factory=dict)
    approvals: Annotated[
        Mapping[str, Approval],
        describe_key("verb, runbook or `all`: a person approves before it runs"),
    ] = msgspec.field(default_factory=dict)
    escalate: Annotated[Ladder, describe_key("escalation levels")] = msgspec.field(
        default_factory=Ladder
    )
    runbooks: Annotated[
        Mapping[RunbookName, AnyRunbook],
        describe_key("name: a list of steps, or a runbook as in its own file"),
    ] = msgspec.field(default_factory=dict)
    machine: Annotated[
        Mapping[str, Mapping[str, str]] | None,
        describe_key("state: {event: state}; replaces the default"),
    ] = None
    savepoints: Annotated[
        Savepoints | None, describe_key("model state kept in the job's process, for rollbacks")
    ] = None
    probe: Annotated[ProbeSettings | None, describe_key("what the probe may cost")] = None
    sampling: Annotated[
        Sampling | None,
        describe_key("how often the probe takes metrics that it does not take at each step"),
    ] = None
    mechanisms: Annotated[
        Mechanisms | None,
        describe_key("spectra of weights, by a process beside the job; default: none"),
    ] = None
    safeguards: Annotated[
        Safeguards,
        describe_key("reactions inside the probe, where the supervisor would be too late"),
    ] = msgspec.field(default_factory=Safeguards)
    job: Annotated[JobSettings, describe_key("properties of the job that the policy relies on")] = (
        msgspec.field(default_factory=JobSettings)
    )
    notify: Annotated[Channels, describe_key("who is notified, from which severity")] = (
        msgspec.field(default_factory=dict)
    )
    warmup: Annotated[Steps, describe_key("frames before the run is nominal")] = 64
    probation: Annotated[Steps, describe_key("steps that a contained incident stays open")] = 100
    blind_after: Annotated[
        BlindAfter, describe_key("how long a rule may be UNKNOWN before it is an incident")
    ] = msgspec.field(default_factory=BlindAfter)
    give_up: Annotated[
        Literal["page", "stop", "stop_sev0"],
        describe_key(
            "when no remedy is left for what should have one: a SEV0, repeated; stop: the job ends "
            "too, with evidence and exit code 78, unless it recovers within 20 steps; stop_sev0: "
            "only where a rule of SEV0 fires then, so that the weights are lost and not just ill"
        ),
    ] = "page"
    journal: Annotated[
        JournalLimit | None, describe_key("limit of the journal of a run; default: none")
    ] = None
    hold_reminder: Annotated[Seconds, describe_key("time between two reminders of a hold")] = (
        14400.0
    )
    repeat: Annotated[
        Seconds,
        describe_key(
            "time after which an open SEV0 or SEV1 without an acknowledgement is repeated"
        ),
    ] = 14400.0


class ScenarioFile(Section, frozen=True):
    """policies/tests/<name>.yaml: scenarios for a whole policy."""

    version: Version
    policy: Annotated[
        str,
        describe_key("the policy: a path relative to this file, else the name of a shipped one"),
    ]
    tests: Annotated[tuple[Scenario, ...], describe_key("series, and the expected decisions")]
    use: Annotated[
        tuple[str, ...], describe_key("other test files, by path: their scenarios run here too")
    ] = ()
    summary: Annotated[str, describe_key("one line")] = ""
    mode: Annotated[Mode | None, describe_key("replaces the policy's mode")] = None


class FailuresFile(Section, frozen=True):
    """policies/failures/classes.yaml: classes in the order in which they are tried."""

    version: Version
    failures: Annotated[
        tuple[FailureClass, ...], describe_key("the first class that matches counts")
    ]
