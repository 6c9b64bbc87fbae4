"""Band: near the curve of an earlier run."""

import math

import pytest

from supervise.core.model.decisions import BREACH, UNKNOWN
from supervise.detectors.band import Band

KNOTS = ((10.0, 4.0, 0.5), (20.0, 2.0, 0.1), (40.0, 2.0, 0.1))


def _band(**fields):
    return Band("loss", **{"knots": KNOTS, "width": 2.0, **fields})


def test_lines_between_knots(read):
    """At step 15 the level is 3 and the spread 0.3, so 2.4 to 3.6 is inside."""
    for sample, letter in ((3.59, "o"), (3.61, "B"), (2.41, "o"), (2.39, "B")):
        watch = _band().start()
        assert read(watch, [sample], first=15) == letter
        numbers = watch.numbers()
        assert (numbers["level"], numbers["spread"]) == (3.0, pytest.approx(0.3))
        assert (numbers["low"], numbers["high"]) == (pytest.approx(2.4), pytest.approx(3.6))
        assert numbers["distance"] == pytest.approx((sample - 3.0) / 0.3)


def test_outside_of_the_knots_it_does_not_know(read):
    """Neither before nor after; the knots themselves are inside."""
    watch = _band().start()

    assert [watch.feed(9.0, step) for step in (0, 9, 10, 40, 41)] == [
        *(UNKNOWN, UNKNOWN),
        *(BREACH, BREACH),
        UNKNOWN,
    ]


def test_a_mean_is_compared_where_each_sample_was(read):
    """On the steep part a sample right on the curve is at distance zero, smoothed or not."""
    watch = _band(smooth=4).start()
    on_the_curve = [4.0 - 0.2 * i for i in range(11)]

    assert read(watch, on_the_curve, first=10) == "???" + "o" * 8
    assert watch.numbers()["distance"] == pytest.approx(0.0, abs=1e-9)
    assert read(watch, [2.3, 2.3, 2.3, 2.3], first=21) == "ooBB"


def test_logs_are_factors(read):
    """Levels in units of the metric, spreads in logs, straight lines in logs."""
    watch = _band(knots=((0.0, 1.0, 0.1), (10.0, 100.0, 0.1)), transform="log").start()

    assert read(watch, [10.0, 0.0, -1.0, None], first=5) == "o???"
    assert watch.numbers()["distance"] is None
    assert read(watch, [100.0 * math.exp(0.21)], first=10) == "B"
    assert watch.numbers()["high"] == pytest.approx(100.0 * math.exp(0.2))


def test_a_flat_curve_does_not_page_on_rounding(read):
    """The spread is a thousandth of the level at least."""
    flat = ((0.0, 2.0, 0.0), (100.0, 2.0, 0.0))

    assert read(_band(knots=flat).start(), [2.0 + 1e-12, 2.003, 2.005]) == "ooB"
    zero = ((0.0, 0.0, 0.0), (100.0, 0.0, 0.0))
    assert read(_band(knots=zero).start(), [0.0, 1e-6]) == "oB"
