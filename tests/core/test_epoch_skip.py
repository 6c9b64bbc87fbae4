"""A launch that goes on in a later epoch than it came from is SEV1."""

from __future__ import annotations

import pytest

from supervise.core.model import Announced, Exited, Launched

from .conftest import messages

NAMES = ("loss", "epoch")
STEPS = 40  # of an epoch


def skips(story):
    return [m["title"] for m in messages(story) if "skipped" in m["title"]]


def train(story, first, last, epoch_of):
    story.step = first - 1
    story.rows(*({"loss": 2.0, "epoch": epoch_of(step)} for step in range(first, last)))


def launch_again(story):
    story.attempt += 1
    story.send(Exited(story.at_ns, 1))
    story.send(Launched(story.at_ns, 2, story.attempt))
    story.send(Announced(story.at_ns, 0, 1, 2, story.names))


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (lambda step: step / STEPS, False),  # it goes on where it was
        (lambda step: (step - 48) / STEPS + 1.0, False),  # the epoch starts again
        (lambda step: (step - 48) / STEPS + 2.0, True),  # 48 of 40 is 1.2
        (lambda step: (step - 48) / STEPS + 1.5, False),  # a part of it
    ],
)
def test_the_rest_of_an_epoch_that_is_given_up_is_reported(tell, again, told):
    """A checkpoint of step 47, in epoch 1.2; the launch before made 60 steps."""
    story = tell(names=NAMES)
    train(story, 0, 60, lambda step: step / STEPS)
    launch_again(story)
    train(story, 48, 70, again)

    text = "the restart skipped 0.8 epochs: step 48 is in 2.00, and 1.20 was expected"
    assert skips(story) == ([text] if told else [])


def test_whole_epochs_and_short_launches_tell_nothing(tell):
    """And no rollback, which is no launch: its loop goes on."""
    story = tell(names=NAMES)
    train(story, 0, 60, lambda step: float(step // STEPS))
    launch_again(story)
    train(story, 48, 53, lambda step: 7.0 + step / STEPS)
    launch_again(story)
    train(story, 50, 90, lambda step: 9.0 + step / STEPS)
    story.attempt += 1
    train(story, 50, 90, lambda step: 11.0 + step / STEPS)

    assert skips(story) == []
