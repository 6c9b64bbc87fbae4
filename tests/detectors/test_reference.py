"""Every detector of metrics against a slow and obvious one, which looks at the whole history again.

The references keep no state between steps but the list of what came; they are written from the
catalog page, not from the code.
"""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.threshold import Threshold
from supervise.detectors.trend import BLOCKS, Trend

from .reference import (
    broken,
    in_order,
    is_known,
    raw_readings,
    readings,
    run,
    samples,
    series,
    smooth,
)

pytestmark = pytest.mark.slow


@given(st.lists(st.tuples(st.one_of(samples), samples), max_size=40))
def test_nonfinite(rows):
    """Any bad value, else any value, else unknown."""
    watch = Nonfinite(("a", "b")).start()
    for step, row in enumerate(rows):
        present = [value for value in row if value is not None]
        bad = [value for value in present if not math.isfinite(value)]

        assert watch.feed(row, step) == (BREACH if bad else OK if present else UNKNOWN)


@pytest.mark.parametrize("bound", ["gt", "gte", "lt", "lte"])
@given(
    events=series(samples),
    clear=st.sampled_from([None, 0.5, 1.0]),
    quota=st.sampled_from([(1, 1), (3, 3), (2, 3), (3, 5)]),
)
@settings(deadline=None)
def test_threshold(bound, events, clear, quota):
    """Bounds as Python compares them."""
    beyond = {
        "gt": lambda x, b: x > b,
        "gte": lambda x, b: x >= b,
        "lt": lambda x, b: x < b,
        "lte": lambda x, b: x <= b,
    }[bound]
    release = 2.0 if clear is None else 2.0 - clear if bound.startswith("g") else 2.0 + clear
    judged = [
        (beyond(value, 2.0), beyond(value, release)) if taken and is_known(value) else None
        for taken, _, value in in_order(events)
    ]
    need, of = quota
    fields = {"for_": need} if need == of else {"m_of_n": quota}

    codes, raws, _ = run(
        Threshold("a", **{bound: 2.0}, clear=None if clear is None else release, **fields), events
    )

    assert codes == readings(judged, need, of)
    assert raws == raw_readings(judged)


def _robust_z(spec, events):
    """Judge each sample by the median and the MAD of the accepted ones before it."""
    window, since, notes, judged = [], [], [], []
    for index, (taken, _, value) in enumerate(in_order(events)):
        log = spec.transform == "log"
        if not (taken and is_known(value) and (value > 0 or not log)):
            judged.append(None)
            continue
        x = math.log(value) if log else value
        baseline = window[-spec.window :]
        if len(baseline) < spec.min_:
            judged.append(None)
            window.append(x)
            since.append((x, False))
            continue
        middle = statistics.median(baseline)
        mad = statistics.median([abs(y - middle) for y in baseline])
        floor = spec.rel_floor if log else spec.rel_floor * abs(middle)
        scale = max(1.4826 * mad, floor, spec.abs_floor)
        distance = {"high": x - middle, "low": middle - x, "both": abs(x - middle)}[spec.side]
        raw = distance > spec.gt * scale
        judged.append((raw, distance > (spec.clear or spec.gt) * scale))
        since.append((x, raw))
        if not raw:
            window.append(x)
        elif sum(flag for _, flag in since[-2 * spec.window :]) >= spec.freeze:
            window = [y for y, _ in since[-spec.freeze :]]
            since = []
            notes.append(index)
    return judged, notes


@pytest.mark.parametrize("transform", ["none", "log"])
@given(
    events=series(samples, 20, 150),
    side=st.sampled_from(["high", "low", "both"]),
    gt=st.sampled_from([1.0, 2.0, 5.0]),
    clear=st.sampled_from([None, 0.5]),
    size=st.sampled_from([(4, 2), (7, 3), (10, 10), (13, 5)]),
    freeze=st.integers(1, 4),
    quota=st.sampled_from([(1, 1), (2, 2), (2, 4)]),
)
@settings(max_examples=120, deadline=None)
def test_robust_z(transform, events, side, gt, clear, size, freeze, quota):
    """Same readings, same raw codes, same rebaselines: the screen never answers for the formula."""
    window, least = size
    spec = RobustZ(
        "a",
        gt=gt,
        clear=clear,
        side=side,
        transform=transform,
        window=window,
        min_=least,
        m_of_n=quota,
        freeze=freeze,
        abs_floor=0.01,
    )
    judged, rebaselined = _robust_z(spec, events)

    codes, raws, notes = run(spec, events)

    assert codes == readings(judged, *quota)
    assert raws == raw_readings(judged)
    assert notes == rebaselined


def _average(values, span):
    """The bias-corrected exponential average, as a weighted sum over everything."""
    weights = [(1 - 2 / (span + 1)) ** age for age in range(len(values))]
    pairs = zip(weights, reversed(values), strict=True)
    return math.fsum(w * x for w, x in pairs) / math.fsum(weights)


def _ratio(spec, events):
    everything, accepted, since, notes, judged = [], [], [], [], []
    bound = spec.gt if spec.gt is not None else spec.lt
    release = bound if spec.clear is None else spec.clear
    for index, (taken, _, value) in enumerate(in_order(events)):
        if not (taken and is_known(value) and value >= 0):
            judged.append(None)
            continue
        everything.append(value)
        if spec.slow is not None:
            reference = _average([*accepted, value], spec.slow)
        else:
            reference = statistics.median(accepted[-spec.ref :] or [value])
        raw = False
        if len(everything) > spec.min_ and reference > 0:
            ratio = _average(everything, spec.fast) / reference
            assume(abs(ratio - bound) > 1e-9 and abs(ratio - release) > 1e-9)
            raw = ratio > bound if spec.gt is not None else ratio < bound
            judged.append((raw, ratio > release if spec.gt is not None else ratio < release))
        else:
            judged.append(None)
        since.append((value, raw))
        if not raw:
            accepted.append(value)
        elif sum(flag for _, flag in since[-2 * (spec.slow or spec.ref) :]) >= spec.freeze:
            accepted = [x for x, _ in since[-spec.freeze :]]
            since = []
            notes.append(index)
    return judged, notes


@pytest.mark.parametrize("reference", [{"slow": 20}, {"ref": 9}])
@given(
    events=series(samples, 10, 100),
    fast=st.sampled_from([1, 3]),
    bounds=st.sampled_from([{"gt": 1.737}, {"gt": 1.737, "clear": 1.213}, {"lt": 0.613}]),
    freeze=st.integers(1, 6),
    least=st.integers(1, 5),
)
@settings(max_examples=120, deadline=None)
def test_ratio(reference, events, fast, bounds, freeze, least):
    """Weighted sums over the whole history instead of running averages."""
    spec = Ratio("a", fast=fast, **reference, **bounds, freeze=freeze, min_=least)
    judged, rebaselined = _ratio(spec, events)

    codes, raws, notes = run(spec, events)

    assert codes == readings(judged, 1, 1)
    assert raws == raw_readings(judged)
    assert notes == rebaselined


@given(
    pairs=series(st.one_of(smooth, smooth, smooth, broken), 40, 160),
    slope=st.sampled_from([0.0, 30.0, -30.0]),
    limit=st.sampled_from([{"slope_per_1k_gt": 11.3}, {"slope_per_1k_lt": -11.3}]),
)
@settings(max_examples=60, deadline=None)
def test_trend(pairs, slope, limit):
    """Blocks cut from the list of known samples; the bound by rank from the sorted slopes."""
    events = [(s, v if not is_known(v) else v + slope * s / 1000) for s, v in pairs]
    size = 2
    z = statistics.NormalDist().inv_cdf(0.9)
    pairs_of_blocks = BLOCKS * (BLOCKS - 1) // 2
    spread = math.sqrt(BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18)
    rank = math.floor((pairs_of_blocks - z * spread) / 2)  # one-based
    known, expected, bound = [], [], math.nan
    for taken, step, value in in_order(events):
        if not (taken and is_known(value)):
            expected.append(UNKNOWN)
            continue
        known.append((step, value))
        blocks = [known[i : i + size] for i in range(0, len(known) // size * size, size)][-BLOCKS:]
        if len(blocks) < BLOCKS:
            expected.append(UNKNOWN)
            continue
        points = [tuple(map(statistics.fmean, zip(*block, strict=True))) for block in blocks]
        slopes = sorted(
            (b[1] - a[1]) / (b[0] - a[0]) for a in points for b in points if a[0] < b[0]
        )
        upper = "slope_per_1k_gt" in limit
        bound = 1000 * slopes[rank - 1 if upper else -rank]
        assume(abs(abs(bound) - 11.3) > 1e-9)
        expected.append(BREACH if (bound > 11.3 if upper else bound < -11.3) else OK)
    watch = Trend("a", window=size * BLOCKS, confidence=0.9, **limit).start()

    assert [watch.feed(value, step) for step, value in events] == expected
    assert watch.numbers()["bound"] == pytest.approx(bound, nan_ok=True)
