"""Notify: tell people now, in the middle of a runbook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action


@dataclass(frozen=True)
class Notify(Action):
    """Send the incident as it stands to every notifier whose least severity it reaches.

    The engine decides it and the outbox delivers it: a notifier that is slow or fails never holds
    up the runbook.

    Example:
        - notify

    Undo: none.
    Source: the outbox pattern: the intent is on disk before the message is sent, so that neither a
        crash nor a dead receiver loses it.
    """

    touches_job: ClassVar[bool] = False
    engine_step: ClassVar[bool] = True
