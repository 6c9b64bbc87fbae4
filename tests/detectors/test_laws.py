"""What holds for every detector, whatever comes: copies, rewinds, resets, numbers, its page."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model import BREACH, HAS_NOTE, OK, UNKNOWN, Detector
from supervise.detectors import (
    Averaged,
    Band,
    Collapse,
    Comparable,
    Cusum,
    Descent,
    Equal,
    Harm,
    Join,
    Negligible,
    Nonfinite,
    Paired,
    Rate,
    RateGuard,
    Ratio,
    Record,
    RobustZ,
    Sequence,
    Stationary,
    Threshold,
    Trend,
)

pytestmark = pytest.mark.slow

Z = {"gt": 3.0, "clear": 1.0, "window": 12, "min_": 4, "freeze": 5}
SUM = {"k": 0.2, "h": 2.0, "clear": 0.5, "window": 12, "min_": 4, "freeze": 5}
FLAT = ((0.0, 1.0, 0.1), (30.0, 1.1, 0.2), (900.0, 1.0, 0.1))
FALLING = ((0.0, 2.0, 0.1), (0.5, 1.2, 0.1), (1.0, 1.0, 0.1))
ALL = {
    "nonfinite": Nonfinite(("a", "b")),
    "nonfinite_few": Nonfinite(("a",), m_of_n=(2, 4), startup=3, without=("b",)),
    "nonfinite_gap": Nonfinite(("a",), without=("b",), gap=8),
    "threshold": Threshold("a", gt=2.0, clear=1.0, m_of_n=(2, 4)),
    "robust_z": RobustZ("a", m_of_n=(2, 3), **Z),
    "robust_z_log": RobustZ("a", side="both", transform="log", **Z),
    "robust_z_steps": RobustZ("a", m_of_n=(2, 3), unit="steps", **Z),
    "threshold_steps": Threshold("a", gt=2.0, m_of_n=(2, 4), unit="steps"),
    "ratio_steps": Ratio("a", fast=2, ref=12, lt=0.5, min_=4, freeze=5, unit="steps"),
    "trend_steps": Trend("a", window=32, slope_per_1k_gt=1.0, unit="steps"),
    "ratio": Ratio("a", fast=2, slow=12, gt=1.5, clear=1.2, min_=4, freeze=5),
    "ratio_ref": Ratio("a", fast=2, ref=12, lt=0.5, min_=4, freeze=5),
    "ratio_ramp": Ratio("a", fast=1, ref=12, gt=1.2, min_=4, freeze=5, precedent=1.1),
    "record": Record("a", gt=1.5, ref=5, window=12, min_=4, calm=2),
    "trend": Trend("a", window=32, slope_per_1k_gt=1.0),
    "rate_guard": RateGuard(("a", "b"), settle=4, min_=3, freeze=5),
    "rate_guard_announced": RateGuard(("a",), announced=("b",), settle=4, min_=3, freeze=5),
    "rate_guard_confirmed": RateGuard(("a",), confirm="b", settle=4, min_=3, freeze=5),
    "rate": Rate("a", window=10, count_gte=3, clear=2),
    "sequence": Sequence(("a", "b", "c"), within=3, until="d"),
    "join": Join(all=("a", "b"), within=3),
    "cusum": Cusum("a", **SUM),
    "cusum_log": Cusum("a", side="both", transform="log", m_of_n=(2, 3), **SUM),
    "comparable": Comparable("a", "b", window=16, lasting=24),
    "comparable_least": Comparable("a", "b", window=16, least=0.5),
    "averaged": Averaged("a", "b", window=32, lasting=24),
    "stationary": Stationary("a", "b"),
    "negligible": Negligible("a", "b", window=16),
    "descent": Descent("a", window=32),
    "harm": Harm("a", window=32),
    "harm_suspected": Harm("a", level="suspected", margin=0.0, window=32),
    "equal": Equal("a", with_="b", tolerance=0.05, m_of_n=(2, 4)),
    "equal_first": Equal("a", to="first", abs_tolerance=0.1, for_=2),
    "equal_previous": Equal("a", to="previous", law="nondecreasing"),
    "equal_changing": Equal("a", to="previous", law="changing", for_=2),
    "equal_longest": Equal("a", to="previous", law="changing", longest=True, for_=2),
    "equal_unlike_past": Equal("a", to="previous", law="changing", unlike_past=True, for_=2),
    "band": Band("a", FLAT, width=2.0, clear=1.0, m_of_n=(2, 3)),
    "band_smooth": Band("a", FLAT, width=2.0, side="high", transform="log", smooth=10),
    "paired": Paired("a", gt=0.15, rel_gt=0.1, lt=-0.5, settle=1, stands=3, for_=2),
    "paired_key": Paired("a", key="b", gt=0.15),
    "collapse": Collapse("a", FALLING, 90, smooth=10, align=(0.1, 0.4), lasting=0.03),
}
DEPTH = 10  # samples over which every rewind is exact; the least is the window of `rate`

usual = st.sampled_from([0.0, 1.0, 1.0, 1.1, 0.9, 1.2, 0.8, 3.0, 50.0])
values = st.one_of(usual, usual, st.floats(width=64), st.none())
codes = st.sampled_from([OK, OK, UNKNOWN, BREACH])
SAMPLES = {
    "metric": values,
    "metrics": st.tuples(values, values),
    "detectors": st.tuples(codes, codes, codes, codes),
    "metric+detector": st.tuples(values, codes),
}
jumps = st.sampled_from([1, 1, 1, 1, 1, 1, 2, 5, 0, -3])


def _sample(detector: Detector) -> st.SearchStrategy:
    if isinstance(detector, Join):
        return st.tuples(codes, codes)
    return SAMPLES[detector.reads]


def _events(detector, least, most):
    """Lists of (step, sample): gaps, repeated steps and steps that go back among them."""

    def stepped(pairs):
        events, step = [], 0
        for jump, sample in pairs:
            step = max(0, step + jump)
            events.append((step, sample))
        return events

    return st.lists(st.tuples(jumps, _sample(detector)), min_size=least, max_size=most).map(stepped)


def _feed(watch, events):
    seen = []
    for step, sample in events:
        code = watch.feed(sample, step)
        seen.append((code, watch.raw, watch.note() if code & HAS_NOTE else None))
    return seen


each = pytest.mark.parametrize("name", ALL)
often = settings(max_examples=10)


@each
@given(data=st.data())
@often
def test_a_copy_goes_on_like_the_original_and_a_reset_is_a_new_start(name, data):
    """Cut anywhere: both continue alike, and what one is fed the other never sees."""
    detector = ALL[name]
    events = data.draw(_events(detector, 10, 80))
    cut = data.draw(st.integers(0, len(events)))
    whole = _feed(detector.start(), events)

    watch = detector.start()
    head = _feed(watch, events[:cut])
    twin, stray = deepcopy(watch), deepcopy(watch)
    _feed(stray, [(step + 1000, sample) for step, sample in events])
    stray.reset()
    tail = _feed(twin, events[cut:])

    assert head + tail == whole
    assert _feed(watch, events[cut:]) == tail
    assert str(watch.numbers()) == str(twin.numbers())
    assert _feed(stray, events) == whole


@each
@given(data=st.data())
@often
def test_rewind_is_never_having_seen_the_later_samples(name, data):
    """Against a watch that was fed up to the step only, and rewound to where it stands."""
    detector = ALL[name]
    before = data.draw(_events(detector, 5, 60))
    later = data.draw(st.lists(_sample(detector), max_size=DEPTH))
    after = data.draw(st.lists(_sample(detector), min_size=30, max_size=30))
    newest = max(step for step, _ in before)
    gap = data.draw(st.integers(0, 9))  # lost frames, and the step gone back to may be one of them
    step = newest + data.draw(st.integers(0, gap))

    undone, fresh = detector.start(), detector.start()
    _feed(undone, before + list(enumerate(later, newest + gap + 1)))
    _feed(fresh, before)
    undone.rewind(step)
    fresh.rewind(step)

    assert undone.raw == fresh.raw
    onwards = list(enumerate(after, step + 1))
    assert _feed(undone, onwards) == _feed(fresh, onwards)
    assert str(undone.numbers()) == str(fresh.numbers())


@each
@given(data=st.data())
@often
def test_a_step_that_is_not_newer_is_not_processed(name, data):
    detector = ALL[name]
    before = data.draw(_events(detector, 5, 60))
    watch = detector.start()
    _feed(watch, before)
    twin, newest = deepcopy(watch), max(step for step, _ in before)
    old = data.draw(st.integers(0, newest))
    code = watch.feed(data.draw(_sample(detector)), old)
    onwards = list(enumerate(data.draw(st.lists(_sample(detector), min_size=9)), newest + 1))

    if name != "nonfinite":  # to it a NaN counts whenever it comes
        assert (code, watch.raw) == (UNKNOWN, UNKNOWN)
    assert _feed(watch, onwards) == _feed(twin, onwards)


@each
@given(data=st.data())
@settings(max_examples=20)
def test_no_sample_makes_it_raise_or_answer_nonsense(name, data):
    """Any float, any order of steps: a code, a raw code, and numbers that JSON can hold."""
    detector = ALL[name]
    watch = detector.start()
    for step, sample in data.draw(_events(detector, 5, 90)):
        code = watch.feed(sample, step)

        assert code & ~HAS_NOTE in (OK, UNKNOWN, BREACH)
        assert watch.raw in (OK, UNKNOWN, BREACH)
        json.dumps(watch.numbers())
        if code & HAS_NOTE:
            note = watch.note()
            json.dumps(note.details, default=dict)
            assert note.kind in ("rebaseline", "near_miss")
            assert note.text


def test_huge_numbers_do_not_overflow():
    """The largest floats up and down: no exception, and the watch is as good as before."""
    for name, detector in ALL.items():
        # To `rate` all of these are events, `collapse` would take them for its scale, and after so
        # many zeros 1 is harm.
        if detector.reads != "metric" or name in ("rate", "collapse", "harm", "harm_suspected"):
            continue
        watch = detector.start()
        wild = [1e308, -1e308, 5e-324, 1.7e308, 0.0] * 20
        _feed(watch, list(enumerate(wild)))
        watch.numbers()
        usual = [(100 + i, 1.0 + 0.01 * (i * 7 % 5)) for i in range(99)]
        codes = [code for code, _, _ in _feed(watch, usual)]

        assert codes[-1] & ~HAS_NOTE == OK, name


def test_an_objective_is_forgotten_when_all_its_rows_are_undone_and_remembered_beyond_memory():
    fall = [(step, 8.0 - step / 50 + step % 3 / 100) for step in range(200)]
    undone = Descent("a", window=32).start()
    _feed(undone, [(5, None), *((step + 6, value) for step, value in fall[:40])])
    assert undone.raw == BREACH
    undone.rewind(5)
    assert _feed(undone, [(6, 0.0)]) == _feed(Descent("a", window=32).start(), [(6, 0.0)])

    old = Descent("a", window=32).start()
    _feed(old, fall)
    old.rewind(10)  # the states of then are gone
    assert [code for code, *_ in _feed(old, [(11, 4.0)])] == [BREACH]


def test_a_second_rewind_leaves_no_row_that_it_undoes():
    rows = [(step, 8.0 - step / 50 + step % 3 / 100) for step in range(200)]
    for first in range(199, 10, -1):
        watch = Descent("a", window=32).start()
        _feed(watch, rows)
        watch.rewind(first)
        watch.rewind(10)
        assert watch.numbers()["samples"] == 0, first
