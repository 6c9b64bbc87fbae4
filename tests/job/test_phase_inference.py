"""What the probe cannot tell of a silent job: real processes that sleep, work, and are stopped."""

import signal
import sys
import time

import psutil
import pytest

from supervise.core.model import Beat
from supervise.runtime import Phases, idleness
from tests.support.waiting import wait_until

SECOND = 1_000_000_000
READS = "while True: open('/dev/zero', 'rb').read(1 << 20)"
SLEEPS = "import time; time.sleep(60)"


@pytest.fixture
def starting(start, monkeypatch):
    """A process in its start-up, looked at every 50 ms; `look` returns its phase and notices."""
    monkeypatch.setattr(idleness, "LOOK_S", 0.05)

    def begin(code):
        process = start(sys.executable, "-c", code)
        seen = Phases(lambda: [psutil.Process(process.pid)])

        def look(at_s, phase="startup", dead=()):
            ranks = [(process.pid, Beat(0, 0, phase))]
            (beat,), notices = seen.judge(ranks, int(at_s * SECOND), dead)
            return beat.phase, notices

        return process, look

    return begin


def test_a_start_up_that_reads_is_loading_and_reported_as_long(starting):
    """A restore of an hour: no standstill, and people hear of it after 15 minutes, then doubled."""
    _, look = starting(READS)
    wait_until(lambda: look(0)[0] == "loading")

    told = {at: look(at)[1] for at in range(60, 3660, 60)}

    assert [at for at, notices in told.items() if notices] == [900, 1800, 3600]
    assert told[900][0].kind == "slow-start" and "after 15 min" in told[900][0].message


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_job_that_only_its_device_works_for_is_at_work(start, monkeypatch, share):
    monkeypatch.setattr(idleness, "LOOK_S", 0.05)
    process = start(sys.executable, "-c", SLEEPS)
    seen = Phases(lambda: [psutil.Process(process.pid)], lambda: share)
    time.sleep(0.3)  # it has started
    for _ in range(5):
        works = seen.works()
        time.sleep(0.06)

    assert works is bool(share)


def test_a_start_up_that_sleeps_is_judged_by_its_limit(starting):
    _, look = starting(SLEEPS)
    time.sleep(0.3)
    for _ in range(5):
        phase, notices = look(5000)
        time.sleep(0.06)

    assert (phase, notices) == ("startup", [])


def test_a_rank_that_a_signal_stops_suspends_all_and_is_named(starting):
    process, look = starting(SLEEPS)
    process.signal(signal.SIGSTOP)
    seen = []
    wait_until(lambda: seen.append(look(0, "step")) or seen[-1][0] == "suspended")

    ((notice,),) = [notices for _, notices in seen if notices]
    assert (notice.kind, notice.rank) == ("stopped", 0)
    assert f"`kill -CONT {process.pid}`" in notice.message
    process.signal(signal.SIGCONT)
    wait_until(lambda: look(1, "step") == ("step", []))


@pytest.mark.parametrize("code", [READS, SLEEPS])
def test_a_dead_rank_is_told_where_nothing_of_the_job_works(starting, code):
    """What works after a training, an upload or an evaluation, was left to do it."""
    _, look = starting(code)
    wanted = "step" if code == READS else "dead"
    time.sleep(0.3)  # it has started
    for _ in range(5):
        phase, _ = look(1, "step", dead=(0,))
        time.sleep(0.06)

    assert phase == wanted


def test_a_dead_rank_is_told_whatever_the_others_do(starting):
    process, _ = starting(READS)
    ranks = [(process.pid, Beat(rank, 0, "step")) for rank in (0, 1)]
    seen = Phases(lambda: [psutil.Process(process.pid)])

    beats = [seen.judge(ranks, at * SECOND, {1})[0] for at in range(3)]

    assert [[beat.phase for beat in each] for each in beats] == [["step", "dead"]] * 3
