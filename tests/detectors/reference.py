"""What the slow and obvious detectors of `test_reference*` are made of.

Series in which gaps, steps that come twice or go back, NaN, infinities and absent samples are
everywhere, and the way from what each sample is by itself to the readings of a detector.
"""

from __future__ import annotations

import math

from hypothesis import strategies as st

from supervise.core.model.decisions import BREACH, OK, UNKNOWN
from supervise.core.model.interfaces import NOTE

usual = st.sampled_from([1.0, 2.0, 2.0, 3.0, 2.5, 1.5, 2.25, 8.0, 0.0, -1.0])
smooth = st.floats(0.5, 4.0, allow_nan=False)
broken = st.sampled_from([None, math.nan, math.inf, -math.inf])
samples = st.one_of(usual, smooth, smooth, smooth, st.sampled_from([30.0, 0.01]), broken)
jumps = st.sampled_from([1] * 12 + [2, 6, 0, -4])


def series(sample, least=0, most=120):
    def stepped(pairs):
        events, step = [], 0
        for jump, value in pairs:
            step = max(0, step + jump)
            events.append((step, value))
        return events

    return st.lists(st.tuples(jumps, sample), min_size=least, max_size=most).map(stepped)


def in_order(events):
    """Return the events with True where the step is newer than all steps before it."""
    newest, found = -1, []
    for step, value in events:
        found.append((step > newest, step, value))
        newest = max(newest, step)
    return found


def is_known(value):
    return value is not None and math.isfinite(value)


def readings(judged, need, of):
    """From (raw, held) of every known sample, None for the others, to readings."""
    codes, firing, counted = [], False, []
    for item in judged:
        if item is None:
            codes.append(UNKNOWN)
            continue
        raw, held = item
        counted.append(raw)
        if sum(counted[-of:]) >= need:
            firing = True
        elif not held:
            firing = False
        codes.append(BREACH if firing else OK)
    return codes


def run(detector, events):
    watch = detector.start()
    codes, raws, notes = [], [], []
    for index, (step, value) in enumerate(events):
        code = watch.feed(value, step)
        codes.append(code & ~NOTE)
        raws.append(watch.raw)
        if code & NOTE:
            notes.append(index)
    return codes, raws, notes


def raw_readings(judged):
    return [UNKNOWN if item is None else BREACH if item[0] else OK for item in judged]
