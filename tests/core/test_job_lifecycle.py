"""The job's processes: crashes, relaunches, hangs, the end."""

from __future__ import annotations

import pytest

from supervise.core import has_start_failed
from supervise.core.model import Beat, Budget, JobSettings, Ladder, RelaunchSettings, Reloaded, Tick
from supervise.detectors import Absence

from .conftest import SECOND, crashing, messages, one_rule, relaunched, save


def test_a_crash_is_answered_and_the_run_goes_on(tell):
    story = crashing(tell)
    story.exit(-9)
    assert story.kinds("incident", "opened")[0].reason.startswith(
        "SEV1 the job ended with signal 9 (SIGKILL) at step 49"
    )
    assert story.actions() == ["inc-1/1/0-snapshot", "inc-1/1/1-relaunch"]
    assert (story.state.job.over, story.state.machine) == (False, "acting")
    relaunched(story, 40)
    story.frames(2.0, times=40)

    assert story.kinds("verify", "passed")
    assert story.state.machine == "nominal"
    assert "recovered" in story.kinds("incident", "closed")[0].reason
    story.exit(0)
    assert (story.state.job.over, story.state.machine) == (True, "halted")


@pytest.mark.parametrize("code", [0, -2, -15, -1, -10, 130, 143, 125, 64, 75, 78])
def test_an_end_that_somebody_meant_is_the_end(tell, code):
    """Signals that people send, and codes with which a job says what it wants."""
    story = crashing(tell)
    story.exit(code)
    assert (story.state.job.over, story.actions()) == (True, [])


@pytest.mark.parametrize(
    ("kind", "code", "is_crash"),
    [("KeyboardInterrupt", -2, False), ("SignalException", 1, False), ("E", 1, True)],
)
def test_a_signal_of_others_that_ended_the_job_is_no_crash(tell, kind, code, is_crash):
    """torchrun makes an error of SIGTERM, and ends with code 1; people hear of the end."""
    story = crashing(tell)
    story.notice("failure", "", data={"type": kind, "leading": True})
    story.exit(code)

    assert bool(story.kinds("incident", "opened")) is bool(story.actions()) is is_crash
    assert story.state.job.over is not is_crash
    assert messages(story)[-1]["severity"] == "SEV1"


def test_threads_logs_and_changes_of_a_job_are_news_once(tell):
    story = tell(job=JobSettings())
    for name in ("prefetch", "pin"):
        data = {"kind": "thread", "type": "KeyError", "message": "'shard'", "thread": name}
        story.notice("failure", "", data=data)
    for text in ("NVRM: Xid 79", "NVRM: Xid 31"):
        data = {"kind": "log", "message": text, "file": "out/k.log", "cls": "gpu"}
        story.notice("failure", "", data={**data, "title": "a fault"})
    changed = "the job differs from attempt 0: code.commit 1f2e → 3a4b"
    story.notice("identity-changed", changed)

    assert [message["title"] for message in messages(story)] == [
        "a thread of the job ended with an error: KeyError: 'shard' (thread prefetch)",
        "a line in a log of the job: a fault: NVRM: Xid 79 in out/k.log",
        changed,
    ]
    story.notice("failure", "", data={"type": "E", "at_ns": 2})
    story.exit(1)
    assert messages(story)[-1]["verdict"].startswith("E; also recorded: KeyError: 'shard'")


def test_the_end_of_a_gang_that_is_started_again_is_no_end(tell):
    story = crashing(tell)
    story.exit(-9)
    story.exit(-9)
    assert story.kinds("note", "relaunching")
    assert not story.state.job.over
    story.finish(story.actions()[-1], {}, "the checkpoint vanished")

    assert story.state.job.over
    assert story.state.machine == "halted"
    message = messages(story)[-1]
    assert "not started again: the relaunch failed: the checkpoint" in message["verdict"]


def test_a_crash_at_the_same_step_again_is_not_answered_again(tell):
    """It would only happen once more; progress in between clears it of that."""
    for steps, is_over in ((9, True), (12, False)):
        story = crashing(tell)
        story.exit(1)
        relaunched(story, 40)
        story.frames(2.0, times=steps)
        story.exit(1)

        assert story.state.job.over is is_over
        why = "it already ended at step 49 before, without progress since"
        assert (why in messages(story)[-1]["verdict"]) is is_over


def test_crashes_without_progress_come_to_an_end_wherever_they_are(tell):
    story = crashing(tell, budgets={})
    for step in (49, 44, 45, 58, 54, 52, 50):
        assert not story.state.job.over
        story.frames(2.0, times=max(0, step - story.step))
        story.exit(1)
        if not story.state.job.over:
            relaunched(story, 40)

    assert story.state.job.over
    assert len([key for key in story.actions() if "relaunch" in key]) == 6
    message = messages(story)[-1]
    assert "it ended 3 times without going past step 58" in message["verdict"]


def failed(story, cls, relaunch):
    """A rank of the job ends with an error of this class, and the job with it."""
    data = {"type": "E", "message": "boom", "file": "train.py", "line": 41, "rank": 1}
    data |= {"cls": cls, "title": "it happened", "relaunch": relaunch, "record": f"f.{story.at_ns}"}
    data |= {"at_ns": story.at_ns, "leading": True}
    story.notice("failure", "E: boom", rank=1, data=data)
    story.exit(1)


@pytest.mark.parametrize(
    ("relaunch", "starts", "why"),
    [
        ("never", 0, "it happened: every start would end the same way (odd)"),
        ("once", 1, "it happened, again after a restart (odd)"),
        ("always", 2, "2 of 2"),
    ],
)
def test_a_crash_is_answered_by_its_class(tell, relaunch, starts, why):
    story = crashing(tell, budgets={"restart": Budget(2), "all": Budget(9)})
    for progress in range(4):
        failed(story, "odd", relaunch)
        if story.state.job.over:
            break
        relaunched(story, 40)
        story.frames(2.0, times=60 + 20 * progress)

    started = [key for key in story.actions() if key.endswith("relaunch")]
    assert (len(started), story.state.job.over) == (starts, True)
    message = messages(story)[-1]
    assert "ended with code 1 at step" in message["title"]
    assert "E: boom at train.py:41 (rank 1)" in message["verdict"]
    assert why in message["verdict"]
    assert story.actions()[-1].endswith("snapshot")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        # A program that the job starts may fail by design, long before or just before.
        ([{"type": "Probe", "at_ns": 1}, {"type": "Own", "at_ns": 9, "leading": True}], "Own"),
        ([{"type": "Probe", "at_ns": 1}, {"type": "Own", "at_ns": 200 * SECOND}], "Own"),
        # What a lost peer raises comes first in time where its end is noticed late.
        ([{"type": "Lost", "at_ns": 1, "secondary": True}, {"type": "Own", "at_ns": 9}], "Own"),
        # A launcher knows which of the processes were ranks.
        (
            [
                {"type": "Probe", "at_ns": 1},
                {"type": "Own", "at_ns": 2, "pid": 7},
                {"type": "Child", "kind": "launcher", "at_ns": 3, "leading": True, "children": [7]},
            ],
            "Own",
        ),
        ([{"type": "T", "kind": "thread"}, {"type": "X", "kind": "exit", "at_ns": 9}], "X"),
        # Native code ends by a signal, and its log says why.
        ([{"type": "S", "kind": "signal"}, {"type": "L", "kind": "log", "leading": True}], "L"),
        ([{"type": "E", "leading": True}, {"type": "L", "kind": "log", "leading": True}], "E"),
    ],
)
def test_the_cause_is_what_follows_from_nothing_else(tell, failures, cause):
    story = tell(job=JobSettings())
    for data in failures:
        story.notice("failure", "", data=data)
    story.exit(1)

    assert story.state.job.cause.type == cause
    assert messages(story)[-1]["verdict"].startswith(cause)


def test_what_was_long_before_and_what_a_launcher_answered_explain_no_end(tell):
    """It started the ranks again by itself."""
    old, answered = tell(job=JobSettings()), tell(job=JobSettings())
    old.notice("failure", "", data={"type": "Probe", "at_ns": 1})
    old.tick(90)
    answered.notice("failure", "", data={"type": "E", "pid": 1})
    answered.announce(0, 1, 2, answered.names, segment=9, again=True)
    for story in (old, answered):
        story.exit(1)
        assert story.state.job.cause is None


def test_a_job_whose_end_was_asked_for_is_not_started_again(tell):
    """Though it lives on, and whatever policy comes: it would only be stopped."""
    story = tell(job=JobSettings(relaunch=RelaunchSettings(args=[])))
    story.notice("signal", "SIGHUP was passed on", data={"signal": "SIGHUP", "final": True})
    story.launch(2, 1)
    digest = story.policy.digest
    story.send(Reloaded(story.at_ns, "bo", digest, "test", "enforce", digest))

    assert story.state.job.unavailable["relaunch"] == "the end of the job was requested"


@pytest.mark.parametrize(
    ("changes", "losses", "is_good", "why"),
    [
        ({"budgets": {"restart": Budget(0), "all": Budget(9)}}, [], True, "0 of 0"),
        ({}, [], False, "relaunch: no good checkpoint"),
        ({"ladder": Ladder(("soften", "hold"))}, [8.0] * 60, True, "inc-1 was held"),
        ({"mode": "shadow"}, [], True, ""),  # nothing acts in it: no reason to give
    ],
    ids=["budget", "checkpoint", "held", "shadow"],
)
def test_a_crash_that_is_not_answered_ends_the_run_with_the_reason(
    tell, changes, losses, is_good, why
):
    """There is nothing to hold; in a hold it is not started again before a person has come."""
    story = crashing(tell, **changes)
    save(story, "ckpt-1", 40, ok=is_good)
    story.frames(*losses)
    story.exit(1)

    assert story.state.job.over
    assert not [key for key in story.actions() if key.endswith("relaunch")]
    assert why in messages(story)[-1]["verdict"]


def test_a_crash_may_have_to_be_asked_for(tell):
    for word in ("approve", "deny"):
        story = crashing(tell, mode="approve")
        story.exit(1)
        story.tick()
        assert not story.state.job.over
        story.say(word, id="ask-1")
        assert story.state.job.over == (word == "deny")
        assert story.actions()[-1].endswith("relaunch") == (word == "approve")


def test_processes_that_are_gone_are_not_silent(tell):
    """From their end to the first word of the new ones nothing is judged, whatever beats say."""
    stalled = Absence(signal="heartbeat", after={"min": 30.0})
    story = crashing(tell, **one_rule(stalled, "SEV0", unknown="breach"))
    story.exit(1)
    old, before = story.at_ns, len(story.kinds("rule", "fired"))
    story.launch(2, 1)
    for _ in range(40):
        story.at_ns += 10**10
        story.send(Tick(story.at_ns, (Beat(0, old, "step"),)))

    assert len(story.kinds("rule", "fired")) == before
    assert not story.kinds("blind")


@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        (True, -2, "INFO interrupted at step 49"),
        (True, 1, "SEV1 the job is DOWN: it ended with code 1 at step 49"),
        (False, -2, "SEV1 the job was ended by SIGINT, as asked, at step 49"),
    ],
)
def test_who_types_ctrl_c_is_not_paged_for_it(tell, typed, code, told):
    """It is the end that somebody at the terminal wanted; an error on the way out is none."""
    story = crashing(tell)
    about = {"signal": "SIGINT", "final": True, "killed": False, "typed": typed}
    story.notice("signal", "SIGINT was typed at the terminal", data=about)
    story.notice("failure", "", data={"type": "KeyboardInterrupt", "leading": True})
    story.exit(code)
    assert bool(story.kinds("incident", "opened")) == (code == 1)

    (message,) = [d.data["message"] for d in story.kinds("notify_intent")]
    assert f"{message['severity']} {message['title']}" == told


ASKS = RelaunchSettings(args=("--from={checkpoint}", "--fast"), env={"START": "{step}"})


@pytest.mark.parametrize(
    ("job", "given"),
    [
        (ASKS, "job.relaunch.args --from={checkpoint} --fast, job.relaunch.env START"),
        (RelaunchSettings(resume="library"), "job.relaunch.resume library"),
    ],
)
def test_a_start_that_came_to_no_step_is_told_with_what_it_was_given(tell, job, given):
    story = crashing(tell, job=JobSettings(on_crash="again", relaunch=job))
    story.exit(1)
    relaunched(story, 40)
    story.exit(2)

    why = f"restarted with {given}, the job ended with code 2 before its first step"
    assert [d.reason for d in story.kinds("verify", "failed")] == [why]
    assert story.state.job.over and has_start_failed(story.state)
    message = messages(story)[-1]
    assert message["title"].endswith("its restart ended with code 2 before its first step")
    assert message["why"] == f"it was started with {given}"
    assert message["next"].startswith(
        "the job is down; read the end of the restart's output, as its error is not on record; "
        f"check {given} in the policy; then "
    )


@pytest.mark.parametrize("code", [0, -15, 130])
def test_a_start_that_ended_without_a_step_may_have_been_meant(tell, code):
    story = crashing(tell)
    story.exit(1)
    relaunched(story, 40)
    story.exit(code)

    assert story.state.job.over and not has_start_failed(story.state)
    assert not story.kinds("verify", "failed")


def test_a_start_may_be_over_before_its_relaunch_is_reported(tell):
    """Its end is its own, not the one of the job before it, and is not forgotten."""
    story = crashing(tell)
    story.exit(1)
    action = story.kinds("intent")[-1].data["action"]["id"]
    assert story.state.incident.run.intent.args["attempt"] == 1
    story.launch(2, 1)
    story.exit(2)
    assert not story.state.job.over
    story.finish(action, {"pid": 2, "attempt": 1, "step": 40})

    assert story.state.job.over and has_start_failed(story.state)
    assert not story.kinds("note", "relaunching")
    assert "code 2 before its first step" in story.kinds("incident", "closed")[0].reason


@pytest.fixture
def stuck(tell):
    """A job of 50 steps that is started again when it makes no step for 30 seconds."""
    return crashing(
        tell,
        **one_rule(Absence(after={"min": 30.0}), "SEV0", "again"),
        budgets={},
        answer=lambda key: None if key.endswith(("relaunch", "stop")) else {},
    )


def hang_again(story, step=49):
    """It comes to a step, hangs there and is started again."""
    story.frames(2.0, times=max(0, step - story.step))
    story.beat(40)
    relaunched(story, 40, ended=True)


def starts(story):
    return len([key for key in story.actions() if key.endswith("relaunch")])


def test_a_job_that_hangs_at_the_same_step_again_is_given_up(stuck):
    story = stuck
    hang_again(story)
    hang_again(story)
    story.frames(2.0, times=9)
    story.beat(40)

    assert starts(story) == 2
    assert [key.split("-", 2)[-1] for key in story.actions()[-2:]] == ["snapshot", "stop"]
    given_up = next(m for m in messages(story) if m["title"] == "inc-1: given up")
    why = "it was restarted 2 times and stalls again without going past step 49"
    assert given_up["verdict"] == why
    stop = story.kinds("intent")[-1].data["action"]
    assert stop["args"]["if_idle_s"] > 0.0, "one that works is not ended"
    story.exit(-15)
    story.finish(stop["id"], {"exit_code": 78, "returncode": -15})
    assert story.state.job.over
    last = messages(story)[-1]
    assert last["title"] == "the job is DOWN: supervise stopped it at step 49, as the policy says"
    assert why in last["verdict"]
    assert story.replayed() == story.recorded()


def test_progress_between_two_hangs_clears_them(stuck):
    for step in (49, 60, 75, 90, 120):
        hang_again(stuck, step)

    assert starts(stuck) == 5
    assert "inc-1: given up" not in [m["title"] for m in messages(stuck)]


def test_a_job_that_works_without_a_step_is_left_to_a_person(stuck):
    hang_again(stuck)
    hang_again(stuck)
    stuck.frames(2.0, times=9)
    stuck.beat(40)
    works = "the job makes no steps but works: not stopped"
    stuck.finish(stuck.actions()[-1], {}, works)

    assert stuck.state.machine == "holding"
    assert works in messages(stuck)[-1]["verdict"]
    assert messages(stuck)[-1]["next"].endswith("supervise release RUN")


def test_nothing_that_a_notice_tells_gets_in_the_way(tell):
    names = "kind reason incident rule severity what rank at_step self details data command_id"
    data = dict.fromkeys(names.split(), "a word")
    story = tell(healthy=1)
    (said,) = story.notice("note", "a word", rank=1, step=3, data=data)

    assert said.data == {"what": "note", "rank": 1, "at_step": 3, "details": data}
