"""Weights that are damaged again after a runbook went back: no further step is lost on them."""

from __future__ import annotations

import pytest

from supervise.actions.rollback import Rollback
from supervise.core.model.events import Announced, Finished, Frame
from supervise.core.model.policy import Budget, Ladder

from .conftest import Above, Touch, Verify, rule_on, runbook_of

DETECTORS = {"huge": Above("train_loss_raw", 50.0), "wild": Above("grad_global_norm", 9.0)}
BACK = runbook_of("back", Rollback(rewarm=0), Verify(within=60))

ASIDE = runbook_of("aside", Touch(), Verify())


def gone(**more):
    return rule_on(DETECTORS, "huge", "SEV0", "back", **more)


@pytest.fixture
def back(tell):
    """Return a function: a SEV0 at step 60 was answered by going back to step 40."""

    def begin(*rules, book=BACK, gone_at=1, **changes):
        def answer(key):
            return None if "rollback" in key else Finished(story.at_ns, key, True)

        made = {
            "detectors": DETECTORS,
            "rules": rules or (gone(),),
            "runbooks": {"back": book, "aside": ASIDE},
            "budgets": {name: Budget(9) for name in ("rollback", "touch", "all")},
            "ladder": Ladder(("back", "hold")),
            "inhibit": (),
        }
        story = tell(answer=answer, **(made | changes), healthy=60)
        story.frames(99.0, times=gone_at)
        if book is BACK:
            assert len(story.actions()) == 1
            story.attempt, story.step = 1, 40
            result = {"attempt": 1, "step": 40}
            story.send(Finished(story.at_ns, story.actions()[0], True, result))
        return story

    return begin


def failed(story):
    return [(d.step, d.reason) for d in story.kinds("verify", "failed")]


@pytest.mark.parametrize("step", [50, 60, 61])
def test_what_comes_back_ends_the_verification_at_once(back, step):
    story = back()
    story.frames(2.0, times=step - 41)
    assert not failed(story)
    story.frames(99.0)

    why = f"back did not help: huge is in breach again at step {step} on rank 0"
    assert failed(story) == [(step, why)]
    assert story.state.machine == "holding"


def test_what_takes_a_few_steps_to_clear_has_them(back):
    """It may be in breach up to where it was first met, and is quiet behind it."""
    story = back()
    story.frames(99.0, times=20)
    story.frames(2.0, times=5)

    assert story.kinds("verify", "passed") and not failed(story)


def test_what_never_cleared_ends_it_beyond_the_first_breach(back):
    story = back()
    story.frames(99.0, times=20)
    assert not failed(story)
    story.frames(99.0)

    why = "back did not help: huge is in breach still at step 61 on rank 0"
    assert failed(story) == [(61, why)]


@pytest.mark.parametrize(
    "more",
    [
        {"severity": "SEV1"},
        {"runbook": "aside"},
        {"runbook": None},
        {"mode": "shadow"},
    ],
)
def test_other_rules_wait_for_the_end_of_the_verification(back, more):
    """What does not damage the weights, is not answered by going back, or acts on nothing."""
    said = {"severity": "SEV0", "runbook": "back", **more}
    other = rule_on(DETECTORS, "wild", said.pop("severity"), said.pop("runbook"), **said)
    story = back(gone(), other)
    story.frames(2.0, times=5)
    story.frames(2.0, times=20, grad=99.0)
    assert "wild" in story.state.incident.rules and not failed(story)
    story.frames(2.0, times=5)

    assert story.kinds("verify", "passed")


def test_frames_from_before_show_nothing(back):
    story = back()
    story.send(Announced(story.at_ns, 1, 2, 8, story.names))
    story.frames(2.0, times=2)
    story.rank(1, 2.0)
    late = [Frame(story.at_ns, 1, 0, step, (99.0, 1.0)) for step in (61, 62)]
    for frame in late:
        story.send(frame)
    story.frames(2.0, times=22)

    assert not failed(story)
