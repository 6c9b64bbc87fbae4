"""The lines at the terminal before and after a run, from the run directory alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    if done["contended"]:
        lines.append(
            f"  {counted(done['contended'], 'time')} steps were slow as others had the CPUs"
        )
    lines += _undelivered(done["undelivered"], shown(run))
    if gap := incomplete(records):
        lines.append(f"  {gap['reason']}")
    lines += [f"  {one['incident']} {one['severity']}: {one['reason']}" for one in done["closed"]]
    verify = audit.verify(run.audit_path)
    lines.append(f"  audit log: {verify.message}; supervise audit show {shown(run)}")
    lines.append(f"  stability record: supervise record {shown(run)}")
    return lines


def next_command(run: RunDir, *, saved: bool, resumes: bool) -> list[str]:
    """Return the line with the command that goes on after a signal ended the job, else [].

    Args:
        saved: there is a checkpoint. resumes: the policy says how the job goes on from one.

    Raises StoreError.
    """
    notes = (one["data"] for one in audit.read(run.audit_path) if one["kind"] == "note")
    signals = [data["details"] for data in notes if data.get("what") == "signal"]
    if not any(details.get("final") for details in signals):
        return []
    described = run.read_json("run.json")
    if saved and not resumes:
        init = shlex.join(["supervise", "init", "--", *described["argv"]])
        return [f"  how it goes on from a checkpoint is not in the policy; {init}"]
    policy, mode = described["reload"]
    command = ["supervise", "run", "--policy", _typed(policy)]
    command += ["--mode", mode] if mode else []
    for kind, settings in described["notify"].items():
        command += ["--notify", f"{kind}:{settings['url_env']}"]
    command += ["--run-dir", _typed(_first_directory(run.path)), "--resume-run", "--"]
    purpose = "to go on" if saved else "no checkpoint was saved; to start again"
    return [f"  {purpose}: {shlex.join([*command, *described['argv']])}"]


def _first_directory(path: Path) -> Path:
    """Return the directory that was given for the first of the runs that follow each other."""
    stem, _, number = path.name.rpartition(".")
    if not stem or not number.isdigit():
        return path
    first = path.with_name(stem)
    return first if (first / "run.json").is_file() else path


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
        "contended": 0,
        "undelivered": [],
    }
    for one in records:
        data = one.get("data") or {}
        if one["kind"] == "incident" and data.get("what") == "closed":
            found["closed"].append(one)
        elif one["kind"] == "suppressed":
            found["contended"] += str(data.get("suppressed_by")).startswith("host:")
        elif one["kind"] == "identity" and data.get("differs"):
            found["identity"].append(one["reason"])
        elif one["kind"] == "run_end":
            found["exit_code"], found["step"] = data["exit_code"], one["step"]
            found["undelivered"] = data.get("undelivered", [])
            found["probe_share"] = data.get("probe_share")
    return found


def dear(share: float | None, run: str) -> list[str]:
    """Return a line about what the probe took of a step, where that is worth one."""
    if share is None or share <= DEAR:
        return []
    return [f"  the probe took {100 * share:.0f} % of a step; its parts: supervise status {run}"]


def _undelivered(messages: Sequence[Mapping[str, Any]], run: str) -> list[str]:
    if not messages:
        return []
    lines = [
        f"  not delivered to {message['channel']}: {message['severity']} {message['title']}"
        for message in messages[:MAX_LISTED]
    ]
    if len(messages) > MAX_LISTED:
        lines.append(f"  not delivered: {len(messages) - MAX_LISTED} more")
    hint = "your next run sends SEV0 and SEV1; to send all now"
    return [*lines, f"  {hint}: supervise outbox flush {run}"]


def counted(number: int, noun: str) -> str:
    """Return "no incident", "1 incident", "2 incidents"."""
    return f"{number or 'no'} {noun}{'s' if number > 1 else ''}"


def shown(run: RunDir) -> str:
    """Return the run's path as typed from the working directory."""
    return _typed(run.path)


def _typed(path: str | Path) -> str:
    """Return a path as typed from the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
