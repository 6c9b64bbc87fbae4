"""Another supervisor takes over: silence meanwhile means nothing, and all else stays."""

from __future__ import annotations

from supervise.core.model.events import Adopted, Finished
from supervise.core.replay import decisions, record

HOUR_NS = 3600 * 10**9


def adopt(story, after_ns=HOUR_NS, alive=True):
    story.at_ns += after_ns
    return story.send(Adopted(story.at_ns, 4711, alive, after_ns))


def test_it_is_on_record_and_replay_agrees(tell):
    story = tell(healthy=30)
    note, told = adopt(story)
    story.frames(8.0, times=5)

    assert "process 4711 took over" in note.reason
    assert (told.kind, told.severity) == ("notify_intent", "INFO")
    again = list(decisions(story.policy, enumerate(story.events)))
    assert [d for _, d in again] == [record(d) for d in story.log]


def test_an_action_under_way_gets_its_time_anew(tell):
    """Its outcome is waited for as long as if it had just begun; then it is in doubt."""
    story = tell(answer=lambda action_id: None, healthy=30, then=8.0)
    (waiting,) = story.actions()
    adopt(story)
    story.tick()
    assert not story.kinds("in_doubt")

    story.send(Finished(story.at_ns, waiting, True, {"ack_step": story.step}))
    assert [d.data["action"]["id"] for d in story.kinds("commit")] == [waiting]


def test_a_verification_does_not_fail_because_nobody_looked(tell):
    """No frame for an hour means nothing when nobody could have seen one."""
    story = tell(healthy=30, then=8.0)
    story.frames(2.0)
    adopt(story)
    story.tick()

    assert not story.kinds("verify", "failed")


def test_a_request_waits_on_and_can_be_answered(tell):
    """The time in which nobody could have taken an answer does not count against it."""
    story = tell(mode="approve", healthy=50, then=8.0)
    adopt(story)
    story.tick()
    assert story.state.approvals.pending.id == "ask-1"

    assert story.say("approve", id="ask-1").data["ok"]
    assert len(story.actions()) == 1
