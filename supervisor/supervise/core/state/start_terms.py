"""Why, and on what terms, a runbook was started; see `runbooks/runner`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a runbook was started, as far as that can go away (see `withdrawal`).

    Attributes:
        rules: ids of the rules that asked for it.
        frames: for a standstill, rank -> frames that it had sent by then; None for other reasons.
    """

    rules: tuple[str, ...]
    frames: dict[int, int] | None = None


@dataclass(slots=True)
class StartTerms:
    """How a runbook came to be started.

    Attributes:
        reason: None: a person's order, or nothing that can go away.
        climbed: it was not asked for: what is below it on the ladder was tried.
        instead: it stands in for one that could not work here.
        entered: the incident's rung before it was started.
        reduced: why only evidence is taken and people are told.
        approved: verbs and arguments that were allowed.
    """

    reason: Reason | None = None
    climbed: bool = False
    instead: bool = False
    entered: int = -1
    reduced: str = ""
    approved: list[dict[str, Any]] | None = None
