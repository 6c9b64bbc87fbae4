"""A recorded run as an arm of a comparison, and what names it in a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..canary.arms import Arm, ArmBuilder
from ..errors import understood
from ..store import audit, files, run_records
from ..store.run_directory import RunDir

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
