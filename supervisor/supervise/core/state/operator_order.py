"""What an operator asked for that runs as a runbook; see `handlers/operator_actions`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OperatorOrder:
    """Who asked for it, and from where it goes on.

    Attributes:
        operator: "" when a rule asked for it. held: the incident was held when it was asked.
        before: the step that the operator goes back to before.
    """

    operator: str = ""
    held: bool = False
    before: int | None = None
