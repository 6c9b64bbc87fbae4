"""Decisions: all that leaves the engine, and the codes and words in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A reading is three-valued. The order makes Kleene logic plain arithmetic: and = min, or = max,
# not = 2 - x.
OK = 0
UNKNOWN = 1
BREACH = 2
CODE_NAMES = ("OK", "UNKNOWN", "BREACH")

SEVERITIES = ("SEV0", "SEV1", "SEV2")  # most severe first
MODES = ("observe", "shadow", "approve", "enforce")  # least powerful first
ACTING_MODES = ("approve", "enforce")  # those in which a rule may touch the job


@dataclass(frozen=True, slots=True)
class Decision:
    """What the engine says. Each one becomes one audit record, in this order.

    Attributes:
        kind: one of `rule incident state suppressed near_miss intent commit abort in_doubt
            verify approval_requested approval override notify_intent rebaseline gap blind note
            policy_load`.
        step: newest step seen when it was decided, -1 before the first frame.
        reason: one sentence with the numbers in it.
        data: JSON-ready detail; floats may be non-finite (the audit log encodes them).
    """

    kind: str
    step: int
    reason: str
    attempt: int = 0
    incident: str | None = None
    rule: str | None = None
    severity: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
