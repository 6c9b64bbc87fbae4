"""Every detector against a slow and obvious one that looks at the whole history again.

The references are written from the catalog pages, not from the code, and keep no state between
steps but the list of what came. `REFERENCES` has one row per kind: which detectors, which series,
and the slow function. The series are full of gaps, steps that come twice or go back, NaN,
infinities and absent samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from supervise.core.model import BREACH, HAS_NOTE, OK, UNKNOWN, Detector
from supervise.detectors import (
    Band,
    Collapse,
    Cusum,
    Equal,
    Join,
    Nonfinite,
    Paired,
    Rate,
    Ratio,
    RobustZ,
    Sequence,
    Threshold,
    Trend,
)

pytestmark = pytest.mark.slow

# ── series ────────────────────────────────────────────────────────────────────────────────────────

one_of = st.sampled_from
usual = one_of([1.0, 2.0, 2.0, 3.0, 2.5, 1.5, 2.25, 8.0, 0.0, -1.0])
smooth = st.floats(0.5, 4.0, allow_nan=False)
broken = one_of([None, math.nan, math.inf, -math.inf])
samples = st.one_of(usual, smooth, smooth, smooth, one_of([30.0, 0.01]), broken)
calm = st.one_of(smooth, smooth, smooth, smooth, broken)
few = one_of([1.0, 1.0, 1.25, 1.5, 2.0, None, None, math.nan])
keys = one_of([7.0, 7.0, 7.0, 8.0, None, math.nan])
events_of_rate = one_of([0.0] * 6 + [1.0] * 3 + [None, math.nan])
codes = one_of([OK] * 5 + [UNKNOWN] + [BREACH] * 3)
quotas = one_of([(1, 1), (2, 2), (3, 3), (2, 3), (2, 4), (3, 5)])
sides = one_of(["high", "low", "both"])
transforms = one_of(["none", "log"])
BLOCKS = 16  # of a trend
ANY_ORDER = [1] * 12 + [2, 6, 0, -4]
ASCENDING = [1] * 8 + [2, 4]


def series(sample, least=0, most=120, jumps=ANY_ORDER):
    def stepped(pairs):
        events, step = [], 0
        for jump, value in pairs:
            step = max(0, step + jump)
            events.append((step, value))
        return events

    return st.lists(st.tuples(one_of(jumps), sample), min_size=least, max_size=most).map(stepped)


def in_order(events):
    """Return the events, with True where the step is newer than all steps before it."""
    newest, found = -1, []
    for step, value in events:
        found.append((step > newest, step, value))
        newest = max(newest, step)
    return found


def is_known(value):
    return value is not None and math.isfinite(value)


def debounced(judged, quota=(1, 1)):
    """From (raw, held) of every known sample, None for the others, to readings and raw codes."""
    need, of = quota
    readings, firing, counted = [], False, []
    for item in judged:
        if item is None:
            readings.append(UNKNOWN)
            continue
        raw, held = item
        counted.append(raw)
        if sum(counted[-of:]) >= need:
            firing = True
        elif not held:
            firing = False
        readings.append(BREACH if firing else OK)
    raws = [UNKNOWN if item is None else BREACH if item[0] else OK for item in judged]
    return readings, raws


def run(detector, events):
    watch = detector.start()
    readings, raws, notes = [], [], []
    for index, (step, value) in enumerate(events):
        code = watch.feed(value, step)
        readings.append(code & ~HAS_NOTE)
        raws.append(watch.raw)
        if code & HAS_NOTE:
            notes.append(index)
    return readings, raws, notes


class Window:
    """The accepted samples; `freeze` of the newest two windows flagged: the newest replace them."""

    def __init__(self, size, freeze):
        self.size, self.freeze = size, freeze
        self.accepted, self.since, self.replaced_at = [], [], []

    def add(self, x, flagged, index):
        self.since.append((x, flagged))
        if not flagged:
            self.accepted.append(x)
        elif sum(flag for _, flag in self.since[-2 * self.size :]) >= self.freeze:
            self.accepted = [y for y, _ in self.since[-self.freeze :]]
            self.since = []
            self.replaced_at.append(index)
            return True
        return False


def scaled(spec, window):
    """Return median and scale."""
    middle = statistics.median(window)
    mad = statistics.median([abs(y - middle) for y in window])
    floor = spec.rel_floor if spec.transform == "log" else spec.rel_floor * abs(middle)
    return middle, max(1.4826 * mad, floor, spec.abs_floor)


def compared(spec, taken, value):
    """Return the number that is compared, None where there is none."""
    if not (taken and is_known(value)):
        return None
    if spec.transform == "none":
        return value
    return math.log(value) if value > 0 else None


def on_side(side, x):
    return {"high": x, "low": -x, "both": abs(x)}[side]


# ── the slow detectors ────────────────────────────────────────────────────────────────────────────


def nonfinite(spec, events):
    """Without `m_of_n` it looks at every sample, also at one whose step came before."""
    judged, present_at = [], -1000
    for taken, step, (*row, other) in in_order(events):
        if other is not None and (taken or not spec.m_of_n):
            present_at = step
        present = [value for value in row if value is not None]
        bad = any(not math.isfinite(value) for value in present)
        if spec.m_of_n and not taken:
            judged.append(None)
        elif other is not None or (spec.startup and step < events[0][0] + spec.startup):
            judged.append((False, False))
        else:
            judged.append((bad and step - present_at > 32, False) if present else None)
    return debounced(judged, spec.m_of_n or (1, 1))


def threshold(spec, events):
    name, bound = spec.bound
    release = bound if spec.clear is None else spec.clear
    beyond = {
        "gt": lambda x, b: x > b,
        "gte": lambda x, b: x >= b,
        "lt": lambda x, b: x < b,
        "lte": lambda x, b: x <= b,
    }[name]
    judged = [
        (beyond(value, bound), beyond(value, release)) if taken and is_known(value) else None
        for taken, _, value in in_order(events)
    ]
    return debounced(judged, spec.m_of_n)


def robust_z(spec, events):
    window, judged = Window(spec.window, spec.freeze), []
    for index, (taken, _, value) in enumerate(in_order(events)):
        x = compared(spec, taken, value)
        baseline = window.accepted[-spec.window :]
        if x is None or len(baseline) < spec.min_:
            judged.append(None)
            if x is not None:
                window.add(x, False, index)
            continue
        middle, scale = scaled(spec, baseline)
        distance = on_side(spec.side, x - middle)
        raw = distance > spec.gt * scale
        if spec.rel_jitter:
            changes = [abs(b - a) for a, b in pairwise(baseline)]
            level = 1.0 if spec.transform == "log" else abs(middle)
            usual = 1.4826 * statistics.median(changes) / math.sqrt(2)
            assume(abs(usual - spec.rel_jitter * level) > 1e-9)
            raw = raw and usual < spec.rel_jitter * level
        judged.append((raw, distance > (spec.clear or spec.gt) * scale))
        window.add(x, raw, index)
    return *debounced(judged, spec.m_of_n), window.replaced_at


def highest_sum(history, k, ceiling):
    total = 0.0
    for z, independent in history:
        total = min(ceiling, max(0.0, total + (z - k) / independent))
    return total


def per_independent(baseline, middle, scale):
    """Samples per independent one, of an autoregression; 1 where it may be chance."""
    off = [max(-3 * scale, min(3 * scale, x - middle)) for x in baseline]
    together = math.fsum(a * b for a, b in pairwise(off))
    r = together / (math.fsum(a * a for a in off) or 1.0)
    assume(abs(r - 0.3) > 1e-9)
    r = min(r, 0.98) if r > 0.3 else 0.0
    return (1 + r) / (1 - r)


def cusum(spec, events):
    window, history, judged = Window(spec.window, spec.freeze), [], []
    fit, accepted, independent, up, down = None, 0, 1.0, 0.0, 0.0
    release = spec.h if spec.clear is None else spec.clear
    for index, (taken, _, value) in enumerate(in_order(events)):
        x = compared(spec, taken, value)
        baseline = window.accepted[-spec.window :]
        if x is None or len(baseline) < spec.min_:
            judged.append(None)
            if x is not None:
                window.add(x, False, index)
            continue
        if fit is None or accepted >= max(1, spec.window // 8):
            fit, accepted = scaled(spec, baseline), 0
            if up == down == 0.0:
                independent = per_independent(baseline, *fit)
        history.append((max(-spec.most, min(spec.most, (x - fit[0]) / fit[1])), independent))
        up, down = (
            highest_sum([(sign * z, n) for z, n in history], spec.k, 2 * spec.h) if of else 0.0
            for sign, of in ((1, spec.side != "low"), (-1, spec.side != "high"))
        )
        total = {"high": up, "low": down, "both": max(up, down)}[spec.side]
        assume(abs(total - spec.h) > 1e-9 and abs(total - release) > 1e-9)
        raw = total > spec.h
        judged.append((raw, total > release))
        accepted += not raw
        if window.add(x, raw, index):
            history, accepted, fit = [], 0, scaled(spec, window.accepted)
            independent, up, down = per_independent(window.accepted, *fit), 0.0, 0.0
    return *debounced(judged, spec.m_of_n), window.replaced_at


def average(values, span):
    """The bias-corrected exponential average, as a weighted sum over everything."""
    weights = [(1 - 2 / (span + 1)) ** age for age in range(len(values))]
    pairs = zip(weights, reversed(values), strict=True)
    return math.fsum(w * x for w, x in pairs) / math.fsum(weights)


def ratio(spec, events):
    window, everything, judged = Window(spec.slow or spec.ref, spec.freeze), [], []
    upper = spec.gt is not None
    bound = spec.gt if upper else spec.lt
    release = bound if spec.clear is None else spec.clear
    for index, (taken, _, value) in enumerate(in_order(events)):
        if not (taken and is_known(value) and value >= 0):
            judged.append(None)
            continue
        everything.append(value)
        if spec.slow is not None:
            reference = average([*window.accepted, value], spec.slow)
        else:
            reference = statistics.median(window.accepted[-spec.ref :] or [value])
        raw = False
        if len(everything) > spec.min_ and reference > 0:
            now = average(everything, spec.fast) / reference
            assume(abs(now - bound) > 1e-9 and abs(now - release) > 1e-9)
            raw = now > bound if upper else now < bound
            judged.append((raw, now > release if upper else now < release))
        else:
            judged.append(None)
        window.add(value, raw, index)
    return *debounced(judged), window.replaced_at


def trend(spec, events):
    """Blocks cut from the list of known samples; the bound by rank from the sorted slopes."""
    size, upper = spec.window // BLOCKS, spec.slope_per_1k_gt is not None
    z = statistics.NormalDist().inv_cdf(spec.confidence)
    spread = math.sqrt(BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18)
    rank = math.floor((BLOCKS * (BLOCKS - 1) // 2 - z * spread) / 2)  # one-based
    known, expected = [], []
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
        bound = 1000 * slopes[rank - 1 if upper else -rank]
        limit = spec.slope_per_1k_gt if upper else spec.slope_per_1k_lt
        assume(abs(bound - limit) > 1e-9)
        expected.append(BREACH if (bound > limit if upper else bound < limit) else OK)
    return (expected,)


def rate(spec, events):
    """What is not known is tried both ways: all of it events, none of it events."""
    seen, expected, firing = {}, [], False
    for taken, step, value in in_order(events):
        if not taken:
            expected.append(UNKNOWN)
            continue
        seen[step] = value
        last = [seen.get(s) for s in range(max(min(seen), step - spec.window + 1), step + 1)]
        unknown = sum(not is_known(v) for v in last)
        came = sum(v == 1 for v in last)
        bound = spec.clear if firing and spec.clear is not None else spec.count_gte
        code = BREACH if came >= bound else UNKNOWN if came + unknown >= bound else OK
        if not is_known(value):
            code = UNKNOWN
        elif code != UNKNOWN:
            firing = code == BREACH
        expected.append(code)
    return (expected,)


def equal(spec, events):
    """Against the list of all known samples; all numbers here but one share are exact in binary."""
    known, judged = [], []
    for taken, _, (value, other) in in_order(events):
        if not (taken and is_known(value)):
            judged.append(None)
            continue
        found = {"first": known[:1], "previous": known[-1:]}.get(spec.to, [spec.to])
        found = found if spec.to is not None else [other]
        known.append(value)
        if not found or not is_known(found[0]):
            judged.append(None)
            continue
        away, room = value - found[0], max(spec.tolerance * abs(found[0]), spec.abs_tolerance)
        fine = {
            "constant": abs(away) <= room,
            "nondecreasing": away >= -room,
            "increasing": away > -room,
            "changing": abs(away) > room,
        }[spec.law]
        judged.append((not fine, False))
    return debounced(judged, spec.m_of_n)


def paired(spec, events):
    """Against the list of the evaluations since the key last changed."""
    now, own, counted, standing, at, expected = None, [], [], UNKNOWN, -1, []
    need, of = spec.m_of_n
    for taken, step, (value, name) in in_order(events):
        if not taken:
            expected.append(UNKNOWN)
            continue
        if spec.key and is_known(name) and name != now:
            now, own, counted, standing = name, [], [], UNKNOWN
        if value is None:
            if spec.stands is not None and step - at > spec.stands:
                standing = UNKNOWN
            expected.append(standing)
            continue
        at, standing = step, UNKNOWN
        if is_known(value) and (not spec.key or now is not None):
            if len(own) > spec.settle:
                rise = value - own[-1]
                up = spec.gt is not None or spec.rel_gt is not None
                up &= rise > (spec.gt or -9) and rise / own[-1] > (spec.rel_gt or -9)
                counted.append(up or rise < (spec.lt or -9))
                standing = BREACH if sum(counted[-of:]) >= need else OK
            own.append(value)
        expected.append(standing)
    return (expected,)


def on_line(knots, x):
    """Return level and spread between the two knots around x."""
    for left, right in pairwise(knots):
        if left[0] <= x <= right[0]:
            share = (x - left[0]) / (right[0] - left[0])
            return [a + share * (b - a) for a, b in zip(left[1:], right[1:], strict=True)]
    return None


def band(spec, events):
    """The mean of the distances to lines between knots, over the floor of the spread."""
    log = spec.transform == "log"
    straight = [(x, math.log(a) if log else a, b) for x, a, b in spec.knots]
    release = spec.width if spec.clear is None else spec.clear
    away, judged = [], []
    for taken, step, value in in_order(events):
        here, x = on_line(straight, step), compared(spec, taken, value)
        if here is not None and x is not None:
            away.append(x - here[0])
        if here is None or x is None or len(away) < spec.smooth:
            judged.append(None)
            continue
        floor = spec.rel_floor * (1 if log else abs(here[0]))
        z = statistics.fmean(away[-spec.smooth :]) / max(here[1], floor, spec.abs_floor)
        z = on_side(spec.side, z)
        assume(abs(z - spec.width) > 1e-9 and abs(z - release) > 1e-9)
        judged.append((z > spec.width, z > release))
    return debounced(judged, spec.m_of_n)


def collapse(spec, events):
    """Scale, residual and how long it lasted, from the whole list each time."""
    first, last = spec.align
    known, expected, firing, above = [], [], False, None
    for taken, step, value in in_order(events):
        x = (step + 1) / spec.total_steps
        here = on_line(spec.knots, x)
        code = UNKNOWN
        if taken and here and is_known(value):
            known.append((x, value, here[0]))
            parts = {}
            for at, loss, shape in known:
                if first <= at <= last:
                    part = min(31, int(32 * (at - first) / (last - first)))
                    parts.setdefault(part, []).append(loss / shape)
            if x > last and len(parts) >= 8 and len(known) >= spec.smooth:
                scale = statistics.median([statistics.fmean(part) for part in parts.values()])
                newest = [loss / scale - shape for _, loss, shape in known[-spec.smooth :]]
                rest = statistics.fmean(newest)
                bound = max(spec.width * here[1], spec.margin)
                assume(abs(rest - bound) > 1e-9 and abs(rest - spec.clear * bound) > 1e-9)
                if rest > bound:
                    above = step if above is None else above
                    firing = firing or step - above >= spec.lasting * spec.total_steps
                else:
                    above = None
                    firing = firing and rest > spec.clear * bound
                code = BREACH if firing else OK
        expected.append(code)
    return (expected,)


def join(spec, events):
    """Per name the best of the last steps, then all or any of them."""
    expected = []
    for count, (step, _) in enumerate(events, 1):
        recent = [row for at, row in events[:count] if at >= step - spec.within]
        best = [max(row[name] for row in recent) for name in range(3)]
        expected.append(min(best) if spec.all else max(best))
    return (expected,)


def sequence(spec, events):
    """Every path through the history is tried: certain ones, then possible ones."""
    expected, low = [], 0
    for last in range(len(events)):
        if latest_match(events, last, low, spec, {BREACH}, {UNKNOWN, BREACH}):
            expected.append(BREACH)
            low = last + 1
        else:
            possible = latest_match(events, last, low, spec, {UNKNOWN, BREACH}, {BREACH})
            expected.append(UNKNOWN if possible else OK)
    return (expected,)


def latest_match(rows, last, low, spec, counts, stops):
    """Whether a match ends at row `last`; `counts`, `stops`: codes that count as a breach."""
    stages = range(len(spec.steps))
    rows_of = [[i for i in range(low, last + 1) if rows[i][1][j] in counts] for j in stages]
    rows_of[-1] = [i for i in rows_of[-1] if i == last]
    for path in product(*rows_of):
        if any(b < a or (b == a and not spec.same_step) for a, b in pairwise(path)):
            continue
        if rows[last][0] - rows[path[0]][0] > spec.within:
            continue
        if not spec.until or not any(rows[i][1][-1] in stops for i in range(path[0] + 1, last + 1)):
            return True
    return False


# ── one row per kind ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Reference:
    """Slow function: (detector, events) -> readings, and where it tells: raw codes, notes."""

    detectors: st.SearchStrategy[Detector]
    events: st.SearchStrategy[list[tuple[int, Any]]]
    slow: Callable[..., tuple[list[int], ...]]


def built(kind, *positional, **fields):
    made = {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in fields.items()}
    return st.builds(kind, *map(st.just, positional), **made)


def sized(kind, sizes, **fields):
    """Build a kind with `window` and `min` drawn together."""
    return one_of(sizes).flatmap(
        lambda size: built(
            kind, "a", window=size[0], min_=size[1], freeze=st.integers(1, 4), **fields
        )
    )


def bounded(kind, *positional, choices, **fields):
    """Build a kind with some fields drawn together."""
    return one_of(choices).flatmap(lambda choice: built(kind, *positional, **choice, **fields))


ABOVE = [{name: 2.0, "clear": clear} for name in ("gt", "gte") for clear in (None, 1.5, 1.0)]
BELOW = [{name: 2.0, "clear": clear} for name in ("lt", "lte") for clear in (None, 2.5, 3.0)]
LAWS = [{"to": to} for to in (1.5, "first", "previous")] + [{"with_": "b"}]
LAWS += [
    {"to": to, "law": law}
    for to, law in product(("first", "previous"), ("nondecreasing", "increasing", "changing"))
    if (to, law) != ("first", "changing")
]
SLACK = one_of([0.0, 0.25])
RISES = [{"gt": 0.2}, {"gt": 0.2, "rel_gt": 0.3}, {"rel_gt": 0.15}, {"lt": -0.6, "gt": 0.7}]
knots = st.tuples(
    st.integers(0, 20), st.lists(st.tuples(smooth, smooth), min_size=2, max_size=6)
).map(lambda made: tuple((float(made[0] + 17 * i), a, b / 4) for i, (a, b) in enumerate(made[1])))
SHARED_CURVE = ((0.0, 2.0, 0.1), (0.3, 1.4, 0.05), (0.9, 1.0, 0.02))

REFERENCES = {
    "nonfinite": Reference(
        built(
            Nonfinite,
            ("a", "b"),
            m_of_n=one_of([None, (2, 4)]),
            startup=one_of([0, 3]),
            without=("c",),
        ),
        series(st.tuples(samples, samples, one_of([None] * 9 + [1.0])), 0, 80),
        nonfinite,
    ),
    "threshold": Reference(
        bounded(Threshold, "a", choices=ABOVE + BELOW, m_of_n=quotas), series(samples), threshold
    ),
    "robust_z": Reference(
        sized(
            RobustZ,
            [(4, 2), (7, 3), (10, 10), (13, 5)],
            gt=one_of([1.0, 2.0, 5.0]),
            clear=one_of([None, 0.5]),
            side=sides,
            transform=transforms,
            m_of_n=quotas,
            abs_floor=0.01,
            rel_jitter=one_of([None, 0.31]),
        ),
        series(samples, 20, 150),
        robust_z,
    ),
    "cusum": Reference(
        sized(
            Cusum,
            [(4, 2), (7, 3), (10, 10), (24, 5)],
            k=0.317,
            h=1.713,
            clear=one_of([None, 0.613]),
            side=sides,
            transform=transforms,
            m_of_n=quotas,
            abs_floor=0.01,
        ),
        series(samples, 20, 150),
        cusum,
    ),
    "ratio": Reference(
        bounded(
            Ratio,
            "a",
            choices=[
                {**reference, **bound}
                for reference in ({"slow": 20}, {"ref": 9})
                for bound in ({"gt": 1.737}, {"gt": 1.737, "clear": 1.213}, {"lt": 0.613})
            ],
            fast=one_of([1, 3]),
            freeze=st.integers(1, 6),
            min_=st.integers(1, 5),
        ),
        series(samples, 10, 100),
        ratio,
    ),
    "trend": Reference(
        bounded(
            Trend,
            "a",
            choices=[{"slope_per_1k_gt": 11.3}, {"slope_per_1k_lt": -11.3}],
            window=2 * BLOCKS,
            confidence=0.9,
        ),
        st.tuples(series(calm, 40, 160), one_of([0.0, 0.03, -0.03])).map(
            lambda made: [(s, v + made[1] * s if is_known(v) else v) for s, v in made[0]]
        ),
        trend,
    ),
    "rate": Reference(
        bounded(
            Rate,
            "a",
            choices=[
                {"window": window, "count_gte": min(need, window), "clear": clear}
                for window in (1, 4, 9)
                for need, clear in ((1, None), (3, None), (3, 1), (4, 2))
                if clear is None or clear < min(need, window)
            ],
        ),
        series(events_of_rate, 0, 100),
        rate,
    ),
    "equal": Reference(
        bounded(Equal, "a", choices=LAWS, tolerance=SLACK, abs_tolerance=SLACK, m_of_n=quotas),
        series(st.tuples(few, few), 0, 60),
        equal,
    ),
    "paired": Reference(
        bounded(
            Paired,
            "a",
            choices=RISES,
            key=one_of([None, "k"]),
            settle=st.integers(0, 2),
            stands=one_of([None, 1, 4]),
            m_of_n=one_of([(1, 1), (2, 2), (1, 2)]),
        ),
        series(st.tuples(few, keys), 0, 80),
        paired,
    ),
    "band": Reference(
        built(
            Band,
            "a",
            knots=knots,
            width=0.913,
            clear=one_of([None, 0.313]),
            side=sides,
            transform=transforms,
            smooth=one_of([1, 2, 7]),
            m_of_n=quotas,
            rel_floor=0.2,
        ),
        series(samples, 10, 120),
        band,
    ),
    "collapse": Reference(
        built(
            Collapse,
            "a",
            knots=SHARED_CURVE,
            total_steps=117,
            width=1.5,
            margin=0.0617,
            lasting=one_of([0.0, 0.02, 0.05]),
            smooth=one_of([1, 5]),
            align=one_of([(0.1, 0.4), (0.05, 0.6)]),
            clear=one_of([1.0, 0.377]),
        ),
        series(calm, 60, 140),
        collapse,
    ),
    "join": Reference(
        bounded(
            Join, choices=[{"all": tuple("abc")}, {"any": tuple("abc")}], within=st.integers(0, 5)
        ),
        series(st.tuples(codes, codes, codes), 0, 40, ASCENDING),
        join,
    ),
    **{
        f"sequence of {len(stages)}{' until' if until else ''}": Reference(
            built(
                Sequence,
                tuple(stages),
                within=st.integers(2, 6),
                until=until,
                same_step=st.booleans(),
            ),
            series(st.tuples(*[codes] * (len(stages) + bool(until))), 0, 14, ASCENDING),
            sequence,
        )
        for stages, until in product(("ab", "abc"), (None, "u"))
    },
}


@pytest.mark.parametrize("kind", REFERENCES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_it_agrees_with_its_reference(kind, data):
    reference = REFERENCES[kind]
    detector = data.draw(reference.detectors)
    events = data.draw(reference.events)
    expected = reference.slow(detector, events)

    assert detector.find_errors() == []
    assert run(detector, events)[: len(expected)] == expected
