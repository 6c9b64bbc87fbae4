"""When a trouble begins: which data came with it, and whether a shard is suspect by now."""

from __future__ import annotations

from .bank import Bank
from .blame import BEFORE
from .incident import Incident
from .state import Turn

FINGERPRINT = "batch_fingerprint"


def began(turn: Turn, bank: Bank, incident: Incident) -> None:
    """The trouble of an incident began at its `breach_step`, for the first time or again.

    Args:
        bank: of the rank that it was seen on.
    """
    onset, blame = incident.breach_step, turn.state.blame
    incident.batches = tuple(
        int(value)
        for step, value in bank.history.series(FINGERPRINT)
        if onset - BEFORE <= step <= onset
    )
    blame.incident(incident.id, onset, bank.attempt)
    suspects = blame.suspects()
    if suspects:
        told = {name: blame.account(name) for name in suspects}
        texts = [f"{name} ({it['blamed']} of {it['troubles']}, p {it['p']:.2g})"
                 for name, it in told.items()]  # fmt: skip
        turn.say("note", f"troubles keep beginning in {', '.join(texts)}"[:400],
                 what="blame", suspects=told)  # fmt: skip
