"""What the person at the terminal reads before and after a run: a few lines, no more.

Reads the run directory, never the live program, so that it can be printed again at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.model.policy import Policy
from ..store import audit
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from . import action_counts
from .action_counts import DONE, DOUBT, FAILED

MOST_PAGES = 8  # named one by one


def opening(run: RunDir, policy: Policy, tier: str, reason: str | None) -> str:
    """Return the line at the start."""
    probe = "" if tier == "T1" else f", no probe ({reason})"
    return f"supervise: policy {policy.name} ({policy.mode}){probe}, run {shown(run)}"


def closing(run: RunDir) -> list[str]:
    """Return the lines at the end. Raises StoreError."""
    records = list(audit.read(run.audit_path))
    done = outcome(records)
    if done["exit_code"] is None:
        return [f"supervise: the audit log of {shown(run)} ends before the run did"]
    where = f"at step {done['step']}" if done["step"] >= 0 else "before a first step was seen"
    acted = action_counts.told(action_counts.count(records))
    lines = [
        f"supervise: exit code {done['exit_code']} {where}; "
        f"{counted(done['incidents'], 'incident')}, {acted}"
    ]
    lines += _undelivered(done["spooled"])
    if lacking := incomplete(records):
        lines.append(f"  {lacking['reason']}")
    lines += [f"  {one['incident']} {one['severity']}: {one['reason']}" for one in done["closed"]]
    verify = audit.verify(run.audit_path)
    lines.append(f"  audit log: {verify.message}; supervise audit show {shown(run)}")
    return lines


def outcome(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count what the audit log of a run holds: incidents, actions on the job, how it ended.

    `actions` were done; `failed` ones, and those `in_doubt`, are counted apart.
    """
    records = list(records)
    made = action_counts.count(records)
    found: dict[str, Any] = {
        "incidents": 0,
        "actions": made[DONE],
        "failed": made[FAILED],
        "in_doubt": made[DOUBT],
        "closed": [],
        "exit_code": None,
        "step": -1,
        "spooled": [],
    }
    for one in records:
        data = one.get("data") or {}
        if one["kind"] == "incident" and data.get("what") == "opened":
            found["incidents"] += 1
        elif one["kind"] == "incident" and data.get("what") == "closed":
            found["closed"].append(one)
        elif one["kind"] == "run_end":
            found["exit_code"], found["step"] = data["exit_code"], one["step"]
            found["spooled"] = data.get("spooled", [])
    return found


def _undelivered(pages: Sequence[Mapping[str, Any]]) -> list[str]:
    if not pages:
        return []
    lines = [
        f"  not delivered to {page['channel']}: {page['severity']} {page['title']}"
        for page in pages[:MOST_PAGES]
    ]
    if len(pages) > MOST_PAGES:
        lines.append(f"  not delivered: {len(pages) - MOST_PAGES} more")
    return [*lines, "  your next run sends what was not delivered; at once: supervise outbox flush"]


def counted(number: int, noun: str) -> str:
    """Return "no incident", "1 incident", "2 incidents"."""
    return f"{number or 'no'} {noun}{'s' if number > 1 else ''}"


def shown(run: RunDir) -> str:
    """Return the run's path as a person would type it."""
    relative = os.path.relpath(run.path)
    return str(run.path) if relative.startswith("..") else relative
