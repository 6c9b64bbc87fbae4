"""Values and decisions as JSON holds them: one encoder, so that replay compares like with like."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .decisions import Decision


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
