"""A runbook in progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.policy import Runbook
from .intent import Intent
from .operator_order import OperatorOrder
from .runbook_failure import RunbookFailure
from .start_terms import StartTerms
from .verification_progress import VerificationProgress


@dataclass(slots=True)
class Run:
    """A runbook in progress.

    Attributes:
        number: of the runbooks of its incident, from 1. severity: of that when it was started.
        index: the step that waits, is performed, or is verified.
        done: indices of steps that were committed.
        intent, order, terms, verification, failure: see their classes.
    """

    number: int
    runbook: Runbook
    severity: str
    index: int = 0
    done: list[int] = field(default_factory=list)
    intent: Intent = field(default_factory=Intent)
    order: OperatorOrder = field(default_factory=OperatorOrder)
    terms: StartTerms = field(default_factory=StartTerms)
    verification: VerificationProgress = field(default_factory=VerificationProgress)
    failure: RunbookFailure = field(default_factory=RunbookFailure)

    def busy(self) -> bool:
        """Return whether a step is being performed, or taken back."""
        return self.intent.waiting_for is not None or self.failure.why is not None
