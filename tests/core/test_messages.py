"""What kind of message people get, and about which incident."""

from __future__ import annotations

import pytest

from supervise.core.incident import Incident
from supervise.core.model.decisions import IncidentOpened
from supervise.core.model.interfaces import ACTION, CLOSED, OPENED, UPDATED, WATCHER
from supervise.core.run_state import MessageDraft, MessageDrafts
from tests.golden.messages import STORIES, played

BY_TITLE = {story.title: story for story in STORIES}


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        (
            "a drill: NaN losses, rolled back, recovered",
            ["opened inc-1", "action inc-1", "closed inc-1"],
        ),
        (
            "approval: a request is denied",
            ["approval inc-1", "updated inc-1"],
        ),
        (
            "a crash during an incident: the job ends with signal 9",
            ["opened inc-1", "updated inc-1", "finished inc-1"],
        ),
        ("a crash: the job ends with code 1", ["finished None"]),
        ("a crash without a good checkpoint", ["opened inc-1", "finished inc-1"]),
        (
            "actions that an operator orders, and those that are refused",
            ["updated inc-1", "closed inc-1", "finished None"],
        ),
        ("what the probe and the supervisor report", ["watcher None"] * 4),
    ],
)
def test_messages_have_a_kind_and_keep_their_incident(title, kinds):
    """Down to the closing one. An end that was ordered is about no incident."""
    told = [made for _, made in played(BY_TITLE[title]) if made.kind == "notify_intent"]

    assert [f"{made.data['message']['kind']} {made.incident}" for made in told] == kinds
    if "operator" in title:
        assert (told[-1].severity, told[-1].reason) == ("INFO", "stopped by operator at step 389")


def incident(name: str) -> Incident:
    return Incident(name, 1, 1, "SEV1", [])


def test_one_event_tells_of_each_incident_once():
    """One closes and the next one opens; a message about the watching is about neither."""
    drafts = MessageDrafts()
    old, new = incident("inc-1"), incident("inc-2")
    drafts.add(MessageDraft(old, CLOSED, "SEV2", "over"), replace=False)
    drafts.add(MessageDraft(new, UPDATED, "SEV2", "spike", reason="rule a"), replace=False)
    drafts.add(MessageDraft(None, WATCHER, "SEV2", "probe off"), replace=False)
    drafts.add(MessageDraft(new, ACTION, "SEV1", "started", next="wait"), replace=False)
    opened = IncidentOpened(reason="", incident="inc-2", runbook="", breach_step=7, band=None)

    told = list(drafts.decisions([opened], 7, 0))

    assert [(made.incident, made.severity, made.message.kind) for made in told] == [
        ("inc-1", "SEV2", CLOSED),
        ("inc-2", "SEV1", OPENED),
        (None, "SEV2", WATCHER),
    ]
    message = told[1].message
    assert (message.title, message.why, message.next) == ("spike", "rule a", "wait")
