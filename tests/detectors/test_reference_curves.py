"""Sums, identities and curves against slow and obvious ones, which look at everything again.

Written from the catalog pages, not from the code, in the manner of `test_reference`.
"""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.detectors.band import Band
from supervise.detectors.collapse import Collapse
from supervise.detectors.cusum import Cusum
from supervise.detectors.equal import Equal
from supervise.detectors.paired import Paired

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

few = st.sampled_from([1.0, 1.0, 1.25, 1.5, 2.0, None, None, math.nan])
keys = st.sampled_from([7.0, 7.0, 7.0, 8.0, None, math.nan])


def _sum(history, k, ceiling):
    """Return the sum of z - k since it was last zero: the largest over all places to begin."""
    total = 0.0
    for z in history:
        total = min(ceiling, max(0.0, total + z - k))
    return total


def _cusum(spec, events):
    window, since, history, notes, judged = [], [], [], [], []
    fit, accepted = None, 0
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
        if fit is None or accepted >= max(1, spec.window // 8):
            level = statistics.median(baseline)
            mad = statistics.median([abs(y - level) for y in baseline])
            floor = spec.rel_floor if log else spec.rel_floor * abs(level)
            fit, accepted = (level, max(1.4826 * mad, floor, spec.abs_floor)), 0
        z = max(-spec.most, min(spec.most, (x - fit[0]) / fit[1]))
        history.append(z)
        up = _sum(history, spec.k, 2 * spec.h)
        down = _sum([-z for z in history], spec.k, 2 * spec.h)
        total = {"high": up, "low": down, "both": max(up, down)}[spec.side]
        release = spec.h if spec.clear is None else spec.clear
        assume(abs(total - spec.h) > 1e-9 and abs(total - release) > 1e-9)
        raw = total > spec.h
        judged.append((raw, total > release))
        since.append((x, raw))
        if not raw:
            window.append(x)
            accepted += 1
        elif sum(flag for _, flag in since[-2 * spec.window :]) >= spec.freeze:
            window = [y for y, _ in since[-spec.freeze :]]
            since, history, accepted = [], [], 0
            level = statistics.median(window)
            mad = statistics.median([abs(y - level) for y in window])
            floor = spec.rel_floor if log else spec.rel_floor * abs(level)
            fit = (level, max(1.4826 * mad, floor, spec.abs_floor))
            notes.append(index)
    return judged, notes


@pytest.mark.parametrize("transform", ["none", "log"])
@given(
    events=series(samples, 20, 150),
    side=st.sampled_from(["high", "low", "both"]),
    clear=st.sampled_from([None, 0.613]),
    size=st.sampled_from([(4, 2), (7, 3), (10, 10), (24, 5)]),
    freeze=st.integers(1, 4),
    quota=st.sampled_from([(1, 1), (2, 2), (2, 4)]),
)
@settings(max_examples=80, deadline=None)
def test_cusum(transform, events, side, clear, size, freeze, quota):
    """Same readings, same raw codes, same rebaselines."""
    window, least = size
    spec = Cusum(
        "a",
        k=0.317,
        h=1.713,
        clear=clear,
        side=side,
        transform=transform,
        window=window,
        min_=least,
        m_of_n=quota,
        freeze=freeze,
        abs_floor=0.01,
    )
    judged, rebaselined = _cusum(spec, events)

    codes, raws, notes = run(spec, events)

    assert codes == readings(judged, *quota)
    assert raws == raw_readings(judged)
    assert notes == rebaselined


@pytest.mark.parametrize("to", ["first", "previous", 1.5, None])
@given(
    events=series(st.tuples(few, few), 0, 60),
    law=st.sampled_from(["constant", "nondecreasing", "increasing", "changing"]),
    slack=st.sampled_from([(0.0, 0.0), (0.25, 0.0), (0.0, 0.5), (0.1, 0.25)]),
    quota=st.sampled_from([(1, 1), (2, 2), (2, 3)]),
)
@settings(deadline=None)
def test_equal(to, events, law, slack, quota):
    """Against the list of all known samples; all numbers here are exact in binary but one share."""
    law = law if isinstance(to, str) else "constant"
    known, judged = [], []
    for taken, _, (value, other) in in_order(events):
        if not (taken and is_known(value)):
            judged.append(None)
            continue
        reference = {"first": known[:1], "previous": known[-1:]}.get(to, [to])
        reference = reference if to is not None else [other]
        known.append(value)
        if not reference or not is_known(reference[0]):
            judged.append(None)
            continue
        ref = reference[0]
        room = max(slack[0] * abs(ref), slack[1])
        fine = {
            "constant": abs(value - ref) <= room,
            "nondecreasing": value - ref >= -room,
            "increasing": value - ref > -room,
            "changing": abs(value - ref) > room,
        }[law]
        judged.append((not fine, False))
    spec = Equal(
        "a",
        to=to,
        with_=None if to is not None else "b",
        law=law,
        tolerance=slack[0],
        abs_tolerance=slack[1],
        m_of_n=quota,
    )

    codes, raws, _ = run(spec, events)

    assert codes == readings(judged, *quota)
    assert raws == raw_readings(judged)


def _line(knots, x):
    """Return level and spread between the two knots around x."""
    for left, right in itertools.pairwise(knots):
        if left[0] <= x <= right[0]:
            share = (x - left[0]) / (right[0] - left[0])
            return [a + share * (b - a) for a, b in zip(left[1:], right[1:], strict=True)]
    return None


@pytest.mark.parametrize("transform", ["none", "log"])
@given(
    events=series(samples, 10, 120),
    inner=st.lists(st.tuples(smooth, smooth), min_size=2, max_size=6),
    begin=st.integers(0, 20),
    count=st.sampled_from([1, 2, 7]),
    side=st.sampled_from(["high", "low", "both"]),
    clear=st.sampled_from([None, 0.313]),
    quota=st.sampled_from([(1, 1), (2, 2), (2, 4)]),
)
@settings(max_examples=80, deadline=None)
def test_band(transform, events, inner, begin, count, side, clear, quota):
    """The mean of the distances to lines between knots, over the floor of the spread."""
    log = transform == "log"
    knots = tuple((float(begin + 17 * i), a, b / 4) for i, (a, b) in enumerate(inner))
    spec = Band(
        "a",
        knots,
        width=0.913,
        clear=clear,
        side=side,
        transform=transform,
        smooth=count,
        m_of_n=quota,
        rel_floor=0.2,
    )
    straight = [(x, math.log(a) if log else a, b) for x, a, b in knots]
    away, judged = [], []
    for taken, step, value in in_order(events):
        here = _line(straight, step)
        if not (taken and here and is_known(value) and (value > 0 or not log)):
            judged.append(None)
            continue
        away.append((math.log(value) if log else value) - here[0])
        if len(away) < count:
            judged.append(None)
            continue
        scale = max(here[1], 0.2 if log else 0.2 * abs(here[0]), 1e-9)
        z = statistics.fmean(away[-count:]) / scale
        z = {"high": z, "low": -z, "both": abs(z)}[side]
        release = 0.913 if clear is None else clear
        assume(abs(z - 0.913) > 1e-9 and abs(z - release) > 1e-9)
        judged.append((z > 0.913, z > release))

    codes, raws, _ = run(spec, events)

    assert codes == readings(judged, *quota)
    assert raws == raw_readings(judged)


@pytest.mark.parametrize("key", [None, "k"])
@given(
    events=series(st.tuples(few, keys), 0, 80),
    bounds=st.sampled_from(
        [{"gt": 0.2}, {"gt": 0.2, "rel_gt": 0.3}, {"rel_gt": 0.15}, {"lt": -0.6, "gt": 0.7}]
    ),
    settle=st.integers(0, 2),
    stands=st.sampled_from([None, 1, 4]),
    quota=st.sampled_from([(1, 1), (2, 2), (1, 2)]),
)
@settings(max_examples=150, deadline=None)
def test_paired(key, events, bounds, settle, stands, quota):
    """Against the list of the evaluations since the key last changed."""
    now, own, counted, standing, at, expected = None, [], [], UNKNOWN, -1, []
    for taken, step, (value, name) in in_order(events):
        if not taken:
            expected.append(UNKNOWN)
            continue
        if key and is_known(name) and name != now:
            now, own, counted, standing = name, [], [], UNKNOWN
        if value is None:
            if stands is not None and step - at > stands:
                standing = UNKNOWN
            expected.append(standing)
            continue
        at, standing = step, UNKNOWN
        if is_known(value) and (not key or now is not None):
            if len(own) > settle:
                rise, share = value - own[-1], (value - own[-1]) / own[-1]
                rose = rise > bounds.get("gt", -9) and share > bounds.get("rel_gt", -9)
                up = rose and ("gt" in bounds or "rel_gt" in bounds)
                counted.append(up or rise < bounds.get("lt", -9))
                need, of = quota
                standing = BREACH if sum(counted[-of:]) >= need else OK
            own.append(value)
        expected.append(standing)
    spec = Paired("a", key=key, settle=settle, stands=stands, m_of_n=quota, **bounds)

    codes, _, _ = run(spec, events)

    assert codes == expected


@given(
    events=series(st.one_of(smooth, smooth, smooth, smooth, broken), 60, 140),
    align=st.sampled_from([(0.1, 0.4), (0.05, 0.6)]),
    count=st.sampled_from([1, 5]),
    lasting=st.sampled_from([0.0, 0.02, 0.05]),
    clear=st.sampled_from([1.0, 0.377]),
)
@settings(max_examples=80, deadline=None)
def test_collapse(events, align, count, lasting, clear):
    """Scale, residual and how long it lasted, from the whole list each time."""
    total, knots = 117, ((0.0, 2.0, 0.1), (0.3, 1.4, 0.05), (0.9, 1.0, 0.02))
    spec = Collapse(
        "a",
        knots,
        total,
        width=1.5,
        margin=0.0617,
        lasting=lasting,
        smooth=count,
        align=align,
        clear=clear,
    )
    known, expected, firing = [], [], False
    above = None
    for taken, step, value in in_order(events):
        x = (step + 1) / total
        here = _line(knots, x)
        if not (taken and here and is_known(value)):
            expected.append(UNKNOWN)
            continue
        known.append((x, value, here[0]))
        if x <= align[1]:
            expected.append(UNKNOWN)
            continue
        parts = {}
        for at, loss, shape in known:
            if align[0] <= at <= align[1]:
                part = min(31, int(32 * (at - align[0]) / (align[1] - align[0])))
                parts.setdefault(part, []).append(loss / shape)
        if len(parts) < 8 or len(known) < count:
            expected.append(UNKNOWN)
            continue
        scale = statistics.median([statistics.fmean(part) for part in parts.values()])
        rest = statistics.fmean([loss / scale - shape for _, loss, shape in known[-count:]])
        bound = max(1.5 * here[1], 0.0617)
        assume(abs(rest - bound) > 1e-9 and abs(rest - clear * bound) > 1e-9)
        if rest > bound:
            above = step if above is None else above
            firing = firing or step - above >= lasting * total
        else:
            above = None
            firing = firing and rest > clear * bound
        expected.append(BREACH if firing else OK)

    codes, _, _ = run(spec, events)

    assert codes == expected
