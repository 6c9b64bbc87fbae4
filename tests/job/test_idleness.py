"""A job that makes no steps is not idle while it computes, uses a device, wakes, or moves."""

import sys
from itertools import chain, repeat

import pytest

from supervise.runtime import Looks, process_movement
from supervise.runtime import process_work as work
from tests.support.waiting import wait_until

WITHIN_S = 0.6
UP = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
WAKING, COMPUTING = UP + "while True: time.sleep(0.02)", UP + "while True: pass"


class Job:
    """A process that stands for a rank; what is read of its stack and device is given."""

    def __init__(self, process, stacks=("wait",), device=0.0):
        shown = chain(stacks, repeat(stacks[-1]))
        self.process = process
        self.looks = Looks(lambda pid: next(shown), lambda: device)

    def pids(self):
        return {0: self.process.pid}

    def work(self, within_s):
        return work(self.process, within_s, self.looks.device)


def test_one_that_sleeps_where_it_was_is_idle(start):
    assert process_movement(Job(start("sleep", "60")), WITHIN_S) == ""


@pytest.mark.parametrize(
    ("script", "moves"),
    [(WAKING, "the main thread of rank 0 woke"), (COMPUTING, "s of CPU and")],
    ids=["waking", "computing"],
)
def test_one_that_works_is_not(start, script, moves, tmp_path):
    """An answer over the network now and then is no byte in /proc, and wakes it."""
    process = start(sys.executable, "-c", script, str(tmp_path / "up"))
    wait_until((tmp_path / "up").exists, "its start")

    assert moves in process_movement(Job(process), WITHIN_S)


@pytest.mark.parametrize(
    ("seen", "moves"),
    [
        ({"device": 0.4}, "a device 40% in use"),
        ({"stacks": ("line 7", "line 7", "line 8")}, "went from one line to another"),
        ({"stacks": ("",)}, "cannot be read"),
    ],
)
def test_what_is_read_from_outside_counts_too(start, seen, moves):
    assert moves in process_movement(Job(start("sleep", "60"), **seen), WITHIN_S)
