"""Robust z: against its own past, which a spike does not enter."""

from supervise.core.model import BREACH, NOTE_MESSAGE, OK, UNKNOWN, Note
from supervise.detectors import RobustZ

QUIET = [9.0, 9.0, 10.0, 11.0, 11.0] * 3  # median 10, MAD 1, scale 1.4826


def _small(**fields):
    return RobustZ("loss", **{"gt": 4.0, "window": 15, "min_": 8, "freeze": 8, **fields})


def test_a_constant_series_does_not_page_on_rounding(read):
    """With MAD 0 the scale is a thousandth of the median."""
    watch = _small().start()
    read(watch, [2.0] * 15)

    assert watch.feed(2.0 + 1e-12, 15) == OK
    assert watch.feed(2.007, 16) == OK
    assert watch.feed(2.009, 17) == BREACH


def test_jitter_is_of_neighbours_so_a_trend_is_none(read):
    """One rises by 0.3 a sample, one goes from 9 to 11 and back: both have a MAD of 1 at least."""
    trend, noise = _small(rel_jitter=0.05).start(), _small(rel_jitter=0.05).start()
    read(trend, [10.0 + 0.3 * step for step in range(15)])
    read(noise, [9.0, 11.0] * 8)

    assert trend.feed(40.0, 15) == BREACH
    assert noise.feed(40.0, 16) == OK


def test_a_lasting_level_becomes_the_baseline_and_says_so(read):
    """The eighth flagged sample is noted; the next ones are judged by the new level."""
    watch = _small().start()
    read(watch, QUIET)

    codes = [watch.feed(20.0, step) for step in range(15, 23)]
    note = watch.note()

    assert codes == [BREACH] * 7 + [BREACH | NOTE_MESSAGE]
    assert note.kind == "rebaseline"
    assert note.details["median"] == 20.0
    assert note.details["steps"] == [15, 22]
    assert note.details["before"]["median"] == 10.0
    assert watch.note() == Note()
    assert watch.feed(20.0, 23) == OK


def test_a_rollback_deeper_than_the_ring_leaves_it_unknown(read):
    """It does not judge by what it no longer holds."""
    watch = _small().start()
    read(watch, QUIET * 4)

    watch.rewind(33)

    assert watch.feed(10.0, 34) == UNKNOWN


def test_a_rollback_past_a_rebaseline_brings_the_old_baseline_back(read):
    """The level that was learnt in the undone life is forgotten."""
    watch = _small().start()
    read(watch, [*QUIET, *[20.0] * 10])

    watch.rewind(14)

    assert read(watch, [10.0, 20.0], first=15) == "oB"
