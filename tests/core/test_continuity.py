"""What the job itself says of how it goes on, after it was taken back."""

from __future__ import annotations

from copy import deepcopy

import pytest

from supervise.actions import Relaunch, Rollback
from supervise.core.model import JobSettings, Ladder, RelaunchSettings, Runbook

from .conftest import AMPLE, NAN, Verify, crashing, good, messages, relaunched, save, taken_back

NAMES = ("train_loss_raw", "grad_global_norm", "learning_rate", "learning_rate_scheduled")
VERIFY = Verify(clear_for=10)
REFUSED = "training did not go on from /c/a: it holds no optimizer state"


def back(tell, action):
    """A trouble was answered by an action, up to its outcome."""
    verb = type(action).__name__.lower()
    book = Runbook("back", (action, VERIFY), (verb, "verify"))
    story = tell(
        answer=lambda key: None if verb in key else {},
        names=NAMES,
        runbooks={**tell().policy.runbooks, "soften": book},
        budgets=AMPLE,
        ladder=Ladder(("soften", "hold")),
        job=JobSettings(relaunch=RelaunchSettings(resume="library")),
    )
    steps(story, 2.0, 60)
    save(story, "a", 40)
    steps(story, 8.0, 1)
    if verb == "relaunch":
        relaunched(story, 40, ended=True)
    else:
        taken_back(story, 40)
    return story


def steps(story, loss, times):
    row = {"train_loss_raw": loss, "grad_global_norm": 1.0, "learning_rate_scheduled": 0.1}
    story.rows(*({**row, "learning_rate": 0.1} for _ in range(times)))


def compared(story, fingerprint="same", loss=2.0, lr=0.1, proof="equal", was=2.0):
    """The first step that is made again was made, with a loss of 2 and a rate of 0.1 before."""
    ok = (fingerprint, loss, lr, proof) == ("same", 2.0, 0.1, "equal")
    data = {"step": 41, "fingerprint": fingerprint, "ok": ok}
    data |= {"loss": {"was": was, "is": loss}, "lr": {"was": 0.1, "is": lr}}
    data["probe_batch"] = {"verdict": proof, "was": 3.0, "is": 3.0}
    story.notice("continuity", "step 41 was made again", 0, 41, data)


RELAUNCH, ROLLBACK = Relaunch(rewarm=0), Rollback(rewarm=0)
OTHER = {"fingerprint": "other", "loss": 2.1}


@pytest.mark.parametrize(
    ("action", "told", "holds"),
    [
        (RELAUNCH, {}, True),
        (RELAUNCH, OTHER, True),
        (RELAUNCH, {"lr": 0.2}, True),
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
def test_a_job_that_goes_on_otherwise_has_not_recovered(tell, action, told, holds):
    """Where the action promises more than it does. A rate alone is told with the steps behind."""
    story = back(tell, action)
    steps(story, 2.0, 1)
    compared(story, **told)
    steps(story, 2.0, 20)

    assert bool(story.kinds("verify", "passed")) is holds
    reasons = [d.reason for d in story.kinds("verify", "failed")]
    assert reasons == ["step 41 was made again"] * (not holds)
    assert story.state.machine == ("probation" if holds else "holding")
    relapse = "if it comes back within 20 steps: no further try, as the policy has none left"
    assert messages(story)[-1]["next"].startswith(f"nothing to do; {relapse}") is holds
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
        (Relaunch(rewarm=0, continuity="any"), {"loss": 9.0}, False),
        (Relaunch(rewarm=0, continuity="exact"), {"loss": 9.0}, True),
    ],
)
def test_a_first_loss_far_above_the_band_is_a_launch_that_began_anew(tell, action, told, anew):
    """The band is 5 % wide at least, twice that where it is not known to be the same batch."""
    story = back(tell, action)
    steps(story, 2.0, 1)
    compared(story, **{"proof": "not judged", **told})
    steps(story, 2.0, 1)
    save(story, "b", 41)

    assert story.state.checkpoints.wrong_checkpoint is anew
    assert (story.state.checkpoints.suspects() == {"b"}) is anew
    assert len(story.kinds("verify", "failed")) == anew
    held = [m["steps"] for m in messages(story) if "a person is needed" in m["title"]]
    mend = [{"command": "supervise stop RUN"}, {"text": "mend how the job loads its checkpoint"}]
    assert [list(way[:2]) for way in held] == [mend] * anew
    (message,) = (each for each in messages(story) if each["title"].startswith("step 41"))
    assert ("it did not load all of its checkpoint" in message["title"]) is anew
    reshuffled = "fingerprint" in told and told["loss"] == told["loss"]
    assert message["severity"] == ("SEV1" if anew else "INFO" if reshuffled else "SEV2")


def test_recovered_is_said_beyond_the_first_breach_only(tell):
    """Quiet steps before it prove nothing, and do not count against the deadline."""
    story = back(tell, RELAUNCH)
    until = story.state.incident.run.verification.deadline_frame
    steps(story, 2.0, 20)  # the trouble was at step 60
    assert not story.kinds("verify", "passed")
    assert story.state.incident.run.verification.deadline_frame == until + 20
    steps(story, 2.0, 1)

    assert story.kinds("verify", "passed")


def test_a_job_that_begins_anew_has_not_recovered_and_what_it_saves_is_suspect(tell):
    """Of this launch only, before and after the notice, whoever verifies; a person may take it."""
    refused = back(tell, RELAUNCH)
    refused.notice("resume-refused", REFUSED, 0, 0, {"path": "/c/a"})
    steps(refused, 2.0, 1)
    assert [d.reason for d in refused.kinds("verify", "failed")] == [REFUSED]
    assert refused.state.machine == "holding"
    (severity,) = (m["severity"] for m in messages(refused) if m["title"] == REFUSED)
    assert severity == "SEV1"

    story = back(tell, RELAUNCH)
    steps(story, 2.0, 21)
    assert story.state.machine == "probation"
    save(story, "b", 45, attempt=1)
    story.notice("resume-refused", REFUSED, 0, 0, {"path": "/c/a"})
    steps(story, 2.0, 60)
    assert story.state.incident is None
    save(story, "c", 90, attempt=1)
    save(story, "d", 95, attempt=2)  # after a rollback
    known = deepcopy(story.state).checkpoints

    assert known.suspects() == {"b", "c", "d"}
    assert [c.id for c in known.good()] == ["a"]
    story.exit(0)
    story.launch(3, 3)
    save(story, "e", 99, attempt=2)
    save(story, "f", 45, attempt=3)
    assert good(story) == ["a", "f"]


def test_a_loop_that_goes_on_is_judged_by_frames_of_the_restored_weights(tell):
    story = back(tell, Rollback(at_least=10, rewarm=0))
    monitor, story.step = story.state.monitors[0], 60
    story.notice("weights-restored", "the weights are back", 0, 60, {"attempt": 1, "to": 40})
    steps(story, 2.0, 5)
    assert [f.step for f in monitor.history.frames][-7:] == [39, 40, 61, 62, 63, 64, 65]
    steps(story, 2.0, 10)
    assert story.kinds("verify")[-1].data["what"] != "failed"


# ── the steps that a job makes again after it was started again, compared with how they were ──────


REPEATED_NAMES = (
    *("train_loss_raw", "grad_global_norm", "learning_rate_scheduled", "learning_rate"),
    *("update_norm", "batch_fingerprint", "tokens_per_update", "val_loss"),
)
CRASH = 60  # its step; the checkpoint is of the step 30 before


def row(step, **changes):
    """A step of a run with a warm-up of 20 steps and a decay, whose batches vary."""
    rate = 1e-3 * min(1.0, (step + 1) / 20) * (1.0 - step / 500)
    made = {
        "train_loss_raw": 2.0 + 0.05 * (step % 3),
        "grad_global_norm": 1.0 + 0.1 * (step % 4),
        "learning_rate_scheduled": rate,
        "learning_rate": rate,
        "batch_fingerprint": 7000.0 + 13 * step,
        "tokens_per_update": 512.0,
    }
    made |= changes
    if step % 4 == 0 or step == CRASH - 29:  # the first of a process, and then not all
        made.setdefault("val_loss", 2.5 - 0.01 * step)
        made.setdefault("update_norm", 40.0 * made["learning_rate"] * (1.0 + 0.1 * (step % 3)))
    return made


def crashed(tell, saved=CRASH - 30, resumable="full"):
    """A job that crashed and was started again from it."""
    story = crashing(tell, healthy=0, names=REPEATED_NAMES)
    story.rows(*(row(step) for step in range(CRASH)))
    save(story, "ckpt-1", saved, resumable=resumable)
    story.exit(1)
    relaunched(story, saved)
    return story


def anew(step):
    """The step of a run that began at the restart."""
    return step - (CRASH - 29)


def of_start(name):
    return lambda step: {name: row(anew(step))[name]}


def new_rate(step):
    rate = row(anew(step))["learning_rate"] if step > CRASH - 29 else row(step)["learning_rate"]
    return {"learning_rate_scheduled": rate, "learning_rate": rate}


def new_moments(step):
    larger = 4.4 / (1 + 2 * anew(step))
    return {"update_norm": 40.0 * row(step)["learning_rate"] * max(1.0, larger)}


def no_batch_at_first(step):
    """The module is not known at the first step of a process."""
    first = {"batch_fingerprint": None}
    return first if step == CRASH - 29 else of_start("batch_fingerprint")(step)


@pytest.mark.parametrize(
    ("change", "severity", "text", "remedy"),
    [
        (
            new_rate,
            "SEV2",
            "learning rate 0.000149 at step 33, 0.000934 before",
            "set the schedule to step 31 by hand where the checkpoint holds no state of it",
        ),
        (new_moments, "SEV2", "update 4", "optimizer's state_dict"),
        (no_batch_at_first, "SEV2", "batches 31.. are those of steps 0..", "position in the data"),
        (lambda s: {"tokens_per_update": 256.0}, "SEV2", "256 tokens per update where", "batch"),
        (lambda s: {"val_loss": 3.0}, "SEV2", "evaluation loss 3 where it was 2.19", "data"),
        (lambda s: {"grad_global_norm": 4.0}, "SEV2", "gradient norm 4 where it was", "precision"),
        (lambda s: {"batch_fingerprint": 9e5 + s}, "INFO", "other batches than before", "seed"),
    ],
)
def test_what_is_not_as_before_is_reported_within_five_steps(tell, change, severity, text, remedy):
    story = crashed(tell)
    before = len(messages(story))
    story.rows(*(row(s, **change(s)) for s in range(31, 36)))
    (message,) = messages(story)[before:]
    assert message["severity"] == severity
    assert text in message["verdict"] and remedy in message["next"]

    story.rows(*(row(s, **change(s)) for s in range(36, CRASH + 30)))
    assert story.actions() == ["inc-1/1/0-snapshot", "inc-1/1/1-relaunch"]
    passed = story.kinds("verify", "passed")[0].reason
    assert (text in passed) is (severity == "SEV2")
    title = "running again, NOT as before" if severity == "SEV2" else "recovered so far"
    assert f"inc-1: {title}; watched for 20 more steps" in [m["title"] for m in messages(story)]
    assert story.replayed() == story.recorded()


def test_a_checkpoint_without_moments_is_not_started_from_again_for_them(tell):
    story = crashed(tell, resumable="weights only")
    story.rows(*(row(s, **new_moments(s)) for s in range(31, 36)))

    assert messages(story)[-1]["next"] == (
        "let it train on, as another start from ckpt-1 (weights only) has new moments again; "
        "before the next start: let the job save and load its optimizer's state_dict"
    )


def test_a_schedule_that_started_over_is_told_from_one_that_is_elsewhere(tell):
    for change, cause in ((new_rate, "started over"), (half, "is not where it was")):
        story = crashed(tell)
        story.rows(*(row(s, **change(s)) for s in range(31, 36)))
        message = messages(story)[-1]
        assert f"the schedule {cause}" in message["verdict"]
        assert message["next"].startswith("stop it now, unless it is meant (")
        assert "supervise stop RUN" in message["next"]


def test_weights_that_were_not_loaded_say_nothing_of_the_moments(tell):
    """The loss of the first step tells them; updates and gradients are those of other weights."""
    story = crashed(tell)
    fresh = {"train_loss_raw": 4.4, "grad_global_norm": 4.0}
    story.rows(*(row(s, **fresh, **new_moments(s)) for s in range(31, 40)))
    assert not story.kinds("verify", "differs")


def half(step):
    rate = 0.5 * row(step)["learning_rate"]
    return {"learning_rate_scheduled": rate, "learning_rate": rate}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {},
        lambda s: {"learning_rate": 0.1 * row(s)["learning_rate"]},  # a re-warm of ours
        lambda s: {"train_loss_raw": 2.01, "grad_global_norm": 1.1 + 0.2 * (s % 2)},
        lambda s: {"learning_rate_scheduled": row(s - 1)["learning_rate"]},  # a step off
        lambda s: {"val_loss": 2.54 - 0.01 * s},
    ],
)
def test_a_job_that_goes_on_as_before_is_not_reported(tell, change):
    story = crashed(tell)
    before = len(messages(story))
    story.rows(*(row(s, **change(s)) for s in range(31, CRASH - 8)))
    titles = [message["title"] for message in messages(story)[before:]]
    assert titles == ["inc-1: recovered so far; watched for 20 more steps"]
    again = f"if it ends at step {CRASH - 1} again: no further restart, as that is no progress"
    assert messages(story)[-1]["next"] == f"nothing to do; {again}"


@pytest.mark.parametrize(("saved", "steps"), [(CRASH - 10, 9), (CRASH - 31, 20)])
def test_a_recovery_waits_for_twenty_repeated_steps_or_all(tell, saved, steps):
    story = crashed(tell, saved)
    story.rows(*(row(s) for s in range(saved + 1, saved + steps)))
    assert not story.kinds("verify", "passed")
    story.rows(row(saved + steps))
    assert story.kinds("verify", "passed")
