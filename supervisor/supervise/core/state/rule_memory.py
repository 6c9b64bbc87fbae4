"""What is remembered of the rules, beside what each rank's monitor knows of them.

Kept by `handlers/rule_fired` (muted), `incidents/flapping` (flips, flapping), `engine` (noted) and
`handlers/operator_commands` (silenced).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class RuleMemory:
    """Which rules flap, are muted or are silenced.

    Attributes:
        flips: (rule id, rank) -> frame counts of its last changes, to tell flapping.
        flapping: ids of the rules that flap.
        noted: (detector, kind) -> frame_count from which on a note of it is written again.
        muted: rule id -> what muted it; such a rule is offered again when that is gone.
        silenced: rule id -> (frame_count until which it is silent, operator).
    """

    flips: dict[tuple[str, int], deque[int]] = field(default_factory=dict)
    flapping: set[str] = field(default_factory=set)
    noted: dict[tuple[str, str], int] = field(default_factory=dict)
    muted: dict[str, str] = field(default_factory=dict)
    silenced: dict[str, tuple[int, str]] = field(default_factory=dict)

    def copy(self) -> RuleMemory:
        """Return an independent copy."""
        flips = {key: deque(counts, maxlen=counts.maxlen) for key, counts in self.flips.items()}
        return RuleMemory(
            flips, set(self.flapping), dict(self.noted), dict(self.muted), dict(self.silenced)
        )

    def silence(self, rule: str, frame_count: int) -> str | None:
        """Return the name of who silenced a rule that is still to be silent, else None."""
        until, operator = self.silenced.get(rule, (0, ""))
        return operator if frame_count < until else None

    def unmute_cleared(self, firing: Collection[str]) -> None:
        """Forget what muted a rule that does not fire any more."""
        self.muted = {rule: by for rule, by in self.muted.items() if rule in firing}

    def forget_unknown(self, known: Collection[str]) -> None:
        """Forget the changes of rules that the policy does not have any more."""
        self.flips = {key: counts for key, counts in self.flips.items() if key[0] in known}
        self.flapping.intersection_update(known)
