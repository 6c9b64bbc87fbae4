"""Which trouble goes first: what is no worse joins, and what was before a rollback is over."""

from __future__ import annotations

import pytest

from supervise.actions.snapshot import Snapshot
from supervise.core.model.events import Beat, Finished, Frame, Tick
from supervise.core.model.policy import Budget, Ladder, Runbook
from supervise.detectors.absence import Absence

from .conftest import SECOND, Above, Touch, Verify, rule_on, runbook_of

DETECTORS = {"high": Above("train_loss_raw", 5.0), "wild": Above("grad_global_norm", 9.0)}


@pytest.fixture
def going(tell):
    """Return a function: `high` runs `back`, which takes the job back when `commit` is called."""

    def begin(severity="SEV0", runbook="back", first="SEV0", **changes):
        book = runbook_of("back", Touch(), Verify(within=30, clear_for=5))
        look = runbook_of("look", Snapshot())
        rules = (
            rule_on(DETECTORS, "high", first, "back"),
            rule_on(DETECTORS, "wild", severity, runbook, keep_steps=2),
        )
        other = Runbook("other", book.steps, book.verbs)
        changes = {"ladder": Ladder(()), **changes}
        story = tell(
            detectors=DETECTORS,
            rules=rules,
            inhibit=(),
            answer=lambda key: None,
            runbooks={"back": book, "other": other, "look": look},
            budgets={"touch": Budget(9), "all": Budget(9)},
            **changes,
            healthy=30,
            then=8.0,
        )
        assert story.actions() == ["inc-1/1/0-touch"]
        return story

    return begin


def commit(story, number=1, attempt=1):
    done = {"attempt": attempt, "ack_step": story.step - 12}
    story.send(Finished(story.at_ns, f"inc-1/{number}/0-touch", True, done))
    story.attempt, story.step = attempt, story.step - 12


@pytest.mark.parametrize("severity", ["SEV0", "SEV1"])
def test_what_fired_before_a_rollback_costs_no_second_one(going, severity):
    """On no level, and for the same runbook: it joins, in the middle of the action or behind it."""
    story = going(severity)
    story.frames(2.0, grad=10.0)
    commit(story)
    story.frames(2.0, times=8)

    assert story.actions() == ["inc-1/1/0-touch"]
    assert not story.kinds("verify", "preempted")
    assert story.kinds("verify", "passed")
    assert story.state.incident.rules == ["high", "wild"]


def test_a_frame_from_before_the_rollback_that_is_read_late_is_no_reason(going):
    """It was in the ring when the outcome came, and it is worse than what was answered."""
    story = going("SEV0", first="SEV1")
    commit(story)
    late = Frame(story.at_ns, 0, 0, story.step + 13, (2.0, 10.0))
    story.send(late)
    story.frames(2.0, times=8)

    assert story.actions() == ["inc-1/1/0-touch"]
    said = [d.reason for d in story.kinds("suppressed") if d.rule == "wild"]
    assert said == ["wild: in frames from before attempt 1"]
    assert not story.state.incident.deferred.rules


@pytest.mark.parametrize("ladder", [Ladder(()), Ladder(("back", "other", "hold"))])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_worse_acts_again_only_when_frames_behind_the_rollback_are_in_breach(
    going, again, ladder
):
    """It fired in the middle of the action; it need not have cleared in between."""
    story = going("SEV0", first="SEV1", ladder=ladder)
    story.frames(2.0, grad=10.0)
    commit(story)
    assert len(story.actions()) == 1
    story.frames(2.0, grad=10.0 if again else 1.0)
    story.frames(2.0, times=6)

    assert len(story.actions()) == (2 if again else 1)
    assert bool(story.kinds("verify", "preempted")) == again


def test_a_rule_that_is_no_worse_does_not_end_a_verification(going):
    """It joins, and stands against the recovery; when that has failed nothing runs twice."""
    story = going("SEV0")
    commit(story)
    story.frames(2.0, times=2)
    story.frames(2.0, times=32, grad=10.0)

    assert not story.kinds("verify", "preempted")
    assert story.kinds("verify", "failed")[0].reason.startswith("back did not help: wild is in")
    assert story.actions() == ["inc-1/1/0-touch"]
    assert story.state.machine == "holding"


@pytest.mark.parametrize("seconds", [100, 5])
def test_silence_ends_a_verification_that_would_never_end(tell, seconds):
    detectors = {
        "high": DETECTORS["high"],
        "stalled": Absence(signal="step", after={"min": 20.0, "p99_multiple": 8.0}),
    }
    rules = (
        rule_on(detectors, "high", "SEV0", "back"),
        rule_on(detectors, "stalled", "SEV0", "look"),
    )
    books = {
        "look": runbook_of("look", Snapshot()),
        "back": runbook_of("back", Touch(), Verify()),
    }
    story = tell(
        detectors=detectors,
        rules=rules,
        inhibit=(),
        ladder=Ladder(("back", "hold")),
        runbooks=books,
        healthy=30,
        then=8.0,
    )
    for _ in range(seconds):
        story.at_ns += SECOND
        story.send(Tick(story.at_ns, (Beat(0, story.at_ns, "step"),)))

    assert bool(story.kinds("verify", "preempted")) == (seconds == 100)
    assert (story.actions()[-1] == "inc-1/2/0-snapshot") == (seconds == 100)
