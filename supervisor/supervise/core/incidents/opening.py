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
    turn: StepContext,
    bank: RankMonitor | None,
    severity: str,
    text: str,
    *,
    breach: int,
    rule: str | None = None,
    see: str = "",
) -> Incident:
    """Open an incident, and say so.

    Args:
        bank: whose frames are asked about it; None: nothing was ever seen of the job.
        text: what it is about, one line. breach: the first step that may be part of it.
        see: the runbook that people read.
    """
    state = turn.state
    state.history.opened += 1
    incident = state.incident = Incident(
        f"inc-{state.history.opened}",
        state.step,
        breach,
        severity,
        [rule] if rule else [],
        headline=text,
    )
    case(turn.policy, state, bank, incident)
    band = incident.case.band
    title = f"{severity} {rule}: {text}" if rule else f"{severity} {text}"
    turn.record(
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


def crash(turn: StepContext, incident: Incident, text: str) -> None:
    """A crash joins an advisory incident that says nothing against the weights.

    It began when the process ended, however long the host has been slow: what was saved until then
    is as good as before.
    """
    incident.severity, incident.headline = "SEV1", text
    incident.breach_step = incident.recovery.crashed = turn.state.step + 1
    bank = turn.state.banks.get(incident.case.rank)
    case(turn.policy, turn.state, bank, incident)
    turn.record(
        "incident",
        f"raised to SEV1 by a crash: {text}",
        severity="SEV1",
        what="raised",
        runbook="",
        breach_step=incident.breach_step,
    )


def case(policy: Policy, state: State, bank: RankMonitor | None, incident: Incident) -> None:
    """Take down what was before it; what was saved since its first breach is not to be trusted."""
    if bank is not None:
        diagnosis.open_case(policy, state, bank, _rank_of(state.banks, bank), incident)
    mark_suspect(state, incident)


def mark_suspect(state: State, incident: Incident) -> None:
    """Suspect checkpoints saved at or after the first breach, for good. Not for advisory rules:

    one signal alone is unusual often enough to leave no checkpoint of a long run in good repute.
    """
    if incident.severity != "SEV2":
        _taint(state.checkpoints, incident, state.attempt, incident.breach_step)


def invalidate_attempt(state: State, incident: Incident) -> None:
    """What was tried did not help: of an attempt that began since the trouble, nothing is good."""
    attempt = max(state.attempt, state.job.launched)
    tainted = incident.recovery.tainted
    if tainted and attempt > min(tainted):
        _taint(state.checkpoints, incident, attempt, 0)


def _taint(checkpoints: Checkpoints, incident: Incident, attempt: int, step: int) -> None:
    tainted = incident.recovery.tainted
    first = tainted[attempt] = min(step, tainted.get(attempt, step))
    checkpoints.mark_suspect(attempt, first, _since(incident))


def _since(incident: Incident) -> str:
    return f"saved after {incident.id} began"


def checkpoint(state: State, data: Mapping[str, Any]) -> None:
    """Take the guard's notice of a checkpoint: suspect, on trial, or neither."""
    incident, saved, step = state.incident, int(data.get("attempt", 0)), int(data["step"])
    suspect = trial = ""
    tainted = {} if incident is None else incident.recovery.tainted
    if incident is not None and saved in tainted:
        suspect = "" if 0 <= step < tainted[saved] else _since(incident)
    elif incident is not None and tainted and saved > min(tainted):
        trial = incident.id
    state.checkpoints.notice(data, suspect, trial)


def _rank_of(banks: Mapping[int, RankMonitor], bank: RankMonitor) -> int:
    return next(rank for rank, one in banks.items() if one is bank)
