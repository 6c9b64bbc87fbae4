"""Replay: same events, same decisions; and another supervisor that takes over."""

from __future__ import annotations

from supervise.core.model.decisions import Decision, plain
from supervise.core.model.events import Adopted, Finished
from supervise.core.replay import compare, decisions, record


def recorded(tell):
    """Return the policy of a story, its events, and its decisions as they are in the log."""
    story = tell(healthy=50)
    story.frames(8.0, 2.0, None, 2.0, float("nan"), times=3)
    story.tick()
    story.frames(99.0, times=2)
    story.frames(2.0, times=60)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
    ]
    return story.policy, events, log


def test_compare_finds_the_first_changed_decision(tell):
    """One changed number in one record is named; everything before it counts as compared."""
    policy, events, log = recorded(tell)
    assert compare(policy, events, log) == (len(log), [])
    log[5] = {**log[5], "reason": log[5]["reason"] + "!"}

    count, [difference] = compare(policy, events, log)

    assert (count, difference.seq) == (5, 5)


def test_a_journal_that_is_ahead_of_the_log_is_no_difference(tell):
    """A supervisor killed between journal and audit log leaves events without decisions."""
    policy, events, log = recorded(tell)
    log = [decision for decision in log if decision["event"] < len(events) - 30]

    assert compare(policy, events, log) == (len(log), [])


def test_a_missing_decision_is_a_difference(tell):
    policy, events, log = recorded(tell)
    del log[4]

    assert compare(policy, events, log)[1]


def test_non_finite_numbers_survive_json():
    made = Decision("note", 1, "x", data={"a": (float("nan"), float("inf"), -float("inf"), 1.5)})

    assert record(made)["data"] == {"a": ["NaN", "+Inf", "-Inf", 1.5]}
    assert plain({"k": (1, 2)}) == {"k": [1, 2]}


def test_a_journal_that_ends_before_the_log_is_incomplete(tell):
    """Its end was lost, or never written: told apart from another decision."""
    policy, events, log = recorded(tell)
    kept = int(log[7]["event"])

    count, [cut] = compare(policy, events[:kept], log)

    assert (cut.lacking, cut.event, cut.recorded) == (True, kept, log[count])
    assert int(log[count - 1]["event"]) < kept <= int(log[count]["event"])
    unwritten = [{**r, "event": -1} if int(r["event"]) >= kept else r for r in log]
    assert compare(policy, events[:kept], unwritten)[1][0].lacking
    log[2] = {**log[2], "reason": "another"}
    assert not compare(policy, events[:kept], log)[1][0].lacking


def test_a_log_without_the_last_decisions_before_the_journal_was_lost_is_incomplete(tell):
    """Neither could be written; then the log could be again, and speaks of no event."""
    policy, events, log = recorded(tell)
    last = int(log[7]["event"])
    left = [{**r, "event": -1} if int(r["event"]) > last else r for r in log]
    left = [r for r in left if r["event"] != last]

    count, [cut] = compare(policy, events[: last + 1], left)

    assert (cut.lacking, cut.event, left[count]["event"]) == (True, last + 1, -1)


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
