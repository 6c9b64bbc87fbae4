"""How far the verification of a runbook has come; see `runbooks/verification`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class VerificationProgress:
    """What the frames after a runbook have shown.

    Attributes:
        until: pace at which it has failed, None before it is verified.
        frame_ns: when the newest frame to verify by came.
        effects: (index of the step, arguments, result) of actions that have shown none so far.
        clear_steps: frames in a row without trouble. last_trouble: what stood against it.
        calm: (rule of SEV0, rank) that was clear meanwhile.
        denied: what the job says against it: it does not go on as it should.
    """

    until: int | None = None
    frame_ns: int = 0
    effects: list[tuple[int, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    clear_steps: int = 0
    last_trouble: str = ""
    calm: set[tuple[str, int]] = field(default_factory=set)
    denied: str = ""
