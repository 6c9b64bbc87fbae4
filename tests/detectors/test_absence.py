"""Absence: silence by the clock of the ticks, with grace by phase."""

import pytest

from supervise.core.model import BREACH, OK
from supervise.detectors import ABSENCE_TIMES, Absence

S = 1_000_000_000


def _stepping(watch, steps, every_s=1.0, begin_s=0.0, first=0):
    """Steps of `every_s` seconds with a tick each; return the second after the last one."""
    at = begin_s
    for step in range(first, first + steps):
        watch.beat(round(at * S), step)
        watch.tick(round(at * S), round(at * S), "step")
        at += every_s
    return at


def _wait(watch, begin_s, seconds, phase="step", heard_s=None):
    """Tick once a second without a step; return the seconds at which it was a BREACH."""
    heard = None if heard_s is None else round(heard_s * S)
    ticks = range(int(begin_s), int(begin_s + seconds))
    return [at for at in ticks if watch.tick(at * S, heard, phase) == BREACH]


def test_a_stall_breaches_after_the_least_time_and_ends_with_a_step():
    """The last step came at second 29; 120 seconds later it is late."""
    watch = Absence().start()
    _stepping(watch, 30)

    assert _wait(watch, 30, 130)[0] == 150
    watch.beat(160 * S, 30)
    assert watch.tick(160 * S, None, "step") == OK


def test_slow_steps_make_it_patient():
    """Steps of 60 seconds: 8 * 60 is more than 120."""
    watch = Absence().start()
    for step in range(30):
        watch.beat(step * 60 * S, step)
        watch.tick(step * 60 * S, None, "step")
        watch.tick((step * 60 + 20) * S, None, "step")
        watch.tick((step * 60 + 40) * S, None, "step")

    assert watch.p99_ns() == 60 * S
    assert _wait(watch, 29 * 60 + 41, 480)[0] == 29 * 60 + 481


def test_the_percentile_is_of_the_newest_step_times():
    """One slow step in 128 is not the 99th percentile, two are."""
    watch = Absence().start()
    at = _stepping(watch, 2 * ABSENCE_TIMES)
    at = _stepping(watch, 1, begin_s=at + 19, first=2 * ABSENCE_TIMES)
    assert watch.p99_ns() == S

    at = _stepping(watch, 1, begin_s=at + 19, first=2 * ABSENCE_TIMES + 1)
    assert watch.p99_ns() == 20 * S
    assert len(watch.ordered) == ABSENCE_TIMES


def test_a_percentile_of_few_is_not_believed():
    """The first steps are slow: compilation, warming caches."""
    watch = Absence().start()
    _stepping(watch, 10, every_s=25.0)

    assert watch.p99_ns() is None


@pytest.mark.parametrize(
    ("phase", "limit"), [("startup", 900), ("eval", 900), ("checkpoint", 600), ("siesta", 600)]
)
def test_each_phase_has_its_grace_and_an_unknown_one_the_shortest(phase, limit):
    """Counted from the change of phase."""
    watch = Absence().start()
    _stepping(watch, 30)

    assert _wait(watch, 30, 1000, phase)[0] == 30 + limit + 1


def test_leaving_a_long_phase_is_a_sign_of_life():
    """After 800 seconds of evaluation the next step has its full time again."""
    watch = Absence().start()
    _stepping(watch, 30)

    assert _wait(watch, 30, 800, "eval") == []
    assert _wait(watch, 830, 130)[0] == 830 + 121


def test_the_time_of_an_evaluation_is_no_step_time():
    """Else one evaluation per hundred steps would make it patient for good."""
    watch = Absence().start()
    at = _stepping(watch, 60)
    for _ in range(3):
        _wait(watch, at, 50, "eval")
        at = _stepping(watch, 20, begin_s=at + 50, first=watch.last + 1)

    assert watch.p99_ns() == S


def test_the_time_over_lost_frames_is_no_step_time():
    """Fifty seconds between steps 59 and 109 were fifty steps."""
    watch = Absence().start()
    at = _stepping(watch, 60)
    for _ in range(3):
        at = _stepping(watch, 20, begin_s=at + 50, first=watch.last + 50)

    assert watch.p99_ns() == S


def test_grace_never_shortens_the_limit():
    """Steps of 25 seconds allow for 200; a grace of 60 does not take that away."""
    watch = Absence(grace={"startup": 60.0, "checkpoint": 60.0, "eval": 60.0}).start()
    at = _stepping(watch, 30, every_s=25.0)

    assert _wait(watch, at, 300, "eval")[0] == at + 201


def test_a_paused_job_is_never_absent_and_starts_afresh():
    """A thousand seconds of pause, then 120 more."""
    watch = Absence().start()
    _stepping(watch, 30)

    assert _wait(watch, 30, 1000, "paused") == []
    assert _wait(watch, 1030, 130)[0] == 1030 + 121


def test_the_heartbeat_is_another_signal():
    """The probe is heard, but no step comes: a hang in a collective. Then it falls silent too."""
    step, heartbeat = Absence().start(), Absence(signal="heartbeat").start()
    for watch in (step, heartbeat):
        _stepping(watch, 30)
    for at in range(30, 200):
        codes = [watch.tick(at * S, at * S, "step") for watch in (step, heartbeat)]
    assert codes == [BREACH, OK]

    assert _wait(heartbeat, 200, 130, heard_s=199)[0] == 199 + 121


def test_a_dead_process_is_missed_as_a_process_and_as_steps():
    """Each from its own beginning: the death, and the last step. Its end as it meant is neither."""
    process, step = Absence(signal="process", after={"min": 90.0}).start(), Absence().start()
    for watch in (process, step):
        _stepping(watch, 30)

    assert [_wait(watch, 30, 130, "dead")[0] for watch in (process, step)] == [121, 150]
    assert [_wait(watch, 160, 1000, "exiting") for watch in (process, step)] == [[], []]
    assert (
        _wait(step, 1160, 1000, "dead") == []
    )  # it ended with an error: nothing is expected of it


def test_a_job_that_was_never_heard_has_the_grace_of_starting():
    """No frame and no heartbeat: counted from the first tick."""
    for signal in ("step", "heartbeat"):
        watch = Absence(signal=signal).start()

        assert _wait(watch, 5, 1000, "startup")[0] == 5 + 901


def test_time_that_nobody_watched_is_not_counted():
    """The whole tree was stopped for an hour; ten silent seconds before it still count."""
    watch = Absence().start()
    _stepping(watch, 30)
    _wait(watch, 30, 10)

    assert watch.tick(3639 * S, None, "step") == OK
    assert _wait(watch, 3640, 130)[0] == 3639 + 120 - 10 + 1


def test_rewind_keeps_the_step_times():
    """A rollback does not make it forget how long a step takes; the way back is no step."""
    watch = Absence().start()
    at = _stepping(watch, 60)

    watch.rewind(30)
    _stepping(watch, 3, begin_s=at + 25, first=31)

    assert watch.p99_ns() == S


def test_the_numbers_say_how_long_and_how_long_is_too_long():
    """In seconds."""
    watch = Absence().start()
    _stepping(watch, 30)
    _wait(watch, 30, 130)

    assert watch.numbers() == {
        "step": 29,
        "value": 130.0,
        "threshold": 120.0,
        "signal": "step",
        "phase": "step",
        "p99_s": 1.0,
        "samples": 29,
    }
