"""The engine, told as stories: frames in, decisions out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.core.model import (
    Announced,
    Beat,
    Budget,
    Exited,
    Finished,
    Gap,
    Ladder,
    Notice,
    OperatorCommand,
    Rule,
    Runbook,
    Tick,
)
from supervise.detectors import Absence, RobustZ

from .conftest import above, one_rule, rule_on


def test_a_quiet_run_decides_nothing_but_its_states(tell):
    story = tell(healthy=100)

    assert [(d.kind, d.data.get("after")) for d in story.log] == [
        ("state", "warming"),
        ("state", "nominal"),
    ]


def test_a_spike_is_softened_verified_and_closed(tell):
    """One incident, one action, verified by quiet frames, closed after probation."""
    story = tell(healthy=50)
    story.frames(8.0, times=3)
    story.frames(2.0, times=60)

    assert story.actions() == ["inc-1/1/0-reach"]
    assert [d.data["what"] for d in story.kinds("incident")] == ["opened", "closed"]
    assert [d.data["what"] for d in story.kinds("verify")] == ["started", "passed"]
    states = [d.data["after"] for d in story.kinds("state")]
    assert states == ["warming", "nominal", "acting", "probation", "nominal"]
    assert story.state.incident is None


def test_the_decision_carries_its_numbers(tell):
    """Value and threshold of the breaching detector are in the record and in the sentence."""
    story = tell(healthy=50, then=8.0)

    fired = story.kinds("rule", "fired")[0]
    numbers = {"code": "BREACH", "value": 8.0, "threshold": 5.0, "metric": "train_loss_raw"}
    assert fired.data["numbers"]["high"].items() >= numbers.items()
    assert "train_loss_raw 8 (limit 5)" in fired.reason
    assert story.kinds("incident", "opened")[0].data["band"]["level"] == 2.0


def test_a_verification_that_fails_climbs_the_ladder(tell):
    """The loss stays up: soften, taken back, then back, then hold; never a third force."""
    story = tell(healthy=50)
    story.frames(8.0, times=100)

    assert story.actions() == ["inc-1/1/0-reach", "inc-1/1/undo-untouch", "inc-1/2/0-touch"]
    assert story.state.machine == "holding"
    assert story.kinds("incident", "held")
    story.frames(8.0, times=200)
    assert len(story.actions()) == 3


def test_shadow_plans_and_touches_nothing(tell):
    story = tell(mode="shadow", healthy=50)
    story.frames(8.0, times=3)
    story.frames(2.0, times=60)

    assert story.kinds("intent") == []
    would = story.kinds("suppressed")[0]
    assert would.data["suppressed_by"] == "mode:shadow"
    assert [s["verb"] for s in would.data["would"]] == ["reach", "verify"]
    assert story.state.machine == "nominal"


def test_an_advisory_rule_notifies_and_moves_to_suspect(tell):
    """SEV2 changes nothing in training and clears by itself."""
    story = tell(healthy=50)
    story.frames(2.0, grad=20.0)
    assert story.state.machine == "suspect"
    story.frames(2.0, times=30)

    assert story.kinds("intent") == []
    assert story.state.machine == "nominal"
    assert [d.data["what"] for d in story.kinds("incident")] == ["opened", "closed"]


def test_a_spent_budget_holds_and_pages(tell):
    story = tell(
        budgets={"touch": Budget(1, per=1000), "all": Budget(9, per=1000)},
        healthy=50,
        then=99.0,
    )
    story.frames(2.0, times=40)
    assert story.state.machine == "nominal"
    story.frames(99.0)

    assert story.actions() == ["inc-1/1/0-touch"]
    assert story.state.machine == "holding"
    spent = [d for d in story.kinds("suppressed") if d.data["suppressed_by"] == "budget:touch"]
    assert spent and "1 of 1" in spent[0].reason
    assert "person is needed" in story.kinds("notify_intent")[-1].data["message"]["title"]


def test_holding_stays_until_a_person_releases_it(tell):
    story = tell(ladder=Ladder(("soften", "hold")), healthy=50)
    story.frames(8.0, times=60)
    assert story.state.machine == "holding"
    story.frames(2.0, times=30)
    story.frames(99.0)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] in ("holding", "inhibit:gone")
    story.send(OperatorCommand(story.at_ns, "anna", "release"))

    assert story.state.machine == "warming"
    assert story.kinds("incident", "closed")[-1].reason.startswith("closed: released by anna")


def test_absent_values_are_unknown_and_long_unknown_is_blind(tell):
    """A metric that was there and went missing is an incident of its own, not health."""
    story = tell(blind_after_steps=30, healthy=50)
    story.frames(None, times=40)

    blind = story.kinds("blind")
    assert [d.rule for d in blind] == []  # judged on ticks, not on frames
    story.tick()
    blind = story.kinds("blind")
    assert {d.rule for d in blind} == {"spike", "gone"}
    assert {d.severity for d in blind} == {"SEV1", "SEV0"}
    assert story.state.machine == "suspect"
    story.tick()
    assert len(story.kinds("blind")) == 2


def test_a_metric_that_is_sampled_does_not_go_missing_between_samples(tell):
    story = tell(blind_after_steps=30)
    for _ in range(4):
        story.frames(2.0)
        story.frames(None, times=60)
        story.tick()

    assert story.kinds("blind") == []


def test_a_metric_that_becomes_rarer_is_not_missing(tell):
    """A collector may stretch its interval while a detector still gathers its samples."""
    story = tell(
        **one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV2"), runbooks={}, blind_after_steps=30
    )
    story.frames(2.0, times=4)
    for _ in range(10):
        story.frames(2.0)
        story.frames(None, times=15)
        story.tick()

    assert story.kinds("blind") == []
    story.frames(None, times=40)
    story.tick()
    assert [d.rule for d in story.kinds("blind")] == ["only"]


def test_a_metric_that_never_existed_makes_its_rule_inactive(tell):
    story = tell(blind_after_steps=30)
    story.send(Announced(0, 0, 1, 1, ("other", "grad_global_norm")))
    story.frames(1.0, times=100)
    story.tick()

    assert story.kinds("blind") == []


def test_any_rank_can_trip_a_rule(tell):
    """Rank 1 alone breaches: the rule fires and names the rank."""
    story = tell(names=("residual_rms", "x"), **one_rule(above("residual_rms", 5.0), "SEV1"))
    for rank in (0, 1):
        story.send(Announced(0, rank, 2, rank + 1, story.names))
    for step in range(50):
        story.frames(2.0)
        story.rank(1, 8.0 if step == 49 else 2.0)

    assert story.kinds("rule", "fired")[0].data["rank"] == 1


def test_a_job_that_ends_closes_everything(tell):
    story = tell(healthy=50, then=8.0)
    story.send(Exited(story.at_ns, -9))

    assert story.state.machine == "halted"
    assert (
        story.kinds("incident", "closed")[0].reason
        == "closed: the job ended with signal 9 (SIGKILL)"
    )
    assert "signal 9" in story.kinds("notify_intent")[-1].data["message"]["title"]


def test_a_new_baseline_is_no_recovery(tell):
    """A level that stays up becomes the baseline; its incident ends late, and not as recovered."""
    story = tell(**one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV2"))
    story.frames(2.0, 2.1, 1.9, times=60)
    story.frames(5.0, 5.1, 4.9, times=60)
    assert len(story.kinds("rebaseline")) == 1
    assert not story.kinds("incident", "closed")  # its loss may still come back
    story.frames(5.0, 5.1, 4.9, times=60)

    closed = story.kinds("incident", "closed")
    assert closed
    assert "not recovered" in closed[0].reason


@pytest.mark.parametrize("kind", ["measurement-changed", "collector-off"])
def test_a_metric_that_is_measured_in_another_way_has_a_new_baseline(tell, kind):
    """Of the rank that says so, and of no other metric; one that is not measured is not missing."""

    def spikes(*changed: str) -> list[str]:
        watch = {name: RobustZ(name, gt=6.0) for name in ("train_loss_raw", "grad_global_norm")}
        rules = tuple(rule_on(watch, name, "SEV2") for name in watch)
        story = tell(detectors=watch, rules=rules, inhibit=())
        story.frames(2.0, 2.1, 1.9, times=60)
        if changed:
            data = {"metrics": list(changed)}
            story.send(Notice(story.at_ns, kind, "a sample", 0, 180, data))
        story.frames(4.0, grad=2.0, times=5)
        return sorted(d.rule or "" for d in story.kinds("rule", "fired"))

    both = ["grad_global_norm", "train_loss_raw"]
    assert spikes() == spikes("other") == both
    assert spikes("grad_global_norm") == ["train_loss_raw"]


SECOND = 1_000_000_000


def hang_story(tell, **changes):
    touch = tell().policy.runbooks["back"].steps[0]
    base = tell().policy
    detectors = {**base.detectors, "hung": Absence("step", {"min": 30.0})}
    rules = (*base.rules, Rule("stuck", lambda codes: codes[3], "hung", ("hung",), "SEV0", "end"))
    runbooks = {**base.runbooks, "end": Runbook("end", (touch,), ("end",))}
    return tell(detectors=detectors, rules=rules, runbooks=runbooks, **changes)


def beat(story, phase="step"):
    for _ in range(40):
        story.at_ns += SECOND
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, phase),)))


def test_silence_counts_only_while_the_probe_is_known_to_be_there(tell):
    """No beat, a probe that is off, a job that is exiting: nothing is stopped for it."""
    story = hang_story(tell)
    story.frames(2.0, times=50)
    story.tick()
    beat(story, phase="exiting")
    story.send(Notice(story.at_ns, "probe-off", "it failed", rank=0))
    beat(story)

    assert story.actions() == []
    assert story.state.incident is None


def test_a_hang_is_answered_whatever_was_tried_before(tell):
    """A runbook off the ladder runs after a recovery, on probation, and in a hold."""
    for recovered in (8, 60):
        story = hang_story(tell)
        story.frames(2.0, times=50)
        story.frames(8.0)
        story.frames(2.0, times=recovered)
        beat(story)
        assert story.actions()[-1].endswith("0-end"), story.actions()

    story = hang_story(tell, ladder=Ladder(("soften", "hold")))
    story.frames(2.0, times=50)
    story.frames(8.0, times=60)
    assert story.state.machine == "holding"
    beat(story)
    assert story.actions()[-1].endswith("0-end")


def test_a_shadow_rule_does_not_swallow_one_that_acts(tell):
    """SEV0 in shadow and SEV1 in enforce in one frame: one is planned, the other runs."""
    rules = list(tell().policy.rules)
    rules[2] = replace(rules[2], mode="shadow")
    story = tell(rules=tuple(rules), inhibit=(), healthy=50, then=99.0)

    assert story.actions() == ["inc-1/1/0-reach"]
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["mode:shadow"]


def test_a_new_trouble_on_probation_gets_its_own_runbook(tell):
    """It asks for a higher level than was tried: that one, and not the one above it."""
    story = tell(healthy=50, then=8.0)
    story.frames(2.0, times=8)
    story.frames(99.0)

    assert story.actions() == ["inc-1/1/0-reach", "inc-1/2/0-touch"]
    assert story.state.machine == "acting"


def test_ranks_without_rank_0_have_a_pace(tell):
    """A second node sees ranks 8 and 9 only; budgets and probation go on all the same."""
    story = tell()
    for rank in (8, 9):
        story.send(Announced(0, rank, 16, rank, story.names))
    for step in range(50):
        story.step = step
        story.rank(8, 2.0)
        story.rank(9, 2.0)

    assert (story.state.frame_count, story.state.step, story.state.machine) == (50, 49, "nominal")


def test_a_long_warm_up_is_not_blindness(tell):
    """Six seconds a step: 64 samples take longer than the limit, and nothing went missing."""
    story = tell(**one_rule(RobustZ("train_loss_raw", gt=6.0), "SEV1"))
    for _ in range(60):
        story.frames(2.0)
        story.tick(6)

    assert story.kinds("blind") == []


def test_blindness_is_an_incident_and_ends(tell):
    story = tell(blind_after_steps=30, healthy=50)
    story.frames(None, times=40)
    story.tick()
    assert story.state.incident is not None
    story.frames(2.0, times=40)

    assert story.state.incident is None
    assert story.state.machine == "nominal"


def test_a_verification_waits_for_the_effect(tell):

    def answer(action_id):
        return Finished(0, action_id, True, {"attempt": 1, "step": 40})

    story = tell(answer=answer, healthy=50, then=8.0)
    story.frames(2.0, times=40)

    assert story.kinds("verify", "passed") == []
    assert "effect" in story.kinds("verify", "failed")[0].reason


def test_a_relapse_that_never_cleared_is_seen_on_probation(tell):
    """`keep` holds the rule firing, so there is no edge; the breach itself counts."""
    rules = list(tell().policy.rules)
    rules[0] = replace(rules[0], keep_steps=500)
    story = tell(rules=tuple(rules), healthy=50, then=8.0)
    story.frames(2.0, times=8)
    assert story.state.machine == "probation"
    story.frames(8.0, times=3)

    assert story.actions()[-1].endswith("0-touch")


def test_a_muted_rule_speaks_when_its_inhibitor_is_gone(tell):
    """SEV0 cleared, SEV1 still in breach: it is enlisted then."""
    story = tell(mode="observe", healthy=50, then=99.0)
    assert story.state.incident.rules == ["gone"]
    story.frames(8.0, times=3)

    assert "spike" in story.state.incident.rules


def test_release_lets_a_rule_that_still_fires_act_again(tell):
    """After a person released the hold, the breach that goes on is answered anew."""
    story = tell(ladder=Ladder(("soften", "hold"), reset_after_steps=1), healthy=50)
    story.frames(8.0, times=120)
    acted = len(story.actions())
    story.send(OperatorCommand(story.at_ns, "anna", "release"))
    story.frames(8.0, times=5)

    assert len(story.actions()) == acted + 1


def test_what_is_worse_than_an_action_under_way_is_answered_when_that_is_over(tell):
    """It may not cut the action; nor may it be forgotten, though it never stops firing."""
    story = tell(answer=lambda key: None, healthy=50, then=8.0)
    (first,) = story.actions()
    story.frames(80.0, times=3)
    assert story.kinds("suppressed")[-1].data["suppressed_by"] == "acting"
    assert story.actions() == [first]

    story.send(Finished(story.at_ns, first, True, {"ack_step": story.step}))

    assert len(story.actions()) == 2
    assert story.actions()[1].endswith("0-touch")


def test_steps_without_a_frame_are_told(tell):
    """Once, whoever lost them; people hear of many. A gap that was told explains its own."""
    story = tell(healthy=50)
    story.step = 59
    story.frames(2.0, times=20)
    assert [d.reason for d in story.kinds("gap")] == ["rank 0: steps 50 to 59 have no frame"]
    assert not story.kinds("notify_intent")
    story.send(Gap(story.at_ns, 0, 80, 30))
    story.step = 109
    story.frames(2.0, times=20)
    assert len(story.kinds("gap")) == 2
    story.step = 229
    story.frames(2.0, times=2)
    story.step += 1
    story.frames(2.0, times=2)

    told = [d.reason for d in story.kinds("gap")][2:]
    assert told == ["rank 0: steps 130 to 229 have no frame", "rank 0: step 232 has no frame"]
    (message,) = [d.data["message"] for d in story.kinds("notify_intent")]
    assert (message["severity"], message["title"]) == ("SEV2", told[0])
