"""A rollback for a loss is withdrawn where the probe batch says that the weights are good."""

from __future__ import annotations

import pytest

from supervise.actions import CheckWeights, Snapshot
from supervise.core import plan_context
from supervise.core.model import Finished, JobSettings

from .conftest import NAMES, NAN, Touch, Verify, messages, one_rule, runbook_of
from .conftest import above as threshold

GOOD, BAD = 2.05, 3.0
KEPT = JobSettings(probe_batch=True)
WAS = [[10, 2.2], [25, 2.0], [60, 9.0]]


@pytest.fixture
def asked(tell):
    """A job of 40 healthy steps and one of loss 8, whose probe batch answers as the test says."""

    def begin(*answers, severity="SEV1", job=KEPT, unknown=False, **result):
        found = iter(answers)

        def answer(key):
            if "check_weights" not in key:
                return Finished(0, key, True, {"attempt": 1} if "touch" in key else {})
            found_now = {"why": "2 ranks"} if unknown else {"loss": next(found), "was": WAS}
            return Finished(0, key, True, {**found_now, **result})

        steps = (CheckWeights(again=40), Snapshot(), Touch(), Verify(within=30, clear_for=5))
        story = tell(
            **one_rule(threshold("train_loss_raw", 5.0), severity, "back"),
            runbooks={"back": runbook_of("back", *steps)},
            answer=answer,
            job=job,
            healthy=40,
        )
        story.frames(8.0)
        return story

    return begin


def verbs(story):
    return [key.rpartition("-")[2] for key in story.actions()]


def test_bad_batches_cost_no_rollback_and_are_told_once(asked):
    story = asked(GOOD)
    story.frames(2.0, times=60)

    assert verbs(story) == ["check_weights", "snapshot"]
    assert story.kinds("abort", "withdrawn")[0].reason == (
        "back withdrawn: the weights are good: the probe batch has a loss of 2.05, and had 2 "
        "before step 40"
    )
    titles = [message["title"] for message in messages(story)]
    assert "inc-1: back withdrawn" in titles and not any("started" in title for title in titles)
    assert story.state.incident is None and story.state.machine == "nominal"


@pytest.mark.parametrize("loss", [BAD, NAN, float("inf")])
def test_bad_weights_are_taken_back(asked, loss):
    story = asked(loss)

    assert verbs(story) == ["check_weights", "snapshot", "touch"]
    assert any("automatic action started" in message["title"] for message in messages(story))


@pytest.mark.parametrize("result", [{"was": []}, {"was": WAS[2:]}, {"loss": NAN}])
def test_where_nobody_knows_it_goes_on(asked, result):
    assert verbs(asked(GOOD, **result)) == ["check_weights", "snapshot", "touch"]


@pytest.mark.parametrize("loss", [2.0, 8.0])
def test_where_nobody_can_say_the_losses_are_waited_for(asked, loss):
    """A quarter of the steps, once: what is over by then needs no rollback."""
    story = asked(unknown=True)
    first = verbs(story)
    story.frames(loss, times=12)

    assert first == ["check_weights", "snapshot"]
    assert ("touch" in verbs(story)) is (loss == 8.0)
    assert verbs(story).count("touch") <= 1


@pytest.mark.parametrize("changes", [{"severity": "SEV0"}, {"job": JobSettings()}])
def test_what_is_worse_than_a_loss_needs_no_second_opinion_nor_is_nobody_asked(asked, changes):
    assert verbs(asked(**changes)) == ["snapshot", "touch"]


def test_it_is_asked_again_while_the_losses_stay_out_of_their_band(asked):
    """Then after twice as many steps; people hear of it once, and when something is done."""
    story, once = asked(GOOD, GOOD, BAD), ["check_weights", "snapshot"]
    assert verbs(story) == once
    story.frames(4.0, times=39)
    assert verbs(story) == once
    story.frames(4.0)
    assert verbs(story) == once * 2
    story.frames(4.0, times=79)
    assert verbs(story) == once * 2
    story.frames(4.0)

    assert verbs(story) == [*once * 3, "touch"]
    titles = [message["title"] for message in messages(story)]
    assert titles.count("inc-1: back withdrawn") == 1
    assert titles.count("inc-1: automatic action started: back") == 1


def test_the_trouble_counts_as_one_of_the_data(asked):
    story = asked(*[GOOD] * 9)
    story.frames(4.0, times=360)
    (found,) = story.kinds("incident", "classified")

    assert found.data["spike"]["class"] == "data event"


@pytest.mark.parametrize(("loss", "sound"), [(2.0, True), (8.0, False), (None, False)])
def test_weights_are_sound_where_they_gave_the_step_of_the_first_breach_a_usual_loss(
    tell, loss, sound
):
    story = tell(**one_rule(threshold("grad_global_norm", 5.0), "SEV1"), healthy=40)
    story.frames(loss, grad=9.0)
    story.frames(8.0, grad=9.0)

    found = plan_context(story.state, story.state.incident)
    assert (found.breach_step, found.sound) == (40, sound)


TOKENS = (*NAMES, "batch_token_drift", "batch_top1_share")
USUAL = {"grad_global_norm": 1.0, "batch_top1_share": 0.05}


@pytest.fixture
def learned(tell):
    """A job whose tokens are looked at, and whose probe batch answers as the test says."""

    def begin(*answers, names=TOKENS):
        found = iter(answers)

        def answer(key):
            if "check_weights" not in key:
                return Finished(0, key, True, {"attempt": 1} if "touch" in key else {})
            story.asked = (
                story.step + 3,
                Finished(0, key, True, {"loss": next(found), "was": WAS}),
            )
            return None

        steps = (CheckWeights(again=20), Snapshot(), Touch(), Verify(within=30, clear_for=5))
        story = tell(
            **one_rule(threshold("train_loss_raw", 2.3), "SEV1", "back", for_steps=2),
            runbooks={"back": runbook_of("back", *steps)},
            answer=answer,
            job=KEPT,
            names=names,
        )
        story.asked = None
        feed(story, [2.0 + 0.02 * (step % 3) for step in range(40)])
        return story

    return begin


def feed(story, losses, drift=0.08, **more):
    for loss in losses:
        row = {"train_loss_raw": loss, "batch_token_drift": drift + loss / 1e3}
        story.rows({**USUAL, **row, **more})
        if story.asked is not None and story.step >= story.asked[0]:
            asked, story.asked = story.asked[1], None
            story.send(asked)


def falling(first, last, steps, half_life=5.0):
    return [last + (first - last) * 0.5 ** (step / half_life) for step in range(steps)]


@pytest.mark.parametrize("first", [GOOD, BAD], ids=["asked at once", "asked late"])
def test_other_data_are_learned_and_nothing_is_taken_back(learned, first):
    """The probe batch is of the old data, and gets worse for as long as others are learned."""
    story = learned(first, *[3.6] * 9)
    feed(story, falling(5.5, 2.25, 60), drift=0.4)
    feed(story, [2.27, 2.33] * 30)

    assert "touch" not in verbs(story)
    orders = [d.data["action"]["args"] for d in story.kinds("intent")]
    assert [args.get("renew", False) for args in orders if "within" in args] == [False, True]
    reasons = [d.reason for d in story.kinds("abort", "withdrawn")]
    assert (
        "the data changed at step 41: KL of the batch's tokens from those before 0.4"
        in (reasons[-1])
    )
    assert "the loss fell by itself, from 4.7" in reasons[-1]


def test_a_loss_that_jumps_while_other_data_are_learned_is_new_evidence(learned):
    story = learned(GOOD, *[3.6] * 9)
    feed(story, falling(5.5, 2.25, 60), drift=0.4)
    feed(story, [6.0] * 20)

    assert verbs(story)[-1] == "touch"
    (started,) = [m for m in messages(story) if "started" in m["title"]]
    assert "new since step" in started["why"] and "the loss jumped again, by 3." in started["why"]


@pytest.mark.parametrize("losses", [falling(4.0, 2.02, 80), [4.0, 4.0, *[2.02] * 78]])
def test_what_heals_by_itself_is_no_new_evidence(learned, losses):
    """As damaged moments and a bad batch do: the probe batch stays a little worse for a while."""
    story = learned(GOOD, *[2.19] * 9)
    feed(story, losses)

    assert "touch" not in verbs(story)


@pytest.mark.parametrize(("lasting", "back"), [(True, False), (False, True)])
def test_one_token_is_nothing_to_learn(learned, lasting, back):
    """Where the loop goes on, a rollback waits until other tokens come in."""
    story = learned(GOOD, *[3.6] * 9)
    feed(story, falling(5.5, 3.5, 30), batch_top1_share=1.0)
    feed(story, [3.5] * 40, batch_top1_share=1.0 if lasting else 0.05)

    assert ("touch" in verbs(story)) is back
    if back:
        (started,) = [m for m in messages(story) if "started" in m["title"]]
        assert "the inputs were one token in" in started["why"]


@pytest.mark.parametrize(("loss", "back"), [(2.35, False), (3.4, True)])
def test_without_tokens_the_two_losses_tell_learning_from_damage(learned, loss, back):
    """Damage costs both alike; other data are learned while the probe batch is forgotten."""
    story = learned(GOOD, *[3.6] * 9, names=NAMES)
    feed(story, falling(5.5, loss, 20, 2.0))
    feed(story, [loss] * 60)

    assert ("touch" in verbs(story)) is back
