"""An end with code 0 before the planned length is SEV1, unless somebody asked for it."""

from __future__ import annotations

import pytest

from supervise.core.model import Exited, JobSettings, Launched, Notice

from .conftest import messages

STEPS = 50


def end(story, code=0, *before):
    """Make 50 steps and end; return severity and title of the newest message."""
    story.frames(2.0, times=STEPS)
    for event in before:
        story.send(event)
    story.send(Exited(story.at_ns, code))
    newest = messages(story)[-1]
    return newest["severity"], newest["title"]


def library(done, total, *, stopped=False):
    data = {"done": done, "total": total, "stopped": stopped}
    return Notice(0, "training-ended", "Trainer ended", data=data)


@pytest.mark.parametrize(
    ("steps", "before", "shortfall"),
    [
        (None, [], ""),
        (50, [], ""),
        (60, [], "50 of 60 steps"),
        (None, [library(30, 40)], "30 of 40 steps"),
        (60, [library(40, 40)], ""),
        (60, [library(30, 40, stopped=True)], ""),
        (None, [library(30, 40), library(40, 40)], ""),
        (60, [Notice(0, "signal", "SIGUSR1", data={"signal": "SIGUSR1", "final": False})], ""),
        (60, [library(30, 40), Launched(0, 2, 1)], "50 of 60 steps"),
        (None, [Notice(0, "training-ended", "damaged", data={"done": "x"})], ""),
    ],
)
def test_success_before_the_planned_length_is_reported(tell, steps, before, shortfall):
    found = end(tell(job=JobSettings(steps=steps)), 0, *before)
    early = ("SEV1", f"the job ended with code 0 after {shortfall}")
    assert found == (early if shortfall else ("INFO", f"finished at step {STEPS - 1}"))


@pytest.mark.parametrize(("signal", "by_drill"), [(9, True), (11, False)])
def test_a_process_that_a_drill_killed_is_not_looked_for_elsewhere(tell, signal, by_drill):
    killed = {"kind": "signal", "type": "SIGKILL", "cls": "killed", "leading": True}
    killed |= {"title": "another process killed it", "then": "look for who sent it"}
    drill = {"fault": "crash", "params": {"signal": signal}, "steps": 1}
    story = tell()
    end(
        story,
        -9,
        Notice(0, "drill", "drill crash begins at step 50", 0, 50, drill),
        Notice(0, "failure", "SIGKILL", 0, data=killed),
    )
    (newest,) = [m for m in messages(story) if m["kind"] == "finished"]
    assert ("a drill ended it" in newest["verdict"]) == by_drill
    (note,) = story.kinds("note", "failure")
    assert note.data["details"]["cls"] == ("drill" if by_drill else "killed")

    story.send(Launched(story.at_ns, 2, 1))
    assert story.state.job.drill_signal == ""


def test_a_failure_is_reported_as_one(tell):
    assert end(tell(job=JobSettings(steps=60)), 1) == (
        "SEV1",
        "the job ended with code 1 at step 49",
    )


def verdict(number, step, damage=""):
    data = {"id": f"ckpt-{number}", "step": step, "attempt": 0, "path": f"out/{step}.pt"}
    return Notice(0, "checkpoint", "", data={**data, "ok": not damage, "damage": damage})


@pytest.mark.parametrize(
    ("verdicts", "then"),
    [
        ([verdict(2, 49, "model.w has NaN")], "no checkpoint of this run is good"),
        ([verdict(2, 49, "torn"), verdict(1, 39)], "use ckpt-1 of step 39 instead"),
        ([verdict(1, 39, "torn"), verdict(2, 49)], ""),
    ],
)
def test_a_damaged_last_checkpoint_is_reported(tell, verdicts, then):
    """No frame follows in which a rule could see it; an older one that was torn is no matter."""
    story = tell()
    found = end(story, 0, *verdicts)
    damaged = ("SEV1", "finished at step 49, and the newest checkpoint is damaged")
    assert found == (damaged if then else ("INFO", "finished at step 49"))
    assert then in str(messages(story)[-1])
