"""The request that waits for a person, and what became of those before (`incidents/approvals`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from ..model.approval_request import ApprovalRequest

KEPT = 64  # settled requests that a late word is told about


@dataclass(slots=True)
class ApprovalLog:
    """What people were asked.

    Attributes:
        pending: the request that waits. asked: how many there were.
        settled: id -> what became of it, of the newest ones.
    """

    pending: ApprovalRequest | None = None
    asked: int = 0
    settled: dict[str, str] = field(default_factory=dict)

    def copy(self) -> ApprovalLog:
        """Return an independent copy."""
        return ApprovalLog(copy.deepcopy(self.pending), self.asked, dict(self.settled))

    def settle(self, pending: ApprovalRequest, outcome: str) -> None:
        """End the request that waits, and remember what became of it."""
        self.pending = None
        self.settled[pending.id] = outcome
        while len(self.settled) > KEPT:
            del self.settled[next(iter(self.settled))]
