"""A recorded run as an arm of a comparison, and what names it in a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import understood
from ..report.records import is_of
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
    with understood(f"the records in {run.audit_path}", HINT):
        for record in audit.read(run.audit_path):
            records.take(record)
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

    def take(self, r: dict[str, Any]) -> None:
        kind, data, step = r["kind"], r.get("data") or {}, int(r["step"])
        if is_of(r, "note", "drill"):
            self._drill(data, step)
        elif is_of(r, "rule", "fired"):
            key = str(r["rule"]), step
            alarm = Alarm(key[0], str(r["severity"]), step)
            if key not in self.alarms or alarm.severity < self.alarms[key].severity:
                self.alarms[key] = alarm  # each rank has a record of its own
        elif kind == "suppressed" and str(data.get("suppressed_by")).partition(":")[0] in MUTED:
            self.alarms.pop((str(r["rule"]), step), None)
        elif kind == "intent" and data["action"]["touches_job"]:
            action = data["action"]
            self.acts[action["id"]] = Act(str(action["verb"]), step, is_done=False)
        elif kind == "commit" and (begin := self.acts.get(data.get("action", {}).get("id"))):
            self.acts[data["action"]["id"]] = Act(begin.verb, begin.step, is_done=True)

    def _drill(self, data: dict[str, Any], step: int) -> None:
        about, rank = data.get("details") or {}, int(data.get("rank") or 0)
        if "refused" in about:
            self.refused[rank] = str(about["refused"])
        elif "fault" in about:
            self.struck.add(rank)
            fault_step = step if data.get("at_step") is None else int(data["at_step"])
            self.injected = fault_step if self.injected is None else min(self.injected, fault_step)
