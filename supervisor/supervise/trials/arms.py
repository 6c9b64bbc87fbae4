"""Arms of a trial: runs as a value per step and metric over all ranks, their alarms and actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from ..core.model.decisions import (
    ActionFinished,
    ActionPlanned,
    Decision,
    NoticeTaken,
    RuleFired,
    Suppressed,
)
from ..errors import reading_recorded_data
from ..report.records import read_records
from ..store import audit, files, run_records
from ..store.run_directory import RunDir

LOSS, GRADIENT, UPDATE = "train_loss_raw", "grad_global_norm", "update_norm"
FINGERPRINT, TOKENS, SKIPPED, LR_SCALE = (
    *("batch_fingerprint", "tokens_per_update", "update_skipped", "lr_scale"),
)
OVERFLOW, PROBE_LOSS = "overflow", "fixed_probe_loss"
MEMORY = ("gpu_mem_allocated", "gpu_mem_reserved")
USED = (LOSS, GRADIENT, UPDATE, TOKENS, SKIPPED, LR_SCALE, OVERFLOW, PROBE_LOSS, *MEMORY)
PAGES = ("SEV0", "SEV1")
HINT = "supervise audit show RUN prints them"
# What mutes a rule altogether, before the colon of `suppressed_by`; the rest only delays an action.
MUTED = ("phase", "silence", "session_end", "inhibit", "planned")


def _greatest(values: Sequence[float]) -> float:
    """Return the greatest value, and NaN if any is: max() would hide it."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# How the values of the ranks become one; a mean where nothing is named.
OVER_RANKS: Mapping[str, Callable[[Sequence[float]], float]] = {
    TOKENS: sum,
    **dict.fromkeys((SKIPPED, OVERFLOW, *MEMORY), _greatest),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One run.

    Attributes:
        name: how reports call it.
        steps: step -> metric id -> value over all ranks, of the newest attempt at the step. NaN
            and infinity are values; an absent one has no key.
        fingerprints: step -> `(rank, batch fingerprint)` of each rank that has one.
        ranks: how many ranks reported.
        attempts: how often the run went back and made steps again.
        exit_code: of the job; None without a record of the end.
        stopped: it was ended by a signal that its supervisor passed on.
        live: a supervisor is still at work.
        cpu_s: CPU seconds per step of all its processes, as the gate measured them beside it; None
            where nobody did.
        inputs: file -> digest of the data manifest, tokenizer and evaluation files; None where the
            run has no identity.
    """

    name: str
    steps: Mapping[int, Mapping[str, float]]
    fingerprints: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    ranks: int = 1
    attempts: int = 0
    exit_code: int | None = 0
    stopped: bool = False
    live: bool = False
    inputs: Mapping[str, str] | None = None
    cpu_s: float | None = None

    @property
    def has_crashed(self) -> bool:
        """Whether the job ended with an error."""
        return self.exit_code is not None and self.exit_code != 0

    @property
    def has_ended_well(self) -> bool:
        """Whether the job is known to have ended well."""
        return self.exit_code == 0 and not self.live

    @property
    def first_step(self) -> int:
        """The first step; 0 for a run without any."""
        return min(self.steps, default=0)

    @property
    def end(self) -> int:
        """The step after the last one."""
        return max(self.steps, default=-1) + 1

    def series(self, metric: str, start: int, end: int) -> dict[int, float]:
        """Return the values of a metric from `start` up to `end` (excluded), by step."""
        return {
            step: values[metric]
            for step, values in sorted(self.steps.items())
            if start <= step < end and metric in values
        }


@dataclass(slots=True)
class ArmBuilder:
    """Makes an arm out of rows in the order of reception.

    Args:
        metrics: further metrics that are wanted, beside `USED`.
    """

    metrics: Collection[str] = ()
    attempts: int = 0
    _rows: dict[int, dict[int, tuple[int, Mapping[str, float]]]] = field(default_factory=dict)

    def add_frame(self, step: int, rank: int, attempt: int, values: Mapping[str, float]) -> None:
        """Take one frame; one of an older attempt than what is known of the step is dropped."""
        self.attempts = max(self.attempts, attempt)
        ranks = self._rows.setdefault(step, {})
        if rank not in ranks or attempt >= ranks[rank][0]:
            metrics = (*USED, FINGERPRINT, *self.metrics)
            ranks[rank] = attempt, {name: values[name] for name in metrics if name in values}

    def arm(self, name: str) -> Arm:
        """Return the arm; how it ended is not known here."""
        steps, prints = {}, {}
        for step, ranks in self._rows.items():
            rows = [(rank, values) for rank, (_, values) in sorted(ranks.items())]
            steps[step] = _over_ranks([values for _, values in rows])
            prints[step] = tuple((r, v[FINGERPRINT]) for r, v in rows if FINGERPRINT in v)
        return Arm(
            name=name,
            steps=steps,
            fingerprints=prints,
            ranks=len({rank for ranks in self._rows.values() for rank in ranks}),
            attempts=self.attempts,
        )


def _over_ranks(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    together: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != FINGERPRINT:
                together.setdefault(name, []).append(value)
    return {name: OVER_RANKS.get(name, _mean)(values) for name, values in together.items()}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule fired for a frame, and nothing muted it. `step`: of that frame, 0-based."""

    rule: str
    severity: str
    step: int


@dataclass(frozen=True, slots=True)
class Act:
    """An action on the job, ordered after step `step`; `is_done`: it was carried out."""

    verb: str
    step: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class FaultArm:
    """A run with a fault, or a healthy one.

    Attributes:
        arm: its series; of a step made again, the newest values.
        repeated: steps that were made more than once.
        injected: the first step with the fault; None: it did not come.
        refused: why the fault cannot act on this job, "" if it can.
        alarms: oldest first, one of a rule and step. acts: likewise.
    """

    arm: Arm
    repeated: int = 0
    injected: int | None = None
    refused: str = ""
    alarms: tuple[Alarm, ...] = ()
    acts: tuple[Act, ...] = ()


def read_arm(
    run: RunDir, metrics: Sequence[str], name: str | None = None, cpu_s: float | None = None
) -> Arm:
    """Read a run.

    Args:
        metrics: further metrics that are wanted, beside those that guards use.
        name: of the arm in reports; None: the path of its run.
        cpu_s: see `Arm`.

    Raises:
        StoreError: a record is missing, or cannot be understood; TamperError: it was changed.
    """
    builder = ArmBuilder(metrics)
    for row in run_records.read_rows(run):
        builder.add_frame(row.step, row.rank, row.attempt, row.values)
    exit_code: int | None = None
    inputs: Mapping[str, str] | None = None
    stopped = False
    with reading_recorded_data(f"the records in {run.audit_path}", HINT):
        for record in audit.read_audit(run.audit_path):
            kind, data = record["kind"], record.get("data") or {}
            exit_code = int(data["exit_code"]) if kind == "run_end" else None
            if kind == "identity" and inputs is None:
                inputs = {str(k): str(v) for k, v in data["identity"].get("inputs", {}).items()}
            if kind == "note" and data.get("what") == "signal":
                stopped = stopped or bool((data.get("details") or {}).get("final"))
    return replace(
        builder.arm(name or str(run.path)),
        exit_code=exit_code,
        stopped=stopped,
        live=files.is_locked(run.audit_path),
        inputs=inputs,
        cpu_s=cpu_s,
    )


class RunCitation(Struct, frozen=True):
    """What names a run in a result: its id, and the head of its audit log."""

    run: str
    records: int
    head: str


def cite_run(run: RunDir) -> RunCitation:
    """Return what names a run in a result."""
    report = audit.verify_audit(run.audit_path, run.id)
    return RunCitation(run.id, report.records, report.head)


def read_fault(run: RunDir, metrics: Sequence[str], name: str) -> FaultArm:
    """Read a run.

    Raises:
        StoreError: a record is missing, or cannot be understood; TamperError: it was changed.
    """
    arm = read_arm(run, metrics, name)
    records = _Records()
    for record in read_records(run):
        if record.decision is not None:
            records.take(record.decision)
    return FaultArm(
        arm,
        repeated=_repeated(run),
        injected=records.injected,
        refused="" if records.struck - records.refused.keys() else records.reason,
        alarms=tuple(records.alarms.values()),
        acts=tuple(records.acts.values()),
    )


def _repeated(run: RunDir) -> int:
    """Return how many steps the first rank made more than once."""
    leader: int | None = None
    steps: list[int] = []
    for row in run_records.read_rows(run):
        leader = row.rank if leader is None else leader
        if row.rank == leader:
            steps.append(row.step)
    return len(steps) - len(set(steps))


class _Records:
    """Takes the records of a run, in their order."""

    def __init__(self) -> None:
        self.injected: int | None = None
        self.struck: set[int] = set()  # ranks that the fault came to
        self.refused: dict[int, str] = {}  # rank -> why; it may find out after it has begun
        self.alarms: dict[tuple[str, int], Alarm] = {}
        self.acts: dict[str, Act] = {}

    @property
    def reason(self) -> str:
        """Why the fault cannot act, "" if no rank refused it."""
        return next(iter(self.refused.values()), "")

    def take(self, decision: Decision) -> None:
        """Take the next decision."""
        step, rule = decision.step, str(decision.rule)
        if isinstance(decision, NoticeTaken) and decision.what == "drill":
            self._drill(decision)
        elif isinstance(decision, RuleFired):
            alarm = Alarm(rule, str(decision.severity), step)
            previous = self.alarms.get((rule, step), alarm)  # each rank has a record of its own
            self.alarms[rule, step] = min(previous, alarm, key=lambda alarm: alarm.severity)
        elif isinstance(decision, Suppressed) and decision.cause in MUTED:
            self.alarms.pop((rule, step), None)
        elif isinstance(decision, ActionPlanned) and decision.action.touches_job:
            self.acts[decision.action.id] = Act(decision.action.verb, step, is_done=False)
        elif isinstance(decision, ActionFinished) and decision.action.id in self.acts:
            act = self.acts[decision.action.id]
            self.acts[decision.action.id] = replace(act, is_done=True)

    def _drill(self, notice: NoticeTaken) -> None:
        rank = notice.rank or 0
        if "refused" in notice.details:
            self.refused[rank] = str(notice.details["refused"])
        elif "fault" in notice.details:
            self.struck.add(rank)
            step = notice.step if notice.at_step is None else notice.at_step
            self.injected = step if self.injected is None else min(self.injected, step)
