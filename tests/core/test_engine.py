"""The engine, told as stories: frames in, decisions out."""

from __future__ import annotations

from supervise.core.model.events import Announced, Exited, OperatorCommand
from supervise.core.model.policy import Budget, Ladder, Rule
from supervise.detectors.robust_z import RobustZ


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
    assert [d.data["after"] for d in story.kinds("state")] == [
        "warming",
        "nominal",
        "acting",
        "probation",
        "nominal",
    ]
    assert story.state.incident is None


def test_the_decision_carries_its_numbers(tell):
    """Value and threshold of the breaching detector are in the record and in the sentence."""
    story = tell(healthy=50, then=8.0)

    fired = story.kinds("rule", "fired")[0]
    assert fired.data["numbers"]["high"] == {
        "code": "BREACH",
        "value": 8.0,
        "threshold": 5.0,
        "breach_step": 50,
        "metric": "train_loss_raw",
    }
    assert "train_loss_raw 8 (limit 5)" in fired.reason
    assert story.kinds("incident", "opened")[0].data["band"]["level"] == 2.0


def test_a_verification_that_fails_climbs_the_ladder(tell):
    """The loss stays up: soften, taken back, then back, then hold; never a third force."""
    story = tell(healthy=50)
    story.frames(8.0, times=100)

    assert story.actions() == ["inc-1/1/0-reach", "inc-1/1/undo-conftest", "inc-1/2/0-touch"]
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
        budgets={"touch": Budget(1, per_steps=1000), "all": Budget(9, per_steps=1000)},
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
        detectors={"z": RobustZ("train_loss_raw", gt=6.0)},
        rules=(Rule("far", lambda codes: codes[0], "z", ("z",), "SEV2"),),
        runbooks={},
        inhibit=(),
        blind_after_steps=30,
    )
    story.frames(2.0, times=4)
    for _ in range(10):
        story.frames(2.0)
        story.frames(None, times=15)
        story.tick()

    assert story.kinds("blind") == []
    story.frames(None, times=40)
    story.tick()
    assert [d.rule for d in story.kinds("blind")] == ["far"]


def test_a_metric_that_never_existed_makes_its_rule_inactive(tell):
    """No loss in this job: its rules are not blind, they do not apply."""
    story = tell(blind_after_steps=30)
    story.send(Announced(0, 0, 1, 1, ("other", "grad_global_norm")))
    story.frames(1.0, times=100)
    story.tick()

    assert story.kinds("blind") == []


def test_any_rank_can_trip_a_rule(tell):
    """Rank 1 alone breaches: the rule fires and names the rank."""
    story = tell()
    story.send(Announced(0, 1, 2, 2, story.names))
    story.frames(2.0, times=50)
    story.rank(1, 2.0, 2.0, 8.0)

    assert story.kinds("rule", "fired")[0].data["rank"] == 1


def test_a_job_that_ends_closes_everything(tell):
    story = tell(healthy=50, then=8.0)
    story.send(Exited(story.at_ns, -9))

    assert story.state.machine == "halted"
    assert story.kinds("incident", "closed")[0].reason == "closed: the job ended with signal 9"
    assert "signal 9" in story.kinds("notify_intent")[-1].data["message"]["title"]


def test_a_new_baseline_is_no_recovery(tell):
    """A level that stays up becomes the baseline; its incident ends late, and not as recovered."""
    detectors = {"z": RobustZ(metric="train_loss_raw", gt=6.0)}
    rules = (Rule("up", lambda codes: codes[0], "z", ("z",), "SEV2"),)
    story = tell(detectors=detectors, rules=rules)
    story.frames(2.0, 2.1, 1.9, times=60)
    story.frames(5.0, 5.1, 4.9, times=60)
    assert len(story.kinds("rebaseline")) == 1
    assert not story.kinds("incident", "closed")  # its loss may still come back
    story.frames(5.0, 5.1, 4.9, times=60)

    closed = story.kinds("incident", "closed")
    assert closed
    assert "not recovered" in closed[0].reason
