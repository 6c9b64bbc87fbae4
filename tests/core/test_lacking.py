"""A relaunch that is refused because no checkpoint was verified yet is tried again when one is."""

from __future__ import annotations

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Announced, Exited, Finished, Launched, Notice
from supervise.core.model.policy import Budget, Ladder

from .conftest import Verify, messages, runbook_of
from .test_choosing import told

FIRST, AGAIN = "inc-1/1/0-snapshot", "inc-1/2/1-relaunch"
BOOK = runbook_of("soften", Snapshot(), Relaunch(rewarm=0), Verify(clear_for=5))


@pytest.fixture
def refused(tell, make_policy):
    """Return a function: the trouble of step 60 finds no checkpoint, and lasts."""

    def begin(breach=60, unavailable=(), calm=False, **changes):
        changes = {
            "ladder": Ladder(("soften", "hold")),
            "job": {"relaunch": {"resume": "args"}},
            **changes,
        }
        story = tell(
            answer=lambda key: None,
            rules=make_policy().rules[:1],
            runbooks={"soften": BOOK},
            budgets={name: Budget(1) for name in ("restart", "all")},
            inhibit=(),
            **changes,
        )
        for verb in unavailable:
            story.send(Notice(0, f"{verb}-unavailable", "a for statement drives the step"))
        story.frames(2.0, times=breach)
        if not calm:
            story.frames(8.0)
        return story

    return begin


def evidence(story):
    story.send(Finished(story.at_ns, FIRST, True, {}))


@pytest.mark.parametrize("ladder", [Ladder(("soften", "hold")), Ladder(())])
def test_the_first_good_checkpoint_is_gone_back_to(refused, ladder):
    """Once, and the budget of one is enough; people had been told what is waited for."""
    story = refused(ladder=ladder)
    assert story.actions() == [FIRST]
    assert messages(story)[0]["title"] == "inc-1: soften waits for a good checkpoint"
    assert "the relaunch follows the first good one" in messages(story)[0]["next"]
    evidence(story)
    story.frames(8.0, times=30)
    assert story.state.machine != "holding"
    told(story, "near", 55)
    told(story, "after", 70)
    told(story, "bad", 39, ok=False)
    assert story.actions() == [FIRST]
    told(story, "a", 39)
    story.send(Finished(story.at_ns, "inc-1/2/0-snapshot", True, {}))
    told(story, "b", 45)

    assert story.actions() == [FIRST, "inc-1/2/0-snapshot", AGAIN]
    assert story.state.incident.run.intent.args["checkpoint"] == "a"
    assert "a good checkpoint is now available" in story.kinds("state")[-1].reason
    story.send(Exited(story.at_ns, -2))
    story.send(Launched(story.at_ns, 2, 1))
    story.send(Finished(story.at_ns, AGAIN, True, {"pid": 2, "attempt": 1, "step": 39}))
    story.send(Announced(story.at_ns, 0, 1, 2, story.names))
    story.attempt, story.step = 1, 39
    story.frames(2.0, times=60)
    assert story.kinds("verify", "passed")
    assert story.actions()[-1] == AGAIN


def test_a_trouble_that_is_over_is_not_answered_late(refused):
    story = refused()
    evidence(story)
    story.frames(2.0, times=3)
    assert story.state.incident is not None
    told(story, "a", 39)

    assert story.actions() == [FIRST]


def test_what_no_checkpoint_helps_is_not_waited_for(refused):
    """It cannot be started again, or saves none, or is too young for one that is old enough."""
    resume = {"relaunch": {"resume": "savepoint"}}
    for story in (
        refused(unavailable=["relaunch"]),
        refused(unavailable=["rollback"], job=resume),
        refused(breach=8),
    ):
        assert story.kinds("abort", "refused")
        assert "tried again" not in messages(story)[0]["next"]
        evidence(story)
        if "portable" not in story.state.job.unavailable:
            told(story, "a", 0)
        assert story.actions() == [FIRST]


def test_a_crash_is_answered_when_one_comes_while_evidence_is_taken(refused):
    for late in (False, True):
        story = refused(calm=True, job={"on_crash": "soften", "relaunch": {"resume": "args"}})
        story.send(Exited(story.at_ns, -9))
        assert story.actions() == [FIRST]
        if not late:
            told(story, "a", 39)
        evidence(story)
        if late:
            told(story, "a", 39)

        assert (story.actions() == [FIRST]) == late
        assert story.state.job.over == late
