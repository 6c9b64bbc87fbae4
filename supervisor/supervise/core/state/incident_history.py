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
        session_start: frame count at which the newest training session started.
        last_level: (level, frame count) of the last incident that acted; the next one starts no
            lower.
        cooldown: rule id -> (frame count, level) of its last runbook.
        tried: runbook -> whether it was verified, or nothing asks for that, the last time it ran.
    """

    opened: int = 0
    session_start: int = 0
    last_level: tuple[int, int] | None = None
    cooldown: dict[str, tuple[int, int]] = field(default_factory=dict)
    tried: dict[str, bool] = field(default_factory=dict)

    def copy(self) -> IncidentHistory:
        """Return an independent copy."""
        return IncidentHistory(
            self.opened, self.session_start, self.last_level, dict(self.cooldown), dict(self.tried)
        )

    def start_session(self, frame_count: int) -> None:
        """Forget what was tried in the training before; incidents are counted on."""
        self.session_start, self.last_level = frame_count, None
        self.cooldown.clear()
        self.tried.clear()

    def renumber(self, level: Callable[[int], int]) -> None:
        """Give every level that is remembered the number that `level` returns for it."""
        self.cooldown = {
            name: (frame_count, level(at)) for name, (frame_count, at) in self.cooldown.items()
        }
        if self.last_level is not None:
            self.last_level = (level(self.last_level[0]), self.last_level[1])
