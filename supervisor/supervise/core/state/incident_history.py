"""What the incidents of a training left behind: what was tried, and how far up the ladder.

Kept by `runbooks` and `handlers/rule_fired`; `handlers/session_change` lets it begin anew, and
`handlers/policy_reload` finds the same runbooks on another ladder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class IncidentHistory:
    """How many incidents there were, and what was tried about them.

    Attributes:
        opened: incidents of the run so far, the open one included.
        began: the pace at which the newest training began.
        floor: (rung, pace) of the last incident that acted; the next one enters no lower.
        cooldown: rule id -> (pace, rung) of its last runbook.
        tried: runbook -> whether it was verified, or nothing asks for that, the last time it ran.
    """

    opened: int = 0
    began: int = 0
    floor: tuple[int, int] | None = None
    cooldown: dict[str, tuple[int, int]] = field(default_factory=dict)
    tried: dict[str, bool] = field(default_factory=dict)

    def copy(self) -> IncidentHistory:
        """Return an independent copy."""
        return IncidentHistory(
            self.opened, self.began, self.floor, dict(self.cooldown), dict(self.tried)
        )

    def begin_training(self, pace: int) -> None:
        """Forget what was tried in the training before; incidents are counted on."""
        self.began, self.floor = pace, None
        self.cooldown.clear()
        self.tried.clear()

    def renumber(self, rung: Callable[[int], int]) -> None:
        """Give every rung that is remembered the number that `rung` returns for it."""
        self.cooldown = {name: (pace, rung(at)) for name, (pace, at) in self.cooldown.items()}
        if self.floor is not None:
            self.floor = (rung(self.floor[0]), self.floor[1])
