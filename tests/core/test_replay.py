"""What everything rests on: same events, same decisions; cut anywhere and resume."""

from __future__ import annotations

from supervise.core.model.decisions import Decision
from supervise.core.model.json_form import plain
from supervise.core.replay import compare, decisions, record


def full_story(tell):
    story = tell(healthy=50)
    story.frames(8.0, 2.0, None, 2.0, float("nan"), times=3)
    story.tick()
    story.frames(99.0, times=2)
    story.frames(2.0, times=60)
    return story


def test_compare_finds_the_first_changed_decision(tell):
    """One changed number in one record is named; everything before it counts as compared."""
    story = full_story(tell)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
    ]
    assert compare(story.policy, events, log) == (len(log), [])
    log[5] = {**log[5], "reason": log[5]["reason"] + "!"}

    count, [difference] = compare(story.policy, events, log)

    assert (count, difference.seq) == (5, 5)


def test_a_journal_that_is_ahead_of_the_log_is_no_difference(tell):
    """A supervisor killed between journal and audit log leaves events without decisions."""
    story = full_story(tell)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
        if n < len(events) - 30
    ]

    assert compare(story.policy, events, log) == (len(log), [])


def test_a_missing_decision_is_a_difference(tell):
    story = full_story(tell)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
    ]
    del log[4]

    assert compare(story.policy, events, log)[1]


def test_non_finite_numbers_survive_json():
    made = Decision("note", 1, "x", data={"a": (float("nan"), float("inf"), -float("inf"), 1.5)})

    assert record(made)["data"] == {"a": ["NaN", "+Inf", "-Inf", 1.5]}
    assert plain({"k": (1, 2)}) == {"k": [1, 2]}


def test_a_journal_that_ends_before_the_log_is_incomplete(tell):
    """Its end was lost, or never written: told apart from another decision."""
    story = full_story(tell)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
    ]
    kept = int(log[7]["event"])

    count, [cut] = compare(story.policy, events[:kept], log)

    assert (cut.lacking, cut.event, cut.recorded) == (True, kept, log[count])
    assert int(log[count - 1]["event"]) < kept <= int(log[count]["event"])
    unwritten = [{**r, "event": -1} if int(r["event"]) >= kept else r for r in log]
    assert compare(story.policy, events[:kept], unwritten)[1][0].lacking
    log[2] = {**log[2], "reason": "another"}
    assert not compare(story.policy, events[:kept], log)[1][0].lacking


def test_a_log_without_the_last_decisions_before_the_journal_was_lost_is_incomplete(tell):
    """Neither could be written; then the log could be again, and speaks of no event."""
    story = full_story(tell)
    events = list(enumerate(story.events))
    log = [
        {"seq": i, "event": n, "actor": "engine", **d}
        for i, (n, d) in enumerate(decisions(story.policy, events))
    ]
    last = int(log[7]["event"])
    left = [{**r, "event": -1} if int(r["event"]) > last else r for r in log]
    left = [r for r in left if r["event"] != last]

    count, [cut] = compare(story.policy, events[: last + 1], left)

    assert (cut.lacking, cut.event, left[count]["event"]) == (True, last + 1, -1)
