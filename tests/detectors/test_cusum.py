"""Cusum: many small steps in one direction."""

import math

import pytest

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.cusum import Cusum

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


def test_it_is_unknown_until_it_has_seen_enough(read):
    """The first `min` samples say nothing, not OK."""
    reading = read(_small().start(), QUIET)

    assert reading[:8] == "?" * 8
    assert "?" not in reading[8:]


def test_what_no_single_sample_shows_adds_up(read):
    """One a step: beyond 4 at the fifth, never above 8, and back by half a scale a step."""
    watch = _warm(read)

    assert read(watch, [UP] * 4, first=100) == "oooo"
    assert watch.numbers()["sum"] == pytest.approx(3.96)
    assert read(watch, [UP] * 3, first=104) == "BBB"
    assert watch.numbers()["since"] == 100
    assert watch.numbers()["direction"] == "high"


def test_one_huge_sample_counts_for_little(read):
    """A lone spike is what other kinds are for."""
    watch = _warm(read)

    assert read(watch, [1e6, 10.0, 10.0], first=100) == "ooo"
    assert watch.numbers()["sum"] == pytest.approx(2.5 - 0.5 - 0.5 - 0.5)


def test_it_clears_when_the_sum_has_come_down(read):
    """Without `clear` as soon as it is at `h`; with it later."""
    rest = [UP] * 5 + [10.0] * 9
    at_h, at_one = _warm(read), _warm(read, clear=1.0)

    assert read(at_h, rest, first=100) == "ooooBB" + "o" * 8
    assert read(at_one, rest, first=100) == "ooooBBBBBBBBoo"


@pytest.mark.parametrize(("side", "up", "down"), [("high", "B", "o"), ("low", "o", "B")])
def test_a_side_that_does_not_count_is_not_seen(read, side, up, down):
    """`both` has a sum for each."""
    for direction, letter in ((1.0, up), (-1.0, down)):
        samples = [10.0 + direction * (UP - 10.0)] * 6

        assert read(_warm(read, side=side), samples, first=100)[-1] == letter
        both = _warm(read, side="both")
        assert read(both, samples, first=100)[-1] == "B"
        assert both.numbers()["direction"] == ("high" if direction > 0 else "low")


def test_the_sum_stops_so_that_the_end_shows(read):
    """However long it went on, back at its level it is over in so many steps."""
    watch = _warm(read, freeze=20)
    read(watch, [UP] * 19, first=100)

    assert watch.numbers()["sum"] == 8.0
    assert read(watch, [10.0] * 9, first=119)[-1] == "o"


def test_a_drift_that_lasts_becomes_the_baseline_and_says_so(read):
    """The eighth sample in breach is noted; the next ones are judged by the new level."""
    watch = _warm(read)
    read(watch, [UP] * 4, first=100)

    codes = [watch.feed(UP, step) for step in range(104, 112)]
    note = watch.note()

    assert codes == [BREACH] * 7 + [BREACH | NOTE]
    assert note["kind"] == "rebaseline"
    assert note["median"] == UP
    assert note["steps"] == [104, 111]
    assert note["before"]["median"] == 10.0
    assert watch.numbers()["sum"] > 4.0  # what it was judged by
    assert watch.feed(UP, 112) == OK
    assert watch.numbers()["sum"] == 0.0


def test_samples_in_breach_do_not_move_the_level(read):
    """They are kept out of the window."""
    watch = _warm(read)
    read(watch, [UP] * 5, first=100)
    samples = watch.numbers()["steps"]
    read(watch, [UP] * 6, first=105)

    assert watch.numbers()["steps"] == samples


def test_a_constant_series_does_not_page_on_rounding(read):
    """The scale is a thousandth of the level at least."""
    watch = _small(side="both").start()

    assert "B" not in read(watch, [2.0 + 1e-12 * (i % 7) for i in range(400)])
    assert "B" not in read(_small(side="both").start(), [0.0] * 100)


def test_log_sees_factors_and_refuses_what_has_no_log(read):
    """The same at every scale."""
    for unit in (1e-6, 1e6):
        watch = _small(transform="log").start()
        read(watch, [unit * x for x in QUIET])

        assert read(watch, [0.0, -unit, *[13 * unit] * 6], first=100)[:2] == "??"
        assert watch.feed(13 * unit, 108) & ~NOTE == BREACH
        assert watch.numbers()["median"] == pytest.approx(10 * unit)


def test_nan_and_gaps_neither_add_nor_take_off(read):
    """The sum stands still."""
    watch = _warm(read)
    read(watch, [UP] * 3, first=100)
    before = watch.numbers()["sum"]

    assert read(watch, [math.nan, math.inf, None, 1e200], first=103) == "????"
    assert watch.feed(10.0, 500) == OK
    assert watch.numbers()["sum"] == pytest.approx(before - 0.5)


def test_a_rollback_begins_the_sums_anew(read):
    """The window is as it was at that step."""
    watch = _warm(read)
    read(watch, [UP] * 6, first=100)
    watch.rewind(99)

    assert watch.raw == UNKNOWN
    assert watch.feed(10.0, 100) == OK
    assert watch.numbers()["sum"] == 0.0
    assert watch.numbers()["samples"] == 100


def test_m_of_n_counts_samples_beyond(read):
    """Three of four, and the raw code is that of the sample."""
    watch = _warm(read, m_of_n=(3, 4))

    assert read(watch, [UP] * 6, first=100) == "oooooo"
    assert watch.numbers()["breaching"] == 2
    assert watch.raw == BREACH
    assert read(watch, [UP], first=106) == "B"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"k": -0.1}, "k"),
        ({"h": 0.0}, "h"),
        ({"clear": 4.0}, "clear"),
        ({"clear": -1.0}, "clear"),
        ({"most": 0.5}, "most"),
        ({"most": math.inf}, "most"),
        ({"min_": 1}, "min"),
        ({"min_": 101}, "min"),
        ({"freeze": 101}, "freeze"),
        ({"rel_floor": -1.0}, "rel_floor"),
        ({"abs_floor": 0.0}, "abs_floor"),
        ({"for_": 0}, "for"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert [field for field, _ in _small(**fields).check()] == [key]


def test_the_defaults_pass():
    """A policy may leave out all but the metric."""
    assert Cusum("loss").check() == []
