"""Trend: a slope with its confidence, looked at once per block."""

import random

import pytest

from supervise.detectors.trend import BLOCKS, Trend

WINDOW = 10 * BLOCKS


def _trend(**fields):
    return Trend("loss", **{"window": WINDOW, "slope_per_1k_gt": 0.5, **fields})


def _line(slope_per_1k, steps, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [2.0 + slope_per_1k * step / 1000 + noise * rng.gauss(0, 1) for step in range(steps)]


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
