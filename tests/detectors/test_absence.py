"""Absence: silence by the clock of the ticks, with grace by phase."""

import pytest

from supervise.core.model import BREACH, OK
from supervise.detectors import Absence

S = 1_000_000_000


def _steps(watch, steps, every_s=1.0, begin_s=0.0, first=0):
    """Steps of `every_s` seconds with a tick each; return the second after the last one."""
    at = begin_s
    for step in range(first, first + steps):
        watch.beat(round(at * S), step)
        watch.tick(round(at * S), round(at * S), "step")
        at += every_s
    return at


def _stepping(**fields):
    """Return a watch of thirty steps, the last one at second 29."""
    watch = Absence(**fields).start()
    _steps(watch, 30)
    return watch


def _wait(watch, begin_s, seconds, phase="step", heard_s=None):
    """Tick once a second without a step; return the seconds at which it was a BREACH."""
    heard = None if heard_s is None else round(heard_s * S)
    ticks = range(int(begin_s), int(begin_s + seconds))
    return [at for at in ticks if watch.tick(at * S, heard, phase) == BREACH]


def test_a_stall_breaches_after_the_least_time_and_ends_with_a_step():
    watch = _stepping()

    assert _wait(watch, 30, 130)[0] == 150
    assert watch.numbers() == {
        "step": 29,
        "value": 130.0,
        "threshold": 120.0,
        "signal": "step",
        "phase": "step",
        "p99_s": 1.0,
        "samples": 29,
    }
    watch.beat(160 * S, 30)
    assert watch.tick(160 * S, None, "step") == OK


def test_slow_steps_make_it_patient():
    """Steps of 60 seconds: 8 * 60 is more than 120."""
    watch = Absence().start()
    for step in range(30):
        watch.beat(step * 60 * S, step)
        for after in (0, 20, 40):
            watch.tick((step * 60 + after) * S, None, "step")

    assert watch.numbers()["p99_s"] == 60.0
    assert _wait(watch, 29 * 60 + 41, 480)[0] == 29 * 60 + 481


def test_the_percentile_is_of_the_newest_128_step_times():
    """One slow step in 128 is not the 99th percentile, two are; one of few is not believed."""
    few, watch = Absence().start(), Absence().start()
    _steps(few, 10, every_s=25.0)
    assert few.numbers()["p99_s"] is None

    at = _steps(watch, 256)
    for step, expected in ((256, 1.0), (257, 20.0)):
        at = _steps(watch, 1, begin_s=at + 19, first=step)
        assert (watch.numbers()["p99_s"], watch.numbers()["samples"]) == (expected, 128)


@pytest.mark.parametrize(
    ("phase", "limit"), [("startup", 900), ("eval", 900), ("checkpoint", 600), ("siesta", 600)]
)
def test_each_phase_has_its_grace_and_an_unknown_one_the_shortest(phase, limit):
    """Counted from the change of phase."""
    assert _wait(_stepping(), 30, 1000, phase)[0] == 30 + limit + 1


@pytest.mark.parametrize(("phase", "seconds"), [("eval", 800), ("paused", 1000)])
def test_the_step_behind_a_long_phase_has_its_full_time_again(phase, seconds):
    watch = _stepping()

    assert _wait(watch, 30, seconds, phase) == []
    assert _wait(watch, 30 + seconds, 130)[0] == 30 + seconds + 121


@pytest.mark.parametrize("lost", [0, 49])
def test_an_evaluation_and_lost_frames_are_no_step_times(lost):
    """Else one evaluation per hundred steps, or fifty steps in one, would make it patient."""
    watch = Absence().start()
    at, first = _steps(watch, 60), 60
    for _ in range(3):
        if not lost:
            _wait(watch, at, 50, "eval")
        at = _steps(watch, 20, begin_s=at + 50, first=first + lost)
        first += lost + 20

    assert watch.numbers()["p99_s"] == 1.0


def test_grace_never_shortens_the_limit():
    """Steps of 25 seconds allow for 200; a grace of 60 does not take that away."""
    watch = Absence(grace={"startup": 60.0, "checkpoint": 60.0, "eval": 60.0}).start()
    at = _steps(watch, 30, every_s=25.0)

    assert _wait(watch, at, 300, "eval")[0] == at + 201


def test_the_heartbeat_is_another_signal():
    """The probe is heard, but no step comes: a hang in a collective. Then it falls silent too."""
    step, heartbeat = _stepping(), _stepping(signal="heartbeat")
    for at in range(30, 200):
        codes = [watch.tick(at * S, at * S, "step") for watch in (step, heartbeat)]
    assert codes == [BREACH, OK]

    assert _wait(heartbeat, 200, 130, heard_s=199)[0] == 199 + 121


def test_a_dead_process_is_missed_as_a_process_and_as_steps():
    """Each from its own beginning: the death, and the last step. Its end as it meant is neither."""
    process, step = _stepping(signal="process", after={"min": 90.0}), _stepping()

    assert [_wait(watch, 30, 130, "dead")[0] for watch in (process, step)] == [121, 150]
    assert [_wait(watch, 160, 1000, "exiting") for watch in (process, step)] == [[], []]
    assert _wait(step, 1160, 1000, "dead") == [], "nothing is expected of what ended by itself"


@pytest.mark.parametrize("signal", ["step", "heartbeat"])
def test_a_job_that_was_never_heard_has_the_grace_of_starting(signal):
    assert _wait(Absence(signal=signal).start(), 5, 1000, "startup")[0] == 5 + 901


def test_time_that_nobody_watched_is_not_counted():
    """The whole tree was stopped for an hour; ten silent seconds before it still count."""
    watch = _stepping()
    _wait(watch, 30, 10)

    assert watch.tick(3639 * S, None, "step") == OK
    assert _wait(watch, 3640, 130)[0] == 3639 + 120 - 10 + 1


def test_rewind_keeps_the_step_times():
    watch = Absence().start()
    at = _steps(watch, 60)
    watch.rewind(30)
    _steps(watch, 3, begin_s=at + 25, first=31)

    assert watch.numbers()["p99_s"] == 1.0
