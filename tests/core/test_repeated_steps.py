"""The steps that a job makes again after it was started again, compared with how they were."""

from __future__ import annotations

import pytest

from supervise.core import record_run, replayed_decisions
from supervise.core.model import Budget, Exited, Finished, JobSettings

from .conftest import AGAIN, messages, relaunched, save

NAMES = (
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


@pytest.fixture
def crashed(tell):
    """A function from a checkpoint's step to a job that crashed and was started again from it."""

    def begin(saved=CRASH - 30, **changes):
        story = tell(
            runbooks={**tell().policy.runbooks, "again": AGAIN},
            budgets={"restart": Budget(2), "touch": Budget(2), "all": Budget(9)},
            job=JobSettings(on_crash="again"),
            answer=lambda key: None if "relaunch" in key else Finished(0, key, True),
            names=NAMES,
        )
        story.rows(*(row(step, **changes) for step in range(CRASH)))
        save(story, "ckpt-1", saved)
        story.send(Exited(story.at_ns, 1))
        relaunched(story, saved)
        return story

    return begin


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
            "learning rate 0.000149 where it was",
            "scheduler's state_dict",
        ),
        (new_moments, "SEV2", "update 4", "optimizer's state_dict"),
        (no_batch_at_first, "SEV2", "batches 31.. are those of steps 0..", "position in the data"),
        (lambda s: {"tokens_per_update": 256.0}, "SEV2", "256 tokens per update where", "batch"),
        (lambda s: {"val_loss": 3.0}, "SEV2", "evaluation loss 3 where it was 2.19", "data"),
        (lambda s: {"grad_global_norm": 4.0}, "SEV2", "gradient norm 4 where it was", "precision"),
        (lambda s: {"batch_fingerprint": 9e5 + s}, "INFO", "other batches than before", "seed"),
    ],
)
def test_what_is_not_as_before_is_reported_within_five_steps(
    crashed, change, severity, text, remedy
):
    """With both numbers and what to do; nothing is rolled back, and no recovery hides it."""
    story = crashed()
    before = len(messages(story))
    story.rows(*(row(s, **change(s)) for s in range(31, 36)))
    (message,) = messages(story)[before:]
    assert message["severity"] == severity
    assert text in message["title"] and remedy in message["next"]

    story.rows(*(row(s, **change(s)) for s in range(36, CRASH + 30)))
    assert story.actions() == ["inc-1/1/0-snapshot", "inc-1/1/1-relaunch"]
    passed = story.kinds("verify", "passed")[0].reason
    assert (text in passed) is (severity == "SEV2")
    assert [d for _, d in replayed_decisions(story.policy, enumerate(story.events))] == [
        record_run(d) for d in story.log
    ]


def test_a_schedule_that_started_over_is_told_from_one_that_is_elsewhere(crashed):
    for change, cause in ((new_rate, "started over"), (half, "is not where it was")):
        story = crashed()
        story.rows(*(row(s, **change(s)) for s in range(31, 36)))
        assert f"the schedule {cause}" in messages(story)[-1]["title"]


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
def test_a_job_that_goes_on_as_before_is_not_reported(crashed, change):
    story = crashed()
    before = len(messages(story))
    story.rows(*(row(s, **change(s)) for s in range(31, CRASH - 8)))
    titles = [message["title"] for message in messages(story)[before:]]
    assert titles == ["inc-1: recovered so far; watched for 20 more steps"]


@pytest.mark.parametrize(("saved", "steps"), [(CRASH - 10, 9), (CRASH - 31, 20)])
def test_a_recovery_waits_for_twenty_repeated_steps_or_all(crashed, saved, steps):
    """Five clear steps are enough for this runbook where nothing is repeated."""
    story = crashed(saved)
    story.rows(*(row(s) for s in range(saved + 1, saved + steps)))
    assert not story.kinds("verify", "passed")
    story.rows(row(saved + steps))
    assert story.kinds("verify", "passed")


def test_one_batch_that_is_always_the_same_is_no_repetition(crashed):
    story = crashed(batch_fingerprint=5.0)
    before = len(messages(story))
    story.rows(*(row(s, batch_fingerprint=5.0) for s in range(31, 50)))
    assert messages(story)[before:] == []
