"""What the job itself says of how it goes on, after it was taken back."""

from __future__ import annotations

import pytest

from supervise.actions import Relaunch, Rollback
from supervise.core.model import (
    Announced,
    Budget,
    Exited,
    Finished,
    JobSettings,
    Ladder,
    Launched,
    Notice,
    RelaunchSettings,
    Runbook,
)

from .conftest import Verify, good, messages, save

NAN = float("nan")
NAMES = ("train_loss_raw", "grad_global_norm", "learning_rate", "learning_rate_scheduled")
VERIFY = (Verify(clear_for=10),)
REFUSED = "training did not go on from /c/a: it holds no optimizer state"


@pytest.fixture
def back(tell):
    """Return a function: a trouble was answered by an action, up to its outcome."""

    def begin(action, verb, verify=VERIFY):
        def answer(key):
            return None if verb in key else Finished(story.at_ns, key, True)

        book = Runbook("back", (action, *verify), (verb, *["verify"] * len(verify)))
        changes = {
            "runbooks": {**tell().policy.runbooks, "soften": book},
            "budgets": {name: Budget(2) for name in ("restart", "rollback", "touch", "all")},
            "ladder": Ladder(("soften", "hold")),
            "job": JobSettings(relaunch=RelaunchSettings(resume="library")),
        }
        story = tell(answer=answer, names=NAMES, **changes)
        steps(story, 2.0, 60)
        save(story, "a", 40)
        steps(story, 8.0, 1)
        (action_id,) = story.actions()
        story.attempt, story.step = 1, 40
        if verb == "relaunch":
            story.send(Exited(story.at_ns, -2))
            story.send(Launched(story.at_ns, 2, 1))
        result = {"pid": 2, "attempt": 1, "step": 40}
        story.send(Finished(story.at_ns, action_id, True, result))
        if verb == "relaunch":
            story.send(Announced(story.at_ns, 0, 1, 2, NAMES))
        return story

    return begin


def steps(story, loss, times):
    row = {"train_loss_raw": loss, "grad_global_norm": 1.0, "learning_rate_scheduled": 0.1}
    story.rows(*({**row, "learning_rate": 0.1} for _ in range(times)))


def compared(story, fingerprint="same", loss=2.0, lr=0.1, proof="equal", was=2.0):
    """The first step that is made again was made, with a loss of 2 and a rate of 0.1 before."""
    ok = (fingerprint, loss, lr, proof) == ("same", 2.0, 0.1, "equal")
    data = {"step": 41, "fingerprint": fingerprint, "ok": ok}
    data |= {"loss": {"was": was, "is": loss}, "lr": {"was": 0.1, "is": lr}}
    data["probe_batch"] = {"verdict": proof, "was": 3.0, "is": 3.0}
    story.send(Notice(story.at_ns, "continuity", "step 41 was made again", 0, 41, data))


RELAUNCH, ROLLBACK = Relaunch(rewarm=0), Rollback(rewarm=0)
OTHER = {"fingerprint": "other", "loss": 2.1}


@pytest.mark.parametrize(
    ("action", "told", "holds"),
    [
        (RELAUNCH, {}, True),
        (RELAUNCH, OTHER, True),
        (RELAUNCH, {"lr": 0.2}, True),
        (RELAUNCH, {"lr": 0.2, **OTHER}, True),
        (RELAUNCH, {"lr": None, **OTHER}, True),
        (RELAUNCH, {"proof": "differs"}, False),
        (Relaunch(rewarm=0, continuity="exact"), {}, True),
        (Relaunch(rewarm=0, continuity="exact"), OTHER, False),
        (Relaunch(rewarm=0, continuity="exact"), {"lr": 0.2}, False),
        (Relaunch(rewarm=0, continuity="exact"), {"proof": "differs"}, False),
        (Relaunch(rewarm=0, continuity="any"), {"lr": 0.2, "proof": "differs"}, True),
        (ROLLBACK, {}, True),
        (ROLLBACK, OTHER, False),
    ],
)
def test_a_job_that_goes_on_otherwise_has_not_recovered(back, action, told, holds):
    """Where the action promises more than it does. A rate alone is told with the steps behind."""
    story = back(action, type(action).__name__.lower())
    steps(story, 2.0, 1)
    compared(story, **told)
    steps(story, 2.0, 20)

    assert bool(story.kinds("verify", "passed")) is holds
    assert [d.reason for d in story.kinds("verify", "failed")] == [
        "step 41 was made again" for _ in range(not holds)
    ]
    assert story.state.machine == ("probation" if holds else "holding")
    news = [m["severity"] for m in messages(story) if m["title"] == "step 41 was made again"]
    reshuffled = holds and told.get("fingerprint") == "other" and told.get("proof") is None
    news_due = bool(told) and not (holds and told == {"lr": 0.2})
    assert news == ["INFO" if reshuffled else "SEV2"] * news_due


@pytest.mark.parametrize(
    ("action", "told", "anew"),
    [
        (RELAUNCH, {"loss": 2.15}, True),
        (RELAUNCH, {"fingerprint": "other", "loss": 2.15}, False),
        (RELAUNCH, {"fingerprint": "other", "loss": 2.25}, True),
        (RELAUNCH, {"fingerprint": "unknown", "loss": 0.1}, False),
        (RELAUNCH, {"fingerprint": "other", "loss": NAN}, False),
        (RELAUNCH, {"fingerprint": "other", "loss": 2.25, "was": 2.2}, False),
        (RELAUNCH, {"fingerprint": "other", "loss": 2.25, "proof": "equal"}, False),
        (Relaunch(rewarm=0, continuity="any"), {"loss": 9.0}, False),
        (Relaunch(rewarm=0, continuity="exact"), {"loss": 9.0}, True),
    ],
)
def test_a_first_loss_far_above_the_band_is_a_launch_that_began_anew(back, action, told, anew):
    """The band is 5 % wide at least, twice that where it is not known to be the same batch."""
    story = back(action, "relaunch")
    steps(story, 2.0, 1)
    compared(story, **{"proof": "not judged", **told})
    steps(story, 2.0, 1)
    save(story, "b", 41)

    assert story.state.checkpoints.wrong_checkpoint is anew
    assert (story.state.checkpoints.suspects() == {"b"}) is anew
    assert [d.reason.split("; ")[0] for d in story.kinds("verify", "failed")] == [
        "step 41 was made again" for _ in range(anew)
    ]
    (message,) = (each for each in messages(story) if each["title"].startswith("step 41"))
    assert ("it did not load all of its checkpoint" in message["title"]) is anew
    reshuffled = "fingerprint" in told and told["loss"] == told["loss"]
    assert message["severity"] == ("SEV1" if anew else "INFO" if reshuffled else "SEV2")


def test_recovered_is_said_beyond_the_first_breach_only(back):
    """Quiet steps before it prove nothing, and do not count against the deadline."""
    story = back(RELAUNCH, "relaunch")
    until = story.state.incident.run.verification.deadline_frame
    steps(story, 2.0, 20)  # the trouble was at step 60
    assert not story.kinds("verify", "passed")
    assert story.state.incident.run.verification.deadline_frame == until + 20
    steps(story, 2.0, 1)

    assert story.kinds("verify", "passed")


def test_a_job_that_begins_anew_has_not_recovered(back):
    story = back(RELAUNCH, "relaunch")
    story.send(Notice(story.at_ns, "resume-refused", REFUSED, 0, 0, {"path": "/c/a"}))
    steps(story, 2.0, 1)

    assert [d.reason for d in story.kinds("verify", "failed")] == [REFUSED]
    assert story.state.machine == "holding"
    message = next(message for message in messages(story) if message["title"] == REFUSED)
    assert message["severity"] == "SEV1"


def test_what_a_job_that_began_anew_saves_is_suspect(back):
    """Of this launch only, before and after the notice, whoever verifies; a person may take it."""
    story = back(RELAUNCH, "relaunch")
    steps(story, 2.0, 21)
    assert story.state.machine == "probation"
    save(story, "b", 45, attempt=1)
    story.send(Notice(story.at_ns, "resume-refused", REFUSED, 0, 0, {"path": "/c/a"}))
    steps(story, 2.0, 60)
    assert story.state.incident is None
    save(story, "c", 90, attempt=1)
    save(story, "d", 95, attempt=2)  # after a rollback
    known = story.state.copy().checkpoints

    assert known.suspects() == {"b", "c", "d"}
    assert [c.id for c in known.good()] == ["a"]
    story.send(Exited(story.at_ns, 0))
    story.send(Launched(story.at_ns, 3, 3))
    save(story, "e", 99, attempt=2)
    save(story, "f", 45, attempt=3)
    assert good(story) == ["a", "f"]


def test_a_loop_that_goes_on_is_judged_by_frames_of_the_restored_weights(back):
    """Step numbers go on; what was seen of the weights that are gone is forgotten."""
    story = back(Rollback(at_least=10, rewarm=0), "rollback")
    monitor, story.step = story.state.monitors[0], 60
    data = {"attempt": 1, "to": 40}
    story.send(Notice(story.at_ns, "weights-restored", "the weights are back", 0, 60, data))
    steps(story, 2.0, 5)
    assert [f.step for f in monitor.history.frames][-7:] == [39, 40, 61, 62, 63, 64, 65]
    steps(story, 2.0, 10)
    assert story.kinds("verify")[-1].data["what"] != "failed"
