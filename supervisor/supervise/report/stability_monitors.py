"""The monitors of a run: each signal with its formula and healthy values, each rule with its
threshold, where that comes from, its lead time, and what it is blind to.

Values, steps and gaps come from the journal, of the leading rank, the lowest that published a
frame. Memory is bounded: of each signal at most `2 * MAX_VALUES` values are held, every 1st, 2nd,
4th, ... healthy one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from ..core.frames import tokens_of_rank
from ..core.model.decisions import RuleFired
from ..core.model.events import Adopted, Announced, Curve, Event, Exited, Frame, Gap
from ..core.model.interfaces import Detector, yaml_name
from ..core.model.payload import Payload
from ..core.model.policy import HOLD, Policy, Rule
from ..errors import StoreError
from ..store import journal
from ..store.run_directory import RunDir
from .incident_facts import LOSSES
from .records import LaunchIdentity, Record
from .stability_record import (
    Baseline,
    InjectedFault,
    Installation,
    LeadInRun,
    LeadTime,
    Monitor,
    RecordedRule,
    Unknown,
)

MAX_VALUES = 2048  # values of each signal, for its quantiles; project default
LEAST = 16  # healthy values for a baseline
Interval = tuple[int, float]  # of CLOCK_MONOTONIC, in nanoseconds
NOT_SHOWN = "not shown: no drill in this run, and no recording of a fault that it reported"
CHANGED = "not shown: its thresholds are not those that were recorded"
STOPPING = frozenset(("stop",))
SHOWN_IN_SUITE = ("delays", "leads", "false_alarms")
CHANGES = frozenset(("rollback", "relaunch", "hold_rate", "lr_scale", "clip", "update_clip"))


class Sample:
    """An even selection of the values of one signal."""

    __slots__ = ("_stride", "_turn", "present", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.present = 0  # frames that hold the signal, healthy or not
        self._stride, self._turn = 1, 0

    def add(self, value: float) -> None:
        """Add the next healthy value."""
        if self._turn == 0 and math.isfinite(value):
            self.values.append(value)
            if len(self.values) == 2 * MAX_VALUES:
                self.values = self.values[::2]
                self._stride *= 2
        self._turn = (self._turn + 1) % self._stride

    def baseline(self) -> Baseline | None:
        """Return median, 5th and 95th percentile; None of too few values."""
        ordered, count = sorted(self.values), len(self.values)
        if count < LEAST:
            return None
        low, middle, high = (ordered[round(share * (count - 1))] for share in (0.05, 0.5, 0.95))
        return Baseline(low, middle, high, count)


@dataclass
class Frames:
    """What the frames of a run show.

    Attributes:
        frames, missing: steps of the leading rank that were seen, and numbers that were skipped.
        redone: steps that were undone, since a later attempt made them again.
        skipped: updates that were skipped. tokens: of all ranks, each batch once.
        first_step, last_step: -1 without any. attempts: distinct ones.
        loss: over the run, of the metric `loss_name`.
        ranks: that published a frame. lost: frames of any rank that were overwritten unread.
        unwatched_s: time between supervisors. down_s: from an end of the job to its next frame.
        span_s: from the first frame to the last.
        unreadable: why the journal does not show all of that, None if it does.
    """

    frames: int = 0
    missing: int = 0
    first_step: int = -1
    last_step: int = -1
    redone: int = 0
    skipped: int = 0
    tokens: float = 0.0
    lost: int = 0
    unwatched_s: list[float] = field(default_factory=list)
    down_s: float = 0.0
    span_s: float = 0.0
    attempts: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    announced: dict[str, None] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    loss: Curve = field(default_factory=Curve)
    loss_name: str = ""
    unreadable: str | None = None
    _leader: int | None = None
    _previous: tuple[int, int] = (-1, -1)  # attempt and step
    _first_ns: int = 0
    _ended_ns: int | None = None

    def add(self, event: Frame, names: Sequence[str], *, healthy: bool) -> None:
        """Count a frame of the leading rank."""
        self.frames += 1
        attempt, step = event.attempt, event.step
        if self._previous[0] == attempt:
            self.missing += max(0, step - self._previous[1] - 1)
        elif self.frames > 1:
            self.redone += max(0, self._previous[1] - step + 1)
        self._previous = attempt, step
        self.attempts.add(attempt)
        if self.first_step < 0:
            self.first_step, self._first_ns = step, event.at_ns
        self.last_step, self.span_s = step, (event.at_ns - self._first_ns) / 1e9
        if self._ended_ns is not None:
            self.down_s += (event.at_ns - self._ended_ns) / 1e9
            self._ended_ns = None
        for name, value in zip(names, event.values, strict=False):
            if value is None:
                continue
            sample = self.samples.get(name)
            if sample is None:
                sample = self.samples[name] = Sample()
            sample.present += 1
            if healthy:
                sample.add(value)
            if name == "update_skipped" and value > 0.0:
                self.skipped += 1
            if name in LOSSES and self.loss_name in ("", name):
                self.loss_name = name
                self.loss.add(step, value)

    def median(self, signal: str) -> float | None:
        """Return the healthy median of a signal, None where it is not known."""
        baseline = self.samples[signal].baseline() if signal in self.samples else None
        return None if baseline is None else baseline.median


Follow = Callable[[Iterable[tuple[int, Event]]], Iterable[tuple[int, Event]]]


def read_frames(run: RunDir, incidents: Sequence[Interval], follow: Follow = iter) -> Frames:
    """Read the journal of a run.

    Args:
        incidents: when incidents were open; what lies in them is not healthy.
        follow: passes the events of the journal on.
    """
    frames = Frames()
    names: dict[int, tuple[str, ...]] = {}
    kinds = (Announced, Frame, Gap, Adopted, Exited)
    try:
        for begin, end in journal.first_events_of_thinned(run.journal_path)[:1]:
            frames.unreadable = (
                f"frames of events {begin} to {end - 1} were removed (journal.max_gb)"
            )
        for _, event in follow(journal.read_journal(run.journal_path, only=kinds)):
            if isinstance(event, Announced):
                names[event.rank] = event.names
                frames.announced.update(dict.fromkeys(event.names))
            elif isinstance(event, Frame):
                frames.ranks.add(event.rank)
                columns = names.get(event.rank, ())
                frames.tokens += tokens_of_rank(dict(zip(columns, event.values, strict=False)))
                if frames._leader is None:
                    frames._leader = event.rank
                if event.rank == frames._leader:
                    is_inside = any(start <= event.at_ns <= end for start, end in incidents)
                    frames.add(event, columns, healthy=not is_inside)
            elif isinstance(event, Gap):
                frames.lost += event.count
            elif isinstance(event, Adopted):
                frames.unwatched_s.append(event.unwatched_ns / 1e9)
            elif isinstance(event, Exited):
                frames._ended_ns = event.at_ns
    except StoreError as error:
        frames.unreadable = str(error)
    return frames


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric, as this installation measures it."""

    module: str
    meaning: str
    unit: str
    formula: str
    formula_version: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be injected; `moves`: the metric that it is made to move."""

    meaning: str
    moves: str
    params: Mapping[str, float | str]


class RecordedRuleResult(Struct, frozen=True):
    """What a rule reported in recordings; faults: kind of fault -> how early."""

    digest: str
    false_alarms: int
    faults: Payload


class Recordings(Struct, frozen=True):
    """Benchmark over recordings of runs with and without a fault."""

    machine: str = ""
    date: str = ""
    healthy: int = 0
    rules: Mapping[str, RecordedRuleResult] = {}


class MovedMetrics(Struct, frozen=True):
    """Benchmark of the drills; moved: variant of a fault -> in how many programs it showed."""

    machine: str = ""
    date: str = ""
    moved: Mapping[str, Payload] = {}


class RecoveryRow(Struct, frozen=True):
    """Verbs of the actions in one recovery."""

    actions: Sequence[str]


class Recoveries(Struct, frozen=True):
    """Benchmark of the recoveries."""

    machine: str = ""
    date: str = ""
    policy: str = ""
    rows: Sequence[Payload] = ()


class BenchmarkResults(Struct, frozen=True):
    """`policies/shown.json`; sha256: of its content, whatever its layout."""

    recordings: Recordings = Recordings()
    drills: MovedMetrics = MovedMetrics()
    recoveries: Recoveries = Recoveries()
    sha256: str = ""

    @classmethod
    def decode(cls, text: str) -> BenchmarkResults:
        """Return the results that a JSON document holds."""
        content = json.loads(text)
        canonical = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        return Payload(content).extended(sha256=digest).parse(cls)


class CitedSuite(Struct, frozen=True):
    """A trial that a run cites; monitors: of a drill suite, what each rule has shown."""

    trial: str
    monitors: Mapping[str, Payload] = {}


@dataclass(frozen=True)
class Knowledge:
    """What this installation knows about the parts of a policy.

    Attributes:
        formulas_sha256: digest of the files that hold the formulas of signals and detectors.
        signal: returns a metric, None for one that is not measured here.
        blind_to: kind of a detector -> what it does not see.
        source: returns where the thresholds of a rule of a policy come from.
        alarms: pack -> healthy situations in which it fires.
    """

    version: str
    formulas_sha256: str
    signal: Callable[[str], Signal | None]
    faults: Mapping[str, Fault]
    benchmark_results: BenchmarkResults
    blind_to: Mapping[str, str]
    source: Callable[[Policy, Rule], str]
    alarms: Callable[[str], Sequence[str]]

    def installation(self) -> Installation:
        """Return what the fields that are read from this installation depend on."""
        return Installation(self.version, self.formulas_sha256, self.benchmark_results.sha256)

    def injectable_faults(self) -> list[Payload]:
        """Return every fault that can be injected, and in how many programs it showed."""
        drills = self.benchmark_results.drills
        return [
            Payload(
                {
                    "fault": name,
                    **dataclasses.asdict(fault),
                    "shown": [
                        {"variant": variant, **programs, "machine": drills.machine}
                        | {"date": drills.date}
                        for variant, programs in drills.moved.items()
                        if variant.partition(":")[0] == name
                    ],
                }
            )
            for name, fault in self.faults.items()
        ]

    def recoveries(self, verbs: Sequence[str]) -> list[Payload]:
        """Return the recorded recoveries in which the job was changed by just these actions."""
        recoveries = self.benchmark_results.recoveries
        origin = {"machine": recoveries.machine, "date": recoveries.date}
        return [
            row.extended(**origin, policy=recoveries.policy)
            for row in recoveries.rows
            if (named := set(row.parse(RecoveryRow).actions))
            and named <= {*verbs, "pause"}
            and {v for v in verbs if v in CHANGES} <= named
        ]


def recorded_monitors(
    policy: Policy, frames: Frames, knowledge: Knowledge, records: Sequence[Record]
) -> list[Monitor]:
    """Return each signal that a rule reads."""
    readers: dict[str, dict[str, None]] = {}
    for rule in policy.rules:
        for name in policy.detectors_of(rule):
            for metric in policy.detectors[name].metrics:
                readers.setdefault(metric, {})[rule.id] = None
    recorded_with = _formulas(records)
    no_formula = Unknown("the job reports it; this installation has no formula of it")
    rows = []
    for metric, rules in sorted(readers.items()):
        signal, sample = knowledge.signal(metric), frames.samples.get(metric)
        version: str | Unknown = no_formula if signal is None else signal.formula_version
        if signal is not None and recorded_with not in (None, knowledge.formulas_sha256):
            version = Unknown(f"recorded with other formulas (sha256 {recorded_with})")
        share: float | Unknown
        if sample is None:
            absent = frames.unreadable or "no frame of the leading rank holds it"
            share, baseline = Unknown(absent), Baseline(unknown=absent)
        else:
            share = round(sample.present / max(1, frames.frames), 6)
            baseline = sample.baseline() or Baseline(unknown="fewer than 16 healthy values")
        rows.append(
            Monitor(
                signal=metric,
                module="the job" if signal is None else signal.module,
                meaning=no_formula if signal is None else signal.meaning,
                unit=no_formula if signal is None else signal.unit,
                formula=no_formula if signal is None else signal.formula,
                formula_version=version,
                rules=list(rules),
                faults=[name for name, fault in knowledge.faults.items() if fault.moves == metric],
                present_in=share,
                healthy_baseline=baseline,
            )
        )
    return rows


def _formulas(records: Sequence[Record]) -> str | None:
    """Return the digest of the formulas that the run was recorded with."""
    for record in records:
        if record.kind == "identity":
            software = record.data.parse(LaunchIdentity).identity.get("supervise")
            digest = software.get("formulas_sha256") if isinstance(software, Mapping) else None
            return None if digest is None else str(digest)
    return None


def recorded_rules(
    policy: Policy,
    frames: Frames,
    knowledge: Knowledge,
    records: Sequence[Record],
    drills: Sequence[InjectedFault],
    citations: Sequence[Payload],
) -> list[RecordedRule]:
    """Return each rule of a policy.

    Args:
        citations: trials that the run cites; what a drill suite has shown of the rule as it is now.
    """
    alarms: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record.decision, RuleFired):
            alarms.setdefault(str(record.decision.rule), []).append(record)
    rows = []
    for rule in policy.rules:
        detectors = {name: policy.detectors[name] for name in policy.detectors_of(rule)}
        kinds = dict.fromkeys(map(_kind, detectors.values()))
        runbook = policy.runbooks.get(rule.runbook or "")
        response = rule.runbook or "people are notified"
        rows.append(
            RecordedRule(
                rule=rule.id,
                severity=rule.severity,
                mode=policy.mode_of(rule),
                condition=rule.text + (f" for {rule.for_steps}" * (rule.for_steps > 1)),
                thresholds={name: _thresholds(detector) for name, detector in detectors.items()},
                threshold_source=knowledge.source(policy, rule),
                response=response,
                stops=response == HOLD
                or (runbook is not None and not STOPPING.isdisjoint(runbook.verbs)),
                alarms=len(alarms.get(rule.id, ())),
                state=_state(detectors.values(), frames),
                lead_time=_lead_time(
                    rule.id,
                    policy.digest_of(rule),
                    knowledge,
                    alarms.get(rule.id, ()),
                    drills,
                    citations,
                ),
                blind_to=[knowledge.blind_to[kind] for kind in kinds if kind in knowledge.blind_to],
            )
        )
    return rows


def _kind(detector: Detector) -> str:
    return yaml_name(type(detector))


def _thresholds(detector: Detector) -> str:
    """Return the kind and all keys of a detector, defaults included."""
    pairs = (
        f"{field.name.rstrip('_')}: {value}"
        for field in dataclasses.fields(detector)
        if (value := getattr(detector, field.name)) not in (None, ())
    )
    return f"{_kind(detector)}, {', '.join(pairs)}"


def _state(detectors: Iterable[Detector], frames: Frames) -> str:
    needed = list(dict.fromkeys(m for detector in detectors for m in detector.metrics))
    lacking = [metric for metric in needed if metric not in frames.announced]
    if not lacking:
        return "evaluated"
    names = ", ".join(lacking)
    if len(lacking) < len(needed):
        return f"evaluated without {names}"
    return f"inactive: the job has no {names}"


def _lead_time(
    rule: str,
    digest: str,
    knowledge: Knowledge,
    alarms: Sequence[Record],
    drills: Sequence[InjectedFault],
    citations: Sequence[Payload],
) -> LeadTime:
    in_run = []
    for number, drill in enumerate(drills):
        until = drills[number + 1].record if number + 1 < len(drills) else float("inf")
        alarm = next((r for r in alarms if drill.record < r.seq < until), None)
        if alarm is not None:
            in_run.append(LeadInRun(drill.fault, drill.step, max(0, alarm.step - drill.step)))
    suites = [
        Payload({"trial": trial.trial} | {name: result[name] for name in SHOWN_IN_SUITE})
        for trial in (citation.parse(CitedSuite) for citation in citations)
        if (result := trial.monitors.get(rule)) is not None
        and result["digest"] == digest
        and result["delays"]
    ]
    recordings = knowledge.benchmark_results.recordings
    recording = recordings.rules.get(rule)
    of_recordings = None
    if recording is not None and recording.digest == digest and recording.faults:
        of_recordings = Payload(
            {
                "machine": recordings.machine,
                "date": recordings.date,
                "unit": "rows from the first report to half of the harm, least, median and most",
                "faults": recording.faults,
                "false_alarms": f"{recording.false_alarms} of {recordings.healthy} healthy runs",
            }
        )
    if not (in_run or suites or of_recordings):
        changed = recording is not None and recording.digest != digest
        return LeadTime(unknown=CHANGED if changed else NOT_SHOWN)
    return LeadTime(in_this_run=in_run or (), suites=suites or (), recordings=of_recordings)
