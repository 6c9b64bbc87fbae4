"""Band: near the curve of an earlier run."""

import pytest

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


def test_a_flat_curve_does_not_page_on_rounding(read):
    """The spread is a thousandth of the level at least."""
    flat = ((0.0, 2.0, 0.0), (100.0, 2.0, 0.0))

    assert read(_band(knots=flat).start(), [2.0 + 1e-12, 2.003, 2.005]) == "ooB"
    zero = ((0.0, 0.0, 0.0), (100.0, 0.0, 0.0))
    assert read(_band(knots=zero).start(), [0.0, 1e-6]) == "oB"
