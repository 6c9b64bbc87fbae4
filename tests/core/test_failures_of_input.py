"""Input that is too much, missing, contaminated or late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.catalog import load_policy
from supervise.core import find_slow_step
from supervise.core.model import Beat, Frame, Tick
from supervise.detectors import Absence, Ratio, RobustZ
from supervise.report import describe_observation

from .conftest import NAN, SECOND, Reach, Story, above, messages, one_rule, rules_of, runbook_of


@pytest.mark.parametrize("order", [1, -1])
def test_a_hundred_rules_in_one_step_are_one_incident_one_runbook_one_message(tell, order):
    detectors = {f"d{i}": above("train_loss_raw", 5.0 + i / 100) for i in range(100)}
    milder = ((name, "SEV1" if name == "d1" else "SEV2", "soften") for name in [*detectors][1:])
    rules = rules_of(detectors, *[("d0", "SEV0", "back"), *milder][::order])
    story = tell(**rules, healthy=50, answer=lambda key: None)
    told = len(messages(story))
    story.frames(9.0)

    assert len(story.kinds("incident", "opened")) == 1
    assert story.actions() == ["inc-1/1/0-touch"]
    assert len(messages(story)) == told + 1
    assert len(story.kinds("rule", "fired")) == 100
    assert messages(story)[-1]["severity"] == "SEV0"


def test_an_advisory_rule_that_flaps_does_not_fill_the_record(tell):
    story = tell(**one_rule(above("train_loss_raw", 5.0), "SEV2"), healthy=20)
    story.frames(*[4.9, 5.1] * 500)
    records = [*story.kinds("rule"), *story.kinds("incident")]
    story.frames(2.0, times=600)

    assert len(records) < 50
    assert len(story.kinds("note", "flapping")) == 1
    assert len(story.kinds("incident", "opened")) == 1
    assert story.kinds("rule")[-1].data["what"] == "cleared"
    story.frames(6.0, times=2)
    assert story.kinds("incident", "opened")[1:], "what comes back later is news"


@pytest.mark.parametrize("hole", [None, NAN])
def test_a_hole_inside_for_neither_advances_nor_resets_it(tell, hole):
    """`for: 4` with samples missing in the middle fires on the fourth bad one that was seen."""
    story = tell(**one_rule(above("train_loss_raw", 5.0), "SEV2", for_steps=4), healthy=20)
    story.frames(8.0, 8.0, hole, hole, hole, 8.0)
    assert not story.kinds("rule", "fired")
    story.frames(8.0)

    assert len(story.kinds("rule", "fired")) == 1


@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize(
    ("unit", "every", "fires", "clears"),
    [("rows", 1, 23, 83), ("steps", 1, 23, 83), ("rows", 10, 50, 110), ("steps", 10, 20, 80)],
)
def test_a_rule_counts_rows_or_the_steps_between_them(tell, unit, every, absent, fires, clears):
    rule = one_rule(above("train_loss_raw", 5.0), "SEV2", for_steps=4, keep_steps=60, unit=unit)
    story = tell(**rule, healthy=0)
    for step in range(700):
        if step % every and not absent:
            story.step += 1
        else:
            story.frames(None if step % every else 8.0 if 20 <= step < 60 else 2.0)
    changes = [(one.data["what"], one.step) for one in story.kinds("rule")]
    if unit == "rows" and not absent:
        clears = fires + 60 * every

    assert changes == [("fired", fires), ("cleared", clears)]


def test_a_rule_in_steps_that_went_back_with_the_run_keeps_firing_as_long(tell):
    rule = one_rule(above("train_loss_raw", 5.0), "SEV2", keep_steps=20, unit="steps")
    story = tell(**rule, healthy=100)
    story.frames(8.0)
    story.step, story.attempt = story.step - 50, 1
    story.frames(2.0, times=30)

    assert [one.step for one in story.kinds("rule", "cleared")] == [70]


def test_a_hole_is_no_relapse_and_no_recovery(tell):
    story = tell(healthy=50, then=8.0)
    story.frames(None, times=8)
    assert not story.kinds("verify", "passed")
    story.frames(2.0, times=8)
    assert story.state.machine == "probation"
    story.frames(None, times=10)
    assert story.state.machine == "probation"
    story.frames(2.0, times=20)

    assert story.state.machine == "nominal"
    assert story.actions() == ["inc-1/1/0-reach"]


def test_a_silent_rank_is_a_stall_of_its_own(tell):
    story = tell(**one_rule(Absence(signal="step", after={"min": 30.0}), "SEV1"))
    for rank in range(1, 4):
        story.announce(rank, 4, rank + 1)
    for step in range(80):
        story.frames(2.0)
        for rank in (1, 2, *([3] if step < 20 else [])):
            story.rank(rank, 2.0)
        beats = tuple(Beat(rank, story.at_ns, "step") for rank in range(4))
        story.send(Tick(story.at_ns, beats))

    assert [d.data["rank"] for d in story.kinds("rule", "fired")] == [3]


def test_a_suspended_machine_is_no_stall(tell):
    """Ten hours between two ticks, and a notice that it slept: the deadline begins anew."""
    story = tell(**one_rule(Absence(signal="step", after={"min": 120.0}), "SEV0"), healthy=30)
    story.at_ns += 36_000 * 10**9
    story.notice("suspended", "the machine slept for 10 hours")
    story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))
    assert not story.kinds("rule", "fired")
    story.beat(13, every=10)

    assert len(story.kinds("rule", "fired")) == 1


@pytest.mark.parametrize("jump", [-20, 0, 5000])
def test_step_ids_that_jump_are_survived(tell, jump):
    """Back without a new attempt, the same again, far ahead: no decision about a healthy loss."""
    detectors = {
        "z": RobustZ("train_loss_raw", gt=6.0, window=32, min_=16),
        "x": Ratio("train_loss_raw", fast=1, ref=16, gt=1.4),
    }
    story = tell(**rules_of(detectors, ("z", "SEV1", "soften"), ("x", "SEV1", "soften")))
    story.frames(2.0, 2.1, 1.9, times=40)
    story.step += jump - (jump == 0)
    story.frames(2.0, 2.1, 1.9, times=40)

    assert story.actions() == []
    assert not story.kinds("incident")


def test_one_that_flaps_and_then_stays_in_breach_is_told(tell):
    story = tell(**one_rule(above("train_loss_raw", 5.0), "SEV2"), healthy=20)
    story.frames(*[4.9, 5.1] * 100)
    before = len(story.kinds("notify_intent"))
    story.frames(6.0, times=900)

    assert len(story.kinds("note", "settled")) == 1
    told = [d.data["message"]["title"] for d in story.kinds("notify_intent")[before:]]
    assert any("no longer flaps" in title for title in told)
    assert not story.state.rules.flapping


def test_one_trouble_seen_by_two_ranks_is_answered_once(tell):
    books = {"soften": runbook_of("soften", Reach())}
    names = ("residual_rms", "grad_global_norm")
    rule = one_rule(above("residual_rms", 5.0), "SEV1", "soften", cooldown_steps=50)
    story = tell(runbooks=books, names=names, **rule)
    for rank in (0, 1):
        story.announce(rank, 2, rank + 1, names)
    for _ in range(20):
        story.frames(2.0)
        story.rank(1, 2.0)
    story.frames(8.0)
    story.rank(1, 8.0)

    assert len(story.actions()) == 1
    assert [d.data["suppressed_by"] for d in story.kinds("suppressed")] == ["answered"]
    assert story.state.machine != "holding"


# ── since when steps take longer, and what in them: in the incident, its card and its advice ──────


NAMES = ("train_loss_raw", "step_time", "forward_time", "backward_time", "input_time", "other_time")


def row(**parts):
    times = {"forward_time": 0.003, "backward_time": 0.004, "other_time": 0.002} | parts
    wait = {"host_cpu_wait": times.pop("host_cpu_wait", None)}
    return {"train_loss_raw": 2.0, "step_time": sum(times.values()), **times, **wait}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"other_time": 0.124}, "reading data, or other code outside of forward"),
        ({"input_time": 0.124}, "waiting for data (124 ms of 133 ms)"),
        ({"backward_time": 0.124}, "the backward pass (124 ms of 129 ms)"),
        ({"forward_time": 0.03, "backward_time": 0.03, "other_time": 0.03}, "90 ms, 9 ms before"),
    ],
)
def test_the_incident_says_since_when_and_where_the_time_goes(tell, part, words):
    begun = slowing(tell, for_=20)
    begun.rows(*[row(**part)] * 30)

    (told,) = messages(begun)
    assert " as long since step 100: " in told["verdict"] and words in told["verdict"]
    (opened,) = begun.kinds("incident", "opened")
    card = describe_observation(opened, [], [], None)
    assert card == told["verdict"].replace(
        " ms, 9 ms before", f" ms by step {opened.step}, 9 ms before"
    )

    begun.exit(0)
    closing = messages(begun)[-2]
    assert closing["steps"][0]["text"] == "to look closer", "what lasts is not nothing to do"


def test_a_job_of_short_steps_that_slows_down_soon_after_its_start_is_reported(tmp_path):
    """200 steps of 7 ms are 1.4 s: 16 means over 90 ms, and far fewer than are compared."""
    (tmp_path / "p.yaml").write_text("version: supervise/v1\nmode: observe\nuse: [throughput]\n")
    story = Story(load_policy(tmp_path / "p.yaml"), ("step_time", "train_loss_raw"))
    fired = None
    for step in range(300):
        step_time = (0.007 if step < 200 else 0.127) * (1 + 0.02 * (step % 3))
        story.at_ns += int(step_time * SECOND)
        story.send(Frame(story.at_ns, 0, 0, step, (step_time, 2.0)))
        if fired is None and story.kinds("rule", "fired"):
            fired = step
    assert fired is not None and 219 <= fired <= 250


SLOW = {"other_time": 0.124}  # 15 times as long


def slowing(tell, for_=3, **more):
    """A job of a hundred steps, under a rule that fires at the third slow one."""
    rules = one_rule(replace(above("step_time", 0.05), for_=for_), "SEV2", see="throughput", **more)
    story = tell(names=(*NAMES, "host_cpu_wait"), **rules)
    story.rows(*[row(host_cpu_wait=0.5)] * 100)
    return story


@pytest.fixture
def begun(tell):
    return slowing(tell, keep_steps=40)


def test_the_rank_that_the_others_wait_for_is_named_and_not_where_they_wait(tell):
    slow = replace(above("straggler_ratio", 1.33), for_=20)
    usual = {"straggler_ratio": 1.0, "straggler_rank": 0.0, "straggler_part": 0.0}
    late = usual | {"straggler_ratio": 5.0, "straggler_rank": 2.0}
    story = tell(names=(*NAMES, *usual), **one_rule(slow, "SEV1", see="straggler"))
    story.rows(*[row(host_cpu_wait=0.5) | usual] * 100)
    story.rows(*[row(backward_time=0.124, host_cpu_wait=0.5) | late] * 40)

    (message,) = messages(story)
    assert "as long since step 100: 129 ms, 9 ms before; rank 2 in its" in message["verdict"]
    assert "backward" not in message["verdict"]
    assert story.replayed() == story.recorded()


def test_slow_steps_that_are_over_within_seconds_are_on_record_only(begun):
    begun.rows(*[row(**SLOW)] * 3, *[row()] * 37)

    assert begun.kinds("rule", "fired") and messages(begun) == []
    (muted,) = begun.kinds("suppressed")
    assert muted.data["suppressed_by"].startswith("brief:")


@pytest.mark.parametrize(("wait", "told"), [(70.0, False), (30.0, True), (None, True)])
def test_slow_steps_that_wait_for_cpus_of_others_are_on_record_only(begun, wait, told):
    """As far as that explains how slow they are; where the wait is over, they are told."""
    begun.rows(*[row(**SLOW, host_cpu_wait=wait)] * 40)
    assert bool(messages(begun)) is told
    reasons = [d.data["suppressed_by"] for d in begun.kinds("suppressed")]
    assert told or any(reason.startswith("host:") for reason in reasons)

    begun.rows(*[row(**SLOW, host_cpu_wait=1.0)] * 3)
    assert len(messages(begun)) == 1
    assert begun.replayed() == begun.recorded()


def test_a_pause_and_a_slow_start_are_no_slower_steps():
    def found(*times):
        points = list(enumerate(times))
        return find_slow_step(lambda name: points if name == "step_time" else [], 100)

    assert found(*[0.01] * 100, *[0.0101] * 30) is None
    assert found(*[0.01] * 100, 5.0, *[0.01] * 29) is None
    assert found(*[0.5] * 20, *[0.01] * 110) is None
    times = [0.1] * 80 + [0.4] * 100 + [0.1] * 10 + [0.2] * 30  # no slower than before all of that
    assert found(*times) is None
    assert found(*[0.01] * 100, 0.1, *[0.01] * 5, *[0.1] * 24).since == 106
