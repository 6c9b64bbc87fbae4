"""Ratio: a short average over a long one."""

import math

import pytest

from supervise.core.model.decisions import OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.ratio import Ratio


def _slow(**fields):
    return Ratio("norm", **{"fast": 1, "slow": 100, "gt": 2.0, "freeze": 4, **fields})


def test_the_averages_are_bias_corrected(read):
    """After one sample both are that sample; after 1, 3 a span of 3 gives (0.5 + 3) / 1.5."""
    watch = Ratio("norm", fast=3, slow=9, gt=2.0, min_=1).start()
    read(watch, [1.0, 3.0])

    numbers = watch.numbers()

    assert numbers["fast"] == pytest.approx(3.5 / 1.5)
    assert numbers["reference"] == pytest.approx((0.8 * 1 + 3) / 1.8)
    assert numbers["ratio"] == pytest.approx(numbers["fast"] / numbers["reference"])


def test_it_answers_long_before_the_reference_is_full(read):
    """Eight samples of a span of 100 are enough."""
    assert read(_slow().start(), [1.0] * 8 + [1.0, 5.0]) == "?" * 8 + "oB"


def test_lt_looks_downwards(read):
    """A norm that falls to a tenth."""
    watch = _slow(gt=None, lt=0.5).start()

    assert read(watch, [1.0] * 9 + [0.1, 1.0]) == "?" * 8 + "oBo"


def test_hysteresis_lasts_until_the_ratio_is_past_clear(read):
    """3 begins it, 1.8 is above 1.5, 1.2 ends it."""
    watch = _slow(clear=1.5).start()

    assert read(watch, [1.0] * 60 + [3.0, 1.8, 1.2, 1.8])[60:] == "BBoo"


def test_the_spike_does_not_raise_the_reference(read):
    """Three samples at 30 leave the slow average where it was."""
    watch = _slow().start()
    read(watch, [1.0] * 50 + [30.0] * 3)

    watch.feed(1.0, 53)

    assert watch.numbers()["reference"] == 1.0


@pytest.mark.parametrize("reference", [{"slow": 100}, {"slow": None, "ref": 20}])
def test_a_lasting_level_becomes_the_reference_and_says_so(read, reference):
    """The fourth flagged sample is noted, the fifth is OK."""
    watch = _slow(**reference).start()
    read(watch, [1.0] * 50)

    codes = [watch.feed(30.0, step) for step in range(50, 55)]
    note = watch.note()

    assert [bool(code & NOTE) for code in codes] == [False, False, False, True, False]
    assert codes[4] == OK
    assert (note["kind"], note["reference"]) == ("rebaseline", 30.0)
    assert watch.note() == {}


def test_the_median_reference_shrugs_off_old_spikes(read):
    """A quarter of the window at 1.9, which is no breach, leaves the median at 1."""
    watch = Ratio("norm", fast=1, ref=20, gt=2.0).start()

    assert read(watch, [1.0] * 15 + [1.9] * 5 + [2.1])[-1] == "B"


def test_what_has_no_ratio_is_unknown(read):
    """Absent, NaN, infinite and negative samples, and a reference of zero."""
    watch = _slow().start()
    assert read(watch, [1.0] * 9 + [None, math.nan, math.inf, -1.0, 1.0])[8:] == "o????o"

    zeros = _slow().start()
    assert read(zeros, [0.0] * 20) == "?" * 20


@pytest.mark.parametrize("step", [60, 47])
def test_rewind_goes_back_to_a_mark_not_far_before(read, step):
    """From step 99 to the mark at 47, that of 48 samples: it answers and knows no 1.9."""
    watch = _slow(freeze=64).start()
    read(watch, [1.0] * 80 + [1.9] * 20)

    watch.rewind(step)
    reading = watch.feed(1.0, step + 1)

    assert reading == OK
    assert watch.numbers()["samples"] == 48 + 1
    assert watch.numbers()["reference"] == 1.0


def test_a_step_that_is_not_newer_is_not_taken(read):
    """The averages do not move."""
    watch = _slow().start()
    read(watch, [1.0] * 20)

    assert watch.feed(50.0, 19) == UNKNOWN
    assert watch.feed(1.0, 20) == OK
    assert watch.numbers()["fast"] == 1.0


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"gt": None}, "gt"),
        ({"lt": 0.5}, "lt"),
        ({"clear": 2.5}, "clear"),
        ({"ref": 50}, "slow"),
        ({"slow": None}, "slow"),
        ({"fast": 0}, "fast"),
        ({"fast": 100}, "slow"),
        ({"min_": 0}, "min"),
        ({"freeze": 101}, "freeze"),
    ],
)
def test_what_cannot_work_is_refused(fields, key):
    """The complaint names the key."""
    assert key in [field for field, _ in _slow(**fields).check()]


def test_good_ones_pass():
    """Either reference."""
    assert Ratio("norm", slow=256, gt=2.0, clear=1.5).check() == []
    assert Ratio("norm", ref=128, lt=0.5, clear=0.7).check() == []
