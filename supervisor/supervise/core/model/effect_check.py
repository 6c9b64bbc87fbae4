"""What an action may look at to tell whether its effect shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EffectCheck:
    """The first frame that can show the effect of an action, and what the action was.

    Attributes:
        args: what `plan` returned.
        result: what `perform` returned (`ack_step` is the step at whose end the probe carried it
            out).
        frame: the metrics of the frame. step, attempt: where it is.
    """

    args: Mapping[str, Any]
    result: Mapping[str, Any]
    frame: Mapping[str, float | None]
    step: int
    attempt: int
