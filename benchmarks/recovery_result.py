"""The result of one run of recovery.py, read from its run directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery_cases import FAULT_STEP, Case

from supervise.store import RunDir, read_audit, read_rows

OF_MACHINE = ("hardware.host_memory", "checkpoint.disk_low", "checkpoint.disk_full")


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        code: exit code; None: it had to be killed after LIMIT_S.
        loss: validation loss, None where the run did not come to its end.
        made: optimizer steps in all, those included that were thrown away. skipped: of these.
        thrown: of these, those that no weights hold any more, the skipped ones included.
        told: steps from the fault to the first word of any severity; acted: to the first action or
            reflex. None: never.
        actions: verbs that touched the job. destructive: how many of them.
        recovered: an incident was closed as recovered. held: one waits for a person.
        evidence: files in the bundles of its incidents.
    """

    code: int | None
    loss: float | None
    made: int
    thrown: int
    skipped: int
    told: int | None
    acted: int | None
    actions: tuple[str, ...]
    destructive: int
    recovered: bool
    held: bool
    evidence: int


def read(case: Case, code: int | None, path: Path) -> Result:
    """Read the run directory."""
    found = RunDir.open(path / "run")
    records = list(read_audit(found.audit_path))
    frames = [(row.step, row.values) for row in read_rows(found) if row.rank == 0]
    losses = re.findall(r"^val_loss ([\d.]+)$", (path / "out.txt").read_text(), re.MULTILINE)
    intents = [r["data"]["action"] for r in records if r["kind"] == "intent"]
    touching = [action for action in intents if action["touches_job"]]
    since = records[_fault(records) :]
    said = _first(r for r in since if _is_word(r) and not _of_else(r, case))
    acted = _first(r for r in since if _is_action(r))
    incidents = [r for r in records if r["kind"] == "incident"]
    return Result(
        code=code,
        loss=float(losses[-1]) if losses else None,
        made=len(frames),
        thrown=max(0, len(frames) - int(frames[-1][1].get("steps_seen") or 0)) if frames else 0,
        skipped=sum(bool(values.get("update_skipped")) for _, values in frames),
        told=said,
        acted=acted,
        actions=tuple(action["verb"] for action in touching),
        destructive=sum(bool(action["destructive"]) for action in touching),
        recovered=any("recovered: no relapse" in r["reason"] for r in incidents),
        held=any(r["data"].get("what") == "held" for r in incidents),
        evidence=sum(1 for file in found.incidents_path.rglob("*") if file.is_file()),
    )


def _is_word(record: Mapping[str, Any]) -> bool:
    what = (record.get("data") or {}).get("what")
    return (record["kind"], what) in (("rule", "fired"), ("incident", "opened"), ("gap", None))


def _of_else(record: Mapping[str, Any], case: Case) -> bool:
    rule = record.get("rule") or ""
    if case.by:
        return rule != case.by
    return rule in OF_MACHINE or (rule.startswith("throughput.") and not case.slows)


def _is_action(record: Mapping[str, Any]) -> bool:
    data = record.get("data") or {}
    reflex = record["kind"] == "note" and data.get("what") == "safeguard"
    return reflex or (record["kind"] == "intent" and data["action"]["touches_job"])


def _first(records: Iterable[Mapping[str, Any]]) -> int | None:
    """Steps from the fault to the first of these records; 0 for the step of the fault."""
    return next((max(0, record["step"] - FAULT_STEP) for record in records), None)


def _fault(records: Sequence[Mapping[str, Any]]) -> int:
    """Index of the last drill's record, or of the record after the last step before the fault."""
    told = [i for i, r in enumerate(records) if (r.get("data") or {}).get("what") == "drill"]
    late = (i for i, r in enumerate(records) if r["step"] >= FAULT_STEP - 1)
    return told[-1] if told else next(late, len(records))
