"""The lines at the terminal before and after a run, from the run directory alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.model.decisions import Notified, Suppressed
from ..core.model.policy import Policy
from ..core.rule_scope import WIRING
from ..store import audit
from ..store.recorder import incomplete_record
from ..store.run_directory import RunDir
from .incident_builder import summarize_incident
from .records import (
    IncidentIndex,
    RunEnd,
    Undelivered,
    count_outcomes,
    decode_log,
    describe_counts,
    list_troubles,
)

MAX_LISTED = 8  # undelivered messages
DEAR = 0.05  # of a step's time, what the probe takes is worth a line; short steps come to it


def opening_line(run: RunDir, policy: Policy, tier: str, reason: str | None) -> str:
    """Return the line at the start."""
    probe = "" if tier == "T1" else f", no probe ({reason})"
    return f"supervise: policy {policy.name} ({policy.mode}){probe}, run {run_path(run)}"


def closing_receipt(run: RunDir, policies: Mapping[str, Policy] | None = None) -> list[str]:
    """Return the lines at the end. Raises StoreError.

    Args:
        policies: the run's, by digest, for the titles of rules.
    """
    log = list(audit.read_audit(run.audit_path))
    records = decode_log(run, log)
    end = next((record for record in records if record.kind == "run_end"), None)
    if end is None:
        return [f"supervise: the audit log of {run_path(run)} is incomplete: no record of the end"]
    argument = run_operand(run)
    position = f"at step {end.step}" if end.step >= 0 else "before the first step"
    ending = end.data.parse(RunEnd)
    incidents = list_troubles(records)
    lines = [
        f"supervise: exit code {ending.exit_code} {position}; "
        f"{count_noun(len(incidents), 'incident')}, "
        f"{describe_counts(count_outcomes(records))}"
    ]
    identities = [r for r in records if r.kind == "identity" and r.data.get("differs")]
    lines += [f"  {record.reason}" for record in identities]
    lines += cost_warning_lines(ending.probe_share, argument)
    suppressed = [r.decision for r in records if isinstance(r.decision, Suppressed)]
    if contended := sum(decision.cause == "host" for decision in suppressed):
        lines.append(f"  {count_noun(contended, 'time')} steps were slow as others had the CPUs")
    lines += _undelivered(ending.undelivered, argument)
    if gap := incomplete_record(log):
        lines.append(f"  {gap['reason']}")
    index = IncidentIndex(records)
    for row in [summarize_incident(index, name, policies or {}) for name in incidents]:
        command = f"supervise why {argument} {shlex.quote(row.id)}"
        lines.append(f"  {row.id} {row.severity} {row.status}: {row.title}; {command}")
    messages = (r.decision.message for r in records if isinstance(r.decision, Notified))
    wiring = (m for m in messages if str(m.facts.get("rule")).startswith(f"{WIRING}."))
    lines += [f"  {message.severity} {message.title}" for message in wiring]
    verify = audit.verify_audit(run.audit_path)
    lines.append(f"  audit log: {verify.message}; supervise audit show {argument}")
    lines.append(f"  stability record: supervise record {argument}")
    return lines


def next_command_lines(run: RunDir, *, has_checkpoint: bool, resumes: bool) -> list[str]:
    """Return the line with the command that goes on after a signal ended the job, else [].

    Args:
        resumes: the policy says how the job goes on from one.

    Raises StoreError.
    """
    notes = (
        record["data"] for record in audit.read_audit(run.audit_path) if record["kind"] == "note"
    )
    signals = [data["details"] for data in notes if data.get("what") == "signal"]
    if not any(details.get("final") for details in signals):
        return []
    described = run.describe()
    if has_checkpoint and not resumes:
        init = shlex.join(["supervise", "init", "--", *described.argv])
        return [f"  how it goes on from a checkpoint is not in the policy; {init}"]
    policy, mode = described.reload
    command = ["supervise", "run", "--policy", _typed(policy)]
    command += ["--mode", mode] if mode else []
    for kind, settings in described.notify.items():
        command += ["--notify", f"{kind}:{settings['url_env']}"]
    command += ["--run-dir", _typed(_first_directory(run.path)), "--resume-run", "--"]
    purpose = "to go on" if has_checkpoint else "no checkpoint was saved; to start again"
    return [f"  {purpose}: {shlex.join([*command, *described.argv])}"]


def _first_directory(path: Path) -> Path:
    """Return the directory that was given for the first of the runs that follow each other."""
    stem, _, number = path.name.rpartition(".")
    if not stem or not number.isdigit():
        return path
    first_path = path.with_name(stem)
    return first_path if (first_path / "run.json").is_file() else path


def cost_warning_lines(share: float | None, run: str) -> list[str]:
    """Return a line about what the probe took of a step, where that is worth one."""
    if share is None or share <= DEAR:
        return []
    return [f"  the probe took {100 * share:.0f} % of a step; its parts: supervise status {run}"]


def _undelivered(messages: Sequence[Undelivered], run: str) -> list[str]:
    if not messages:
        return []
    lines = [
        f"  not delivered to {message.channel}: {message.severity} {message.title}"
        for message in messages[:MAX_LISTED]
    ]
    if len(messages) > MAX_LISTED:
        lines.append(f"  not delivered: {len(messages) - MAX_LISTED} more")
    hint = "your next run sends SEV0 and SEV1; to send all now"
    return [*lines, f"  {hint}: supervise outbox flush {run}"]


def count_noun(number: int, noun: str) -> str:
    """Return "no incident", "1 incident", "2 incidents"."""
    return f"{number or 'no'} {noun}{'s' if number > 1 else ''}"


def run_path(run: RunDir) -> str:
    """Return the run's path as typed from the working directory."""
    return _typed(run.path)


def run_operand(run: RunDir) -> str:
    """Return the same as an argument of a command that is to be pasted."""
    return shlex.quote(run_path(run))


def _typed(path: str | Path) -> str:
    """Return a path as typed from the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
