"""A recorded run of a drill suite: its series, its alarms, and what was done to the job."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import understood
from ..fault_suite.fault_arm import Act, Alarm, FaultArm
from ..report.records import is_of
from ..store import audit, history
from ..store.run_directory import RunDir
from .recorded_arm import HINT, read_arm


def read_fault(run: RunDir, metrics: Sequence[str], name: str) -> FaultArm:
    """Read a run.

    Raises:
        StoreError: a record is missing, or cannot be understood; TamperError: it was changed.
    """
    arm = read_arm(run, metrics, name)
    made = sum(1 for row in history.rows(run) if row.rank == 0)
    injected: int | None = None
    refused = ""
    alarms: list[Alarm] = []
    acts: dict[str, Act] = {}
    with understood(f"the records in {run.audit_path}", HINT):
        for r in audit.read(run.audit_path):
            kind, data, step = r["kind"], r.get("data") or {}, int(r["step"])
            if is_of(r, "note", "drill"):
                about = data.get("details") or {}
                if "refused" in about:
                    refused = str(about["refused"])
                elif "fault" in about and injected is None:
                    injected = step if data.get("at_step") is None else int(data["at_step"])
            elif is_of(r, "rule", "fired"):
                alarms.append(Alarm(str(r["rule"]), str(r["severity"]), step))
            elif kind == "intent" and data["action"]["touches_job"]:
                action = data["action"]
                acts[action["id"]] = Act(str(action["verb"]), step, done=False)
            elif kind == "commit" and data.get("action", {}).get("id") in acts:
                started = acts[data["action"]["id"]]
                acts[data["action"]["id"]] = Act(started.verb, started.step, done=True)
    return FaultArm(
        arm,
        made=made,
        injected=injected,
        refused=refused,  # it may find out after it has started
        alarms=tuple(alarms),
        acts=tuple(acts.values()),
    )
