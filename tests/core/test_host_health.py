"""Hosts and ranks: only what is certain prevents a start; who holds a job up."""

from __future__ import annotations

import pytest

from supervise.core import (
    CheckTimeout,
    Collective,
    Device,
    Finding,
    LoaderWorker,
    RankStand,
    Reported,
    explain_standstill,
    health_summary,
    judge_devices,
    judge_disk,
    judge_matmul,
    judge_memory,
)
from supervise.core.model import FailureClass
from supervise.runtime import deepest_own_frame, main_frames

from .conftest import crashing, messages, relaunched

GB = 1e9
CLASSES = (FailureClass("gpu-hardware", "a fault", match=["ECC error"]),)


@pytest.mark.parametrize(
    ("judge", "arguments", "verdict"),
    [
        # Half of what the job had, since a leak may have made it large; or what the policy names.
        (judge_memory, (31 * GB, 60 * GB, None), "good"),
        (judge_memory, (29 * GB, 60 * GB, None), "bad"),
        (judge_memory, (29 * GB, 60 * GB, 20 * GB), "good"),
        (judge_memory, (61 * GB, None, 64 * GB), "bad"),
        (judge_memory, (1 * GB, None, None), "skipped"),
        (judge_memory, (None, 60 * GB, 64 * GB), "undecided"),
        # The next checkpoint has to fit; some file systems of object stores report 0 of 0.
        (judge_disk, ("/out", 3 * GB, 90 * GB, 2 * GB, None), "good"),
        (judge_disk, ("/out", 1 * GB, 90 * GB, 2 * GB, None), "bad"),
        (judge_disk, ("/out", 3 * GB, 90 * GB, 2 * GB, 5 * GB), "bad"),
        (judge_disk, ("/out", 1 * GB, 90 * GB, 2 * GB, 0.0), "good"),
        (judge_disk, ("/out", 0.0, 0.0, 2 * GB, None), "undecided"),
        (judge_disk, ("/out", None, 0.0, 2 * GB, None), "undecided"),
    ],
)
def test_memory_and_disk_are_compared_with_what_the_job_needs(judge, arguments, verdict):
    assert judge(*arguments).verdict == verdict


def device(number=0, **facts):
    return Device(device=f"device {number}", name="H100", **facts)


@pytest.mark.parametrize(
    ("devices", "before", "some", "verdict", "text"),
    [
        ([], None, False, "skipped", "no NVIDIA device"),
        ([device(0), device(1)], 2, False, "good", "2 without a fault"),
        ([device(0)], 2, False, "bad", "1 devices, of 2 when the run began"),
        ([device(0)], 2, True, "undecided", "1 devices, of 2 when the run began"),
        ([device(3, lost="it does not answer")], 1, False, "bad", "device 3 (H100): it does not"),
        ([device(remap_failed=True)], 1, False, "bad", "more rows of its memory are faulty"),
        ([device(remap_pending=True)], 1, False, "undecided", "remapped at the next reset"),
        ([device(ecc_errors=4)], 1, False, "undecided", "4 uncorrected memory errors"),
        (None, 2, False, "undecided", "no answer"),
    ],
)
def test_what_the_driver_says(devices, before, some, verdict, text):
    timeout = CheckTimeout(seconds=30.0)
    found = judge_devices(devices, before, some=some, trouble=timeout)
    assert found.verdict == verdict and text in found.text


def multiplied(number=0, **other):
    row = {"device": f"cuda:{number}", "name": "H100", "free": 79e9, "total": 80e9}
    row |= {"products": 900, "wrong": 0, "no_memory": False, "in_use": False, "error": ""}
    return Device(**row | other)


@pytest.mark.parametrize(
    ("devices", "verdict", "text"),
    [
        ([multiplied(0), multiplied(1)], "good", "1800 products on 2 devices are right, in 5 s"),
        ([multiplied(wrong=2)], "bad", "cuda:0 (H100): 2 of 900 products are wrong"),
        ([multiplied(0), multiplied(1, wrong=900)], "bad", "cuda:1 (H100): 900 of 900"),
        ([multiplied(0, wrong=900), multiplied(1, wrong=900)], "undecided", "900 of 900"),
        ([multiplied(products=0, error="CUDA error: ECC error")], "bad", "ECC error"),
        ([multiplied(products=0, error="no kernel image")], "undecided", "no kernel image"),
        ([multiplied(products=0, in_use=True, free=1e9)], "undecided", "79.0 of 80.0 GB are in"),
        ([multiplied(products=0, no_memory=True, free=0)], "bad", "80.0 of 80.0 GB are in use"),
    ],
)
def test_products_that_are_known(devices, verdict, text):
    """Where no device has a right one, the arithmetic may be another and no device broken."""
    found = judge_matmul(devices, CLASSES, 5.0)
    assert found.verdict == verdict and text in found.text


def looked(story, *found):
    checks = [Finding(check, verdict, Reported(report="no answer")) for check, verdict in found]
    text, data = health_summary(checks)
    story.notice("host-health", text, data=data)


def test_a_host_that_is_not_fit_is_in_the_message_of_the_end(tell):
    story = crashing(tell)
    story.exit(-9)
    before = len(messages(story))
    looked(story, ("devices", "bad"), ("matmul", "undecided"))
    error = f"this host is not fit to start the job on: {'devices: no answer'}"
    story.finish(story.actions()[-1], {}, error)

    assert story.state.job.over
    (message,) = messages(story)[before:]
    assert message["severity"] == "SEV1" and "signal 9 (SIGKILL) at step 49" in message["title"]
    assert f"not started again: the relaunch failed: {error}" in message["verdict"]
    assert message["next"].startswith("repair or free what is named, or start the job on another")


def test_a_doubt_prevents_no_start_and_is_told_once(tell):
    story = crashing(tell)
    for times in (1, 2):
        story.exit(-9)
        looked(story, ("memory", "good"), ("matmul", "undecided"))
        relaunched(story, 40)
        story.frames(2.0, times=40 * times)

    (told,) = [m for m in messages(story) if "could not be checked in full" in m["title"]]
    assert (told["severity"], told["verdict"]) == ("SEV2", "the job is started all the same")
    assert told["title"].endswith("in full: matmul: no answer")
    assert not story.state.job.over


# ── who holds a job up, by what is seen of each rank from outside ─────────────────────────────────


IDLE = RankStand("", 0.0, 59)
REDUCES = IDLE._replace(collective=Collective(121, "all_reduce", True), place="train.py:30 in step")
DONE = IDLE._replace(collective=Collective(120, "all_reduce", False))
LOADS = DONE._replace(place="train.py:9 in load")
BACKWARD = IDLE._replace(place="train.py:28 in step()", in_backward=True)
BARRIER = IDLE._replace(collective=Collective(121, "barrier", True), place="train.py:40 in save")
STOPPED = REDUCES._replace(state="stopped")
EARLIER = REDUCES._replace(collective=Collective(120, "all_reduce", True))
WAIT = "ranks 0, 2 wait in all_reduce (call 121)"
PATH = "rank 1 took another path: it"


@pytest.mark.parametrize(
    ("second", "others", "text"),
    [
        (LOADS, REDUCES, f"rank 1 waits at train.py:9 in load, after step 59; {WAIT}"),
        (LOADS._replace(cpu=0.4), REDUCES, "rank 1 computes at train.py:9 in load"),
        (STOPPED, REDUCES, "stopped (SIGSTOP or a debugger); kill -CONT 71 lets it go on; " + WAIT),
        (REDUCES._replace(state="exited", cpu=None), REDUCES, f"its process ended; {WAIT}"),
        (REDUCES._replace(state="disk"), REDUCES, "for a disk or a device"),
        (BARRIER, REDUCES, f"{PATH} waits in barrier at train.py:40 in save; {WAIT}"),
        (EARLIER, REDUCES, "rank 1 waits in all_reduce (call 120)"),
        (LOADS, BACKWARD, "in load, after step 59; ranks 0, 2 wait in the backward"),
        (IDLE._replace(step=57), IDLE, "is not known, after step 57; the others made step 59"),
        (REDUCES, BACKWARD, f"{PATH} waits in all_reduce (call 121) at train.py:30 in step; ranks"),
        (BACKWARD, REDUCES, f"{PATH} waits in the backward at train.py:28 in step(); ranks 0, 2"),
        (BACKWARD._replace(cpu=0.9), REDUCES, "rank 1 computes at train.py:28 in step"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(second, others, text):
    found = explain_standstill({0: others, 1: second, 2: others}, {0: 70, 1: 71, 2: 72})
    assert found.ranks == (1,) and text in found.text


@pytest.mark.parametrize(
    ("second", "others", "text"),
    [
        (REDUCES, REDUCES, "all 3 ranks wait in all_reduce (call 121): no rank is late"),
        (BACKWARD, BACKWARD, "all 3 ranks are in the backward: no rank is late"),
        (IDLE, BACKWARD, "which of 3 ranks the others wait for is unknown"),
    ],
)
def test_no_rank_is_named_where_none_is_late_or_nobody_knows(second, others, text):
    found = explain_standstill({0: others, 1: second, 2: others}, {0: 70, 1: 71, 2: 72})
    assert found.ranks == () and text in found.text


def test_several_ranks_that_took_other_paths_are_named_and_none_of_two():
    ranks = {0: REDUCES, 1: BARRIER, 2: REDUCES, 3: BARRIER, 4: REDUCES}
    found = explain_standstill(ranks, {rank: 70 + rank for rank in ranks})

    assert found.ranks == (1, 3)
    assert found.text.startswith("ranks 1, 3 took other paths: rank 1 in barrier, rank 3 in barr")
    both = explain_standstill({0: BACKWARD, 1: REDUCES}, {0: 70, 1: 71})
    assert (both.ranks, "different paths" in both.text) == ((), True)
    alone = explain_standstill({0: LOADS._replace(cpu=1.0)}, {0: 70})
    assert alone == ((0,), "rank 0 computes at train.py:9 in load, after step 59")


LOCKED = LoaderWorker(80, "", 0.0, "busy", "train.py:9 in read", waits_for_lock=True)
READS = LoaderWorker(81, "", 0.6, "busy", "train.py:7 in read")
WITHOUT_WORK = LoaderWorker(82, "", 0.0, "idle")
UNKNOWN = LoaderWorker(84, "", 0.0)


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([LOCKED, WITHOUT_WORK], "; worker pid 80 waits for a lock at train.py:9 in read"),
        (
            [READS, LOCKED._replace(pid=83), LOCKED],
            "; worker pid 83, 80 waits for a lock at train.py:9 in read; worker pid 81 computes at "
            "train.py:7 in read",
        ),
        ([WITHOUT_WORK] * 2, "; its 2 workers are idle: no batch is asked for"),
        ([UNKNOWN], "; worker pid 84 does not run the probe: its stack is not known"),
        ([LOCKED._replace(state="stopped")], "; worker pid 80 is stopped (SIGSTOP or a debugger)"),
        ([], ""),
    ],
)
def test_who_waits_for_its_data_is_as_good_as_the_workers(workers, text):
    stand = LOADS._replace(in_loader=True, workers=tuple(workers))
    found = explain_standstill({0: stand}, {0: 70})

    assert found.text == (
        f"rank 0 waits for data in next(loader) at train.py:9 in load, after step 59{text}"
    )


STACKS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/home/user/data.py", line 5 in fetch

Current thread 0x00007f0000000002 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 869 in _engine_run_backward
  File "/home/user/train.py", line 28 in step
  File "/home/user/train.py", line 40 in <module>
(all threads of 71)
"""  # noqa: E501 - as faulthandler writes it


def test_the_place_is_the_deepest_frame_of_the_job_in_its_main_thread():
    assert deepest_own_frame(main_frames(STACKS.splitlines())) == "train.py:28 in step()"
    assert main_frames(STACKS.replace("Current thread", "Thread").splitlines()) == []
    py_spy = 'Thread 71 (idle): "MainThread"\n    recv (socket.py:5)\n    load (jobs/a.py:9)\n'
    assert deepest_own_frame(main_frames(py_spy.splitlines())).endswith(" in recv()")
