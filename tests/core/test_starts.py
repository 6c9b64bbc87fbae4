"""What the job that was started again comes to."""

from __future__ import annotations

import pytest

from supervise.core.handlers.job_lifecycle import start_failed
from supervise.core.model.events import Exited, Finished, Launched

from .crashes import crashing, relaunched

ASKS = {"resume": "args", "args": ["--from={checkpoint}", "--fast"], "env": {"START": "{step}"}}


@pytest.mark.parametrize(
    ("job", "given"),
    [
        (ASKS, "job.relaunch.args --from={checkpoint} --fast, job.relaunch.env START"),
        ({"resume": "library", "args": [], "env": {}}, "job.relaunch.resume library"),
    ],
)
def test_a_start_that_came_to_no_step_is_told_with_what_it_was_given(tell, job, given):
    """A flag that the script does not know: its runbook failed, and people hear where to look."""
    story = crashing(tell, job={"on_crash": "again", "relaunch": job})
    story.send(Exited(story.at_ns, 1))
    relaunched(story, 40)
    story.send(Exited(story.at_ns, 2))

    why = f"restarted with {given}, the job ended with code 2 before its first step"
    assert [d.reason for d in story.kinds("verify", "failed")] == [why]
    assert story.state.job.over and start_failed(story.state)
    message = story.kinds("notify_intent")[-1].data["message"]
    assert message["title"] == (
        "the job was restarted, and ended with code 2 before its first step"
    )
    assert "it already ended at step 49 before" in message["verdict"]
    assert message["why"] == f"it was started with {given}"
    assert message["next"] == "check the end of its output, and job.relaunch"


@pytest.mark.parametrize("code", [0, -2, -15, 130])
def test_a_start_that_ended_without_a_step_may_have_been_meant(tell, code):
    story = crashing(tell)
    story.send(Exited(story.at_ns, 1))
    relaunched(story, 40)
    story.send(Exited(story.at_ns, code))

    assert story.state.job.over and not start_failed(story.state)
    assert not story.kinds("verify", "failed")


def test_a_start_may_be_over_before_its_relaunch_is_reported(tell):
    """Its end is its own, not the one of the job before it, and is not forgotten."""
    story = crashing(tell)
    story.send(Exited(story.at_ns, 1))
    action = story.kinds("intent")[-1].data["action"]["id"]
    assert story.state.incident.run.intent.args["attempt"] == 1
    story.send(Launched(story.at_ns, 2, 1))
    story.send(Exited(story.at_ns, 2))
    assert not story.state.job.over
    story.send(Finished(story.at_ns, action, True, {"pid": 2, "attempt": 1, "step": 40}))

    assert story.state.job.over and start_failed(story.state)
    assert not story.kinds("note", "relaunching")
    assert "code 2 before its first step" in story.kinds("incident", "closed")[0].reason
