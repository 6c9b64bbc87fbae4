"""What one policy made of one recorded run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Alarm:
    """An incident that was opened or raised (`what`), or that a rule joined."""

    step: int
    severity: str
    rule: str
    incident: str
    what: str
    reason: str
    row: int  # how many frames of the run had been judged


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
    stops: bool  # after it there is no run any more
    row: int


@dataclass(slots=True)
class Outcome:
    """What one policy made of one run.

    Attributes:
        rows: frames judged. spacing: the usual number of steps between two of them.
        budgets: class -> [most that was used at once, what the policy allows, intents refused].
        inactive: rules whose metrics the run never had. unheard: rules that listen for silence,
            in a recording without beats.
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
    unheard: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """Return the outcome as one JSON line holds it.

        Alarms that joined are in it: an incident may stay open over the next trouble.
        """
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
            "unheard": self.unheard,
            "notes": self.notes,
        }
