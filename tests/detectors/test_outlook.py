"""What a window promises about its median and MAD before the samples come, against what comes."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.detection.feeder import STRETCH
from supervise.detectors._baseline import Baseline
from supervise.detectors._outlook import medians, reach


@pytest.mark.parametrize("size", [8, 9, 33, 64, 96, 128, 301])
@given(seed=st.integers(0, 2**32), factor=st.sampled_from([1.0, 3.0, 12.0]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_samples_break_the_promise(size, seed, factor, data):
    """The worst that can come: all in one place, or around the middle of any neighbours."""
    chance = random.Random(seed)
    count = data.draw(st.integers(1, size // 4))
    base = Baseline(size, size)
    shape = chance.choice([lambda: chance.gauss(0, 1), lambda: chance.choice([0.0, 1.0, 1.5])])
    window = [shape() for _ in range(size + chance.randrange(size))]
    for step, value in enumerate(window):
        base.accept(step, value)
    staying = base.staying(count)
    assert staying == sorted(window[count - size :])
    least, most = medians(staying, size, count)
    high = reach(staying, size, (least, most), factor, True)
    low = reach(staying, size, (least, most), factor, False)
    near = size // 2 - count
    for _ in range(12):
        at = chance.randrange(len(staying) - near + 1)
        middle = 0.5 * (staying[at] + staying[at + near - 1])
        place = chance.choice([middle, middle, least, most, -1e3, 1e3])
        seen = list(window)
        for _ in range(count):
            seen.append(place)
            now = seen[-size:]
            median = statistics.median(now)
            mad = statistics.median([abs(x - median) for x in now])
            assert least <= median <= most
            assert median + factor * mad >= high - 1e-9
            assert median - factor * mad <= low + 1e-9


def test_the_promise_is_worth_something():
    """For a usual window it lies beyond all usual samples, else nobody is ever left alone."""
    chance = random.Random(4)
    base = Baseline(128, 64)
    for step in range(300):
        base.accept(step, chance.gauss(0.0, 1.0))

    staying = base.staying(STRETCH)
    middle = medians(staying, 128, STRETCH)
    assert reach(staying, 128, middle, 7 * 1.4826, True) > 2.5
    assert Baseline(1024, 64).staying(STRETCH) is None


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_many_samples_at_once_are_one_after_the_other(seed):
    """When the oldest are dropped, before the window is full, and with flagged samples about."""
    chance = random.Random(seed)
    size = chance.choice([4, 5, 8])
    one, many, step = Baseline(size, size), Baseline(size, size), 0
    for _ in range(40):
        values = [chance.choice([0.0, -0.0, 1.0, chance.random()]) for _ in range(9)]
        values = values[: chance.randrange(1, 10)]
        steps = list(range(step, step + len(values)))
        step += len(values)
        many.accept_all(steps, values)
        for at, value in zip(steps, values, strict=True):
            one.accept(at, value)
        if chance.random() < 0.1 and not one.flag(step, 5.0) | many.flag(step, 5.0):
            step += 1
        if chance.random() < 0.1:
            back = max(-1, step - chance.randrange(4))
            one.rewind(back)
            many.rewind(back)
        if chance.random() < 0.5:
            assert repr(many.ordered) == repr(one.ordered)
            assert many.steps() == one.steps()
