"""The beginning of an incident, whoever it begins with: a rule, a crash, or a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detection.rank_monitor import RankMonitor
from ..model.checkpoint_registry import Checkpoints
from ..model.policy import Policy
from ..state.incident import Incident
from ..state.run_state import State, StepContext
from . import diagnosis


def open_incident(
    ctx: StepContext,
    monitor: RankMonitor | None,
    severity: str,
    text: str,
    *,
    breach: int,
    rule: str | None = None,
    see: str = "",
) -> Incident:
    """Open an incident, and say so.

    Args:
        monitor: whose frames are asked about it; None: nothing was ever seen of the job.
        text: what it is about, one line. breach: the first step that may be part of it.
        see: the runbook that people read.
    """
    state = ctx.state
    state.history.opened += 1
    incident = state.incident = Incident(
        f"inc-{state.history.opened}",
        state.step,
        breach,
        severity,
        [rule] if rule else [],
        headline=text,
    )
    record_baseline(ctx.policy, state, monitor, incident)
    band = incident.case.band
    title = f"{severity} {rule}: {text}" if rule else f"{severity} {text}"
    ctx.record(
        "incident",
        title,
        rule=rule,
        severity=severity,
        what="opened",
        runbook=see,
        breach_step=breach,
        band=None if band is None else {"level": band.level, "limit": band.limit},
    )
    return incident


def join_crash(ctx: StepContext, incident: Incident, text: str) -> None:
    """A crash joins an advisory incident that says nothing against the weights.

    It began when the process ended, however long the host has been slow: what was saved until then
    is as good as before.
    """
    incident.severity, incident.headline = "SEV1", text
    incident.breach_step = incident.recovery.crashed = ctx.state.step + 1
    monitor = ctx.state.monitors.get(incident.case.rank)
    record_baseline(ctx.policy, ctx.state, monitor, incident)
    ctx.record(
        "incident",
        f"raised to SEV1 by a crash: {text}",
        severity="SEV1",
        what="raised",
        runbook="",
        breach_step=incident.breach_step,
    )


def record_baseline(
    policy: Policy, state: State, monitor: RankMonitor | None, incident: Incident
) -> None:
    """Take down what was before it; what was saved since its first breach is not to be trusted."""
    if monitor is not None:
        diagnosis.open_case(policy, state, monitor, _rank_of(state.monitors, monitor), incident)
    mark_suspect(state, incident)


def mark_suspect(state: State, incident: Incident) -> None:
    """Suspect checkpoints saved at or after the first breach, for good. Not for advisory rules:

    one signal alone is unusual often enough to leave no checkpoint of a long run in good repute.
    """
    if incident.severity != "SEV2":
        _suspect_from(state.checkpoints, incident, state.attempt, incident.breach_step)


def invalidate_attempt(state: State, incident: Incident) -> None:
    """What was tried did not help: of an attempt that began since the trouble, nothing is good."""
    attempt = max(state.attempt, state.job.launched)
    tainted = incident.recovery.suspect_from
    if tainted and attempt > min(tainted):
        _suspect_from(state.checkpoints, incident, attempt, 0)


def _suspect_from(checkpoints: Checkpoints, incident: Incident, attempt: int, step: int) -> None:
    tainted = incident.recovery.suspect_from
    first = tainted[attempt] = min(step, tainted.get(attempt, step))
    checkpoints.mark_suspect(attempt, first, _since(incident))


def _since(incident: Incident) -> str:
    return f"saved after {incident.id} began"


def on_checkpoint(state: State, data: Mapping[str, Any]) -> None:
    """Take the guard's notice of a checkpoint: suspect, on trial, or neither."""
    incident, saved, step = state.incident, int(data.get("attempt", 0)), int(data["step"])
    suspect = trial = ""
    tainted = {} if incident is None else incident.recovery.suspect_from
    if incident is not None and saved in tainted:
        suspect = "" if 0 <= step < tainted[saved] else _since(incident)
    elif incident is not None and tainted and saved > min(tainted):
        trial = incident.id
    state.checkpoints.notice(data, suspect, trial)


def _rank_of(monitors: Mapping[int, RankMonitor], monitor: RankMonitor) -> int:
    return next(rank for rank, one in monitors.items() if one is monitor)
