"""The next training in a process, or another program: what is open belongs to the one before."""

from __future__ import annotations

import pytest

from supervise.core.incidents import withdrawal
from supervise.core.model.events import Announced, Exited, Finished, Frame, Launched
from supervise.core.model.policy import Ladder, Runbook
from supervise.core.replay import decisions, record

from .conftest import NAN, SECOND, Story, Touch, Verify, messages

UNDO = "inc-1/1/undo-conftest"  # verbs are named as their modules are
OVER = "over: its training session ended after step {}; another one starts"


def another(story: Story, rank: int = 0, segment: int = 9):
    """The next training begins, and the segment before was read to its end."""
    return story.send(Announced(story.at_ns, rank, 1, 1, story.names, segment))


@pytest.fixture
def begun(tell):
    """Start a run that is well; what it came to is the same in a replay."""
    stories = []

    def make(**changes):
        story = tell(**changes)
        story.frames(2.0, times=40)
        stories.append(story)
        return story

    yield make
    for story in stories:
        again = [made for _, made in decisions(story.policy, enumerate(story.events))]
        assert again == [record(made) for made in story.log]


def test_an_incident_ends_with_its_training(begun):
    """People who were told of it are told so, and the new one is judged by itself."""
    story = begun(mode="shadow")
    story.frames(8.0, times=5)
    made = another(story)

    (closed,) = story.kinds("incident", "closed")
    assert closed in made
    assert (closed.incident, closed.severity) == ("inc-1", "SEV1")
    assert closed.reason == "closed: " + OVER.format(44)
    told = messages(story)[-1]
    assert (told["severity"], told["title"]) == ("SEV1", "inc-1: closed")
    assert OVER.format(44) in told["verdict"]
    assert [d.reason for d in story.kinds("rule", "cleared")] == [
        "spike cleared: its training session ended"
    ]
    assert (story.state.incident, story.state.machine) == (None, "warming")
    story.frames(2.0, times=9)
    assert story.state.machine == "warming"
    story.frames(2.0, times=40)
    assert story.state.machine == "nominal"
    assert len(story.kinds("incident", "opened")) == 1


@pytest.mark.parametrize("mode", ["shadow", "enforce"], ids=["at once", "behind an action"])
def test_the_loss_is_classified_as_at_the_end_of_the_job(begun, mode):
    """What the new one's loss is like is no evidence."""
    ended, story = (begun(mode=mode, answer=lambda key: None) for _ in range(2))
    for each in (ended, story):
        each.frames(8.0, times=5)
    ended.send(Exited(ended.at_ns, 0))
    another(story)
    story.frames(2.0, times=30)
    if mode == "enforce":
        story.send(Finished(story.at_ns, "inc-1/1/0-reach", True))
        story.send(Finished(story.at_ns, UNDO, True))
    story.frames(2.0, times=300)

    (closed,), (known,) = (each.kinds("incident", "closed") for each in (story, ended))
    assert closed.data["spike"] == known.data["spike"]
    assert closed.data["spike"]["questions"]
    assert not story.kinds("incident", "classified")


def test_the_same_rule_fires_in_the_next_training(begun):
    """It fires anew, and begins on the first level: here nothing was tried yet."""
    story = begun()
    story.frames(8.0, times=5)
    another(story)
    story.frames(2.0, times=5)
    story.frames(8.0, times=2)

    assert story.actions() == ["inc-1/1/0-reach", UNDO, "inc-2/1/0-reach"]
    assert [d.incident for d in story.kinds("incident", "opened")] == ["inc-1", "inc-2"]


def test_a_verification_ends_and_nothing_follows_it(begun):
    """The new training's frames neither fulfil it nor fail it; what stands is taken back."""
    story = begun()
    story.frames(8.0, times=3)
    assert story.kinds("verify", "started")
    another(story)
    story.frames(2.0, times=200)

    assert not story.kinds("verify", "passed") and not story.kinds("verify", "failed")
    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    assert [d.data["action"]["verb"] for d in story.kinds("intent")] == ["reach", "conftest"]
    assert story.kinds("incident", "closed")[0].data["acted"] is True


def test_a_probation_ends(begun):
    """It did not last as long as it takes to call it recovered."""
    story = begun()
    story.frames(8.0, *[2.0] * 8)
    assert story.state.machine == "probation"
    another(story)

    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(48)
    assert story.state.machine == "warming"


def test_a_request_is_withdrawn(begun):
    """A yes that comes late touches nothing."""
    story = begun(mode="approve")
    story.frames(8.0, times=2)
    another(story)

    assert [d.data["what"] for d in story.kinds("approval")] == ["withdrawn"]
    late = story.say("approve", id="ask-1").data
    assert not late["ok"] and "withdrawn" in late["answer"]
    assert story.actions() == []


def test_a_hold_ends(begun):
    """It kept hands off a training that is no more; of the next one nobody is reminded."""
    story = begun(ladder=Ladder(("soften", "hold"), reset_after_steps=500))
    story.frames(8.0, times=60)
    assert story.state.machine == "holding"
    another(story)

    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(99)
    assert story.state.machine == "warming"
    story.frames(2.0, times=20)
    story.tick(100 * 24 * 3600.0)
    assert not [told for told in messages(story) if "still held" in told["title"]]
    assert story.say("release").data["ok"] is False


def test_an_action_under_way_is_waited_for_and_nothing_follows(begun):
    """Only one is performed at a time: what fires meanwhile is an incident of its own then."""
    story = begun(answer=lambda key: None)
    story.frames(8.0, 8.0)
    (waiting,) = story.actions()
    another(story)
    assert withdrawal.withdrawn(story.policy, story.state)
    assert not story.kinds("incident", "closed")
    story.frames(8.0, times=3)
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["session_end:inc-1"]
    assert story.actions() == [waiting]
    story.send(Finished(story.at_ns, waiting, False, {"refused": True}, "its training is over"))

    assert [d.data["action"]["id"] for d in story.kinds("abort")] == [waiting]
    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(41)
    assert not withdrawal.withdrawn(story.policy, story.state)
    story.frames(8.0)
    assert story.actions() == [waiting, "inc-2/1/0-reach"]
    assert not [one for one in story.actions() if "undo" in one]


@pytest.mark.parametrize("ok", [True, False])
def test_whatever_it_came_to_is_on_record(begun, ok):
    """Done in its training, or not: of two steps the second is not asked for."""
    book = Runbook("soften", (Touch(), Touch(), Verify()), ("touch", "touch", "verify"))
    story = begun(answer=lambda key: None, runbooks={"soften": book, "back": book})
    story.frames(8.0, 8.0)
    another(story)
    story.send(Finished(story.at_ns, "inc-1/1/0-touch", ok, {}, None if ok else "it went away"))

    assert len(story.kinds("commit" if ok else "abort")) == 1
    assert story.actions() == ["inc-1/1/0-touch"]
    assert story.state.incident is None


def test_one_without_an_outcome_does_not_keep_it_open(begun):
    """In doubt, it is over all the same."""
    story = begun(answer=lambda key: None)
    story.frames(8.0, 8.0)
    another(story)
    story.tick(3600.0)
    story.send(Finished(story.at_ns, UNDO, True))  # it may have been done

    assert story.kinds("in_doubt")
    assert story.state.incident is None


def test_a_new_launch_goes_on_with_its_incident(begun):
    """A relaunch under way ended that other training, and went back to the one in trouble."""
    story = begun(answer=lambda key: None)
    story.frames(8.0, 8.0)
    another(story)
    story.send(Launched(story.at_ns, 7, 1))
    (waiting,) = story.actions()
    story.send(Finished(story.at_ns, waiting, True, {"ack_step": 41}))

    assert not story.kinds("incident", "closed")
    assert story.kinds("verify", "started")


def test_what_an_operator_asked_for_ends_with_it_but_for_stop(begun):
    """A stop is about the job; the rest was said of the training before, and is told not done."""
    story = begun(answer=lambda key: None)
    story.say("lr", value=0.5, key="k1")
    (waiting,) = story.actions()
    assert story.say("stop", key="k2").data["answer"].startswith("queued until")
    another(story)
    story.send(Finished(story.at_ns, waiting, False, {}, "rank 0 went away"))

    assert any("command of anna failed" in told["title"] for told in messages(story))
    assert story.actions() == [waiting, "inc-2/1/0-stop"]
    another(story, segment=10)
    assert not withdrawal.withdrawn(story.policy, story.state)
    story.send(Finished(story.at_ns, "inc-2/1/0-stop", True, {"exit_code": 75}))
    story.send(Exited(story.at_ns, -15))
    assert story.state.job.over
    assert messages(story)[-1]["title"] == "stopped by anna at step 39"


def test_ranks_begin_one_after_the_other(begun):
    """The one that leads ends the incident; one that follows ends its own, and no newer one."""
    story = begun(mode="shadow")
    story.send(Announced(story.at_ns, 1, 2, 2, story.names))
    story.frames(8.0, times=3)
    another(story)
    story.rank(1, 8.0, 8.0)  # the last of its old ones
    assert story.state.incident.case.rank == 1
    story.send(Announced(story.at_ns, 1, 2, 2, story.names, 9))
    story.frames(NAN, 8.0)
    assert story.state.incident.case.rank == 0
    story.send(Announced(story.at_ns, 1, 2, 2, story.names, 10))

    assert [d.incident for d in story.kinds("incident", "closed")] == ["inc-1", "inc-2"]
    assert story.state.incident.id == "inc-3"


def test_a_launch_is_no_other_training(begun):
    """A job that is started again goes on, and so does its incident."""
    story = begun(mode="shadow")
    story.frames(8.0, times=3)
    story.send(Launched(story.at_ns, 2, 1))
    story.send(Announced(story.at_ns, 0, 1, 2, story.names, 9))
    story.attempt = 1
    story.frames(8.0)

    assert not story.kinds("incident", "closed")
    assert story.state.incident is not None


def test_a_crash_behind_it_is_one_of_the_new_training(begun):
    """The end of the job with an action under way: the incident was of the one before."""
    story = begun(answer=lambda key: None, job={"on_crash": "back"})
    story.frames(8.0, 8.0)
    another(story)
    story.send(Frame(story.at_ns + SECOND, 0, 0, 42, (2.0, 1.0)))
    story.send(Exited(story.at_ns, 1))
    assert story.state.incident.id == "inc-1"
    story.send(Finished(story.at_ns, "inc-1/1/0-reach", False, {}, "the job has ended"))

    assert story.kinds("incident", "closed")[0].reason == "closed: " + OVER.format(41)
    assert [d.incident for d in story.kinds("incident", "opened")] == ["inc-1", "inc-2"]


def test_what_a_launcher_starts_again_behind_a_crash_is_the_same_training(begun):
    """A hold goes on, and so does the incident; people are told that it is another program."""
    story = begun(mode="shadow")
    story.frames(8.0, times=5)
    before = story.state.incident.id
    made = story.send(Announced(story.at_ns, 0, 1, 2, story.names, 9, again=True))

    assert [d.data["what"] for d in made] == ["program-replaced"]
    assert story.state.incident.id == before and not story.state.incident.deferred.session_end


def test_what_went_with_its_training_may_have_been_done(begun):
    """Only what the job has refused is known not to act on the next one."""
    story = begun(answer=lambda key: None)
    story.frames(8.0)
    another(story)
    story.send(Finished(story.at_ns, "inc-1/1/0-reach", False, {}, "rank 0 went away"))
    story.send(Finished(story.at_ns, UNDO, True))

    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    assert len(story.kinds("incident", "closed")) == 1


@pytest.mark.parametrize("error", [None, "a rank refused"])
def test_what_stands_is_taken_back_from_the_next_training(begun, error):
    """Before the incident is closed; where that fails people know, and it is not tried again."""
    story = begun(answer=lambda key: None)
    story.frames(8.0)
    story.send(Finished(story.at_ns, "inc-1/1/0-reach", True, {"ack_step": story.step}))
    another(story)
    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    assert not withdrawal.withdrawn(story.policy, story.state)
    assert not story.kinds("incident", "closed")
    story.send(Finished(story.at_ns, UNDO, error is None, {}, error))
    story.frames(2.0, times=5)

    assert len(story.actions()) == 2
    assert len(story.kinds("incident", "closed")) == 1
    failed = [told for told in messages(story) if "undoing an action failed" in told["title"]]
    assert len(failed) == (error is not None)


def test_an_undo_that_the_end_cut_short_is_asked_for_again(begun):
    """It went with the training, and may not have been done."""
    story = begun(answer=lambda key: None)
    story.frames(8.0)
    story.send(Finished(story.at_ns, "inc-1/1/0-reach", True, {"ack_step": story.step}))
    story.frames(8.0, times=31)  # it did not help
    assert story.actions() == ["inc-1/1/0-reach", UNDO]
    another(story)
    story.send(Finished(story.at_ns, UNDO, False, {}, "rank 0 went away"))
    assert story.actions() == ["inc-1/1/0-reach", UNDO, UNDO]
    story.send(Finished(story.at_ns, UNDO, True))

    assert len(story.kinds("incident", "closed")) == 1
    assert not [told for told in messages(story) if "failed" in told["title"]]
