"""The next training session in a process, or another program in the same launch."""

from __future__ import annotations

import math
from functools import partial

import pytest

from supervise.core import explain_withdrawal
from supervise.core.model import UNKNOWN, Announced

from .conftest import NAMES, Story, messages

UNDO = "inc-1/1/undo-untouch"  # verbs are named as their modules are
OVER = "over: its training session ended after step {}; another one starts"


def another(story: Story, rank: int = 0, segment: int = 9):
    """The next training begins, and the segment before was read to its end."""
    return story.announce(rank, 1, 1, story.names, segment)


@pytest.fixture
def begun(tell):
    return partial(tell, healthy=40)


def test_an_incident_ends_with_its_training(begun):
    story = begun(mode="shadow")
    story.frames(8.0, times=5)
    made = another(story)

    (closed,) = story.kinds("incident", "closed")
    assert closed in made
    assert (closed.incident, closed.severity) == ("inc-1", "SEV1")
    assert closed.reason == "closed: " + OVER.format(44)
    told = messages(story)[-1]
    assert (told["severity"], told["title"]) == ("SEV1", "inc-1: closed")
    assert [d.reason for d in story.kinds("rule", "cleared")] == [
        "spike cleared: its training session ended"
    ]
    assert (story.state.incident, story.state.machine) == (None, "warming")
    story.frames(2.0, times=9)
    assert story.state.machine == "warming"
    story.frames(2.0, times=40)
    assert story.state.machine == "nominal"
    assert len(story.kinds("incident", "opened")) == 1
    assert story.replayed() == story.recorded()


def test_a_request_and_a_verification_end_and_nothing_follows_them(begun):
    """The new training's frames neither fulfil it nor fail it; what stands is taken back."""
    asked = begun(mode="approve", then=8.0)
    another(asked)
    assert [d.data["what"] for d in asked.kinds("approval")] == ["withdrawn"]
    late = asked.say("approve", id="ask-1").data
    assert not late["ok"] and "withdrawn" in late["answer"]

    story = begun()
    story.frames(8.0, times=3)
    assert story.kinds("verify", "started")
    another(story)
    story.frames(2.0, times=200)

    assert not story.kinds("verify", "passed") and not story.kinds("verify", "failed")
    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    assert story.kinds("incident", "closed")[0].data["acted"] is True


def test_an_action_under_way_is_waited_for_and_nothing_follows(begun):
    story = begun(answer=lambda key: None)
    story.frames(8.0, 8.0)
    (waiting,) = story.actions()
    another(story)
    assert explain_withdrawal(story.policy, story.state)
    assert not story.kinds("incident", "closed")
    story.frames(8.0, times=3)
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["session_end:inc-1"]
    assert story.actions() == [waiting]
    before = len(messages(story))
    story.frames(60.0)
    assert [m["severity"] for m in messages(story)[before:]] == ["SEV0"], "told at once"
    assert story.actions() == [waiting]
    story.frames(8.0)
    story.finish(waiting, {"refused": True}, "its training is over")

    assert [d.data["action"]["id"] for d in story.kinds("abort")] == [waiting]
    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(41)
    assert not explain_withdrawal(story.policy, story.state)
    story.frames(8.0)
    assert story.actions() == [waiting, "inc-2/1/0-reach"]
    assert not [one for one in story.actions() if "undo" in one]


def test_trainings_that_pass_until_an_action_is_over_do_not_count(begun):
    story = begun(answer=lambda key: None)
    story.frames(8.0, 8.0)
    (waiting,) = story.actions()
    for segment in (9, 10):
        another(story, segment=segment)
        story.frames(2.0, times=30)
    story.finish(waiting, {"refused": True}, "its training is over")

    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(41)


def test_what_an_operator_asked_for_ends_with_it_but_for_stop(begun):
    """A stop is about the job; the rest was said of the training before, and is told not done."""
    story = begun(answer=lambda key: None)
    story.say("lr", value=0.5, key="k1")
    (waiting,) = story.actions()
    assert story.say("stop", key="k2").data["answer"].startswith("queued until")
    another(story)
    story.finish(waiting, {}, "rank 0 went away")

    assert any("command of anna failed" in told["title"] for told in messages(story))
    assert story.actions() == [waiting, "inc-2/1/0-stop"]
    another(story, segment=10)
    assert not explain_withdrawal(story.policy, story.state)
    story.finish("inc-2/1/0-stop", {"exit_code": 75})
    story.exit(-15)
    assert story.state.job.over
    assert messages(story)[-1]["title"] == "stopped by anna at step 39"


@pytest.mark.parametrize("error", [None, "a rank refused"])
def test_what_stands_is_taken_back_from_the_next_training(begun, error):
    story = begun(answer=lambda key: None)
    story.frames(8.0)
    story.finish("inc-1/1/0-reach", {"ack_step": story.step})
    another(story)
    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    assert not explain_withdrawal(story.policy, story.state)
    assert not story.kinds("incident", "closed")
    story.finish(UNDO, {}, error)
    story.frames(2.0, times=5)

    assert len(story.actions()) == 2
    assert len(story.kinds("incident", "closed")) == 1
    failed = [told for told in messages(story) if "undoing an action failed" in told["title"]]
    assert len(failed) == (error is not None)


@pytest.mark.parametrize(("pid", "segment"), [(1, 9), (2, 0)], ids=["exec", "another process"])
def test_another_program_starts_from_nothing_and_is_told_of_once(tell, pid, segment):
    """Its first steps are no jump back, what was seen is not its own, and rows may repeat."""
    story = tell(healthy=40)
    story.step = -1
    news = Announced(story.at_ns, 0, 1, pid, ("train_loss_raw",), segment)
    made = story.send(news)
    monitor = story.state.monitors[0]
    seen = list(monitor.codes), monitor.value("train_loss_raw"), monitor.step
    again = story.send(news)
    story.frames(2.0, times=5)

    assert seen == ([UNKNOWN] * 3, None, -1)
    assert [(d.kind, d.data.get("what", d.data.get("after"))) for d in made] == [
        ("note", "program-replaced"),
        ("state", "warming"),
    ]
    assert made[0].data["last_step"] == 39
    assert "another training of rank 0 started after step 39 in the same launch" in made[0].reason
    assert again == [] and not story.kinds("gap")


@pytest.mark.parametrize(("phase", "is_search"), [(4.0, True), (0.5, False)])
def test_a_loss_that_breaks_in_a_search_for_the_highest_rate_opens_nothing(tell, phase, is_search):
    story = tell(names=(*NAMES, "lr_phase"))
    for step in range(140):
        loss = 2.0 if step < 100 else 8.0 if step < 135 else math.nan
        story.rows({"train_loss_raw": loss, "lr_phase": phase})

    reasons = [decision.reason for decision in story.kinds("suppressed")]
    assert bool(story.kinds("incident", "opened")) is not is_search
    assert any("search for the highest learning rate" in text for text in reasons) is is_search
    assert story.state.phase.name == "early"
    assert story.replayed() == story.recorded()


def test_spikes_of_optimizers_that_take_turns_are_recorded_only(tell):
    """Each has a loss of its own. People hear of it once."""
    story = tell(healthy=100)
    story.notice("turns", "optimizers of different parameters take turns")
    story.notice("turns", "optimizers of different parameters take turns")
    story.frames(8.0, times=20)

    assert story.kinds("incident", "opened") == []
    told = [message for message in messages(story) if "take turns" in message["title"]]
    assert [message["severity"] for message in told] == ["SEV2"]
    assert any("take turns" in decision.reason for decision in story.kinds("suppressed"))
    assert story.replayed() == story.recorded()
