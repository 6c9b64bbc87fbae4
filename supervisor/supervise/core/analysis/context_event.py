"""Question 4 about a trouble: what is known to have happened just then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEDULE = "schedule"  # the kind of a jump of the learning rate that the job itself asked for


@dataclass(frozen=True, slots=True)
class ContextEvent:
    """Something that happened near an onset. `kind`: data, logging, planned, rate, action, ..."""

    step: int
    kind: str
    text: str


def answered(happened: Sequence[ContextEvent]) -> dict[str, Any]:
    """Return `{"answer": yes|no, "text", "events"}`; the text names the first three."""
    events = [{"step": h.step, "kind": h.kind, "text": h.text} for h in happened]
    if not events:
        return {"answer": "no", "text": "no other event is known", "events": events}
    # What the job did to itself comes first: it explains all the rest.
    first = sorted(happened, key=lambda h: h.kind != SCHEDULE)[:3]
    named = [f"{h.text} (step {h.step})" for h in first]
    more = f" and {len(events) - 3} more" if len(events) > 3 else ""
    return {"answer": "yes", "text": "also: " + ", ".join(named) + more, "events": events}
