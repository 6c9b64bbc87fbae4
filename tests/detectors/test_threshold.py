"""Threshold: bounds, `for`, `m_of_n`, and `clear`."""

import math

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.threshold import Threshold


@pytest.mark.parametrize(
    ("bound", "readings"),
    [({"gt": 2.0}, "ooB"), ({"gte": 2.0}, "oBB"), ({"lt": 2.0}, "Boo"), ({"lte": 2.0}, "BBo")],
)
def test_each_bound_is_open_or_closed_as_it_says(read, bound, readings):
    """1, 2 and 3 against 2."""
    assert read(Threshold("loss", **bound).start(), [1.0, 2.0, 3.0]) == readings


def test_for_waits_for_samples_in_a_row(read):
    """Two in a row do not make three; the third does; the first good one ends it."""
    watch = Threshold("loss", gt=10.0, for_=3).start()

    assert read(watch, [11, 11, 1, 11, 11, 11, 11, 1]) == "oooooBBo"


def test_m_of_n_counts_in_a_window(read):
    """Three of five, not in a row; it lasts while three of the last five breach."""
    watch = Threshold("loss", gt=10.0, m_of_n=(3, 5)).start()

    assert read(watch, [11, 1, 11, 1, 11, 1, 1, 1]) == "ooooBooo"


def test_clear_holds_a_breach_until_the_sample_is_past_it(read):
    """Between 8 and 10 nothing begins and nothing ends."""
    watch = Threshold("loss", gt=10.0, clear=8.0).start()

    assert read(watch, [9, 11, 9, 9, 8, 9, 11]) == "oBBBooB"


def test_clear_works_downwards_too(read):
    """A lower bound clears upwards; `lte: 2, clear: 3` ends above 3."""
    watch = Threshold("scale", lte=2.0, clear=3.0).start()

    assert read(watch, [2, 3, 3.5]) == "BBo"


def test_unknown_neither_advances_nor_resets(read):
    """NaN and absent samples are read as UNKNOWN and are not counted."""
    watch = Threshold("loss", gt=10.0, for_=3).start()

    assert read(watch, [11, None, 11, math.nan, math.inf, 11, None, 11, 1]) == "o?o??B?Bo"


def test_raw_is_the_code_before_for_and_clear():
    """Couplings read every single breach."""
    watch = Threshold("loss", gt=10.0, clear=5.0, for_=2).start()
    raws = []
    for step, sample in enumerate([11.0, 11.0, 7.0, None]):
        watch.feed(sample, step)
        raws.append(watch.raw)

    assert raws == [BREACH, BREACH, OK, UNKNOWN]


def test_a_step_that_is_not_newer_is_not_taken():
    """The same frame twice does not count twice, and is no proof of health either."""
    watch = Threshold("loss", gt=10.0, for_=2).start()
    watch.feed(11.0, 5)

    assert [watch.feed(11.0, 5), watch.feed(1.0, 4)] == [UNKNOWN, UNKNOWN]
    assert watch.feed(11.0, 6) == BREACH


def test_rewind_starts_the_verdict_anew(read):
    """What was counted belonged to a life that was undone."""
    watch = Threshold("loss", gt=10.0, for_=2).start()
    read(watch, [1, 11, 11])

    watch.rewind(0)

    assert watch.raw == UNKNOWN
    assert read(watch, [11, 11], first=1) == "oB"


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


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "gt"),
        ({"gt": 1.0, "lt": 2.0}, "lt"),
        ({"gt": math.nan}, "gt"),
        ({"gt": 1.0, "clear": 1.0}, "clear"),
        ({"lt": 1.0, "clear": 0.5}, "clear"),
        ({"gt": 1.0, "for_": 0}, "for"),
        ({"gt": 1.0, "m_of_n": (4, 3)}, "m_of_n"),
        ({"gt": 1.0, "for_": 2, "m_of_n": (1, 3)}, "m_of_n"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in Threshold("loss", **fields).check()] == [key]


def test_a_good_one_passes():
    """No complaint about the example of the docs."""
    assert Threshold("loss", gt=12.0, clear=11.0, for_=2).check() == []
