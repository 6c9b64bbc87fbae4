"""Another policy in the middle of a run: what keeps its memory, what survives, what starts anew."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from supervise.core import compare_decisions, initial_state, policy_differences
from supervise.core import step as step_engine
from supervise.core.model import (
    Budget,
    Inhibit,
    JobSettings,
    Ladder,
    PolicyChanges,
    RelaunchSettings,
    Reloaded,
    decision_record,
)
from supervise.detectors import Absence, Join, Nonfinite, Ratio, RobustZ, Sequence, Threshold, Trend

from .conftest import NAN, Story, above, one_rule, policy, rule_on


def detectors():
    return {
        "z": RobustZ("train_loss_raw", gt=6.0, window=16, min_=8, freeze=8),
        "x": Ratio("train_loss_raw", fast=1, ref=16, gt=1.4, clear=1.2, freeze=16),
        "up": Threshold("train_loss_raw", gt=5.0, m_of_n=(2, 3)),
        "bad": Nonfinite(("train_loss_raw",)),
        "drift": Trend("train_loss_raw", window=16, slope_per_1k_gt=50.0),
        "g": RobustZ("grad_global_norm", transform="log", window=16, min_=8, freeze=8),
        "both": Join(all=("z", "g"), within=3),
        "then": Sequence(("g", "z"), within=4),
        "still": Absence("step", {"min": 30.0}),
    }


def rich(**changes):
    found = detectors()
    rules = (
        rule_on(found, "z", "SEV2", keep_steps=5),
        rule_on(found, "up", "SEV1", "soften", cooldown_steps=20),
        rule_on(found, "bad", "SEV0", "back", for_steps=2),
        rule_on(found, "both", "SEV1", "soften"),
        rule_on(found, "then", "SEV2"),
        rule_on(found, "drift", "SEV2"),
        rule_on(found, "x", "SEV2", unknown="breach"),
        rule_on(found, "still", "SEV1"),
    )
    inhibit = (Inhibit(mute=("z",), by_rule="bad"),)
    return policy(**{"detectors": found, "rules": rules, "inhibit": inhibit} | changes)


def reloaded(policy, at_ns=0, before="sha256:0", changes=None, refused=None):
    changes, new = changes or PolicyChanges(), (policy.digest, policy.name, policy.mode)
    return Reloaded(at_ns, "anna", *new, before, changes, refused)


def follow(policy, events, at=None, new=None):
    """Return the decisions of all events but the reload, taken before event number `at`."""
    state, found = initial_state(policy), []
    for number, event in enumerate(events):
        if number == at:
            policy = new
            state, _ = step_engine(new, state, reloaded(new, event.at_ns))
        state, made = step_engine(policy, state, event)
        found += [decision_record(d) for d in made]
    return found


LOSS = st.sampled_from([2.0, 2.1, 1.9, 2.05, 4.0, 9.0, NAN, None])
GRAD = st.sampled_from([1.0, 1.1, 0.9, 8.0, None])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(LOSS, GRAD), min_size=20, max_size=70),
    calm=st.integers(0, 40),
    part=st.floats(0.0, 1.0),
)
def test_the_same_policy_again_changes_no_decision(rows, calm, part):
    """Wherever it comes: in a window, between intent and outcome, in a hold."""
    base = rich()
    story = Story(base)
    story.frames(*[2.0 + 0.01 * (i % 5) for i in range(calm)])
    for loss, grad in rows:
        story.frames(loss, grad=grad)
        if grad is None:
            story.tick(40.0)
    again = rich(digest="sha256:1")
    at = int(part * (len(story.events) - 1))

    assert follow(base, story.events, at, again) == story.recorded()


def warm(policy, steps=40):
    story = Story(policy)
    story.frames(*[2.0 + 0.01 * (i % 5) for i in range(steps)])
    return story


def load(story, policy, **more):
    story.policy = policy
    return story.send(reloaded(policy, story.at_ns, **more))


def test_a_changed_detector_starts_anew_and_its_neighbour_does_not(tell):
    base = rich()
    story = warm(base)
    changed = {**detectors(), "g": RobustZ("grad_global_norm", gt=7.0, window=16, min_=8, freeze=8)}
    new = rich(detectors=changed, digest="sha256:1")

    made = load(story, new, changes=policy_differences(base, new, base))

    monitor = story.state.monitors[0]
    assert monitor.watches[0].numbers()["samples"] == 16
    assert monitor.watches[5].numbers()["samples"] == 0
    [told] = [d for d in made if d.kind == "policy_load"]
    assert told.data["reset"] == {"detectors": ["both", "g", "then"], "rules": ["both", "then"]}
    assert told.data["changes"] == {"detectors": {"changed": ["g"]}}
    assert (told.data["before"], told.data["after"]) == ("sha256:0", "sha256:1")
    assert "detectors ~g" in told.reason


def test_a_new_rule_fires_and_a_removed_one_is_forgotten(tell):
    base = rich()
    story = warm(base)
    story.frames(9.0, times=2)
    assert story.state.monitors[0].rules[1].firing
    found = {**detectors(), "low": Threshold("grad_global_norm", gt=0.5)}
    rules = (*(r for r in rich().rules if r.id != "up"), rule_on(found, "low", "SEV2"))
    made = load(story, rich(detectors=found, rules=rules, digest="sha256:1"))

    assert [d.rule for d in made if d.data.get("what") == "cleared"] == ["up"]
    story.frames(2.0)
    assert [d.rule for d in story.kinds("rule", "fired")][-1] == "low"


def test_no_reload_refunds_a_budget(tell):
    """Two of two were spent: also after a reload, and under a class that is new to the policy."""
    budgets = {"touch": Budget(2, per=1000)}
    rule = one_rule(above("train_loss_raw", 50.0), "SEV0", "back")
    story = tell(budgets=budgets, ladder=Ladder(("back", "hold")), **rule)
    for _ in range(2):
        story.frames(2.0, times=40)
        story.frames(99.0)
        story.frames(2.0, times=40)
        load(story, replace(story.policy, budgets={"all": Budget(2, per=1000)}))
    assert len(story.actions()) == 2

    story.state.history.last_level = None
    story.frames(2.0, times=600)
    story.frames(99.0)

    assert len(story.actions()) == 2
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "budget:all"


def test_a_runbook_in_progress_ends_as_it_began(tell):
    base = policy()
    soften = replace(base.runbooks["soften"], if_it_fails="back")
    books = {**base.runbooks, "soften": soften}
    story = tell(answer=lambda action_id: None, runbooks=books, healthy=20, then=8.0)
    waiting = story.state.incident.run.intent.action_id
    assert waiting == "inc-1/1/0-reach"

    fewer = {"soften": replace(base.runbooks["back"], name="soften")}
    changes = {"runbooks": fewer, "rules": base.rules[:2], "ladder": Ladder(("soften",))}
    made = load(story, replace(base, **changes))

    assert [d.data["what"] for d in made if d.kind == "note"] == ["if-it-fails"]
    assert story.state.incident.run.intent.action_id == waiting
    story.answer = None
    story.finish(waiting, {}, "no")
    assert story.state.machine == "holding"
    assert [a for a in story.actions() if a.endswith("-touch")] == []


def test_a_rule_that_may_act_from_now_on_has_to_fire_again(tell):
    """Promotion from shadow: it acts on its next breach, not on an old one."""
    story = tell(mode="shadow", healthy=20, then=8.0)
    assert story.actions() == []
    load(story, replace(story.policy, mode="enforce"))
    assert story.actions() == []
    story.frames(8.0)

    assert story.actions() == ["inc-1/1/0-reach"]


def test_a_reload_may_allow_a_relaunch_and_forbid_it_again(tell):
    story = tell(healthy=20)
    base = story.policy
    for job, is_possible in ((JobSettings(relaunch=RelaunchSettings()), True), (base.job, False)):
        load(story, replace(base, job=job))
        assert ("relaunch" not in story.state.job.unavailable) is is_possible


def test_a_refused_reload_changes_nothing_and_is_told(tell):
    story = tell(healthy=20)
    before = deepcopy(story.state)
    made = load(story, story.policy, refused="mine.yaml:3:1: no such key")

    assert [d.kind for d in made] == ["policy_load", "notify_intent"]
    assert "mine.yaml:3:1" in made[0].reason
    assert made[1].severity == "SEV2"
    assert story.state.monitors[0].rules[0].code == before.monitors[0].rules[0].code
    assert story.state.monitors[0].policy is story.policy


def test_replay_follows_a_reload(tell):
    """With the policies at hand it is the same; without them the first difference is shown."""
    story = warm(rich())
    first = story.policy
    new = replace(first, rules=first.rules[1:], digest="sha256:1")
    load(story, new, changes=policy_differences(first, new, first))
    story.frames(9.0, 2.0, times=10)
    story.say("ack", "anna")
    log, numbers = [], {}
    state, policy = initial_state(first), first
    for number, event in enumerate(story.events):
        policy = new if isinstance(event, Reloaded) else policy
        state, made = step_engine(policy, state, event)
        log += [
            {"seq": len(log) + i, "event": number, "actor": "engine", **decision_record(d)}
            for i, d in enumerate(made)
        ]
        numbers[number] = len(log)
    events = list(enumerate(story.events))

    assert compare_decisions(first, events, log, {"sha256:1": new}.__getitem__) == (len(log), [])
    assert compare_decisions(first, events, log)[1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"mode": "shadow"}, {"mode": ["enforce", "shadow"]}),
        ({"probation_steps": 7}, {"settings": ["probation_steps"]}),
        (
            {"budgets": {"touch": Budget(1)}},
            {"budgets": {"removed": ["all"], "changed": ["touch"]}},
        ),
        ({"savepoints": {"every": 5}}, {"settings": ["savepoints"], "restart": ["savepoints"]}),
        ({"sampling": {"weights": 9}}, {"settings": ["sampling"], "restart": ["sampling"]}),
    ],
)
def test_what_is_different_is_named(change, found):
    old = policy()

    assert to_builtins(policy_differences(old, policy(**change), old)) == found
    worse = replace(old.rules[0], location="b.yaml:9:1", severity="SEV0")
    new = replace(policy(), rules=(worse, *policy().rules[1:]))  # other functions
    assert to_builtins(policy_differences(old, new, old)) == {"rules": {"changed": ["spike"]}}
