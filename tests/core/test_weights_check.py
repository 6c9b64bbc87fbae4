"""A rollback for a loss is withdrawn where the probe batch says that the weights are good."""

from __future__ import annotations

import pytest

from supervise.actions.check_weights import CheckWeights
from supervise.actions.snapshot import Snapshot
from supervise.core.incidents import action_planning
from supervise.core.model.events import Finished, Notice

from .conftest import NAN, Touch, Verify, messages, one_rule, runbook_of
from .conftest import above as threshold

GOOD, BAD = 2.05, 3.0
KEPT = {"probe_batch": True}
WAS = [[10, 2.2], [25, 2.0], [60, 9.0]]


@pytest.fixture
def asked(tell):
    """A job of 40 healthy steps and one of loss 8, whose probe batch answers as the test says."""

    def begin(*answers, severity="SEV1", job=KEPT, keeps=False, unknown=False, **result):
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
        if keeps:
            story.send(Notice(story.at_ns, "rewind-unavailable", "it is a for loop"))
        story.frames(8.0)
        return story

    return begin


def verbs(story):
    return [key.rpartition("-")[2] for key in story.actions()]


@pytest.mark.parametrize("keeps", [False, True])
def test_bad_batches_cost_no_rollback_and_are_told_once(asked, keeps):
    """Where a rollback takes the loop back it is asked once more in any case."""
    story = asked(GOOD, GOOD, keeps=keeps)
    story.frames(2.0, times=60)

    assert verbs(story) == ["check_weights"] * (1 if keeps else 2) + ["snapshot"]
    assert story.kinds("abort", "withdrawn")[0].reason == (
        "back withdrawn: the weights are good: the probe batch has a loss of 2.05, and had 2 "
        "before step 40"
    )
    titles = [message["title"] for message in messages(story)]
    assert "inc-1: back withdrawn" in titles and not any("started" in title for title in titles)
    assert story.state.incident is None and story.state.machine == "nominal"


@pytest.mark.parametrize(
    ("keeps", "first", "then"),
    [(False, 2.05, 2.15), (False, 1.9, 2.05), (True, 1.9, 2.15), (True, 2.15, 2.19)],
)
def test_the_second_question_is_stricter_where_no_progress_is_lost(asked, keeps, first, then):
    """Within half of what is allowed at first, also of the loss that was good then."""
    story = asked(first, then, keeps=keeps)
    assert verbs(story) == ["check_weights", *["snapshot"] * keeps]
    story.frames(4.0, times=40)

    assert ("touch" in verbs(story)) is not keeps


@pytest.mark.parametrize("loss", [BAD, NAN, float("inf")])
def test_bad_weights_are_taken_back(asked, loss):
    story = asked(loss)

    assert verbs(story) == ["check_weights", "snapshot", "touch"]
    assert any("automatic action started" in message["title"] for message in messages(story))


@pytest.mark.parametrize("result", [{"was": []}, {"was": WAS[2:]}, {"loss": NAN}])
def test_where_nobody_knows_it_goes_on(asked, result):
    assert verbs(asked(GOOD, **result)) == ["check_weights", "snapshot", "touch"]


@pytest.mark.parametrize(("keeps", "loss"), [(True, 2.0), (True, 8.0), (False, 8.0)])
def test_where_nobody_can_say_and_the_loop_goes_on_the_losses_are_waited_for(asked, keeps, loss):
    """A quarter of the steps, once: what is over by then needs no rollback."""
    story = asked(keeps=keeps, unknown=True)
    now = verbs(story)
    story.frames(loss, times=12)

    once = ["check_weights", "snapshot"]
    assert now == (once if keeps else [*once, "touch"])
    assert ("touch" in verbs(story)) is (loss == 8.0)
    assert verbs(story).count("touch") <= 1


@pytest.mark.parametrize("changes", [{"severity": "SEV0"}, {"job": {}}])
def test_what_is_worse_than_a_loss_needs_no_second_opinion_nor_is_nobody_asked(asked, changes):
    assert verbs(asked(**changes)) == ["snapshot", "touch"]


@pytest.mark.parametrize(("keeps", "first"), [(False, 10), (True, 40)])
def test_it_is_asked_again_while_the_losses_stay_out_of_their_band(asked, keeps, first):
    """Then after twice as many steps; people hear of it when something is done. The loop of some
    jobs goes on: the bad batches, too, so that it is asked later, and told at once."""
    story, once = asked(GOOD, GOOD, BAD, keeps=keeps), ["check_weights", "snapshot"]
    asking = once if keeps else once[:1]
    story.frames(4.0, times=first - 1)
    assert verbs(story) == asking
    story.frames(4.0)
    assert verbs(story) == asking + once
    story.frames(4.0, times=2 * first - 1)
    assert verbs(story) == asking + once
    story.frames(4.0)

    assert verbs(story) == [*asking, *once, *once, "touch"]
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

    found = action_planning.plan_context(story.state, story.state.incident)
    assert (found.breach_step, found.sound) == (40, sound)
