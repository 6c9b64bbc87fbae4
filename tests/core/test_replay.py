"""Replay: same events, same decisions, cut anywhere; and another supervisor that takes over."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice

import pytest

from supervise.core import compare_decisions, initial_state
from supervise.core import step as step_engine
from supervise.core.model import (
    Adopted,
    Gap,
    Inhibit,
    LateFrame,
    decision_from_record,
    decision_record,
)
from supervise.detectors import Absence, Join, Nonfinite, Ratio, RobustZ, Sequence

from .conftest import NAN, above, replay_decisions, rules_of


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
        for i, (n, d) in enumerate(replay_decisions(story.policy, events))
    ]
    return story.policy, events, log


def test_compare_finds_the_first_changed_decision(tell):
    policy, events, log = recorded(tell)
    assert compare_decisions(policy, events, log) == (len(log), [])
    log[5] = {**log[5], "reason": log[5]["reason"] + "!"}

    count, [difference] = compare_decisions(policy, events, log)

    assert (count, difference.seq) == (5, 5)
    del log[4]
    assert compare_decisions(policy, events, log)[0] == 4


def test_a_journal_that_is_ahead_of_the_log_is_no_difference(tell):
    """A supervisor killed between journal and audit log leaves events without decisions."""
    policy, events, log = recorded(tell)
    log = [decision for decision in log if decision["event"] < len(events) - 30]

    assert compare_decisions(policy, events, log) == (len(log), [])


def test_every_record_is_read_back_as_the_decision_that_it_holds(tell):
    _, _, log = recorded(tell)

    for entry in log:
        assert entry.items() >= decision_record(decision_from_record(entry)).items()


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", 1.5, None])
def test_a_number_without_a_form_in_json_is_read_back(tell, number):
    _, _, log = recorded(tell)
    opened = next(r for r in log if r["data"].get("what") == "opened")
    slow = {"since": 3, "before_s": 1.0, "now_s": number, "part": "", "part_s": 0.0}
    entry = {**opened, "data": {**opened["data"], "slow_step": slow}}
    if number is None:
        with pytest.raises(ValueError, match="now_s"):
            decision_from_record(entry)
        return

    again = decision_from_record(entry)

    assert repr(again.slow_step.now_s) == str(number).lower().replace("+", "")


def test_a_withdrawal_of_before_its_cause_was_a_fact_is_read_back(tell):
    _, _, log = recorded(tell)
    entry = {**log[0], "kind": "abort", "data": {"what": "withdrawn", "runbook": "soften"}}

    assert decision_from_record(entry).cause == ""


def test_a_journal_that_ends_before_the_log_is_incomplete(tell):
    """Its end was lost, or never written: told apart from another decision."""
    policy, events, log = recorded(tell)
    kept = int(log[7]["event"])

    count, [cut] = compare_decisions(policy, events[:kept], log)

    assert (cut.lacking, cut.event, cut.recorded) == (True, kept, log[count])
    assert int(log[count - 1]["event"]) < kept <= int(log[count]["event"])
    unwritten = [{**r, "event": -1} if int(r["event"]) >= kept else r for r in log]
    assert compare_decisions(policy, events[:kept], unwritten)[1][0].lacking
    log[2] = {**log[2], "reason": "another"}
    assert not compare_decisions(policy, events[:kept], log)[1][0].lacking


def test_a_log_without_the_last_decisions_before_the_journal_was_lost_is_incomplete(tell):
    policy, events, log = recorded(tell)
    last = int(log[7]["event"])
    left = [{**r, "event": -1} if int(r["event"]) > last else r for r in log]
    left = [r for r in left if r["event"] != last]

    count, [cut] = compare_decisions(policy, events[: last + 1], left)

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
    assert story.replayed() == story.recorded()


def test_the_time_in_which_nobody_looked_counts_against_nothing(tell):
    acting = tell(answer=lambda action_id: None, healthy=30, then=8.0)
    verifying, asking = tell(healthy=30, then=8.0), tell(mode="approve", healthy=50, then=8.0)
    verifying.frames(2.0)
    for story in (acting, verifying, asking):
        adopt(story)
        story.tick()

    assert not acting.kinds("in_doubt") and not verifying.kinds("verify", "failed")
    (waiting,) = acting.actions()
    acting.finish(waiting, {"ack_step": acting.step})
    assert [d.data["action"]["id"] for d in acting.kinds("commit")] == [waiting]
    assert asking.say("approve", id="ask-1").data["ok"]
    assert len(asking.actions()) == 1


def everything(tell):
    """A story with every kind of event and nearly every kind of decision in it."""
    detectors = {
        "high": above("train_loss_raw", 5.0),
        "huge": above("train_loss_raw", 50.0),
        "z": RobustZ("grad_global_norm", gt=6.0, window=32, min_=16),
        "x": Ratio("train_loss_raw", fast=1, ref=16, gt=1.4),
        "chain": Sequence(steps=("z", "x"), within=5),
        "either": Join(any=("z", "x"), within=2),
        "bad": Nonfinite(("train_loss_raw", "grad_global_norm")),
        "stalled": Absence(signal="step", after={"min": 60.0}),
        "rank": above("rank", 5.0),
    }
    acting = {"high": ("SEV1", "soften"), "huge": ("SEV0", "back")}
    rules = [(name, *acting.get(name, ("SEV2",))) for name in detectors]
    made = rules_of(detectors, *rules, cooldown_steps=30, phases={"late": "SEV1"})
    made["inhibit"] = (Inhibit(mute=("high",), by_rule="huge"),)
    story = tell(**made, blind_after_steps=20, hold_reminder_s=600.0)
    story.frames(2.0, 2.1, 1.9, times=20)
    for step in (25, 50, 45, 55):
        story.send(LateFrame(story.at_ns, "savepoint", 0, step, {"rank": 9.0}))
    story.notice("collector-off", "the optimizer collector is off")
    story.frames(8.0, 2.0, 2.1, 1.9)
    story.frames(2.0, 2.1, times=20)
    story.send(Gap(story.at_ns, 0, 70, 5))
    story.frames(2.0, 2.1, times=3, grad=50.0)
    story.frames(NAN, None, 2.0, times=4)
    story.frames(None, times=30)
    story.tick()
    story.frames(2.0, 2.1, times=20)
    story.frames(99.0, times=40)
    story.tick(1000.0)
    story.say("release", "ann")
    story.frames(99.0, times=2)
    story.attempt += 1
    story.step -= 30
    story.frames(2.0, 2.1, times=40)
    story.finish("inc-9/1/0-touch")
    story.exit(-9)
    return story


def test_a_run_can_be_cut_before_any_event(tell):
    """Fold, copy, go on: the same decisions byte for byte, wherever the supervisor was killed."""
    story = everything(tell)
    whole = story.recorded()
    kinds = {d["kind"] for d in whole}
    wanted = "rule incident state suppressed intent commit verify notify_intent gap blind note"
    assert kinds >= set(wanted.split())
    state, done = initial_state(story.policy), 0
    for i, event in enumerate(story.events):
        if i % 5 == 0:
            rest = replay_decisions(story.policy, enumerate(story.events[i:]), deepcopy(state))
            ahead = [made for _, made in islice(rest, 8)]
            assert ahead == whole[done : done + len(ahead)], f"cut before event {i}"
        state, made = step_engine(story.policy, state, event)
        done += len(made)
    assert done == len(whole)
