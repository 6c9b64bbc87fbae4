"""`unit: steps`: windows of a sampled metric mean the same steps, however far apart its samples."""

from dataclasses import replace

import pytest

from supervise.core.model import BREACH, OK, UNKNOWN
from supervise.detectors import Band, Cusum, Equal, Ratio, RobustZ, Threshold, Trend

Z = RobustZ("a", gt=8.0, unit="steps")
GROWTH = Ratio("a", fast=16, ref=512, gt=2.0, min_=64, freeze=128, unit="steps")
OUTLIERS = RobustZ("a", gt=8.0, m_of_n=(3, 5), unit="steps")
DRIFT = Cusum("a", k=1.0, unit="steps")
CURVE = Band("a", knots=((0, 10.0, 0.1), (9000, 10.0, 0.1)), smooth=20, unit="steps")
CLIMB = Trend("a", window=160, slope_per_1k_gt=5.0, unit="steps")


def _first(detector, code, value, every, steps=4000):
    """The first step that reads `code`, of samples each `every` steps; others are absent."""
    watch = detector.start()
    for step in range(1, steps):
        sample = None if step % every else value(step)
        if watch.feed(sample, step) == code:
            return step
    return None


def _usual(step):
    return 10.0 + 0.01 * (step * 7 % 5)


@pytest.mark.parametrize(
    ("detector", "every", "speaks"),
    [
        (Z, 1, 65),  # 64 steps, and so as many samples
        (Z, 7, 91),  # 12 samples for a spread
        (Z, 50, 650),
        (GROWTH, 1, 65),
        (GROWTH, 7, 91),
        (GROWTH, 50, 650),
        (Threshold("a", gt=100.0, for_=3, unit="steps"), 50, 50),
        (DRIFT, 1, 65),
        (DRIFT, 50, 650),
        (CURVE, 1, 20),
        (CURVE, 8, 24),
        (CURVE, 50, 50),
        (CLIMB, 1, 160),
        (CLIMB, 10, 160),
        (CLIMB, 50, 800),  # a sample for each of 16 blocks
    ],
)
def test_it_speaks_after_min_steps_and_as_few_samples_as_have_a_spread(detector, every, speaks):
    assert _first(detector, OK, _usual, every) == speaks


@pytest.mark.parametrize("every", [1, 7, 50])
@pytest.mark.parametrize("unit", ["steps", "rows"])
@pytest.mark.parametrize("detector", [Z, GROWTH, OUTLIERS, DRIFT, CURVE, CLIMB])
def test_what_it_lacks_is_said_until_it_speaks(detector, unit, every):
    watch = (detector if unit == "steps" else replace(detector, unit="rows")).start()
    speaks = lacking = 0
    for step in range(every, 170 * every + 200, every):
        known = watch.feed(_usual(step), step) & 3 != UNKNOWN
        speaks, lacking = speaks or known * step, step if watch.lacks(every) else lacking

    assert speaks - 2 * every <= lacking < speaks


@pytest.mark.parametrize(("every", "tells"), [(1, 3), (2, 4), (8, 8), (50, 50)])
def test_a_threshold_speaks_from_the_first_sample_that_stands_for_its_steps(every, tells):
    watched = Threshold("a", gt=100.0, for_=3, unit="steps")

    assert _first(watched, BREACH, lambda step: 150.0, every) == tells


@pytest.mark.parametrize(("every", "tells"), [(1, 1003), (2, 1004), (50, 1050)])
def test_an_identity_that_fails_for_steps_is_told_at_their_end(every, tells):
    """And a curve that is left, and a level that creeps, within the same steps."""
    equal, at = Equal("a", to=10.0, for_=3, unit="steps").start(), []
    for step in range(1, 1200):
        sample = None if step % every else 10.0 if step <= 1000 else 11.0
        at += [step] if equal.feed((sample,), step) == BREACH else []
    left = _first(CURVE, BREACH, lambda step: 10.0 if step <= 1000 else 12.0, every)

    assert at[0] == tells
    assert 1000 < left <= 1000 + max(20, every)


def test_a_drift_over_few_samples_is_told():
    assert _first(DRIFT, BREACH, lambda s: _usual(s) + max(0, s - 2000) * 4e-4, 50) < 3000


@pytest.mark.parametrize(("every", "tells"), [(1, 180), (10, 180), (100, 200)])
def test_most_of_the_steps_are_most_of_the_samples_and_two_at_least(every, tells):
    dropping = Threshold("a", gt=1.0, m_of_n=(180, 200), unit="steps")

    assert _first(dropping, BREACH, lambda step: 1.5, every) == tells


@pytest.mark.parametrize(("every", "tells"), [(1, 2003), (10, 2010), (50, 2050)])
def test_one_strange_sample_is_no_vote(every, tells):
    """Whatever the spacing, a second one must agree."""
    at = 2001 if every == 1 else 2000
    assert _first(OUTLIERS, BREACH, lambda step: 20.0 if step >= at else _usual(step), every) == (
        tells
    )
    once = _first(OUTLIERS, BREACH, lambda step: 20.0 if step == 2000 else _usual(step), every)
    assert once is None


@pytest.mark.parametrize("every", [8, 50])
def test_growth_over_the_same_steps_is_growth_at_each_spacing(every):
    """Doubled after 1000 steps; and a level that stays becomes the usual one after `freeze`."""
    watch, firing = GROWTH.start(), []
    for step in range(8, 4000, 1):
        sample = (80.0 if step > 1000 else 30.0) if step % every == 0 else None
        if watch.feed(sample, step) & 3 == BREACH:
            firing.append(step)

    assert 1000 < firing[0] <= 1000 + 3 * every
    assert firing[-1] <= 1000 + max(128, 12 * every) + every


def test_a_sparser_metric_keeps_the_baseline_of_its_denser_start():
    watch = Z.start()
    for step in [*range(7, 100, 7), 100]:
        watch.feed(_usual(step), step)
    codes = [watch.feed(_usual(step), step) for step in range(150, 2000, 50)]

    assert UNKNOWN not in codes
