"""Paired: evaluations of the same pinned input, one after the other."""

import pytest

from supervise.core.model.decisions import BREACH, UNKNOWN
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


def test_a_reading_stands_for_so_long(letters):
    """Then it is not known any more, until the next evaluation."""
    watch = Paired("a", gt=0.1, stands=2).start()

    assert letters(watch, [1.0, 2.0, None, None, None, None, 2.0]) == "?BBB??o"


def test_the_raw_code_is_of_evaluations_only(letters):
    """Couplings must not see one evaluation for a thousand steps."""
    watch = Paired("a", gt=0.1).start()
    letters(watch, [1.0, 2.0])
    assert watch.raw == BREACH

    assert watch.feed((None,), 2) == BREACH
    assert watch.raw == UNKNOWN


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
