"""Since when steps take longer, and what in them: in the incident, its card and its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervise.core import find_slow_step, record_run, replayed_decisions
from supervise.core.model import Exited
from supervise.report import observation_sentence

from .conftest import above, messages, rule_on

NAMES = ("train_loss_raw", "step_time", "forward_time", "backward_time", "input_time", "other_time")


def row(**parts):
    times = {"forward_time": 0.003, "backward_time": 0.004, "other_time": 0.002} | parts
    wait = {"host_cpu_wait": times.pop("host_cpu_wait", None)}
    return {"train_loss_raw": 2.0, "step_time": sum(times.values()), **times, **wait}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"other_time": 0.124}, "reading data, or other code outside of forward"),
        ({"input_time": 0.124}, "waiting for data, 124 ms of 133 ms"),
        ({"backward_time": 0.124}, "in the backward pass, 124 ms of 129 ms"),
        ({"forward_time": 0.03, "backward_time": 0.03, "other_time": 0.03}, "90 ms, 9 ms before"),
    ],
)
def test_the_incident_says_since_when_and_where_the_time_goes(tell, part, words):
    detectors = {"slow": replace(above("step_time", 0.05), for_=20)}
    rule = replace(rule_on(detectors, "slow", "SEV2", see="throughput"), id="throughput.drift")
    story = tell(names=NAMES, detectors=detectors, rules=(rule,), inhibit=())
    story.rows(*[row()] * 100, *[row(**part)] * 30)

    (told,) = messages(story)
    assert " as long since step 100: " in told["verdict"] and words in told["verdict"]
    (opened,) = story.kinds("incident", "opened")
    assert observation_sentence(opened, [], [], None) == told["verdict"]

    story.send(Exited(story.at_ns, 0))
    closing = messages(story)[-2]
    assert closing["next"].startswith("what to check: "), "what lasts is not nothing to do"


SLOW = {"other_time": 0.124}  # 15 times as long


@pytest.fixture
def begun(tell):
    """A job of a hundred steps, under a rule that fires at the third slow one."""
    detectors = {"slow": replace(above("step_time", 0.05), for_=3)}
    rule = replace(rule_on(detectors, "slow", "SEV2", see="throughput", keep_steps=40), id="t.slow")
    names = (*NAMES, "host_cpu_wait")
    story = tell(names=names, detectors=detectors, rules=(rule,), inhibit=())
    story.rows(*[row(host_cpu_wait=0.5)] * 100)
    return story


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
    assert (
        any(d.data["suppressed_by"].startswith("host:") for d in begun.kinds("suppressed")) or told
    )

    begun.rows(*[row(**SLOW, host_cpu_wait=1.0)] * 3)
    assert len(messages(begun)) == 1
    assert [d for _, d in replayed_decisions(begun.policy, enumerate(begun.events))] == [
        record_run(d) for d in begun.log
    ]


def test_a_pause_and_a_slow_start_are_no_slower_steps():
    def found(*times):
        points = list(enumerate(times))
        return find_slow_step(lambda name: points if name == "step_time" else [], 100)

    assert found(*[0.01] * 100, *[0.0101] * 30) is None
    assert found(*[0.01] * 100, 5.0, *[0.01] * 29) is None
    assert found(*[0.5] * 20, *[0.01] * 110) is None
    assert found(*[0.01] * 100, 0.1, *[0.01] * 5, *[0.1] * 24).since == 106
