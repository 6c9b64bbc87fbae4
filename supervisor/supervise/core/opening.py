"""The beginning of an incident, whoever it begins with: a rule, a crash, or a word."""

from __future__ import annotations

from . import questions
from .bank import Bank
from .incident import Incident
from .state import Turn


def open_incident(
    turn: Turn, bank: Bank | None, severity: str, text: str, *,
    breach: int, rule: str | None = None, see: str = "",
) -> Incident:  # fmt: skip
    """Open an incident, and say so.

    Args:
        bank: whose frames are asked about it; None: nothing was ever seen of the job.
        text: what it is about, one line. breach: the first step that may be part of it.
        see: the runbook that people read.
    """
    state = turn.state
    state.incidents += 1
    incident = state.incident = Incident(
        f"inc-{state.incidents}", state.step, breach, severity, [rule] if rule else [],
        headline=text,
    )  # fmt: skip
    case(turn, bank, incident)
    band = incident.band
    title = f"{severity} {rule}: {text}" if rule else f"{severity} {text}"
    turn.say(
        "incident", title, rule=rule, severity=severity, what="opened", runbook=see,
        breach_step=breach, band=None if band is None else {"level": band.level,
                                                            "limit": band.limit},
    )  # fmt: skip
    return incident


def case(turn: Turn, bank: Bank | None, incident: Incident) -> None:
    """Take down what was before it; what was saved since its first breach is not to be trusted."""
    if bank is not None:
        questions.open_case(turn, bank, rank_of(turn, bank), incident)
    taint(turn, incident)


def taint(turn: Turn, incident: Incident) -> None:
    """Suspect checkpoints saved at or after the first breach, for good. Not for advisory rules:

    one signal alone is unusual often enough to leave no checkpoint of a long run in good repute.
    """
    if incident.severity != "SEV2":
        incident.tainted = (turn.state.attempt, incident.breach_step)
        turn.state.checkpoints.taint(*incident.tainted, f"saved after {incident.id} began")


def rank_of(turn: Turn, bank: Bank) -> int:
    """Return the rank whose bank that is."""
    return next(rank for rank, one in turn.state.banks.items() if one is bank)
