"""Commands to the ranks, over a complete fake of the segments and a real process."""

import signal
import sys
import time

import psutil
import pytest

from supervise.actions import CheckWeights
from supervise.core.model import Payload
from supervise.errors import ActionError, SegmentError
from supervise.runtime import PauseLease
from tests.support.waiting import wait_until

from .conftest import FakeRank

LR = {"value": 0.5, "rewarm_steps": 0}


def silence(_):
    return None


def command(control, verb="x", args=LR, *, key="k", deadline_s=10):
    return control.command(verb, args, key=key, deadline_s=deadline_s)


def test_the_ack_of_rank_0_comes_back_with_its_step_and_the_number_of_ranks(controlled):
    ranks = [FakeRank(n, 2, answer={"x": lambda _, n=n: {"from": n}}) for n in (0, 1)]
    control = controlled(*ranks)

    assert command(control, key="k1") == {"from": 0, "ranks": 2, "ack_step": 7}
    for rank in ranks:
        ((key, verb, args),) = rank.letters
        assert (key, verb, args["value"]) == ("k1", "x", 0.5)
        assert args["until_ns"] > time.monotonic_ns()  # after it the probe would refuse
    assert control.world_size == 2
    assert control.snapshot("inc-1", key="k2", deadline_s=5) == {"args": ("inc-1", "k2", 5)}


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([(3.0, 1.0), (1.0, 1.0)], 0),  # rank 0 alone has other weights
        ([(5.0, 5.0), (3.0, 2.0)], 1),  # its batch is the easier one
        ([(1.0, 1.0), (1.0, None)], 1),  # nothing is known of it
    ],
)
def test_the_rank_that_is_farthest_off_says_whether_the_weights_are_good(controlled, losses, found):
    """Now and at the newest savepoint of before; one of after it is no measure."""

    ranks = []
    for number, (now, was) in enumerate(losses):
        savepoints = [] if was is None else [[40, was], [60, now]]
        answer = {"from": number, "loss": now, "was": savepoints}
        ranks.append(FakeRank(number, 2, answer={"check_weights": lambda _, it=answer: it}))
    args = Payload({"before_step": 50, "within": 1.1})

    result = command(controlled(*ranks), "check_weights", args)

    assert (result["from"], result["ranks"]) == (found, 2)
    assert CheckWeights().objection(args, result) == ""


def unwritable():
    def send(*_):
        raise SegmentError("segment rank-0 is too short")

    rank = FakeRank()
    rank.send = send
    return rank


@pytest.mark.parametrize(
    ("ranks", "deadline_s", "error"),
    [
        ((), 10, "x was not sent: no probe is attached to the job"),
        ((FakeRank(0, 4),), 10, "only 1 of 4 ranks have a probe attached"),
        ((unwritable(),), 10, "rank 0 cannot be written to: segment rank-0 is too sho"),
        (
            (FakeRank(answer={"x": lambda _: "no savepoint before step 9"}),),
            10,
            "rank 0 refused x: no savepoint before step 9",
        ),
        (
            (FakeRank(0, 2), FakeRank(1, 2, answer={"x": silence})),
            0.1,
            "from rank 1 after 1 of 2 ranks did it: they may differ",
        ),
    ],
    ids=["no probe", "a rank is missing", "a segment cut short", "a refusal", "one is silent"],
)
def test_a_command_that_not_every_rank_carries_out_fails(controlled, ranks, deadline_s, error):
    with pytest.raises(ActionError, match=error):
        command(controlled(*ranks), deadline_s=deadline_s)

    assert len(ranks) != 1 or error.startswith("rank 0 refused") or ranks[0].letters == []


def test_an_answer_that_comes_too_late_is_told(controlled):
    rank = FakeRank(answer={"lr_scale": silence})
    control = controlled(rank)
    with pytest.raises(ActionError, match=r"no answer within .* from rank 0"):
        command(control, "lr_scale", deadline_s=0.05)
    assert control.late_answers() == []

    rank.answer["lr_scale"] = lambda args: {"lr_scale": args["value"]}
    rank.send("k", "lr_scale", LR)

    assert wait_until(control.late_answers) == ["lr_scale by rank 0 after its deadline was done"]
    assert control.late_answers() == []


def test_the_end_of_the_job_ends_the_wait(controlled):
    control = controlled(FakeRank(answer={"x": silence}), argv=("sh", "-c", "sleep 0.3; exit 3"))

    with pytest.raises(ActionError, match=r"x: the job has ended \(exit code 3\)"):
        command(control, deadline_s=60)
    with pytest.raises(ActionError, match=r"was not sent: the job has ended \(exit code 3\)"):
        command(control, key="k2", deadline_s=60)


@pytest.mark.parametrize("pid", [4343, 4242], ids=["another process", "an exec"])
def test_a_rank_that_is_replaced_meanwhile_does_not_answer(controlled, control_of, pid):
    rank = FakeRank(answer={"x": silence})
    asked = controlled(rank).send_command("x", {}, key="k")
    wait_until(lambda: rank.letters, every_s=0.001)

    control_of.ranks[0] = FakeRank(pid=pid)

    assert asked.wait(10) == {}
    assert asked.lost == {0: "rank 0 went away"}


def test_an_order_that_a_stuck_main_loop_did_not_send_is_never_sent(control_of):
    control = control_of(rank := FakeRank())

    with pytest.raises(ActionError, match="x was not sent: the main loop is busy"):
        command(control, deadline_s=0.05)
    control.run_pending_work(time.monotonic_ns())

    assert rank.letters == []


def test_an_order_does_not_wait_for_the_events_of_a_round(control_of):
    """A burst of them at the beginning of an incident takes longer than a step of the job."""
    control = control_of(rank := FakeRank())

    control.send_command("x", {}, key="k")
    control.send_commands(withdrawal_reason="")
    too_late = control.send_command("y", {}, key="l")
    control.send_commands(withdrawal_reason="the pause has ended")

    assert rank.letters == [("k", "x", {})]
    assert too_late.refusal == "the pause has ended"


@pytest.fixture
def paused(controlled):
    def build(total_s=60.0):
        rank = FakeRank(answer={"pause": lambda _: {"paused_step": 7}, "resume": lambda _: "no"})
        control = controlled(rank, lease=PauseLease(0.06))
        command(control, "pause", {"lease_s": total_s}, key="p")
        return control, rank

    return build


@pytest.mark.parametrize("how", ["resume", "a failed resume", "its end by itself"])
def test_a_pause_is_renewed_until_it_is_over(paused, how):
    control, rank = paused()
    ((_, _, args),) = rank.letters
    assert args["lease_s"] == 0.06 and control.paused
    wait_until(lambda: len(rank.leases) >= 5)

    if how == "a failed resume":
        with pytest.raises(ActionError, match="refused resume"):
            command(control, "resume", {}, key="r")
    elif how == "resume":
        rank.answer.clear()
        command(control, "resume", {}, key="r")
    else:
        control.on_loop(control.on_pause_ended, 10)

    assert not control.paused
    time.sleep(0.05)  # one may be on its way
    renewed = len(rank.leases)
    time.sleep(0.1)
    assert len(rank.leases) == renewed


def test_no_renewal_of_a_pause_reaches_beyond_its_time_in_all(paused):
    _, rank = paused(total_s=0.3)
    latest_ns = time.monotonic_ns() + int(0.3e9)
    time.sleep(0.5)

    assert 0 < max(rank.leases) <= latest_ns


def test_a_supervisor_that_hangs_holds_no_job(control_of):
    control = control_of(rank := FakeRank(), lease=PauseLease(0.06, patience_s=0.3))
    control.resume_after_crash(time.monotonic_ns() + 10**12, None)
    latest_ns = time.monotonic_ns() + int(0.36e9)
    wait_until(lambda: rank.leases)

    time.sleep(0.6)

    assert max(rank.leases) <= latest_ns
    control.run_pending_work(time.monotonic_ns())
    wait_until(lambda: max(rank.leases) > latest_ns)


def test_that_a_job_goes_on_is_known_by_its_status_though_its_notice_was_lost(paused):
    control, rank = paused()
    assert not control.on_loop(control.has_unpaused, 10)
    for is_paused in (True, False):
        rank.status = lambda is_paused=is_paused: Payload({"paused": is_paused})
        assert control.on_loop(control.has_unpaused, 10) is not is_paused


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: command(control, "lr_scale"),
        lambda control: control.stop(grace_s=10, term_s=5, exit_code=78),
        lambda control: control.quarantine({"add": []}, key="k1", deadline_s=10),
    ],
    ids=["a command", "a stop", "a quarantine"],
)
def test_what_is_withdrawn_does_not_reach_the_job_in_its_place(controlled, ask):
    rank = FakeRank()
    control = controlled(rank, loop={"withdrawn": "the training that it was for is over"})

    with pytest.raises(ActionError, match="the training that it was for is over") as raised:
        ask(control)

    assert raised.value.refused
    assert rank.letters == []
    assert (control.process.returncode, control.exit_code) == (None, None)


# ── stop ─────────────────────────────────────────────────────────────────────────────────────────

SAVES_ON_INTERRUPT = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(0)
"""


def test_a_stepping_job_is_interrupted_at_a_step_boundary(controlled, tmp_path):
    def stop(args):
        assert args == {"how": "interrupt"}
        control.process.signal(signal.SIGINT)
        return {"stopping_step": 7}

    argv = (sys.executable, "-c", SAVES_ON_INTERRUPT, str(tmp_path / "up"))
    control = controlled(FakeRank(answer={"stop": stop}), argv=argv)
    wait_until((tmp_path / "up").exists)

    seen = control.stop(grace_s=10, term_s=5, exit_code=78)

    assert (seen["how"], seen["interrupt"], seen["returncode"]) == ("interrupt", "interrupted", 0)
    assert control.exit_code == seen["exit_code"] == 78


@pytest.mark.parametrize(
    ("answer", "silent_s", "standstill", "said"),
    [
        ("rank is busy", 0.0, False, "not done: rank is busy"),
        (None, 0.0, False, "not done: no rank answered"),
        ({}, 60.0, False, "skipped: the job was silent for 60 s"),
        ({"stopping_step": 7}, 0.0, True, "skipped: the job stands still"),
    ],
)
def test_a_job_that_cannot_be_asked_gets_term(controlled, answer, silent_s, standstill, said):
    rank = FakeRank(answer={"stop": lambda _: answer}, silent_s=silent_s)

    seen = controlled(rank, loop={"standstill": standstill}).stop(
        grace_s=0.5, term_s=5, exit_code=75
    )

    assert seen["interrupt"] == said and bool(rank.letters) != said.startswith("skipped")
    assert (seen["how"], seen["returncode"]) == ("term", -signal.SIGTERM)
    assert seen["exit_code"] == 75


@pytest.mark.slow
def test_a_job_that_somebody_stopped_by_a_signal_does_not_hang(controlled):
    """kill -STOP in the last moment: the stop for its standstill is not carried out."""
    control = controlled(rank := FakeRank(), loop={"standstill": True})
    rank.pid = control.process.pid
    control.process.signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED)

    with pytest.raises(ActionError, match="stopped by a signal: it does not hang"):
        control.stop(grace_s=1, term_s=1, exit_code=78)

    assert control.process.returncode is None


def test_a_job_that_ignores_everything_is_killed(controlled):
    rank = FakeRank(answer={"stop": lambda _: {"stopping_step": 7}})
    control = controlled(rank, argv=("sh", "-c", "trap '' TERM INT; while true; do sleep 1; done"))

    seen = control.stop(grace_s=0.2, term_s=0.2, exit_code=78)

    assert (seen["how"], seen["returncode"]) == ("kill", -signal.SIGKILL)
    assert seen["survivors"] == []


def test_a_job_that_ended_before_a_stop_keeps_its_own_result(controlled):
    control = controlled(argv=("true",))
    wait_until(lambda: control.process.returncode is not None)

    seen = control.stop(grace_s=1, term_s=1, exit_code=78)

    assert (seen["how"], seen["returncode"]) == ("ended", 0)
    assert control.exit_code is None


def test_answers_to_a_supervisor_before_us_stand(control_of, looping):
    ranks = [FakeRank(n, 2) for n in (0, 1)]
    for rank in ranks:
        rank.send("known", "x", {})
    ranks[0].send("partly", "x", {})
    control = control_of(*ranks)
    control.resume_after_crash(time.monotonic_ns() + 10**12, None)
    looping(control)

    assert (control.paused, control.exit_code) == (True, None)
    assert (control.is_answered("known"), control.is_answered("partly")) == (True, False)
    for key in ("known", "partly"):
        assert command(control, key=key)["ack_step"] == 7
    sent = [[key for key, *_ in rank.letters] for rank in ranks]
    assert sent == [["known", "partly", "partly"], ["known", "partly"]]
