"""The messages of one event: at most one about each incident, and one about none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..model.decisions import SEVERITIES, Decision, IncidentOpened, MessageText, Notified
from ..model.interfaces import ACTION, APPROVAL, CLOSED, FINISHED, OPENED, UPDATED, WATCHER
from .incident import Incident

RANKS = (*SEVERITIES, "INFO")
WEIGHTS = (FINISHED, CLOSED, APPROVAL, ACTION, UPDATED, WATCHER)  # the first one names a message


@dataclass(slots=True)
class MessageDraft:
    """What is to be told about an incident, or about none.

    Attributes:
        next: what happens now, or what a person should do.
        request: id of the approval that is asked for, "" for none.
        acknowledged_by: the operator who has just acknowledged the incident, "" for nobody.
        to_all: it goes to every channel, whatever its least severity.
        explanation: a rule of the same event about what the model is given, with its numbers.
    """

    incident: Incident | None
    kind: str
    severity: str
    title: str
    verdict: str = ""
    why: str = ""
    next: str = ""
    request: str = ""
    acknowledged_by: str = ""
    to_all: bool = False
    explanation: str = ""

    def merge(self, other: MessageDraft, *, replace: bool) -> None:
        """Take over another one: the worst severity, the weightiest kind, and its `next`.

        The texts stand unless they are empty or `replace` is set.
        """
        self.severity = min(self.severity, other.severity, key=RANKS.index)
        self.kind = min(self.kind, other.kind, key=WEIGHTS.index)
        if replace:
            self.title = other.title
        if other.verdict and (replace or not self.verdict):
            self.verdict = other.verdict
        if other.why and (replace or not self.why):
            self.why = other.why
        self.next = other.next or self.next
        self.request = other.request or self.request
        self.acknowledged_by = other.acknowledged_by or self.acknowledged_by
        self.to_all |= other.to_all
        self.explanation = self.explanation or other.explanation

    def decision(self, kind: str, step: int, attempt: int) -> Notified:
        """Return the message as a record for the audit log."""
        incident = self.incident
        message = MessageText(
            kind=kind,
            severity=self.severity,
            title=self.title,
            verdict="; ".join(filter(None, (self.verdict, self.explanation))),
            why=self.why,
            next=self.next,
            step=step,
            rules=() if incident is None else tuple(incident.rules),
            request=self.request,
            acknowledged_by=self.acknowledged_by,
            to_all=self.to_all,
        )
        return Notified(
            step=step,
            attempt=attempt,
            reason=self.title,
            incident=None if incident is None else incident.id,
            severity=self.severity,
            message=message,
        )


class MessageDrafts:
    """The messages of one event, in the order in which they were begun."""

    __slots__ = ("_drafts",)

    def __init__(self) -> None:
        self._drafts: dict[str | None, MessageDraft] = {}

    def add(self, draft: MessageDraft, *, replace: bool) -> None:
        """Take a message, and merge it into an earlier one about the same incident."""
        key = None if draft.incident is None else draft.incident.id
        if key in self._drafts:
            self._drafts[key].merge(draft, replace=replace)
        else:
            self._drafts[key] = draft

    def explain(self, incident: Incident, text: str) -> None:
        """Add an explanation to the message about an incident, where there is one."""
        if incident.id in self._drafts:
            self._drafts[incident.id].explanation = text

    def drop(self, incident: Incident) -> None:
        """Tell nothing of an incident."""
        self._drafts.pop(incident.id, None)

    def decisions(self, others: Iterable[Decision], step: int, attempt: int) -> Iterator[Decision]:
        """Yield each message; `others`: what else was decided in the event.

        The first message about an incident that was opened in the event is its opening.
        """
        new = {decision.incident for decision in others if isinstance(decision, IncidentOpened)}
        for key, draft in self._drafts.items():
            opens = key in new and draft.kind in (ACTION, UPDATED)
            yield draft.decision(OPENED if opens else draft.kind, step, attempt)
