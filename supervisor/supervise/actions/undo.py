"""Undo: take back what was done about this incident and still stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action


@dataclass(frozen=True)
class Undo(Action):
    """Take back, newest first, what earlier runbooks of this incident did and nobody took back.

    What a runbook did that was not verified is taken back by itself, before the next rung. So this
    is for one that begins while an earlier one is still being verified, or on its probation. The
    engine carries it out as intents of its own; actions without an `undo` stay.

    Example:
        - undo

    Undo: none needed; what it takes back can be done again.
    Source: sagas (Garcia-Molina and Salem, SIGMOD 1987): compensations run in reverse order.
    """

    engine_step: ClassVar[bool] = True
