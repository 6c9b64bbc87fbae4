"""The outcome of one policy on one recorded run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Alarm:
    """An incident: `what` is opened, raised, or joined (by a further rule)."""

    step: int
    severity: str
    rule: str
    incident: str
    what: str
    reason: str
    row: int  # frames of the run processed so far


@dataclass(slots=True)
class Act:
    """A runbook that the policy would have run."""

    step: int
    severity: str
    rule: str
    incident: str
    runbook: str
    touches_job: bool
    destructive: bool
    stops: bool  # it ends the run
    row: int


@dataclass(slots=True)
class Outcome:
    """The outcome of one policy on one run.

    Attributes:
        rows: frames processed. spacing: the usual number of steps between two of them.
        budgets: class -> [most used at once, allowed, intents refused].
        inactive: rules whose metrics the run never had. no_heartbeat: rules on the clock, in a
            recording without heartbeats.
        pieces: first and last step, and number of frames, of each piece.
        fired: rule -> how often it fired.
    """

    run: str
    policy: str
    rows: int = 0
    spacing: float = 1.0
    probation: int = 0
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    actions: list[Act] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, list[int]] = field(default_factory=dict)
    inactive: list[str] = field(default_factory=list)
    no_heartbeat: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """Return the outcome as a JSON object; `incidents` holds those that rules joined, too."""
        return {
            "run": self.run,
            "policy": self.policy,
            "incidents": [asdict(alarm) for alarm in self.alarms],
            "actions": [asdict(act) for act in self.actions],
            "rows": self.rows,
            "steps": [[first, last] for first, last, _ in self.pieces],
            "fired": self.fired,
            "budgets": self.budgets,
            "inactive": self.inactive,
            "no_heartbeat": self.no_heartbeat,
            "notes": self.notes,
        }
