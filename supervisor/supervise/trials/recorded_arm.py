"""A recorded run as an arm of a comparison, and what names it in a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.model.decisions import (
    ActionFinished,
    ActionPlanned,
    Decision,
    NoticeTaken,
    RuleFired,
    Suppressed,
)
from ..errors import understood
from ..report.records import read_records
from ..store import audit, files, run_records
from ..store.run_directory import RunDir
from .arms import Act, Alarm, Arm, ArmBuilder, FaultArm

HINT = "supervise audit show RUN prints them"


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
    for row in run_records.rows(run):
        builder.take(row.step, row.rank, row.attempt, row.values)
    exit_code: int | None = None
    inputs: Mapping[str, str] | None = None
    stopped = False
    with understood(f"the records in {run.audit_path}", HINT):
        for record in audit.read(run.audit_path):
            kind, data = record["kind"], record.get("data") or {}
            exit_code = int(data["exit_code"]) if kind == "run_end" else None
            if kind == "identity" and inputs is None:
                inputs = {str(k): str(v) for k, v in data["identity"].get("inputs", {}).items()}
            if kind == "note" and data.get("what") == "signal":
                stopped = stopped or bool((data.get("details") or {}).get("final"))
    return builder.arm(
        name or str(run.path),
        exit_code=exit_code,
        stopped=stopped,
        live=files.locked(run.audit_path),
        inputs=inputs,
        cpu_s=cpu_s,
    )


def cite(run: RunDir) -> dict[str, Any]:
    """Return what names a run in a verdict: its id, and the head of its audit log."""
    report = audit.verify(run.audit_path, run.id)
    return {"run": run.id, "records": report.records, "head": report.head}


# What mutes a rule altogether, before the colon of `suppressed_by`; the rest only delays an action.
MUTED = ("phase", "silence", "session_end", "inhibit", "planned")


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
    for row in run_records.rows(run):
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
