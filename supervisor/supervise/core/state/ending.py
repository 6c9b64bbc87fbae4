"""What decides when an incident that needs nothing more is over; read by the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ending:
    """How long an incident has been quiet, and must be.

    Attributes:
        probation_until: pace at which its probation has passed.
        quiet_since: pace since which no rule has fired, None while one does.
        rebaselined: a detector behind it took the new level for its baseline.
    """

    probation_until: int = 0
    quiet_since: int | None = None
    rebaselined: bool = False
