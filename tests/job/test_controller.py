"""Commands to the ranks, over a complete fake of the segments and a real process."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from supervise.core.model import Payload
from supervise.errors import ActionError, SegmentError
from supervise.runtime import Control, Lease, is_suspended
from tests.support.waiting import wait_until

PYTHON = sys.executable
LR = {"value": 0.5, "rewarm_steps": 0}


def edges():
    """What collects evidence and what starts the job again: both return what they were given."""
    return [lambda *args: {"args": args[1:]}] * 2


@pytest.fixture
def controlled(start, fake_segments, looping):
    """A control with a running main loop over the given ranks and command."""

    def build(*ranks, argv=("sleep", "60"), **loop):
        segments = fake_segments({rank.rank: rank for rank in ranks})
        control = Control(start(*argv), segments, *edges())
        build.segments = segments
        looping(control, control.process, **loop)
        return control

    return build


def scaled(args):
    return {"lr_scale": args["value"]}


def test_the_ack_of_rank_0_comes_back_with_its_step_and_the_number_of_ranks(controlled, fake_rank):
    """Every rank is asked and every rank must answer."""
    ranks = [fake_rank(n, 2, answer={"x": lambda _, n=n: {"from": n}}) for n in (0, 1)]
    control = controlled(*ranks)

    assert control.command("x", {"a": 1}, key="k1", deadline_s=10) == {
        "from": 0,
        "ranks": 2,
        "ack_step": 7,
    }
    for rank in ranks:
        ((key, verb, args),) = rank.letters
        assert (key, verb, args["a"]) == ("k1", "x", 1)
        assert args["until_ns"] > time.monotonic_ns()  # after it the probe would refuse
    assert control.world_size == 2


def test_a_refusal_is_the_actions_error(controlled, fake_rank):
    """The probe's own sentence reaches the audit log."""
    control = controlled(fake_rank(answer={"rollback": lambda _: "no savepoint before step 9"}))

    with pytest.raises(ActionError, match="rank 0 refused rollback: no savepoint before step 9"):
        control.command("rollback", {}, key="k", deadline_s=10)


def test_a_rank_that_stays_silent_fails_the_command(controlled, fake_rank):
    """Some did it and some did not: that is said, since the ranks may differ now."""
    silent = fake_rank(1, 2, answer={"x": lambda _: None})
    control = controlled(fake_rank(0, 2), silent)

    with pytest.raises(ActionError, match="from rank 1 after 1 of 2 ranks did it: they may differ"):
        control.command("x", {}, key="k", deadline_s=0.1)


def test_an_answer_that_comes_too_late_is_told(controlled, fake_rank):
    """A letter cannot be called back, so its late effect must not go unseen."""
    rank = fake_rank(answer={"lr_scale": lambda _: None})
    control = controlled(rank)
    with pytest.raises(ActionError, match=r"no answer within .* from rank 0"):
        control.command("lr_scale", LR, key="k", deadline_s=0.05)
    assert control.late() == []

    rank.answer["lr_scale"] = scaled
    rank.send("k", "lr_scale", LR)

    assert wait_until(control.late) == ["lr_scale by rank 0 after its deadline was done"]
    assert control.late() == []


def test_nothing_is_sent_while_a_rank_is_missing(controlled, fake_rank):
    """All ranks or none: the one that is there is not touched."""
    rank = fake_rank(0, 4)
    control = controlled(rank)

    with pytest.raises(ActionError, match="only 1 of 4 ranks have a probe attached"):
        control.command("x", {}, key="k", deadline_s=10)

    assert rank.letters == []


def test_without_a_probe_there_is_nobody_to_ask(controlled):
    """T0, or before the first step."""
    with pytest.raises(ActionError, match="x was not sent: no probe is attached to the job"):
        controlled().command("x", {}, key="k", deadline_s=10)


def test_the_end_of_the_job_ends_the_wait(controlled, fake_rank):
    """Nobody waits two minutes for the dead."""
    rank = fake_rank(answer={"x": lambda _: None})
    control = controlled(rank, argv=("sh", "-c", "sleep 0.3; exit 3"))

    with pytest.raises(ActionError, match=r"x: the job has ended \(exit code 3\)"):
        control.command("x", {}, key="k", deadline_s=60)
    with pytest.raises(ActionError, match=r"was not sent: the job has ended \(exit code 3\)"):
        control.command("x", {}, key="k2", deadline_s=60)


@pytest.mark.parametrize("pid", [4343, 4242], ids=["another process", "an exec"])
def test_a_rank_that_is_replaced_meanwhile_does_not_answer(controlled, fake_rank, pid):
    """torchrun started it again: the new program knows nothing of the order."""
    rank = fake_rank(answer={"x": lambda _: None})
    control = controlled(rank)
    asked = control.ask("x", {}, key="k")
    while not rank.letters:
        time.sleep(0.001)

    controlled.segments.ranks[0] = fake_rank(pid=pid)

    assert asked.wait(10) == {}
    assert asked.lost == {0: "rank 0 went away"}


def test_a_letter_that_cannot_be_written_is_an_error(controlled, fake_rank):
    """A segment cut short under us fails the action, not the supervisor."""
    rank = fake_rank()

    def send(*_):
        raise SegmentError("segment rank-0 is too short")

    rank.send = send

    with pytest.raises(ActionError, match="rank 0 cannot be written to: segment rank-0 is too sho"):
        controlled(rank).command("x", {}, key="k", deadline_s=10)


def test_a_stuck_main_loop_is_an_error_and_nothing_is_sent_later(start, fake_rank, fake_segments):
    """What was given up before it was sent is never sent."""
    rank = fake_rank()
    control = Control(start("sleep", "60"), fake_segments({0: rank}), *edges())

    with pytest.raises(ActionError, match="x was not sent: the main loop is busy"):
        control.command("x", {}, key="k", deadline_s=0.05)
    control.pump(time.monotonic_ns())

    assert rank.letters == []


@pytest.fixture
def paused(fake_rank, fake_segments, start, looping):
    """A paused job under a lease of 60 ms: control and rank. `lease` are arguments of `Lease`."""

    def build(total_s=60.0, **lease):
        rank = fake_rank(answer={"pause": lambda _: {"paused_step": 7}, "resume": lambda _: "no"})
        control = Control(
            start("sleep", "60"), fake_segments({0: rank}), *edges(), lease=Lease(0.06, **lease)
        )
        looping(control, control.process)
        control.command("pause", {"lease_s": total_s}, key="p", deadline_s=10)
        return control, rank

    return build


@pytest.mark.parametrize("how", ["resume", "a failed resume", "its end by itself"])
def test_a_pause_is_renewed_until_it_is_over(paused, how):
    """The job is told of 60 ms, and of no more of them afterwards; a failed resume counts too."""
    control, rank = paused()
    ((_, _, args),) = rank.letters
    assert args["lease_s"] == 0.06 and control.paused
    wait_until(lambda: len(rank.leases) >= 5)

    if how == "a failed resume":
        with pytest.raises(ActionError, match="refused resume"):
            control.command("resume", {}, key="r", deadline_s=10)
    elif how == "resume":
        rank.answer.clear()
        control.command("resume", {}, key="r", deadline_s=10)
    else:
        control.on_loop(control.on_pause_ended, 10)

    assert not control.paused
    time.sleep(0.05)  # one may be on its way
    renewed = len(rank.leases)
    time.sleep(0.1)
    assert len(rank.leases) == renewed


def test_a_pause_is_renewed_for_so_long_in_all(paused):
    """No renewal reaches beyond that."""
    _, rank = paused(total_s=0.3)
    latest_ns = time.monotonic_ns() + int(0.3e9)
    time.sleep(0.5)

    assert 0 < max(rank.leases) <= latest_ns


def test_a_supervisor_that_hangs_holds_no_job(fake_rank, fake_segments, start):
    """A main loop that stays away ends the renewals; one that comes back goes on with them."""
    rank = fake_rank()
    lease = Lease(0.06, patience_s=0.3)
    control = Control(start("sleep", "60"), fake_segments({0: rank}), *edges(), lease=lease)
    control.resume(time.monotonic_ns() + 10**12, None)
    latest_ns = time.monotonic_ns() + int(0.36e9)
    wait_until(lambda: rank.leases)

    time.sleep(0.6)

    assert max(rank.leases) <= latest_ns
    control.pump(time.monotonic_ns())
    wait_until(lambda: max(rank.leases) > latest_ns)


def test_that_a_job_goes_on_is_known_though_its_notice_was_lost(paused):
    """Its status says so."""
    control, rank = paused()
    assert not control.on_loop(control.has_unpaused, 10)
    rank.status = lambda: Payload({"paused": True})
    assert not control.on_loop(control.has_unpaused, 10)
    rank.status = lambda: Payload({"paused": False})
    assert control.on_loop(control.has_unpaused, 10)


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: control.command("lr_scale", LR, key="k1", deadline_s=10),
        lambda control: control.stop(grace_s=10, term_s=5, exit_code=78),
        lambda control: control.quarantine({"add": []}, key="k1", deadline_s=10),
    ],
    ids=["a command", "a stop", "a quarantine"],
)
def test_what_is_withdrawn_does_not_reach_the_job(controlled, fake_rank, ask):
    """The training that it was for is over: the one in its place is not touched."""
    rank = fake_rank()
    control = controlled(rank, withdrawn="the training that it was for is over")

    with pytest.raises(ActionError, match="the training that it was for is over") as raised:
        ask(control)

    assert raised.value.refused
    assert rank.letters == []
    assert control.process.returncode is None
    assert control.exit_code is None


# ── stop ─────────────────────────────────────────────────────────────────────────────────────────

SAVES_ON_INTERRUPT = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(0)
"""


def interrupting(control):
    def stop(args):
        assert args == {"how": "interrupt"}
        control().process.signal(signal.SIGINT)
        return {"stopping_step": 7}

    return stop


def test_a_stepping_job_is_interrupted_at_a_step_boundary(controlled, fake_rank, tmp_path):
    """It saves and exits as on Ctrl-C; the supervisor's exit code is the policy's."""
    control = None
    rank = fake_rank(answer={"stop": interrupting(lambda: control)})
    control = controlled(rank, argv=(PYTHON, "-c", SAVES_ON_INTERRUPT, str(tmp_path / "up")))
    wait_until((tmp_path / "up").exists)

    seen = control.stop(grace_s=10, term_s=5, exit_code=78)

    assert (seen["how"], seen["interrupt"]) == ("interrupt", "interrupted")
    assert control.exit_code == seen["exit_code"] == 78
    assert seen["returncode"] == 0


@pytest.mark.parametrize(
    ("answer", "silent_s", "said"),
    [
        ("rank is busy", 0.0, "not done: rank is busy"),
        (None, 0.0, "not done: no rank answered"),
        ({}, 60.0, "skipped: the job was silent for 60 s"),
    ],
)
def test_a_job_that_cannot_be_asked_gets_term(controlled, fake_rank, answer, silent_s, said):
    """A refusal, silence, or a job that hangs: on to TERM, without waiting for nothing."""
    rank = fake_rank(answer={"stop": lambda _: answer}, silent_s=silent_s)

    seen = controlled(rank).stop(grace_s=0.5, term_s=5, exit_code=75)

    assert seen["interrupt"] == said
    assert (seen["how"], seen["returncode"]) == ("term", -signal.SIGTERM)
    assert seen["exit_code"] == 75


def test_a_job_that_stands_still_is_not_asked_at_a_boundary(controlled, fake_rank):
    """One that comes to a boundary does not stand still: no order of ours may wait for it there."""
    rank = fake_rank(answer={"stop": lambda _: {"stopping_step": 7}})

    seen = controlled(rank, standstill=True).stop(grace_s=30, term_s=5, exit_code=78)

    assert seen["interrupt"] == "skipped: the job stands still" and rank.letters == []
    assert seen["how"] == "term"


def test_a_job_that_somebody_stopped_by_a_signal_does_not_hang(controlled, fake_rank):
    """kill -STOP in the last moment: the stop for its standstill is not carried out."""
    rank = fake_rank()
    control = controlled(rank, standstill=True)
    rank.pid = control.process.pid
    control.process.signal(signal.SIGSTOP)
    wait_until(lambda: is_suspended(rank.pid))

    with pytest.raises(ActionError, match="stopped by a signal: it does not hang"):
        control.stop(grace_s=1, term_s=1, exit_code=78)

    assert control.process.returncode is None


def test_a_job_that_ignores_everything_is_killed(controlled, fake_rank):
    """It says it will stop, but neither that nor TERM ends it: KILL, all within the deadlines."""
    rank = fake_rank(answer={"stop": lambda _: {"stopping_step": 7}})
    control = controlled(rank, argv=("sh", "-c", "trap '' TERM INT; while true; do sleep 1; done"))

    seen = control.stop(grace_s=0.2, term_s=0.2, exit_code=78)

    assert (seen["how"], seen["returncode"]) == ("kill", -signal.SIGKILL)
    assert seen["survivors"] == []


def test_a_job_that_ended_by_itself_keeps_its_own_result(controlled):
    """A stop that comes too late does not turn a finished run into a stopped one."""
    control = controlled(argv=("true",))
    wait_until(lambda: control.process.returncode is not None)

    seen = control.stop(grace_s=1, term_s=1, exit_code=78)

    assert (seen["how"], seen["returncode"]) == ("ended", 0)
    assert control.exit_code is None


def test_answers_to_a_supervisor_before_us_stand(start, fake_segments, fake_rank, looping):
    """An order that every rank has answered is not sent again; one that only some did is."""
    ranks = [fake_rank(n, 2) for n in (0, 1)]
    for rank in ranks:
        rank.send("known", "x", {})
    ranks[0].send("partly", "x", {})
    control = Control(start("sleep", "60"), fake_segments(dict(enumerate(ranks))), *edges())
    control.resume(time.monotonic_ns() + 10**12, None)
    looping(control, control.process)

    assert (control.paused, control.exit_code) == (True, None)
    assert (control.answered("known"), control.answered("partly")) == (True, False)
    for key in ("known", "partly"):
        assert control.command("x", {}, key=key, deadline_s=10)["ack_step"] == 7
    assert [[key for key, *_ in rank.letters] for rank in ranks] == [
        ["known", "partly", "partly"],
        ["known", "partly"],
    ]
