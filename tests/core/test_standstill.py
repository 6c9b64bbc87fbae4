"""Who holds a job up, by what is seen of each rank from outside."""

from __future__ import annotations

import pytest

from supervise.core import Collective, LoaderWorker, RankStand, explain_standstill
from supervise.runtime import main_frames, own_place

IDLE = RankStand("", 0.0, 59, 30.0)
REDUCES = IDLE._replace(collective=Collective(121, "all_reduce", True), place="train.py:30 in step")
DONE = IDLE._replace(collective=Collective(120, "all_reduce", False))
LOADS = DONE._replace(place="train.py:9 in load")
BACKWARD = IDLE._replace(place="train.py:28 in step", in_backward=True)
BARRIER = IDLE._replace(collective=Collective(121, "barrier", True), place="train.py:40 in save")
WAIT = "ranks 0, 2 wait in all_reduce (call 121)"


@pytest.mark.parametrize(
    ("second", "others", "ranks", "text"),
    [
        (LOADS, REDUCES, (1,), f"rank 1 waits at train.py:9 in load, after step 59; {WAIT}"),
        (LOADS._replace(cpu=0.4), REDUCES, (1,), "rank 1 computes at train.py:9 in load"),
        (
            REDUCES._replace(state="stopped"),
            REDUCES,
            (1,),
            f"rank 1: its process is stopped (SIGSTOP or a debugger); kill -CONT 71 lets it go on; "
            f"{WAIT}",
        ),
        (REDUCES._replace(state="exited", cpu=None), REDUCES, (1,), f"its process ended; {WAIT}"),
        (REDUCES._replace(state="disk"), REDUCES, (1,), "for a disk or a device"),
        (
            BARRIER,
            REDUCES,
            (1,),
            "rank 1 took another path: it waits in barrier at train.py:40 in save; ranks 0, 2 wait "
            "in all_reduce (call 121)",
        ),
        (
            REDUCES._replace(collective=Collective(120, "all_reduce", True)),
            REDUCES,
            (1,),
            "rank 1 waits in all_reduce (call 120)",
        ),
        (REDUCES, REDUCES, (), "all 3 ranks wait in all_reduce (call 121): no rank is late"),
        (LOADS, BACKWARD, (1,), "in load, after step 59; ranks 0, 2 wait in the backward"),
        (BACKWARD, BACKWARD, (), "all 3 ranks are in the backward: no rank is late"),
        (
            IDLE._replace(step=57),
            IDLE,
            (1,),
            "rank 1 waits at a place that is not known, after step 57; the others made step 59",
        ),
        (
            REDUCES,
            BACKWARD,
            (1,),
            "rank 1 took another path: it waits in all_reduce (call 121) at train.py:30 in step; "
            "ranks 0, 2 wait in the backward",
        ),
        (BACKWARD, REDUCES, (1,), "path: it waits in the backward at train.py:28 in step; ranks 0"),
        (
            BACKWARD._replace(cpu=0.9),
            REDUCES,
            (1,),
            "rank 1 computes at train.py:28 in step",
        ),
        (IDLE, IDLE, (), "which of 3 ranks the others wait for is unknown"),
        (IDLE, BACKWARD, (), "which of 3 ranks the others wait for is unknown"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(second, others, ranks, text):
    found = explain_standstill({0: others, 1: second, 2: others}, {0: 70, 1: 71, 2: 72})
    assert found.ranks == ranks and text in found.text


def test_of_two_ranks_that_wait_for_each_other_none_is_blamed():
    found = explain_standstill({0: BACKWARD, 1: REDUCES}, {0: 70, 1: 71})

    assert (found.ranks, "different paths" in found.text) == ((), True)


def test_several_ranks_that_took_other_paths_are_named():
    ranks = {0: REDUCES, 1: BARRIER, 2: REDUCES, 3: BARRIER, 4: REDUCES}
    found = explain_standstill(ranks, {rank: 70 + rank for rank in ranks})

    assert found == (
        (1, 3),
        "ranks 1, 3 took other paths: rank 1 in barrier, rank 3 in barrier; ranks 0, 2, 4 wait in "
        "all_reduce (call 121)",
    )


def test_of_one_rank_the_place_is_said():
    found = explain_standstill({0: LOADS._replace(cpu=1.0)}, {0: 70})
    assert found == ((0,), "rank 0 computes at train.py:9 in load, after step 59")


LOCKED = LoaderWorker(80, "", 0.0, "busy", "train.py:9 in read", waits_for_lock=True)
READS = LoaderWorker(81, "", 0.6, "busy", "train.py:7 in read")
WITHOUT_WORK = LoaderWorker(82, "", 0.0, "idle")


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([LOCKED, WITHOUT_WORK], "; worker pid 80 waits for a lock at train.py:9 in read"),
        (
            [READS, LOCKED._replace(pid=83), LOCKED],
            "; worker pid 83, 80 waits for a lock at train.py:9 in read; worker pid 81 computes at "
            "train.py:7 in read",
        ),
        ([WITHOUT_WORK, WITHOUT_WORK], "; its 2 workers are idle: no batch is asked for"),
        (
            [LoaderWorker(84, "", 0.0)],
            "; worker pid 84 does not run the probe: its stack is not known",
        ),
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
    assert own_place(main_frames(STACKS.splitlines())) == "train.py:28 in step"
    assert main_frames(STACKS.replace("Current thread", "Thread").splitlines()) == []
    py_spy = 'Thread 71 (idle): "MainThread"\n    recv (socket.py:5)\n    load (jobs/a.py:9)\n'
    assert own_place(main_frames(py_spy.splitlines())).endswith(" in recv")
