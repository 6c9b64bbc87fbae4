"""What kind of message people get, and about which incident."""

from __future__ import annotations

from supervise.core import Incident, MessageDraft, MessageDrafts
from supervise.core.model import (
    ACTION_MESSAGE,
    CLOSED_MESSAGE,
    OPENED_MESSAGE,
    UPDATED_MESSAGE,
    WATCHER,
    IncidentOpened,
)


def incident(name: str) -> Incident:
    return Incident(name, 1, 1, "SEV1", [])


def test_one_event_tells_of_each_incident_once():
    """One closes and the next one opens; a message about the watching is about neither."""
    drafts = MessageDrafts()
    old, new = incident("inc-1"), incident("inc-2")
    drafts.add(MessageDraft(old, CLOSED_MESSAGE, "SEV2", "over"), replace=False)
    drafts.add(MessageDraft(new, UPDATED_MESSAGE, "SEV2", "spike", reason="rule a"), replace=False)
    drafts.add(MessageDraft(None, WATCHER, "SEV2", "probe off"), replace=False)
    drafts.add(MessageDraft(new, ACTION_MESSAGE, "SEV1", "started", next="wait"), replace=False)
    opened = IncidentOpened(reason="", incident="inc-2", runbook="", breach_step=7, band=None)

    told = list(drafts.decisions([opened], 7, 0))

    assert [(made.incident, made.severity, made.message.kind) for made in told] == [
        ("inc-1", "SEV2", CLOSED_MESSAGE),
        ("inc-2", "SEV1", OPENED_MESSAGE),
        (None, "SEV2", WATCHER),
    ]
    message = told[1].message
    assert (message.title, message.why, message.next) == ("spike", "rule a", "wait")
