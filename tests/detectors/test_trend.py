"""Trend: a slope with its confidence, looked at once per block."""

import math
import random

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.trend import BLOCKS, Trend

WINDOW = 10 * BLOCKS


def _trend(**fields):
    return Trend("loss", **{"window": WINDOW, "slope_per_1k_gt": 0.5, **fields})


def _line(slope_per_1k, steps, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [2.0 + slope_per_1k * step / 1000 + noise * rng.gauss(0, 1) for step in range(steps)]


def test_it_is_unknown_until_the_window_was_full(read):
    """Then it has a verdict at every step."""
    readings = read(_trend().start(), _line(0.0, WINDOW + 20))

    assert readings == "?" * (WINDOW - 1) + "o" * 21


def test_a_clear_climb_breaches_and_a_gentle_one_does_not(read):
    """The slope of a straight line is found exactly."""
    watch = _trend().start()

    assert read(watch, _line(0.6, WINDOW))[-1] == "B"
    assert watch.numbers()["value"] == pytest.approx(0.6)
    assert read(_trend().start(), _line(0.4, WINDOW))[-1] == "o"


def test_noise_must_not_pass_for_a_climb(read):
    """A flat noisy series is OK over 200 seeds but for the few that 99 % allows."""
    watches = [_trend(slope_per_1k_gt=0.0, confidence=0.99).start() for _ in range(200)]

    wrong = sum(
        read(watch, _line(0.0, WINDOW, noise=0.1, seed=seed))[-1] == "B"
        for seed, watch in enumerate(watches)
    )

    assert wrong <= 8


def test_lt_looks_for_a_fall(read):
    """The upper bound of the slope is below the limit."""
    watch = _trend(slope_per_1k_gt=None, slope_per_1k_lt=-0.5).start()

    assert read(watch, _line(-0.6, WINDOW))[-1] == "B"


def test_three_bad_blocks_do_not_bend_the_line(read):
    """A spike is not a climb."""
    series = _line(0.0, WINDOW)
    series[-30:] = [50.0] * 30

    assert read(_trend().start(), series)[-1] == "o"


def test_absent_and_nan_samples_are_unknown_and_belong_to_no_block(read):
    """The slope is that of the steps that were seen."""
    watch = _trend().start()
    series = [
        bad if step % 4 == 0 else value
        for step, (value, bad) in enumerate(
            zip(_line(0.6, 2 * WINDOW), [None, math.nan, math.inf, 1e200] * WINDOW, strict=False)
        )
    ]

    readings = read(watch, series)

    assert set(readings[::4]) == {"?"}
    assert readings[-1] == "B"
    assert watch.numbers()["value"] == pytest.approx(0.6)


def test_after_a_rollback_it_still_answers(read):
    """The blocks of before were kept, the open one is begun again."""
    watch = _trend().start()
    read(watch, _line(0.0, 2 * WINDOW - 25) + _line(90.0, 25))

    watch.rewind(2 * WINDOW - 30)

    assert watch.feed(2.0, 2 * WINDOW - 29) == OK
    assert watch.numbers()["steps"] == [WINDOW - 30, 2 * WINDOW - 31]


def test_a_step_that_is_not_newer_is_not_taken(read):
    """The verdict is not given for it."""
    watch = _trend().start()
    read(watch, _line(0.6, WINDOW))

    assert watch.feed(9.0, 3) == UNKNOWN
    assert watch.feed(9.0, WINDOW) == BREACH


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"slope_per_1k_gt": None}, "slope_per_1k_gt"),
        ({"slope_per_1k_lt": 0.0}, "slope_per_1k_lt"),
        ({"window": 31}, "window"),
        ({"confidence": 0.5}, "confidence"),
        ({"confidence": 1.0 - 1e-9}, "confidence"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in _trend(**fields).check()] == [key]
