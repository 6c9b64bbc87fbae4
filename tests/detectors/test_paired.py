"""Paired: evaluations of the same pinned input, one after the other."""

import math

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.paired import Paired


@pytest.fixture
def letters(read):
    """Feed values, or pairs of value and key."""

    def _letters(watch, values, first=0):
        rows = [v if isinstance(v, tuple) else (v,) for v in values]
        return read(watch, rows, first)

    return _letters


def test_a_rise_against_the_evaluation_before(letters):
    """Nothing before the first; a fall is no rise; the reading stands in between."""
    watch = Paired("val_loss", gt=0.1).start()

    assert letters(watch, [None, 2.0, None, 1.9, None, 2.05, None, None, 2.1]) == "???ooBBBo"
    assert watch.numbers()["before"] == 2.05


def test_both_bounds_of_a_rise_must_be_broken(letters):
    """0.2 is more than 0.1, and 2 % of 10 but 20 % of 1."""
    fields = {"gt": 0.1, "rel_gt": 0.05}

    assert letters(Paired("a", **fields).start(), [10.0, 10.2]) == "?o"
    assert letters(Paired("a", **fields).start(), [1.0, 1.2]) == "?B"
    assert letters(Paired("a", **fields).start(), [0.1, 0.15]) == "?o"
    assert letters(Paired("a", rel_gt=0.05).start(), [0.1, 0.15]) == "?B"


def test_a_sudden_gain_is_looked_for_where_it_is_asked(letters):
    """`lt` stands by itself."""
    assert letters(Paired("a", gt=0.1).start(), [2.0, 1.0]) == "?o"
    assert letters(Paired("a", gt=0.1, lt=-0.5).start(), [2.0, 1.6, 1.0, 1.2]) == "?oBB"
    assert letters(Paired("a", lt=-0.5).start(), [1.0, 9.0, 8.0]) == "?oB"


def test_another_input_is_not_compared(letters):
    """A new key begins anew, whether it comes with an evaluation or before one."""
    watch = Paired("a", key="hash", gt=0.1).start()

    assert letters(watch, [(1.0, 7.0), (1.0, 7.0), (5.0, 8.0), (5.0, 8.0)]) == "?o?o"
    assert letters(watch, [(None, 9.0), (9.0, None), (9.5, None)], 4) == "??B"
    assert letters(watch, [(None, 7.0), (9.9, 7.0)], 7) == "??"


def test_without_a_key_there_is_no_input_to_speak_of(letters):
    """Abstain rather than compare what may be two things."""
    watch = Paired("a", key="hash", gt=0.1).start()

    assert letters(watch, [(1.0, None), (5.0, None), (5.0, math.nan), (5.0, 1.0)]) == "????"
    assert letters(watch, [(5.0, 1.0)], 4) == "o"


def test_the_first_differences_may_be_left_out(letters):
    """`settle: 2` is three evaluations before one is judged, after a change of the key too."""
    watch = Paired("a", key="k", gt=0.1, settle=2).start()

    assert letters(watch, [(1.0, 1.0), (5.0, 1.0), (9.0, 1.0), (9.5, 1.0)]) == "???B"
    assert letters(watch, [(1.0, 2.0), (5.0, 2.0), (9.0, 2.0), (9.05, 2.0)], 4) == "???o"


def test_a_reading_stands_for_so_long(letters):
    """Then it is not known any more, until the next evaluation."""
    watch = Paired("a", gt=0.1, stands=2).start()

    assert letters(watch, [1.0, 2.0, None, None, None, None, 2.0]) == "?BBB??o"


def test_for_counts_evaluations(letters):
    """Two rises in a row, whatever the time between them."""
    watch = Paired("a", gt=0.1, for_=2).start()

    assert letters(watch, [1.0, 2.0, None, None, 3.0, None, 3.0]) == "?oooBBo"


def test_a_new_key_begins_the_count_anew(letters):
    """A rise of the old input and one of the new are not two in a row."""
    watch = Paired("a", key="k", gt=0.1, for_=2).start()

    assert letters(watch, [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]) == "?o?oB"


def test_an_evaluation_that_is_nan_is_not_compared_with(letters):
    """Nor is the old reading still the reading."""
    watch = Paired("a", gt=0.1).start()

    assert letters(watch, [1.0, 1.0, math.nan, None, 1.05]) == "?o??o"


def test_the_raw_code_is_of_evaluations_only(letters):
    """Couplings must not see one evaluation for a thousand steps."""
    watch = Paired("a", gt=0.1).start()
    letters(watch, [1.0, 2.0])
    assert watch.raw == BREACH

    assert watch.feed((None,), 2) == BREACH
    assert watch.raw == UNKNOWN


def test_a_rollback_gives_the_evaluation_and_the_key_of_then_back(letters):
    """What came after it is forgotten, the key as well."""
    watch = Paired("a", key="k", gt=0.1).start()
    letters(watch, [(1.0, 7.0), (1.0, 7.0), (9.0, 8.0), (9.0, 8.0)])
    watch.rewind(1)

    assert letters(watch, [(1.05, 7.0), (2.0, 7.0)], 2) == "oB"


def test_long_runs_take_no_more_memory(letters):
    """64 evaluations are kept at least."""
    watch = Paired("a", key="k", gt=0.1).start()
    letters(watch, [(float(i), float(i // 2)) for i in range(1000)])

    assert 64 <= len(watch.values) <= 128
    assert 64 <= len(watch.keys) <= 128


def test_a_constant_series_does_not_page_on_rounding(letters):
    """Bounds are above zero, so an ulp is not beyond one."""
    watch = Paired("a", gt=1e-6, lt=-1e-6).start()

    assert set(letters(watch, [2.0, 2.0 + 4e-16, 2.0] * 10)) == {"?", "o"}


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "gt"),
        ({"gt": 0.0}, "gt"),
        ({"rel_gt": -1.0}, "rel_gt"),
        ({"lt": 0.0}, "lt"),
        ({"lt": -math.inf}, "lt"),
        ({"gt": 1.0, "key": "a"}, "key"),
        ({"gt": 1.0, "settle": -1}, "settle"),
        ({"gt": 1.0, "settle": 64}, "settle"),
        ({"gt": 1.0, "stands": 0}, "stands"),
        ({"gt": 1.0, "for_": 0}, "for"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in Paired("a", **fields).check()] == [key]


def test_a_step_that_is_not_newer_is_not_taken(letters):
    """The evaluation before stays the one before."""
    watch = Paired("a", gt=0.1).start()
    letters(watch, [1.0, 1.0])

    assert watch.feed((9.0,), 1) == UNKNOWN
    assert watch.feed((1.05,), 2) == OK
