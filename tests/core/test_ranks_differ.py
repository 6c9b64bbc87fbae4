"""A command that some ranks carried out and others did not."""

from __future__ import annotations

import pytest

from supervise.actions import LrScale, Relaunch, Snapshot
from supervise.core.model import Budget, Finished, Ladder, Launched

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


def test_ranks_that_cannot_act_at_one_step_are_asked_once_in_a_launch(tell):
    """The reason is reported once; what needs no step of all ranks is still done."""
    why = "rank 1 waits in a collective for what rank 0 does only behind the end of its step"
    books = {
        "ease": runbook_of("ease", LrScale(set=0.5), Verify(), if_refused="look"),
        "look": runbook_of("look", Snapshot()),
    }

    def answer(key):
        facts = {"refused": True, "unfenceable": why, "retryable": False}
        return Finished(0, key, False, facts, why) if "lr_scale" in key else None

    story = tell(
        **one_rule(above("train_loss_raw", 5.0), "SEV1", "ease"),
        runbooks=books,
        budgets={name: Budget(9) for name in ("all", "lr_scale")},
        ladder=Ladder(("ease", "hold")),
        answer=answer,
    )
    for _ in range(2):
        story.frames(2.0, times=60)
        story.frames(9.0, times=3)

    verbs = [action.rpartition("-")[2] for action in story.actions()]
    assert verbs[:2] == ["lr_scale", "snapshot"] and verbs.count("lr_scale") == 1
    assert why in story.state.job.unavailable["fence"]
    assert len([m for m in messages(story) if "cannot be changed together" in m["title"]]) == 1
    assert [r for r in story.kinds("abort", "refused") if why in r.reason and "ease" in r.reason]

    story.send(Launched(story.at_ns, 1, 77))
    assert "fence" not in story.state.job.unavailable
