"""Threshold: bounds, `for`, `m_of_n`, and `clear`."""

import math

import pytest

from supervise.detectors.threshold import Threshold


@pytest.mark.parametrize(
    ("bound", "readings"),
    [({"gt": 2.0}, "ooB"), ({"gte": 2.0}, "oBB"), ({"lt": 2.0}, "Boo"), ({"lte": 2.0}, "BBo")],
)
def test_each_bound_is_open_or_closed_as_it_says(read, bound, readings):
    """1, 2 and 3 against 2."""
    assert read(Threshold("loss", **bound).start(), [1.0, 2.0, 3.0]) == readings


def test_clear_holds_a_breach_until_the_sample_is_past_it(read):
    """Between 8 and 10 nothing begins and nothing ends."""
    watch = Threshold("loss", gt=10.0, clear=8.0).start()

    assert read(watch, [9, 11, 9, 9, 8, 9, 11]) == "oBBBooB"


def test_unknown_neither_advances_nor_resets(read):
    """NaN and absent samples are read as UNKNOWN and are not counted."""
    watch = Threshold("loss", gt=10.0, for_=3).start()

    assert read(watch, [11, None, 11, math.nan, math.inf, 11, None, 11, 1]) == "o?o??B?Bo"


def test_the_numbers_say_value_bound_and_count():
    """Enough to write the sentence: 11 > 10, 2 of 2."""
    watch = Threshold("loss", gt=10.0, clear=8.0, for_=2).start()
    watch.feed(11.0, 0)
    watch.feed(11.0, 1)

    assert watch.numbers() == {
        "step": 1,
        "value": 11.0,
        "gt": 10.0,
        "threshold": 10.0,
        "clear": 8.0,
        "breaching": 2,
        "needed": 2,
        "of": 2,
    }
