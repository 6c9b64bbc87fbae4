"""What asked for the newest runbook of an incident, and on what terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trigger:
    """What asked for the newest runbook; kept by `incidents/withdrawal`.

    Attributes:
        asked_by: id of the rule. still: because the job stood still.
        asks: a rule in mode `approve` began it, so that all that it leads to is asked for.
    """

    asked_by: str = ""
    still: bool = False
    asks: bool = False
