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
