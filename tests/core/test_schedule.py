"""A learning rate that the job itself raised explains what follows: no layer is to blame."""

from __future__ import annotations

import pytest

from supervise.core.analysis import spike_classifier
from supervise.core.model.policy import Budget, Ladder

from .conftest import Above, Touch, Verify, messages, rule_on, runbook_of

NAMES = (
    "train_loss_raw",
    "grad_global_norm",
    "update_norm",
    "learning_rate",
    "learning_rate_scheduled",
    "val_loss",
)
ONSET = 300


def row(loss=2.0, rate=1e-3, asked=None, update=0.1, **others):
    made = {"train_loss_raw": loss, "grad_global_norm": 1.0, "update_norm": update}
    return made | {"learning_rate": rate, "learning_rate_scheduled": asked or rate} | others


@pytest.fixture
def begun(tell):
    """A run of 300 steps with a rule on its loss, and one on its rate that only tells."""

    def begin(**changes):
        detectors = {"high": Above("train_loss_raw", 5.0), "lr": Above("learning_rate", 5e-3)}
        rules = (rule_on(detectors, "high", "SEV1", "mend"), rule_on(detectors, "lr", "SEV2"))
        made = {
            "names": NAMES,
            "detectors": detectors,
            "rules": rules,
            "inhibit": (),
            "runbooks": {"mend": runbook_of("mend", Touch(), Verify())},
            "ladder": Ladder(("mend", "hold")),
            "budgets": {"touch": Budget(9)},
        }
        story = tell(**(made | changes))
        story.rows(*[row(val_loss=2.2) if i % 25 == 0 else row() for i in range(ONSET)])
        return story

    return begin


def verdict(story):
    story.say("release")
    return story.kinds("incident", "closed")[-1].data["spike"]


def test_what_outlives_the_ladder_behind_a_jump_of_the_jobs_own_rate_is_its_schedule(begun):
    """The rate is told first, the loss follows; the hold says what is to be mended."""
    story = begun()
    story.rows(row(2.0, 0.1), *[row(8.0, 0.1, update=9.0)] * 60)
    held = story.kinds("incident", "held")[0].data["spike"]

    assert held["class"] == "learning rate jump"
    assert "the job's own learning rate 0.001 to 0.1 (step 300)" in messages(story)[-1]["verdict"]
    assert "compare its schedule with the one that was meant" in messages(story)[-1]["next"]
    assert spike_classifier.NO_KNOB not in messages(story)[-1]["next"]
    assert verdict(story)["class"] == "learning rate jump", "and so to the end of the incident"


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (1e-3, "structural instability"),  # somebody else did it: a drill, or an action of ours
        (1.9e-3, "structural instability"),  # too little to explain it
        (2.1e-3, "learning rate jump"),
    ],
)
def test_only_a_rate_that_the_job_asked_for_and_that_jumped_is_its_schedule(begun, asked, kind):
    story = begun()
    story.rows(*[row(8.0, 0.1, asked, update=9.0)] * 60)

    assert story.kinds("incident", "held")[0].data["spike"]["class"] == kind


@pytest.mark.parametrize(
    ("loss", "value", "kind"),
    [
        (4.0, 4.2, "learning rate jump"),
        (4.0, None, "learning rate jump"),  # it needs no evaluation: the cause is known
        (4.0, 2.2, "logging artefact or data order"),  # the model is as good as before
        (2.0, 2.2, "learning rate jump"),  # the loss is back, the large updates are not
    ],
)
def test_the_four_questions_come_to_the_schedule(begun, loss, value, kind):
    """350 frames later, where the last frames of before the onset still are; and long after."""
    story = begun(mode="observe")
    late = [
        row(loss, 0.1, update=9.0, **({"val_loss": value} if value and i % 25 == 0 else {}))
        for i in range(900)
    ]
    story.rows(*[row(8.0, 0.1, update=9.0)] * 3, *late[:400])
    assert story.kinds("incident", "classified")[0].data["spike"]["class"] == kind
    story.rows(*late[400:], row(loss, update=9.0), *[row(loss, update=9.0)] * 20)

    assert story.kinds("incident", "closed")[-1].data["spike"]["class"] == kind
