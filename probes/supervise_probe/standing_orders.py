"""Reflexes that a policy armed inside the job, because the supervisor is always a step late.

`skip_nonfinite`: a step whose loss or gradient norm is NaN or Inf does not reach the weights. At
most `max` times in `per` steps: a run that is not finite for good must not idle on. It acts only on
values that the host has anyway; on an accelerator it cannot act, and says so.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Deque, Mapping, Optional, Sequence

from .scalars import Number


class SkipNonfinite:
    """The order `{"max": 3, "per": 128}`, in steps.

    Attributes:
        state: what the status says: `armed`, or why it cannot act.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._per = max(1, int(order.get("per", 128)))
        self._fired: Deque[int] = deque(maxlen=max(1, int(order.get("max", 3))))
        self._attempted = 0
        self.state = "armed"

    def step_ended(self) -> None:
        """Count a step; a rollback does not turn this clock back."""
        self._attempted += 1

    def why_skip(self, values: Sequence[Optional[Number]]) -> Optional[str]:
        """Return why the update must not happen, or None.

        Args:
            values: loss and gradient norm of this update; None where unknown.
        """
        if all(type(v) is float and math.isfinite(v) for v in values):
            self.state = "armed"
            return None
        known = [v for v in values if isinstance(v, (int, float))]
        on_device = any(v is not None and not isinstance(v, (int, float)) for v in values)
        self.state = "cannot act: the values live on a device" if on_device else "armed"
        if all(math.isfinite(v) for v in known):
            return None
        full = len(self._fired) == self._fired.maxlen
        if full and self._attempted - self._fired[0] < self._per:
            return None
        self._fired.append(self._attempted)
        return "loss or gradient norm is not finite"
