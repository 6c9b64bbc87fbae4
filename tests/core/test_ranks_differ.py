"""A command that some ranks carried out and others did not."""

from __future__ import annotations

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Finished
from supervise.core.model.policy import Budget

from .conftest import Reach, Verify, above, messages, one_rule, runbook_of

WHY = "the ranks differ from step 61 on: rank 1 did not answer"


@pytest.fixture
def apart(tell):
    """A story whose first action was carried out by some ranks only."""

    def begin(*more):
        first = runbook_of("first", Reach(), Verify())
        books = {book.name: book for book in (first, *more)}
        budgets = {name: Budget(9) for name in ("all", "touch", "restart", "lr_scale")}
        made = one_rule(above("train_loss_raw", 5.0), "SEV1", "first") | {
            "runbooks": books,
            "budgets": budgets,
        }

        def answer(key):
            facts = {"inconsistent": True, "retryable": False}
            return Finished(0, key, False, facts, WHY) if "reach" in key else None

        story = tell(**made, answer=answer)
        story.frames(2.0, times=50)
        story.frames(9.0, times=3)
        return story

    return begin


def test_a_relaunch_is_tried_and_no_other_command_sent(apart):
    """Not even to undo the step: that would be a second command to ranks that differ."""
    story = apart(runbook_of("again", Snapshot(), Relaunch(), Verify()))

    assert [action.rpartition("-")[2] for action in story.actions()] == ["reach", "snapshot"]
    assert [m for m in messages(story) if m["severity"] == "SEV0" and WHY in m["verdict"]]
    assert "relaunch" in str(story.state.incident.run.terms.reduced_reason)


def test_without_a_relaunch_a_person_is_needed(apart):
    story = apart()

    assert len(story.actions()) == 1
    assert story.state.incident.severity == "SEV0" and story.state.incident.phase == "held"
