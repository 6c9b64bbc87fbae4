"""What the job itself says of how it goes on, after it was taken back."""

from __future__ import annotations

import pytest

from supervise.actions.relaunch import Relaunch
from supervise.actions.rollback import Rollback
from supervise.core.rule import Budget, Ladder, Runbook
from supervise.core.values import Announced, Exited, Finished, Launched, Noticed

from .conftest import Verify

NAMES = ("train_loss_raw", "grad_global_norm", "learning_rate", "learning_rate_scheduled")
REFUSED = "training did not go on from /c/a: it holds no optimizer state"


@pytest.fixture
def back(tell):
    """Return a function: a trouble was answered by an action, up to its outcome."""

    def begin(action, verb):
        def answer(key):
            return None if verb in key else Finished(story.at_ns, key, True)

        book = Runbook("back", (action, Verify(clear_for=10)), (verb, "verify"))
        changes = {
            "runbooks": {**tell().policy.runbooks, "soften": book},
            "budgets": {name: Budget(2) for name in ("restart", "rollback", "touch", "all")},
            "ladder": Ladder(("soften", "hold")),
            "job": {"relaunch": {"resume": "library"}},
        }
        story = tell(answer=answer, names=NAMES, **changes)
        steps(story, 2.0, 60)
        data = {"id": "a", "step": 40, "attempt": 0, "path": "/c/a", "ok": True}
        story.send(Noticed(story.at_ns, "checkpoint", "a was verified", data=data))
        steps(story, 8.0, 1)
        (action_id,) = story.actions()
        story.attempt, story.step = 1, 40
        if verb == "relaunch":
            story.send(Exited(story.at_ns, -2))
            story.send(Launched(story.at_ns, 2, 1))
        result = {"pid": 2, "attempt": 1, "step": 40}
        story.send(Finished(story.at_ns, action_id, True, result))
        story.send(Announced(story.at_ns, 0, 1, 2, NAMES))
        return story

    return begin


def steps(story, loss, times):
    row = {"train_loss_raw": loss, "grad_global_norm": 1.0, "learning_rate_scheduled": 0.1}
    story.rows(*({**row, "learning_rate": 0.1} for _ in range(times)))


def compared(story, fingerprint="same", loss=2.0, lr=0.1):
    """The first step that is made again was made, with a loss of 2 and a rate of 0.1 before."""
    ok = (fingerprint, loss, lr) == ("same", 2.0, 0.1)
    data = {"step": 41, "fingerprint": fingerprint, "ok": ok}
    data |= {"loss": {"was": 2.0, "is": loss}, "lr": {"was": 0.1, "is": lr}}
    story.send(Noticed(story.at_ns, "continuity", "step 41 was made again", 0, 41, data))


RELAUNCH, ROLLBACK = Relaunch(rewarm=0), Rollback(rewarm=0)
OTHER = {"fingerprint": "other", "loss": 2.1}


@pytest.mark.parametrize(
    ("action", "told", "holds"),
    [
        (RELAUNCH, {}, True),
        (RELAUNCH, OTHER, True),
        (RELAUNCH, {"loss": 2.1}, True),
        (RELAUNCH, {"lr": 0.2}, False),
        (RELAUNCH, {"lr": None, **OTHER}, True),
        (Relaunch(rewarm=0, continuity="exact"), {}, True),
        (Relaunch(rewarm=0, continuity="exact"), OTHER, False),
        (Relaunch(rewarm=0, continuity="any"), {"lr": 0.2}, True),
        (ROLLBACK, {}, True),
        (ROLLBACK, OTHER, False),
    ],
)
def test_a_job_that_goes_on_otherwise_has_not_recovered(back, action, told, holds):
    """Where the action promises more than it does. People hear of it in any case."""
    story = back(action, type(action).__name__.lower())
    steps(story, 2.0, 1)
    compared(story, **told)
    steps(story, 2.0, 12)

    assert bool(story.kinds("verify", "passed")) is holds
    assert [d.reason for d in story.kinds("verify", "failed")] == [
        "step 41 was made again" for _ in range(not holds)
    ]
    assert story.state.machine == ("probation" if holds else "holding")
    messages = [d.data["message"] for d in story.kinds("notify_intent")]
    news = [m["severity"] for m in messages if m["title"] == "step 41 was made again"]
    assert news == ["SEV2"] * bool(told)


def test_a_job_that_begins_anew_has_not_recovered(back):
    """Also where its steps look right."""
    story = back(RELAUNCH, "relaunch")
    story.send(Noticed(story.at_ns, "resume-refused", REFUSED, 0, 0, {"path": "/c/a"}))
    steps(story, 2.0, 1)

    assert [d.reason for d in story.kinds("verify", "failed")] == [REFUSED]
    assert story.state.machine == "holding"
    message = next(
        d.data["message"]
        for d in story.kinds("notify_intent")
        if d.data["message"]["title"] == REFUSED
    )
    assert message["severity"] == "SEV1"


def test_nobody_has_to_be_verifying(tell):
    """Then people are told, and nothing else happens."""
    story = tell()
    story.frames(2.0, times=20)
    story.send(Noticed(story.at_ns, "resume-refused", REFUSED, 0, 0, {"path": "/c/a"}))

    assert story.kinds("notify_intent")[-1].data["message"]["title"] == REFUSED
    assert (story.state.machine, story.state.incident) == ("nominal", None)
