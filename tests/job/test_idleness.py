"""Activity of a silent job: real processes that sleep, work, wake, and are stopped."""

import signal
import sys
import time
from itertools import chain, repeat

import psutil
import pytest

from supervise.core.model import Beat
from supervise.runtime import Looks, Phases, explain_movement
from tests.support.waiting import wait_until

from .conftest import FakeRank

SECOND = 1_000_000_000
READS = "while True: open('/dev/zero', 'rb').read(1 << 20)"
SLEEPS = "import time; time.sleep(60)"
UP = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
WAKES, COMPUTES = "while True: time.sleep(0.02)", "while True: pass"


@pytest.fixture
def moving(controlled, tmp_path):
    """A function that says why a rank with this script and these looks is not idle."""

    def make(script, stacks=("wait",), device=0.0):
        shown = chain(stacks, repeat(stacks[-1]))
        rank, argv = FakeRank(), (sys.executable, "-c", UP + script, str(tmp_path / "up"))
        control = controlled(rank, argv=argv, looks=Looks(lambda pid: next(shown), lambda: device))
        rank.pid = control.process.pid
        wait_until((tmp_path / "up").exists, "its start")
        time.sleep(0.1)
        return explain_movement(control, 0.6)

    return make


@pytest.mark.parametrize(
    ("script", "looks", "moves"),
    [
        (SLEEPS, {}, ""),
        # An answer over the network now and then is no byte in /proc, and wakes it.
        (WAKES, {}, "the main thread of rank 0 woke"),
        (COMPUTES, {}, "s of CPU and"),
        (SLEEPS, {"device": 0.4}, "a device 40% in use"),
        (SLEEPS, {"stacks": ("line 7", "line 7", "line 8")}, "went from one line to another"),
        (SLEEPS, {"stacks": ("",)}, "cannot be read"),
    ],
    ids=["sleeping", "waking", "computing", "device", "stack", "no stack"],
)
def test_only_a_job_that_sleeps_where_it_was_is_idle(moving, script, looks, moves):
    reason = moving(script, **looks)
    assert moves in reason and bool(moves) == bool(reason)


# ── its phase ────────────────────────────────────────────────────────────────────────────────────


class Starting:
    def __init__(self, process, share=0.0):
        self.process = process
        members = [psutil.Process(process.pid)]
        self.phases = Phases(lambda: members, lambda: share, look_s=0.05)

    def look(self, at_s=0, phase="startup", dead=()):
        ranks = [(self.process.pid, Beat(0, 0, phase))]
        (beat,), notices = self.phases.adjust_beats(ranks, int(at_s * SECOND), dead)
        return beat.phase, notices

    def settled(self, look):
        time.sleep(0.3)
        for _ in range(5):
            seen = look()
            time.sleep(0.06)
        return seen


@pytest.fixture
def starting(start):
    return lambda code, **options: Starting(start(sys.executable, "-c", code), **options)


def test_a_start_up_that_reads_is_loading_and_reported_as_long(starting):
    """A restore of an hour: no standstill, and people hear of it after 15 minutes, then doubled."""
    job = starting(READS)
    wait_until(lambda: job.look()[0] == "loading")

    told = {at: job.look(at)[1] for at in range(60, 3660, 60)}

    assert [at for at, notices in told.items() if notices] == [900, 1800, 3600]
    assert told[900][0].kind == "slow-start" and "after 15 min" in told[900][0].message


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_job_that_only_its_device_works_for_is_at_work(starting, share):
    """Before its first step there is no rank yet, and so no beat to ask for."""
    job = starting(SLEEPS, share=share)
    assert job.settled(job.phases.is_using_resources) is bool(share)


def test_a_start_up_that_sleeps_is_judged_by_its_limit(starting):
    job = starting(SLEEPS)
    assert job.settled(lambda: job.look(5000)) == ("startup", [])


@pytest.mark.parametrize(("code", "phase"), [(READS, "step"), (SLEEPS, "dead")])
def test_a_dead_rank_is_told_where_nothing_of_the_job_works(starting, code, phase):
    """An upload or an evaluation after a training was left to do it."""
    job = starting(code)
    assert job.settled(lambda: job.look(1, "step", dead=(0,)))[0] == phase


def test_a_dead_rank_is_told_whatever_the_others_do(starting):
    """They wait for it in a collective, and spin."""
    job = starting(READS)
    ranks = [(job.process.pid, Beat(rank, 0, "step")) for rank in (0, 1)]

    beats = [job.phases.adjust_beats(ranks, at * SECOND, {1})[0] for at in range(3)]

    assert [[beat.phase for beat in each] for each in beats] == [["step", "dead"]] * 3


def test_a_rank_that_a_signal_stops_suspends_all_and_is_named(starting):
    job = starting(SLEEPS)
    job.process.signal(signal.SIGSTOP)
    seen = []
    wait_until(lambda: seen.append(job.look(0, "step")) or seen[-1][0] == "suspended")

    ((notice,),) = [notices for _, notices in seen if notices]
    assert (notice.kind, notice.rank) == ("stopped", 0)
    assert f"`kill -CONT {job.process.pid}`" in notice.message
    job.process.signal(signal.SIGCONT)
    wait_until(lambda: job.look(1, "step") == ("step", []))
