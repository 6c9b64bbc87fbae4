"""Routing of messages to a channel, and its quiet hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase

from ..core.model.interfaces import Message

DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Route:
    """Which messages go to a channel, beside those below its least severity.

    Attributes:
        kinds: of messages; none: all.
        rules: patterns such as `loss_spike.*`, of which one must match a rule of the incident;
            none: all, also messages without a rule.
        quiet: `(first, last, zone)`: minutes of the day between which what is below SEV1 waits.
    """

    kinds: Sequence[str] = ()
    rules: Sequence[str] = ()
    quiet: tuple[int, int, str] | None = None

    def takes(self, message: Message) -> bool:
        """Return whether the message goes to the channel."""
        if self.kinds and message.kind not in self.kinds:
            return False
        return not self.rules or any(
            fnmatchcase(rule, pattern) for rule in message.rules for pattern in self.rules
        )

    def quiet_left_s(self, now: datetime) -> float:
        """Return how long it stays quiet, 0 while it is not. `now`: with its zone."""
        if self.quiet is None:
            return 0.0
        from zoneinfo import ZoneInfo  # as late as httpx: most runs have no quiet hours

        first, last, zone = self.quiet
        local = now.astimezone(ZoneInfo(zone))
        minute = local.hour * 60 + local.minute
        inside = first <= minute < last if first < last else not last <= minute < first
        left = (last - minute) % DAY_MINUTES
        return max(0.0, left * 60.0 - local.second) if inside else 0.0
