"""Budgets: how often a class of action may be started, counted when it is intended.

A crash cannot refund an intent and a reload cannot reset one: the ledger is rebuilt by folding the
journal. Steps are counted by the run's `frame_count`, which never decreases; the job's own step
number does, at every rollback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .policy import Budget

ALL = "all"
KEPT = 1000  # newest intents of a class; no sane budget allows more


@dataclass(slots=True)
class Ledger:
    """What was spent, per class: `(frame count, at_ns)` of every intent still inside its window."""

    spent: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def exhausted(
        self, budgets: Mapping[str, Budget], kind: str, frame_count: int, at_ns: int
    ) -> tuple[str, Budget, int] | None:
        """Return `(class, budget, spent)` of the first class that has no intent left, or None."""
        for name in (kind, ALL):
            budget = budgets.get(name)
            if budget is None:
                continue
            used = self._used(name, budget, frame_count, at_ns)
            if used >= budget.max:
                return name, budget, used
        return None

    def spend(self, kind: str, frame_count: int, at_ns: int) -> None:
        """Count one intent in its class and in `all`."""
        for name in (kind, ALL):
            self.spent.setdefault(name, deque(maxlen=KEPT)).append((frame_count, at_ns))

    def usage(self, budgets: Mapping[str, Budget], frame_count: int, at_ns: int) -> dict[str, str]:
        """Return `{"rollback": "1/2", ...}` for people."""
        return {
            name: f"{count}/{budgets[name].max}"
            for name, count in self.used(budgets, frame_count, at_ns).items()
        }

    def used(self, budgets: Mapping[str, Budget], frame_count: int, at_ns: int) -> dict[str, int]:
        """Return how many intents each budget counts now."""
        return {
            name: self._used(name, budget, frame_count, at_ns) for name, budget in budgets.items()
        }

    def _used(self, name: str, budget: Budget, frame_count: int, at_ns: int) -> int:
        entries = self.spent.get(name, ())
        return sum(not _expired(budget, entry, frame_count, at_ns) for entry in entries)


def _expired(budget: Budget, entry: tuple[int, int], frame_count: int, at_ns: int) -> bool:
    if budget.per_steps is not None:
        return frame_count - entry[0] >= budget.per_steps
    if budget.per_s is not None:
        return at_ns - entry[1] >= budget.per_s * 1e9
    return False
