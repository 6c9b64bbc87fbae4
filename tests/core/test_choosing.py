"""A relaunch goes back to the newest checkpoint that is good when the job has been stopped."""

from __future__ import annotations

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.core.model.events import Exited, Finished, Launched, Notice
from supervise.core.model.policy import Budget, Ladder

from .conftest import Verify, runbook_of

ACTION = "inc-1/1/0-relaunch"


def told(story, name, step, ok=True, attempt=0):
    data = {"id": name, "step": step, "attempt": attempt, "path": f"/{name}.pt", "ok": ok}
    story.send(Notice(story.at_ns, "checkpoint", f"{name} was verified", data=data))


def choose(story):
    story.send(Notice(story.at_ns, "checkpoint-choice", "what it left was looked at"))
    return [d.data["action"]["args"]["checkpoint"] for d in story.kinds("note", "replanned")]


@pytest.fixture
def stopping(tell):
    """Return a function: the trouble of step 60 is answered by a relaunch to step 19."""

    def begin(**changes):
        book = runbook_of("soften", Relaunch(rewarm=0, skip=30), Verify(clear_for=5))
        changes = {"ladder": Ladder(("soften", "hold")), **changes}
        changes["runbooks"] = {"calm": book, "soften": book, **changes.get("runbooks", {})}
        story = tell(
            answer=lambda key: None,
            budgets={name: Budget(3) for name in ("restart", "all")},
            job={"relaunch": {"resume": "args"}},
            **changes,
            healthy=60,
        )
        told(story, "a", 19)
        story.frames(8.0)
        return story

    return begin


@pytest.fixture
def stopped(stopping):
    story = stopping()
    assert story.actions() == [ACTION]
    story.send(Exited(story.at_ns, -2))
    return story


def test_what_is_verified_after_the_stop_is_gone_back_to(stopped):
    """On record, under the same action; its effect is looked for behind the newer one."""
    story = stopped
    told(story, "b", 39)

    assert choose(story) == ["b"]
    (note,) = story.kinds("note", "replanned")
    action = note.data["action"]
    assert action["id"] == ACTION and note.incident == "inc-1"
    assert note.reason == "relaunch goes back to b of step 39, not to a of step 19"
    assert action["args"] == story.state.incident.run.intent.args
    assert (action["args"]["attempt"], action["args"]["skip"]) == (1, [[40, 60]])
    story.send(Launched(story.at_ns, 2, 1))
    story.send(Finished(story.at_ns, ACTION, True, {"pid": 2, "attempt": 1, "step": 39}))
    story.attempt, story.step = 1, 39
    story.frames(2.0, times=21)
    assert not story.kinds("verify", "passed")
    story.frames(2.0)
    assert story.kinds("verify", "passed")


def test_neither_one_of_the_trouble_nor_one_too_near_is_chosen(stopped):
    """What the policy allows is what it was when the relaunch was intended."""
    story = stopped
    told(story, "b", 60)
    told(story, "c", 55)
    told(story, "d", 39, ok=False)

    assert choose(story) == []
    assert story.state.incident.run.intent.args["checkpoint"] == "a"


def test_what_people_approved_is_what_is_done(stopping):
    story = stopping(mode="approve")
    story.say("approve", id="ask-1")
    assert story.actions()[-1].endswith("relaunch")
    story.send(Exited(story.at_ns, -2))
    told(story, "b", 39)

    assert choose(story) == []


@pytest.mark.parametrize("final", [True, False])
def test_who_ends_the_run_meanwhile_is_told_of_its_end(stopped, final):
    """Ctrl-C while what the job left is looked at: nothing starts it again, and people hear so."""
    story = stopped
    told = len(story.kinds("notify_intent"))
    data = {"signal": "SIGINT", "final": final}
    story.send(Notice(story.at_ns, "signal", "SIGINT was passed on", data=data))

    assert story.state.job.over == final
    said = [d.reason for d in story.kinds("notify_intent")[told:]]
    assert any("ended with signal 2 at step 60" in text for text in said) == final
    reasons = [d.reason for d in story.kinds("abort")]
    asked = f"{ACTION} failed: a request to end the job came first"
    assert (asked in reasons) == final
    assert (story.state.machine == "halted") == final
