"""Equal: a number that must be another one."""

import math

import pytest

from supervise.detectors.equal import Equal


@pytest.fixture
def letters(read):
    """Feed values of one metric, or pairs of two."""

    def _letters(watch, values, first=0):
        rows = [v if isinstance(v, tuple) else (v,) for v in values]
        return read(watch, rows, first)

    return _letters


def test_a_number(letters):
    """Exactly, where nothing else is said."""
    watch = Equal("opt_state_finite", to=1.0).start()

    assert letters(watch, [1.0, 0.0, 1.0, None, math.nan, math.inf, 1.0000001]) == "oBo???B"
    assert watch.numbers()["difference"] == pytest.approx(1e-7)
    assert watch.numbers()["threshold"] == 1.0


def test_another_metric_of_the_same_step(letters):
    """Within a share of what is referred to; each of the two may be absent."""
    watch = Equal("learning_rate", with_="learning_rate_scheduled", tolerance=1e-6).start()
    pairs = [(1e-3, 1e-3), (1.0000005e-3, 1e-3), (1.00001e-3, 1e-3), (1e-4, 1e-3)]

    assert letters(watch, pairs) == "ooBB"
    assert letters(watch, [(None, 1.0), (1.0, None), (1.0, math.nan)], 4) == "???"
    assert watch.spec.metrics == ("learning_rate", "learning_rate_scheduled")
    assert Equal("a", to=1.0).metrics == ("a",)


def test_a_long_constant_takes_no_memory(letters):
    """Only changes are kept, and of them no more than needed."""
    watch = Equal("a", to="previous").start()
    letters(watch, [1.0] * 2000)
    assert len(watch.values) == 1
    letters(watch, [float(i) for i in range(2000)], 2000)

    assert 256 <= len(watch.values) <= 512
