"""Ratio: a short average over a long one."""

import pytest

from supervise.core.model.decisions import OK
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
