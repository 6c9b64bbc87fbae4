"""A job that stands still: started again while that helps, given up when it does not."""

from __future__ import annotations

import pytest

from supervise.core.model.events import Beat, Exited, Finished, Tick
from supervise.core.model.policy import Budget
from supervise.core.replay import decisions, record
from supervise.detectors.absence import Absence

from .conftest import SECOND, messages, rule_on
from .crashes import crashing, relaunched

STALLED = {"stalled": Absence(after={"min": 30.0})}


@pytest.fixture
def stuck(tell):
    """A job of 50 steps that is started again when it makes no step for 30 seconds."""

    def begin(runbook="again", **changes):
        made = {
            "detectors": STALLED,
            "rules": (rule_on(STALLED, "stalled", "SEV0", runbook),),
            "inhibit": (),
            "budgets": {"restart": Budget(9), "all": Budget(99)},
            "answer": lambda key: (
                None if {"relaunch", "stop"} & set(key.split("-")) else Finished(0, key, True)
            ),
        }
        return crashing(tell, **(made | changes))

    return begin


def hang(story, seconds=40):
    for _ in range(seconds):
        story.at_ns += SECOND
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))


def again(story, to=49):
    relaunched(story, 40, ended=True)
    story.frames(2.0, times=to - 40)


def starts(story):
    return len([key for key in story.actions() if key.endswith("relaunch")])


def test_a_job_that_hangs_at_the_same_step_again_is_given_up(stuck):
    """Two more starts came to the same step: it is ended with evidence, and not held for ever."""
    story = stuck()
    hang(story)
    again(story)
    hang(story)
    again(story)
    hang(story)

    assert starts(story) == 2
    assert [key.split("-", 2)[-1] for key in story.actions()[-2:]] == ["snapshot", "stop"]
    given_up = next(m for m in messages(story) if m["title"] == "inc-1: given up")
    assert given_up["verdict"] == (
        "it was restarted 2 times and stalls again without going past step 49"
    )
    assert "goes on" not in given_up["next"]
    stop = story.kinds("intent")[-1].data["action"]
    assert stop["args"]["if_idle_s"] > 0.0, "one that works is not ended"
    story.send(Exited(story.at_ns, -15))
    story.send(Finished(story.at_ns, stop["id"], True, {"exit_code": 78, "returncode": -15}))
    assert story.state.job.over
    last = messages(story)[-1]
    assert last["title"] == "stopped by policy at step 49"
    assert last["why"].endswith(given_up["verdict"])
    assert [d for _, d in decisions(story.policy, enumerate(story.events))] == [
        record(d) for d in story.log
    ]


def test_progress_between_two_hangs_clears_them(stuck):
    story = stuck()
    for step in (49, 60, 75, 90, 120):
        story.frames(2.0, times=max(0, step - story.step))
        hang(story)
        again(story, to=step + 1)

    assert starts(story) == 5
    assert "inc-1: given up" not in [m["title"] for m in messages(story)]


def test_a_job_that_works_without_a_step_is_left_to_a_person(stuck):
    story = stuck()
    for _ in range(2):
        hang(story)
        again(story)
    hang(story)
    works = "the job makes no steps but works: not stopped"
    story.send(Finished(story.at_ns, story.actions()[-1], False, {}, works))

    assert story.state.machine == "holding"
    assert works in messages(story)[-1]["verdict"]
    assert messages(story)[-1]["next"].endswith("; the job is stalled at step 49")
