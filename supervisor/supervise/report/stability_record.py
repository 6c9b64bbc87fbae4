"""Stability record: the class of what an auditor checks of a run, months later.

A field that neither the audit log, the journal nor the policy shows is `Unknown`, with the reason.
`make docs` writes the schema to `docs/record.schema.json`. Also here: the comparison of a record
with the run that it is about, or with another record, field by field; and its tables, as Markdown
and as one HTML page, which both escape the texts of a job.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from ..core.model.decisions import json_document, plain_json
from ..core.model.formats import format_number, printable, readable_metric
from ..core.model.payload import Payload
from ..json_schemas import published_schema
from .incident_facts import sparkline
from .pages import Figure, figure_over_steps, render_template

SCHEMA_ID: Literal["supervise/record/v1"] = "supervise/record/v1"
KEYS = ("signal", "id", "fault", "incident", "runbook", "rule", "part")  # what names a list's item
MAX_FIELDS = 20  # named of those that differ
# What is read from the installation and not from the run: another version may say it otherwise.
INSTALLATION = (
    *("made_by", "limits", "fault_injection.design"),
    *("module", "meaning", "unit", "formula", "formula_version", "faults"),
    *("lead_time", "blind_to", "threshold_source", "shown"),
)


class Unknown(Struct, frozen=True, forbid_unknown_fields=True):
    """A field that is not known, with the reason."""

    unknown: str


class Installation(Struct, frozen=True, forbid_unknown_fields=True):
    """The installation that wrote the record."""

    version: str
    formulas_sha256: str
    shown_sha256: str


class RecordedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The run."""

    id: str
    created: str
    host: str
    command: Sequence[str]
    previous: str | Unknown
    state: str
    exit_code: int | Unknown
    first_step: int | Unknown
    last_step: int | Unknown
    steps_made: int | Unknown
    tokens: float | Unknown
    attempts: int
    ranks: int


class Reload(Struct, frozen=True, forbid_unknown_fields=True):
    """A policy that was loaded during the run."""

    step: int
    record: int
    digest: str | None
    reason: str = field(name="by")


class RecordedPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """The policy."""

    name: str
    mode: str
    digest: str
    reloads: Sequence[Reload]


class IdentityChange(Struct, frozen=True, forbid_unknown_fields=True):
    """A launch whose job differs from that of the launch before it."""

    attempt: int
    since: str
    step: int
    differs: Sequence[Payload]


class JobIdentity(Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of the job from its first step on: code, packages, data, machine."""

    initial: Payload = field(name="first")
    changes: Sequence[IdentityChange]


class Baseline(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values of steps without an open incident, or why there are too few."""

    p05: float | None = None
    median: float | None = None
    p95: float | None = None
    values: int | None = None
    unknown: str | None = None


class Monitor(Struct, frozen=True, forbid_unknown_fields=True):
    """A signal that rules of the policy read.

    Attributes:
        module: what of the job it watches, and who measures it
        faults: injected faults that are made to move it
        present_in: share of the steps that hold it
    """

    signal: str
    module: str
    meaning: str | Unknown
    unit: str | Unknown
    formula: str | Unknown
    formula_version: str | Unknown
    rules: Sequence[str]
    faults: Sequence[str]
    present_in: float | Unknown
    healthy_baseline: Baseline


class LeadInRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A drill of this run that the rule reported; `reported_after`: steps."""

    fault: str
    step: int
    reported_after: int


class LeadTime(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How early the rule reports faults, or why that is not known.

    Attributes:
        suites: drill suites that the run cites
        recordings: recordings of faults with this rule as it is now
    """

    in_this_run: Sequence[LeadInRun] = ()
    suites: Sequence[Payload] = ()
    recordings: Payload | None = None
    unknown: str | None = None


class RecordedRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of the policy in force at the end.

    Attributes:
        response: the runbook that it runs, hold, or nothing
        stops: the response can stop the job or hold it
    """

    rule: str
    severity: str
    mode: str
    condition: str
    thresholds: Mapping[str, str]
    threshold_source: str
    response: str
    stops: bool
    alarms: int = field(name="fired")
    state: str
    lead_time: LeadTime
    blind_to: Sequence[str]


class InjectedFault(Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that was injected in this run, and how many steps later what followed."""

    fault: str
    step: int
    record: int
    params: Payload
    rule: str | Unknown
    reported_after: int | Unknown
    acted_after: int | Unknown


class FaultInjection(Struct, frozen=True, forbid_unknown_fields=True):
    """How the monitors were tested."""

    in_this_run: Sequence[InjectedFault]
    design: Sequence[Payload]


class RecordedIncident(Struct, frozen=True, forbid_unknown_fields=True):
    """An incident."""

    incident: str
    severity: str
    rule: str
    step: int
    headline: str
    end: str | Unknown
    end_step: int | Unknown


class Intervention(Struct, frozen=True, forbid_unknown_fields=True):
    """An action on the job."""

    id: str
    action: str
    runbook: str | Unknown
    incident: str | Unknown
    step: int
    outcome: Literal["done", "failed", "in doubt"]
    observed: Payload
    record: int


class OperatorCommand(Struct, frozen=True, forbid_unknown_fields=True):
    """A command of an operator."""

    step: int
    record: int
    command: str


class Interventions(Struct, frozen=True, forbid_unknown_fields=True):
    """All that changed the job."""

    by_name: Mapping[str, Mapping[str, int]]
    safeguards: Mapping[str, int]
    operators: Sequence[OperatorCommand]
    actions: Sequence[Intervention]


class Recovery(Struct, frozen=True, forbid_unknown_fields=True):
    """A runbook of the policy."""

    runbook: str
    procedure: Sequence[str]
    used: int
    verified: int
    failed: int
    recoveries: Sequence[Payload] | Unknown = field(name="shown")


class BlindRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A rule that could not be evaluated for a while."""

    rule: str
    step: int
    record: int
    reason: str = field(name="why")


class Gaps(Struct, frozen=True, forbid_unknown_fields=True):
    """Steps and times at which nothing was seen."""

    unwatched_s: Sequence[float]
    frames_lost: int | Unknown
    steps_without_frame: int | Unknown
    blind_share: float | Unknown
    blind_rules: Sequence[BlindRule]
    inactive_rules: Sequence[str]
    journal: str


class RunCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of incidents and interventions to the run."""

    steps: int | Unknown
    skipped_updates: int | Unknown
    tokens: float | Unknown
    paused_s: float
    down_s: float | Unknown
    device_hours: float | Unknown
    device_hours_of_run: float | Unknown
    probe_share: float | Unknown


class RecordedLoss(Struct, frozen=True, forbid_unknown_fields=True):
    """The loss over the run: the highest of the steps up to the next one, null not finite."""

    metric: str
    steps: Sequence[int]
    highest: Sequence[float | None]

    @property
    def values(self) -> list[float]:
        """With NaN for what is not finite."""
        return [math.nan if value is None else value for value in self.highest]


class AuditedPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the run."""

    part: str
    status: str
    text: str


class AuditState(Struct, frozen=True, forbid_unknown_fields=True):
    """The audit log that all of this is read from."""

    status: str
    records: int
    head: str
    parts: Sequence[AuditedPart]
    not_checked: Sequence[str]


class StabilityRecord(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Record of a run for its auditor.

    Attributes:
        citations: drill suites and canary trials that the run or its policy names
    """

    schema: Literal["supervise/record/v1"]
    made_by: Installation
    run: RecordedRun
    policy: RecordedPolicy
    identity: JobIdentity
    monitors: Sequence[Monitor] | Unknown
    rules: Sequence[RecordedRule] | Unknown
    fault_injection: FaultInjection
    citations: Sequence[Payload] = ()  # records of the first versions do not have them
    incidents: Sequence[RecordedIncident]
    interventions: Interventions
    recovery: Sequence[Recovery] | Unknown
    gaps: Gaps
    cost: RunCost
    loss: RecordedLoss | None = None  # likewise; or no frame has one
    limits: Sequence[str]
    audit: AuditState

    def encode(self) -> bytes:
        """Return the bytes that are signed."""
        return f"{json_document(self, indent=1)}\n".encode()


def decode_record(raw: bytes) -> StabilityRecord:
    """Return the record in the bytes of a file; ValueError if it has not the published form."""
    return Payload(json.loads(raw)).parse(StabilityRecord)


def stability_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record."""
    return published_schema(StabilityRecord, "The stability record of a run of supervise")


def record_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, value)` of each leaf; items of a list are named by what identifies them."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from record_leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        names: set[str] = set()
        for index, inner in enumerate(value):
            name = next((str(inner[key]) for key in KEYS if key in inner), str(index))
            name = f"{name} {index}" if name in names else name
            names.add(name)
            yield from record_leaves(inner, f"{path}[{name}]")
    else:
        yield path, value


def record_differences(old: StabilityRecord, new: StabilityRecord) -> list[tuple[str, Any, Any]]:
    """Return `(path, old, new)` of each leaf that differs; None for one that is missing."""
    old_leaves, new_leaves = (
        dict(record_leaves(plain_json(old))),
        dict(record_leaves(plain_json(new))),
    )
    return [
        (path, old_leaves.get(path), new_leaves.get(path))
        for path in dict.fromkeys((*old_leaves, *new_leaves))
        if path not in old_leaves or path not in new_leaves or old_leaves[path] != new_leaves[path]
    ]


class ChangedFields(NamedTuple):
    """The fields in which a record differs from the run, and whether all were compared."""

    paths: list[str]
    all_compared: bool


def changed_fields(recorded: StabilityRecord, rebuilt: StabilityRecord) -> ChangedFields:
    """Compare a record with the run.

    Where another installation wrote it, what comes from that is left out.
    """
    is_same_installation = recorded.made_by == rebuilt.made_by
    if recorded.loss is None and not is_same_installation:  # an earlier one did not write it
        rebuilt = msgspec.structs.replace(rebuilt, loss=None)
    paths = [path for path, _, _ in record_differences(recorded, rebuilt)]
    if not is_same_installation:
        paths = [path for path in paths if not _is_of_installation(path)]
    return ChangedFields(paths, is_same_installation)


def _is_of_installation(path: str) -> bool:
    parts = path.replace("[", ".").replace("]", "").split(".")
    return path.startswith(INSTALLATION[:3]) or not {*INSTALLATION[3:]}.isdisjoint(parts)


@dataclass(frozen=True, slots=True)
class Block:
    """A section: its heading, then a table."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_of(value: Any) -> str:
    """Return a value of a record as one line of text."""
    if isinstance(value, msgspec.Struct):
        return text_of(_builtins(value))
    if isinstance(value, Mapping):
        if value.keys() == {"unknown"}:
            return f"unknown: {value['unknown']}"
        return "; ".join(f"{name}: {text_of(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text_of, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, float):
        return format_number(value)
    return printable(str(value))


def _pairs(title: str, fields: Struct | Payload, without: str = "") -> Block:
    rows = [
        (key.replace("_", " "), text_of(value))
        for key, value in _builtins(fields).items()
        if key != without
    ]
    return Block(title, ("field", "value"), rows)


def _table(title: str, values: Any, without: Collection[str] = ()) -> Block:
    """Return a table of objects with the same fields, or why there is none."""
    if not isinstance(values, (list, tuple)):
        return Block(title, ("field", "value"), [(title, text_of(values))])
    rows = [_builtins(value) for value in values]
    head = list(dict.fromkeys(name for row in rows for name in row if name not in without))
    cells = [[text_of(row.get(name)) for name in head] for row in rows]
    return Block(title, [name.replace("_", " ") for name in head], cells)


def _builtins(value: Struct | Payload) -> Any:
    return msgspec.to_builtins(value, enc_hook=dict)


def record_blocks(record: StabilityRecord) -> Iterator[Block]:
    """Yield the sections of a record."""
    yield _pairs("Run", record.run)
    yield _pairs("Policy", record.policy)
    yield _pairs("Identity of the job at its first launch", _counted(record.identity.initial))
    yield _table("Changes of the identity", record.identity.changes)
    yield _table("Monitored signals", record.monitors)
    yield _table("Rules, thresholds and lead times", record.rules)
    yield _table("Faults injected in this run", record.fault_injection.in_this_run)
    yield _table("Trials cited", record.citations, without=("monitors", "runs"))
    yield _table("Fault-injection design", record.fault_injection.design)
    yield _table("Incidents", record.incidents)
    yield _pairs("Interventions", record.interventions, without="actions")
    yield _table("Actions on the job", record.interventions.actions)
    yield _table("Recovery procedures", record.recovery)
    yield _pairs("Gaps", record.gaps)
    yield _pairs("Cost", record.cost)
    if record.loss is not None:
        highest = record.loss.values
        yield Block(
            "Loss",
            ("field", "value"),
            [
                ("metric", record.loss.metric),
                ("over the run", sparkline(highest, [0] * len(highest))),
            ],
        )
    yield Block("Limits", ("limit",), [[text_of(limit)] for limit in record.limits])
    yield _pairs("Audit", record.audit, without="parts")
    yield _table("Audited parts", record.audit.parts)
    yield _pairs("Written by", record.made_by)


def _counted(identity: Payload) -> Payload:
    """Return an identity with the number of its packages instead of their versions."""
    packages = identity.get("packages")
    versions = packages.get("versions") if isinstance(packages, Mapping) else None
    if not isinstance(packages, Mapping) or not isinstance(versions, (Mapping, list)):
        return identity
    number = len(versions)
    fields = {"source": packages["source"], "number": number, "sha256": packages["sha256"]}
    return identity.extended(packages=fields)


def render_record_markdown(record: StabilityRecord) -> str:
    """Return a record as Markdown."""
    lines = [f"# Stability record of run {record.run.id}", ""]
    for block in record_blocks(record):
        lines += [f"## {block.title}", ""]
        if not block.rows:
            lines += ["none", ""]
            continue
        lines.append(f"| {' | '.join(block.head)} |")
        lines.append("| --- " * len(block.head) + "|")
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in block.rows]
        lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)


# ── page ──────────────────────────────────────────────────────────────────────────────────────────

# Chapters of the page: id, heading, the blocks in it.
CHAPTERS = (
    ("run", "The run", ("Run", "Policy", "Changes of the identity", "Trials cited")),
    ("happened", "What happened", ("Incidents", "Actions on the job", "Interventions", "Cost")),
    ("faults", "Faults that were injected", ("Faults injected in this run",)),
    ("unseen", "What was not seen", ("Gaps", "Limits")),
    (
        "watched",
        "What watched",
        ("Rules, thresholds and lead times", "Monitored signals", "Recovery procedures"),
    ),
    ("design", "How the monitors are tested", ("Fault-injection design",)),
    ("job", "What the job consists of", ("Identity of the job at its first launch",)),
    ("audit", "What this is read from", ("Audit", "Audited parts", "Written by")),
)
# Of what is too wide for a table: the columns that stand for a row until it is opened.
BRIEF = {
    "Rules, thresholds and lead times": ("rule", "severity", "state", "fired", "response"),
    "Monitored signals": ("signal", "meaning", "present in"),
    "Recovery procedures": ("runbook", "used", "verified", "failed"),
    "Fault-injection design": ("fault", "meaning", "moves"),
}
LONG = 12  # rows, more are folded


def render_record_page(record: StabilityRecord) -> str:
    """Return a record as an HTML page, of nothing but the record."""
    blocks = {block.title: block for block in record_blocks(record)}
    return render_template(
        "record",
        record=record,
        verdict=_verdict(record),
        tone=_tone(record),
        figures=[plot for plot in (_loss_figure(record),) if plot is not None],
        chapters=[
            (name, heading, [blocks[title] for title in titles if title in blocks])
            for name, heading, titles in CHAPTERS
        ],
        brief={
            title: [(blocks[title].head.index(name), name) for name in names]
            for title, names in BRIEF.items()
            if {*names} <= {*blocks[title].head}
        },
        long=LONG,
    )


def _verdict(record: StabilityRecord) -> str:
    run, incidents, cost = record.run, record.incidents, record.cost
    still = [incident for incident in incidents if isinstance(incident.end, Unknown)]
    count = len(record.interventions.actions)
    return "; ".join(
        (
            f"{run.state}, exit code {text_of(run.exit_code)}, {_steps(run.steps_made)} made",
            f"{len(incidents)} incident{'' if len(incidents) == 1 else 's'}"
            + (f", {len(still)} not closed" if still else ", all closed" if incidents else ""),
            f"{count} action{'' if count == 1 else 's'} on the job, {_steps(cost.steps)} lost",
            f"audit log {record.audit.status}",
        )
    )


def _steps(count: int | Unknown) -> str:
    return "an unknown number of steps" if isinstance(count, Unknown) else f"{count} steps"


def _tone(record: StabilityRecord) -> str:
    ends = (record.run.exit_code, *(incident.end for incident in record.incidents))
    is_open = any(isinstance(end, Unknown) for end in ends)
    failed = not isinstance(ends[0], Unknown) and ends[0] != 0
    return "bad" if failed or record.audit.status != "good" else "busy" if is_open else "good"


def _loss_figure(record: StabilityRecord) -> Figure | None:
    if record.loss is None or not record.loss.steps:
        return None
    points = list(zip(map(float, record.loss.steps), record.loss.values, strict=True))
    opened = [("opened", incident.step) for incident in record.incidents]
    back = [
        ("back", action.step)
        for action in record.interventions.actions
        if action.action in ("rollback", "relaunch") and action.outcome == "done"
    ]
    low, high = min(record.loss.steps), max(record.loss.steps)  # a point's steps follow it
    marks = [(kind, float(min(max(step, low), high))) for kind, step in (*opened, *back)]
    title = readable_metric(record.loss.metric)
    figure = figure_over_steps(title, [("line", points)], marks, log=True)
    return None if figure is None else replace(figure, name=record.loss.metric, tall=True)
