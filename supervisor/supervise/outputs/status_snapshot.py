"""The current status of a run as plain data, for `state.json`.

The supervisor never reads it back: the journal is authoritative.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..core.model.decisions import CODE_NAMES, Decision
from ..core.model.policy import Policy
from ..core.runbooks import checkpoint_choice
from ..core.state.incident import Incident
from ..core.state.run_state import ApprovalRequest, State

FAILURES = 8  # shown of them


def snapshot(
    policy: Policy,
    state: State,
    ranks: Mapping[int, Mapping[str, Any]],
    *,
    wall: str,
    now_ns: int,
    tier: str,
    last: Decision | None,
    trouble: str | None,
) -> dict[str, Any]:
    """Return the content of `supervise status`.

    Args:
        ranks: per rank `pid`, `phase`, `seen_ns` and the probe's `status`.
        trouble: why decisions cannot be recorded, None if they can.
    """
    pending = state.approvals.pending
    found: dict[str, Any] = {
        "state": state.machine,
        "mode": policy.mode,
        "policy": policy.name,
        "tier": tier,
        "step": state.step,
        "attempt": state.attempt,
        "world_size": state.job.world_size,
        "incidents": {"opened": state.history.opened, "open": _open(state.incident)},
        "approvals": [] if pending is None else [_request(pending, now_ns)],
        "silenced": {rule: text for rule in state.rules.silenced if (text := state.silence(rule))},
        "checkpoints_good": [found.id for found in state.checkpoints.good()][-3:],
        "budgets": state.ledger.usage(policy.budgets, state.frame_count, state.at_ns),
        "rules": rules(policy, state),
        "ranks": {
            str(rank): {
                "pid": view["pid"],
                "phase": view["phase"],
                "silent_s": round((now_ns - view["seen_ns"]) / 1e9, 1),
                "overhead": overhead(state, rank),
                **view["status"],
            }
            for rank, view in sorted(ranks.items())
        },
        "last_decision": None if last is None else {"kind": last.kind, "reason": last.reason},
        "updated_wall": wall,
    }
    if state.job.failures:
        found["failures"] = [failure.text for failure in state.job.failures_by_cause[:FAILURES]]
    if cause := state.job.cause:
        found["ended_by"] = {"text": cause.text, "class": cause.cls, "means": cause.title}
    if awaited := _awaited(policy, state):
        found["waits_for"] = awaited
    if trouble is not None:
        found["trouble"] = trouble
    return found


def overhead(state: State, rank: int | None = None) -> float | None:
    """Return the share of a step that the probe of a rank, else the leading one, took lately."""
    leader = state.leader() if rank is None else rank
    monitor = None if leader is None else state.monitors.get(leader)
    return None if monitor is None else monitor.value("probe_overhead_frac")


def _open(incident: Incident | None) -> dict[str, Any] | None:
    """Return the summary of the open incident."""
    if incident is None:
        return None
    return {
        "id": incident.id,
        "severity": incident.severity,
        "phase": incident.phase,
        "rules": list(incident.rules),
        "headline": incident.headline,
        "runbook": incident.run.runbook.name if incident.run is not None else None,
        "acked": incident.acknowledged_by,
    }


def _awaited(policy: Policy, state: State) -> str:
    before = checkpoint_choice.needed_before(policy, state)
    awaited = checkpoint_choice.awaited(policy, state)
    if before is None or awaited is None:
        return ""
    for_s = (state.at_ns - awaited.since_ns) / 1e9
    left = "" if awaited.candidates is None else f", {awaited.candidates} to verify"
    return f"a verified checkpoint from before step {before} (for {for_s:.0f} s{left})"


def _request(pending: ApprovalRequest, now_ns: int) -> dict[str, Any]:
    """Return an approval request and its remaining time in seconds."""
    return {
        "id": pending.id,
        "incident": pending.incident,
        "runbook": pending.runbook,
        "steps": pending.plan,
        "args_sha256": pending.sha,
        "left_s": round(max(0.0, (pending.deadline_ns - now_ns) / 1e9)),
        "on_timeout": pending.on_timeout,
    }


def no_probe(marks: Collection[str], reason: str | None) -> str | None:
    """Return why no step was seen, from the probe's marks; None: the probe has reported it.

    Args:
        marks: names of the probe's marks (`boot`, `armed`, `off`).
        reason: why no step was expected, None if one was.
    """
    if "off" in marks:
        return None
    if reason is not None:
        why = reason
    elif "armed" in marks:
        why = "the job imported torch, but made no optimizer step"
    elif "boot" in marks:
        why = "the job runs Python, but has not imported torch"
    else:
        why = "the probe was not loaded: no Python with our PYTHONPATH was started"
    return f"no step was seen: {why}; only exit and signals are watched"


def rules(policy: Policy, state: State) -> dict[str, str]:
    """Return each rule's state: `firing`, `flapping`, `inactive`, `blind`, else its worst code.

    `inactive`: a required metric does not exist in this job.
    """
    found: dict[str, str] = {}
    for r, rule in enumerate(policy.rules):
        watches = [monitor.rules[r] for monitor in state.monitors.values()]
        if any(watch.firing for watch in watches):
            found[rule.id] = "flapping" if rule.id in state.rules.flapping else "firing"
        elif any(watch.blind for watch in watches):
            found[rule.id] = "blind"
        elif not any(monitor.active(r) for monitor in state.monitors.values()):
            found[rule.id] = "inactive"
        else:
            found[rule.id] = CODE_NAMES[max((watch.code for watch in watches), default=1)]
    return found
