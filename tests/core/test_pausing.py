"""A pause that nobody renewed: the job goes on, and what relied on the pause is given up."""

from __future__ import annotations

import pytest

from supervise.actions.pause import Pause
from supervise.actions.resume import Resume
from supervise.actions.rollback import Rollback
from supervise.actions.snapshot import Snapshot
from supervise.core.incidents import pausing, withdrawal
from supervise.core.model.events import Finished, Notice
from supervise.core.model.policy import Budget, Ladder, Runbook

from .conftest import Above, Verify, messages, rule_on

STEPS = (Pause(), Snapshot(), Rollback(at_least=5), Resume(), Verify())
VERBS = ("pause", "snapshot", "rollback", "resume", "verify")
BACK = {"step": 30, "attempt": 0}


@pytest.fixture
def waiting(tell):
    """A function: the runbook has come to the step `verb`, whose outcome it waits for."""

    def begin(verb):
        def answer(action):
            return None if action.endswith(verb) else Finished(0, action, True, BACK)

        detectors = {"high": Above("train_loss_raw", 5.0)}
        return tell(
            answer=answer,
            detectors=detectors,
            inhibit=(),
            ladder=Ladder(("mend", "hold")),
            rules=(rule_on(detectors, "high", "SEV1", "mend"),),
            runbooks={"mend": Runbook("mend", STEPS, VERBS)},
            budgets={"all": Budget(9), "rollback": Budget(9)},
            healthy=50,
            then=8.0,
        )

    return begin


def end_pause(story, action="inc-1/1/0-pause"):
    data = {"key": f"run:{action}"} if action else {}
    story.send(Notice(story.at_ns, pausing.ENDED, "nobody renewed the pause", data=data))


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize(("verb", "withdrawn"), [("snapshot", False), ("rollback", True)])
def test_a_runbook_that_relies_on_the_pause_fails(waiting, verb, withdrawn, ok):
    """The step under way comes to its end, no other follows, no resume; the incident is held."""
    story = waiting(verb)
    end_pause(story)
    assert not story.state.job.paused
    why = withdrawal.withdrawn(story.policy, story.state)
    assert why == (pausing.UNPAUSED if withdrawn else "")
    asked = story.actions()
    story.send(Finished(story.at_ns, asked[-1], ok, BACK, None if ok else "not sent"))

    assert story.actions() == asked and asked[-1].endswith(verb)
    assert story.state.machine == "holding"
    assert not pausing.withdrawn(story.state)
    assert "pause ended by itself" in " ".join(m["title"] for m in messages(story))


def test_a_pause_that_ended_before_its_outcome_came_is_over(waiting):
    """The supervisor hung meanwhile. A resume makes sure, and nothing else is done."""
    story = waiting("pause")
    end_pause(story)
    story.send(Finished(story.at_ns, story.actions()[-1], True, {"paused_step": 50}))

    assert [action.rpartition("/")[2] for action in story.actions()] == ["0-pause", "undo-resume"]
    assert story.state.machine == "holding" and not story.state.job.paused


def test_a_resume_under_way_is_as_good(waiting):
    story = waiting("resume")
    end_pause(story, action="")
    assert not pausing.withdrawn(story.state)
    story.send(Finished(story.at_ns, story.actions()[-1], True, {"resumed": True}))

    assert story.state.machine == "acting" and story.kinds("verify", "started")
