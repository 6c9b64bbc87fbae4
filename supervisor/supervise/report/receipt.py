"""The lines at the terminal before and after a run, from the run directory alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.model.policy import Policy
from ..store import audit
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from .records import DONE, DOUBT, FAILED, count_outcomes, describe_counts, troubles

MAX_LISTED = 8  # undelivered messages
DEAR = 0.05  # of a step's time, what the probe takes is worth a line; short steps come to it


def opening(run: RunDir, policy: Policy, tier: str, reason: str | None) -> str:
    """Return the line at the start."""
    probe = "" if tier == "T1" else f", no probe ({reason})"
    return f"supervise: policy {policy.name} ({policy.mode}){probe}, run {shown(run)}"


def closing(run: RunDir) -> list[str]:
    """Return the lines at the end. Raises StoreError."""
    records = list(audit.read(run.audit_path))
    done = outcome(records)
    if done["exit_code"] is None:
        return [f"supervise: the audit log of {shown(run)} is incomplete: no record of the end"]
    where = f"at step {done['step']}" if done["step"] >= 0 else "before the first step"
    acted = describe_counts(count_outcomes(records))
    lines = [
        f"supervise: exit code {done['exit_code']} {where}; "
        f"{counted(done['incidents'], 'incident')}, {acted}"
    ]
    lines += [f"  {text}" for text in done["identity"]]
    lines += dear(done["probe_share"], shown(run))
    lines += _undelivered(done["spooled"])
    if gap := incomplete(records):
        lines.append(f"  {gap['reason']}")
    lines += [f"  {one['incident']} {one['severity']}: {one['reason']}" for one in done["closed"]]
    verify = audit.verify(run.audit_path)
    lines.append(f"  audit log: {verify.message}; supervise audit show {shown(run)}")
    lines.append(f"  stability record: supervise record {shown(run)}")
    return lines


def outcome(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the incidents and the actions on the job in an audit log, and return its end.

    An order of an operator is no incident. `actions` counts those that were done; `failed` and
    `in_doubt` are counted apart. `identity` has what differs between its launches.
    """
    records = list(records)
    made = count_outcomes(records)
    found: dict[str, Any] = {
        "incidents": len(troubles(records)),
        "actions": made[DONE],
        "failed": made[FAILED],
        "in_doubt": made[DOUBT],
        "identity": [],
        "closed": [],
        "exit_code": None,
        "step": -1,
        "probe_share": None,
        "spooled": [],
    }
    for one in records:
        data = one.get("data") or {}
        if one["kind"] == "incident" and data.get("what") == "closed":
            found["closed"].append(one)
        elif one["kind"] == "identity" and data.get("differs"):
            found["identity"].append(one["reason"])
        elif one["kind"] == "run_end":
            found["exit_code"], found["step"] = data["exit_code"], one["step"]
            found["spooled"] = data.get("spooled", [])
            found["probe_share"] = data.get("probe_share")
    return found


def dear(share: float | None, run: str) -> list[str]:
    """Return a line about what the probe took of a step, where that is worth one."""
    if share is None or share <= DEAR:
        return []
    return [f"  the probe took {100 * share:.0f} % of a step; its parts: supervise status {run}"]


def _undelivered(pages: Sequence[Mapping[str, Any]]) -> list[str]:
    if not pages:
        return []
    lines = [
        f"  not delivered to {page['channel']}: {page['severity']} {page['title']}"
        for page in pages[:MAX_LISTED]
    ]
    if len(pages) > MAX_LISTED:
        lines.append(f"  not delivered: {len(pages) - MAX_LISTED} more")
    return [*lines, "  your next run sends them; to send them now: supervise outbox flush"]


def counted(number: int, noun: str) -> str:
    """Return "no incident", "1 incident", "2 incidents"."""
    return f"{number or 'no'} {noun}{'s' if number > 1 else ''}"


def shown(run: RunDir) -> str:
    """Return the run's path as typed from the working directory."""
    relative = os.path.relpath(run.path)
    return str(run.path) if relative.startswith("..") else relative
