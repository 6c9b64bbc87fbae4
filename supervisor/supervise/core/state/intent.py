"""The action of a runbook that was intended last; see `runbooks/steps`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..model.action import Action


@dataclass(slots=True)
class Intent:
    """What is being performed, or was last.

    Attributes:
        waiting_for: id of the action whose outcome is awaited, None when none is.
        action: the action itself. verb, args: its name, and its absolute arguments.
        overdue_ns: when the outcome is in doubt.
    """

    waiting_for: str | None = None
    action: Action | None = None
    verb: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    overdue_ns: int = 0

    def awaits(self, verb: str) -> bool:
        """Return whether the outcome of such an action is awaited."""
        return self.waiting_for is not None and self.verb == verb
