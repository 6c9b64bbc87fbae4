"""Cusum: many small steps in one direction."""

import pytest

from supervise.core.model import BREACH, NOTE_MESSAGE, OK
from supervise.detectors import Cusum

QUIET = [9.0, 9.0, 10.0, 11.0, 11.0] * 20  # median 10, MAD 1, scale 1.4826; also with a few more
UP = 10.0 + 1.4826 * 1.49  # z = 1.49: each one adds 0.99 at k = 0.5


def _small(**fields):
    keys = {"k": 0.5, "h": 4.0, "window": 100, "min_": 8, "freeze": 8}
    return Cusum("loss", **{**keys, **fields})


def _warm(read, **fields):
    watch = _small(**fields).start()
    read(watch, QUIET)
    watch.rewind(99)  # the sums begin at zero
    return watch


def test_what_no_single_sample_shows_adds_up(read):
    """One a step: beyond 4 at the fifth, never above 8, and back by half a scale a step."""
    watch = _warm(read)

    assert read(watch, [UP] * 4, first=100) == "oooo"
    assert watch.numbers()["sum"] == pytest.approx(3.96)
    assert read(watch, [UP] * 3, first=104) == "BBB"
    assert watch.numbers()["since"] == 100
    assert watch.numbers()["direction"] == "high"


def test_a_drift_that_lasts_becomes_the_baseline_and_says_so(read):
    """The eighth sample in breach is noted; the next ones are judged by the new level."""
    watch = _warm(read)
    read(watch, [UP] * 4, first=100)

    codes = [watch.feed(UP, step) for step in range(104, 112)]
    note = watch.note()

    assert codes == [BREACH] * 7 + [BREACH | NOTE_MESSAGE]
    assert note.kind == "rebaseline"
    assert note.details["median"] == UP
    assert note.details["steps"] == [104, 111]
    assert note.details["before"]["median"] == 10.0
    assert watch.numbers()["sum"] > 4.0  # what it was judged by
    assert watch.feed(UP, 112) == OK
    assert watch.numbers()["sum"] == 0.0


def test_a_constant_series_does_not_page_on_rounding(read):
    """The scale is a thousandth of the level at least."""
    watch = _small(side="both").start()

    assert "B" not in read(watch, [2.0 + 1e-12 * (i % 7) for i in range(400)])
    assert "B" not in read(_small(side="both").start(), [0.0] * 100)
