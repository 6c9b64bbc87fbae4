"""What was measured of an earlier step, minutes later: judged, shown and replayed at that step."""

from __future__ import annotations

import json

import pytest

from supervise.core.model import LateFrame, Rule
from supervise.detectors import Join, RobustZ, Sequence, Trend

from .conftest import NAMES, above, messages, one_rule, rule_on, rules_of

STREAMS = ("checkpoint", "savepoint", "build")


def late(story, step, stream="savepoint", attempt=0, **values):
    return story.send(LateFrame(story.at_ns, stream, attempt, step, values))


def fired(story):
    return [(d.rule, d.data.get("measured_step")) for d in story.kinds("rule", "fired")]


def test_an_incident_says_which_mechanism_it_is_of_and_what_the_others_do(tell):
    """A fault of the step size moves attention as well; routers that stayed are not the cause."""
    detectors = {
        "order": above("qk_d3_ratio", 0.1),
        "flat": above("router_token_entropy", 0.9),
        "kernel": above("key_gradient_sum", 1.0),
    }
    story = tell(**rules_of(detectors, ("order", "SEV2")), healthy=100)

    late(story, 75, qk_d3_ratio=0.2, router_token_entropy=0.5, key_gradient_sum=5.0)

    (opened,) = story.kinds("incident", "opened")
    assert "step size moved first (step 75), attention moved too, routers stayed" in opened.reason
    signs = opened.mechanisms
    assert (signs.first, signs.moved, signs.stayed) == ("step size", ("attention",), ("routers",))
    assert story.replayed() == story.recorded()


def test_the_router_that_moved_is_named_by_its_layer(tell):
    """Also where it is the loss that opens the incident; what moves with any loss says nothing."""
    detectors = {
        "loss": above("train_loss_raw", 5.0),
        "update": above("update_norm", 1.0),
        "alike": above("router_similarity_max", 0.5),
        "kernel": above("key_gradient_sum", 1.0),
        "rise": above("qk_d3_ratio", 0.1),
    }
    names = ("train_loss_raw", "update_norm")
    story = tell(**rules_of(detectors, ("loss", "SEV1")), names=names)
    story.frames(2.0, times=100, grad=0.5)
    layers = {"router_similarity_max.1": 0.2, "router_similarity_max.4": 0.8}
    late(story, 75, router_similarity_max=0.8, key_gradient_sum=0.2, qk_d3_ratio=0.05, **layers)

    story.frames(9.0, grad=2.0)

    (opened,) = story.kinds("incident", "opened")
    clause = "routers moved first (step 75, most in layer 4), attention stayed"
    assert opened.reason.endswith(f"; {clause}")
    assert any(clause in json.dumps(message) for message in messages(story))
    assert story.replayed() == story.recorded()


def test_streams_are_judged_in_their_own_order_whatever_comes_between(tell):
    """Each detector sees its steps in order, and reads as in a run of that stream alone."""
    trend = Trend("rank", window=16, slope_per_1k_gt=1.0)
    detectors = {"rank": trend, "other": RobustZ("loss.code", min_=12), "high": above("m", 1.0)}
    rules = rules_of(detectors, *((name, "SEV2") for name in detectors))
    alone, mixed = tell(**rules, healthy=800), tell(**rules, healthy=800)
    for i in range(30):
        late(alone, 25 * i, rank=1.2**i)
        late(mixed, 700 - 12 * i, "checkpoint", **{"loss.code": 2.0})
        late(mixed, 25 * i, rank=1.2**i)
        mixed.frames(2.0)

    readings = [s.state.monitors[0].numbers(s.policy.rules[0])["rank"] for s in (alone, mixed)]
    assert readings[0] == readings[1]
    assert fired(alone) == fired(mixed) != []
    assert mixed.replayed() == mixed.recorded()


def test_parts_of_one_step_are_one_step(tell):
    """A result that is too long for one letter comes in several."""
    detectors = {"a": above("rank.0", 5.0), "b": above("rank.1", 5.0), "both": Join(all=("a", "b"))}
    story = tell(**rules_of(detectors, ("both", "SEV2")), healthy=99)

    late(story, 50, **{"rank.0": 9.0})
    late(story, 50, **{"rank.1": 1.0})
    late(story, 75, **{"rank.0": 9.0, "rank.1": 9.0})

    assert fired(story) == [("both", 75)]


@pytest.mark.parametrize("stream", STREAMS)
def test_what_was_measured_of_weights_that_were_taken_back_says_nothing(tell, stream):
    """A rollback to step 59 undoes what was seen of later ones; of the data nothing is undone."""
    story = tell(**one_rule(above("rank", 5.0), "SEV2", for_steps=2), healthy=100)
    late(story, 80, stream, rank=9.0)
    story.step, story.attempt = 59, 1
    story.frames(2.0, times=30)

    late(story, 90, stream, rank=9.0)
    assert bool(fired(story)) == (stream == "build")
    late(story, 50, stream, rank=9.0)
    late(story, 85, stream, attempt=1, rank=9.0)
    late(story, 88, stream, attempt=1, rank=9.0)
    assert len(fired(story)) == 1
    assert story.replayed() == story.recorded()


def test_a_relaunch_goes_on_with_what_is_known_of_the_weights_it_starts_from(tell):
    story = tell(**one_rule(above("rank", 5.0), "SEV2", for_steps=2), healthy=100)
    late(story, 50, "checkpoint", rank=9.0)
    story.exit(1)
    story.launch(2, 1)
    story.announce(0, 1, 2)
    story.step, story.attempt = 59, 1
    story.frames(2.0, times=30)

    late(story, 75, "checkpoint", attempt=1, rank=9.0)

    assert fired(story) == [("only", 75)]


def test_a_rule_about_the_run_and_a_stream_is_judged_at_the_steps_of_the_run(tell):
    """What came late holds until the next result; a coupling of both has no order of steps."""
    detectors = {
        "high": above("train_loss_raw", 5.0),
        "flat": above("rank", 5.0),
        "order": Sequence(steps=("flat", "high"), within=500),
    }
    uses = ("high", "flat")
    both = Rule("both", lambda codes: min(codes[:2]), "high and flat", uses, "SEV2")
    rules = (both, rule_on(detectors, "order", "SEV2"))
    story = tell(detectors=detectors, rules=rules, inhibit=(), healthy=99)
    late(story, 50, rank=9.0)
    assert fired(story) == []

    story.frames(9.0)

    assert fired(story) == [("both", None)]
    assert story.replayed() == story.recorded()


def test_the_run_has_the_last_word_on_a_metric_that_it_measures_itself(tell):
    story = tell(**one_rule(above(NAMES[0], 5.0), "SEV2"), healthy=99)

    late(story, 50, **{NAMES[0]: 9.0})

    assert fired(story) == []
