"""Couplings against brute force, and the level shift against numpy over the whole history."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE
from supervise.detectors.join import Join
from supervise.detectors.level_shift import BLOCKS, GUARD, LevelShift
from supervise.detectors.sequence import Sequence

pytestmark = pytest.mark.slow

codes = st.sampled_from([OK] * 5 + [UNKNOWN] + [BREACH] * 3)
jumps = st.sampled_from([1] * 8 + [2, 4])


def _best(rows, last, low, spec, counts, stops):
    """Return the latest start of a match that ends at row `last`, by trying all of them.

    rows: (step, codes) of the whole history; low: first row that may be used; counts: the codes
    that count as a breach; stops: the codes of `until` that count as one.
    """
    stages = len(spec.steps)
    rows_of = [[i for i in range(low, last + 1) if rows[i][1][j] in counts] for j in range(stages)]
    rows_of[-1] = [i for i in rows_of[-1] if i == last]
    best = None
    for path in product(*rows_of):
        if any(b < a or (b == a and not spec.same_step) for a, b in pairwise(path)):
            continue
        first = path[0]
        if rows[last][0] - rows[first][0] > spec.within:
            continue
        if spec.until and any(rows[i][1][-1] in stops for i in range(first + 1, last + 1)):
            continue
        best = first if best is None else max(best, first)
    return best


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_sequence_agrees_with_brute_force(data):
    """Every path through the history is tried: certain ones, then possible ones."""
    stages = data.draw(st.integers(2, 3))
    spec = Sequence(
        tuple("abc"[:stages]),
        within=data.draw(st.integers(0, 6)),
        until=data.draw(st.sampled_from([None, "u"])),
        same_step=data.draw(st.booleans()),
    )
    width = len(spec.detectors)
    moves = data.draw(st.lists(st.tuples(jumps, st.tuples(*[codes] * width)), max_size=14))
    watch, rows, low, step = spec.start(), [], 0, 0
    for jump, row in moves:
        step += jump
        rows.append((step, row))
        last = len(rows) - 1
        sure = _best(rows, last, low, spec, {BREACH}, {UNKNOWN, BREACH})
        possible = _best(rows, last, low, spec, {UNKNOWN, BREACH}, {BREACH})

        code = watch.feed(row, step) & ~NOTE

        if sure is not None:
            assert code == BREACH
            assert watch.numbers()["match"]["first_step"] == rows[sure][0]
            low = last + 1
        else:
            assert code == (OK if possible is None else UNKNOWN)


@pytest.mark.parametrize("every", [True, False])
@given(
    moves=st.lists(st.tuples(jumps, st.tuples(codes, codes, codes)), max_size=40),
    within=st.integers(0, 5),
)
@settings(deadline=None)
def test_join_agrees_with_a_look_at_the_whole_history(every, moves, within):
    """Per name the best of the last steps, then all or any of them."""
    watch = (
        Join(all=("a", "b", "c"), within=within) if every else Join(any=tuple("abc"), within=within)
    )
    watch = watch.start()
    rows, step = [], 0
    for jump, row in moves:
        step += jump
        rows.append((step, row))
        recent = [row for at, row in rows if at >= step - within]
        best = [max(row[name] for row in recent) for name in range(3)]

        assert watch.feed(row, step) == (min(best) if every else max(best))


def _numpy_shift(spec, steps, series, trigger, begin, end):
    """The shift and its interval, with numpy and the whole history."""

    def blocks(first, stop):
        edges = first + (stop - first) / BLOCKS * np.arange(BLOCKS + 1)
        cut = [(steps >= a) & (steps < b) for a, b in pairwise(edges)]
        cut = [part for part in cut if part.any()]
        at = np.array([np.log(steps[part] + 1.0).mean() for part in cut])
        return at, np.array([series[part].mean() for part in cut])

    def line(x, y):
        i, j = np.triu_indices(len(x), 1)
        slope = np.median((y[j] - y[i]) / (x[j] - x[i]))
        return slope, np.median(y - slope * x)

    at, means = blocks(trigger - GUARD - spec.window, trigger - GUARD)
    slope, intercept = line(at, means)
    half = len(at) // 2
    bend = line(at[half:], means[half:])[0] - line(at[:half], means[:half])[0]
    variance = ((means - intercept - slope * at) ** 2).sum() / (len(at) - 2)
    after, levels = blocks(begin, end)
    above = levels - intercept - slope * after
    ahead = after.mean() - at.mean()
    error = math.sqrt(
        above.var(ddof=0) / (len(above) - 1)
        + variance * (1 / len(at) + ahead**2 / ((at - at.mean()) ** 2).sum())
        + (bend * ahead) ** 2
    )
    student = {7: 1.8946, 8: 1.8595, 9: 1.8331}[len(above) - 1]  # 95 %, from a table
    return above.mean(), student * error


@given(
    seed=st.integers(0, 10**6),
    damage=st.sampled_from([0.0, 0.0, 0.12, 0.3, 1.0]),
    noise=st.sampled_from([0.003, 0.03, 0.2]),
    lost=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=80, deadline=None)
def test_level_shift_agrees_with_numpy(seed, damage, noise, lost):
    """The first verdict, or the second after the one extension."""
    rng = np.random.default_rng(seed)
    spec = LevelShift("a", after="b", settle=10, window=40, margin=0.1)
    trigger, total = 120, 120 + 10 + 81
    every = np.arange(total)
    full = (
        2
        + 4 * (every + 1.0) ** -0.3
        + noise * rng.standard_normal(total)
        + damage * (every >= trigger)
    )
    seen = rng.random(total) >= lost
    watch = spec.start()
    readings = {}
    for step in range(total):
        sample = float(full[step]) if seen[step] else None
        readings[step] = watch.feed((sample, BREACH if step == trigger else OK), step)
        if step == trigger + 10 + 40:
            early = watch.numbers()

    steps, series = every[seen], full[seen]
    shift, reach = _numpy_shift(spec, steps, series, trigger, 130, 170)
    assert early["shift"] == pytest.approx(shift, rel=1e-9, abs=1e-12)
    assert early["upper"] - early["shift"] == pytest.approx(reach, rel=2e-3)
    decided = _verdict(shift, reach)
    if decided == UNKNOWN:
        shift, reach = _numpy_shift(spec, steps, series, trigger, 130, 210)
        decided = _verdict(shift, reach)
    if decided is not None and seen[total - 1]:
        assert readings[total - 1] & ~NOTE == decided


def _verdict(shift, reach):
    """BREACH, OK or UNKNOWN; None when the table's rounding could decide it."""
    if min(abs(shift - reach), abs(shift - 0.1), abs(shift + reach - 0.1)) < 1e-2 * reach:
        return None
    if shift - reach > 0 and shift > 0.1:
        return BREACH
    return OK if shift + reach < 0.1 else UNKNOWN
