"""Decisions: all that leaves the engine, the codes and words in them, and their form as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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


def plain(value: Any) -> Any:
    """Return `value` as JSON holds it: lists for tuples, "NaN" "+Inf" "-Inf" for non-finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def record(decision: Decision) -> dict[str, Any]:
    """Return a decision as its audit record holds it."""
    found: dict[str, Any] = json.loads(json.dumps(plain(asdict(decision)), allow_nan=False))
    return found
