"""How far up the ladder of runbooks an incident has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Escalation:
    """What was tried about an incident; kept by `runbooks/runner`.

    Attributes:
        rung: of the ladder, -1 before any. runs: how many runbooks were started.
        shadowed: runbooks that shadow mode only wrote down.
    """

    rung: int = -1
    runs: int = 0
    shadowed: list[str] = field(default_factory=list)
