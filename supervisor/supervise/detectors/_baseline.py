"""Comparison of a sample with its past: a window of accepted samples, a line, a reference curve.

The window is sorted, without the spike it judges, and can be rewound.

A spike inside the window would raise its own threshold, so a flagged sample stays out. But not for
ever: when `freeze` of the newest two windows of samples were flagged, the newest `freeze` samples,
flagged or not, become the window. For a step to a new level these are the flagged ones. When only
the spread grew they are a mixture; a count of flagged samples in a row would never be reached then.

Rewind: two windows are kept, so that `rewind` over at most `size` accepted samples restores exactly
the window of that time; further back it is shorter. A replaced baseline is kept for as long.

The Theil-Sen slope is robust to a quarter of outliers. It is used on block means: the noise of
single steps is autocorrelated, which makes the interval of a per-step fit meaningless. Source: Sen,
1968 (JASA 63:1379-1389), with the ranks as in Gilbert, 1987, section 16.5.

A reference curve has knots `[x, level, spread]`, with straight lines between them. They are part of
the policy, so its digest covers them and a run can be replayed without the files they came from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from itertools import pairwise
from typing import Any

from ..core.model.decisions import UNKNOWN
from ..core.model.interfaces import REBASELINE, Note, Reading
from ..core.model.payload import Json, Payload
from ..core.model.values import Unit
from ._watch import LEAST, NEVER, Debounced, explain_lacks

KEPT = 2  # windows that `rewind` can restore
SLACK = 2  # further windows before the oldest samples are dropped in one go
NORMAL = 1.4826  # MAD of a normal sample times this is its standard deviation


class FlaggedSamples:
    """The recently flagged samples, and the newest samples since the first of them.

    `flags` has one bit per sample, newest lowest. While it is 0, unflagged samples need no `add`.
    """

    __slots__ = ("flags", "most", "newest", "span", "unit")

    def __init__(self, span: int, limit: int, unit: Unit = "rows") -> None:
        self.span = span
        self.most = limit
        self.unit = unit
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.flags = 0
        self.newest: list[tuple[int, float]] = []

    def add_and_check_limit(self, step: int, value: float, flagged: bool) -> bool:
        """Add a sample. True when `most` of the newest `span` were flagged."""
        self.flags = (self.flags << 1 | flagged) & ((1 << self.span) - 1)
        if not self.flags:
            self.newest = []
            return False
        self.newest.append((step, value))
        if len(self.newest) > 2 * self.most:
            del self.newest[: self.most]
        sample_count = self._samples()
        span = max(self.span * sample_count // self.most, 2 * sample_count)
        return (self.flags & ((1 << span) - 1)).bit_count() >= sample_count

    def _samples(self) -> int:
        """Return `most` in samples: at their spacing, if it is in steps."""
        if self.unit == "rows" or len(self.newest) < 2:
            return self.most
        span = self.newest[-1][0] - self.newest[0][0]
        return max(math.ceil(self.most * (len(self.newest) - 1) / span), min(self.most, LEAST))

    def drain(self) -> list[tuple[int, float]]:
        """Return the newest `most` samples, and forget everything."""
        drained = self.newest[-self._samples() :]
        self.clear()
        return drained


class Baseline:
    """The newest `size` accepted samples; or those of the newest `size` steps, and LEAST anyway."""

    __slots__ = (
        *("_by_steps", "_freeze", "_full", "_ordered", "_replaced", "_size", "_steps", "_unit"),
        "_values",
    )

    def __init__(self, size: int, freeze: int, unit: Unit = "rows") -> None:
        self._size, self._full = size, (KEPT + SLACK) * size
        self._unit, self._by_steps = unit, unit == "steps"
        self._freeze = FlaggedSamples(2 * size, freeze, unit)
        self._replaced: list[tuple[int, list[float], list[int]]] = []
        self._clear()

    def _clear(self) -> None:
        self._ordered: list[float] | None = []  # None: not sorted yet
        self._values: list[float] = []
        self._steps: list[int] = []

    @property
    def ordered(self) -> list[float]:
        """The values, ascending."""
        if self._ordered is None:
            self._ordered = sorted(self.newest)
        return self._ordered

    def middle(self) -> float | None:
        """Return the median, None without a value."""
        ordered = self._ordered or self.ordered
        half = len(ordered) >> 1
        if len(ordered) & 1:
            return ordered[half]
        return 0.5 * ordered[half - 1] + 0.5 * ordered[half] if half else None

    def middle_over_steps(self) -> float | None:
        """Return the median over the steps, each sample for those to the nearest other one.

        Where samples became rarer, those of a short time at first are not the usual level. Not the
        steps since the one before: those between may have been flagged.
        """
        first_index, count = self._first_index(), len(self._steps)
        # In each step there is one, as mostly: nothing to weigh. This runs for every frame.
        if not count or self._steps[-1] - self._steps[first_index] < count - first_index:
            return self.middle()
        steps, values = self._steps[first_index:], self._values[first_index:]
        gaps = [later - step for step, later in pairwise(steps)]
        if min(gaps) == max(gaps):
            return self.middle()
        spans = [*map(min, [gaps[0], *gaps], [*gaps, gaps[-1]])]
        half, passed = sum(spans) / 2, 0
        ordered = sorted(zip(values, spans, strict=True))
        for n, (value, span) in enumerate(ordered):
            passed += span
            if passed == half:
                return 0.5 * value + 0.5 * ordered[n + 1][0]
            if passed > half:
                return value
        return ordered[-1][0]

    @property
    def newest(self) -> list[float]:
        """The values, oldest first."""
        return self._values[self._first_index() :]

    def _first_index(self) -> int:
        """Return the place of the window's first sample."""
        count = len(self._steps)
        if self._unit == "rows":
            return max(0, count - self._size)
        first_index = bisect_left(self._steps, self._steps[-1] - self._size + 1) if count else 0
        return max(0, min(first_index, count - min(self._size, LEAST)))

    @property
    def was_replaced(self) -> bool:
        """Whether flagged samples became the window, up to where `rewind` goes back."""
        return bool(self._replaced)

    def covers(self) -> float:
        """Return how many steps the window covers, if each sample stands for its spacing."""
        steps, first_index = self._steps, self._first_index()
        count = len(steps) - first_index
        return (steps[-1] - steps[first_index]) * count / (count - 1) if count > 1 else 0.0

    def accept(self, step: int, value: float) -> None:
        """Add a sample; the oldest one leaves."""
        ordered, values = self._ordered, self._values
        count = len(values)
        first_index = self._first_index() if self._by_steps else 0
        if ordered is not None:
            if not self._by_steps and count >= (size := self._size):
                del ordered[bisect_left(ordered, values[-size])]
            insort(ordered, value)
        values.append(value)
        self._steps.append(step)
        if ordered is not None and self._by_steps:
            for outdated in values[first_index : self._first_index()]:
                del ordered[bisect_left(ordered, outdated)]
        if count + 1 >= self._full:
            self._drop()
        if self._freeze.flags:
            self._freeze.add_and_check_limit(step, value, False)

    def _drop(self) -> None:
        """Drop what is too old for any rewind."""
        del self._values[: -KEPT * self._size], self._steps[: -KEPT * self._size]

    def add_flagged(self, step: int, value: float) -> bool:
        """Keep a sample out. True when the limit of flagged samples is reached: `refit` is due."""
        return self._freeze.add_and_check_limit(step, value, True)

    def refit(self) -> None:
        """Make the newest samples, flagged or not, the window."""
        newest = self._freeze.drain()
        self._replaced.append((newest[-1][0], self._values, self._steps))
        del self._replaced[: -(self._size // self._freeze.most + 1)]
        self._clear()
        for step, value in newest:
            self.accept(step, value)

    def refit_note(self, metric: str, level: float, reading_before: Reading) -> Note:
        """Return the note of a `refit`. `level`: of the new window."""
        count = len(self.ordered)
        text = f"{metric}: {count} samples were flagged; "
        text += f"the new baseline is the level of the newest {count}, {level:.6g}"
        details: dict[str, Json] = {"metric": metric, "median": level, "samples": count}
        details |= {"steps": list(self.steps() or ()), "before": reading_before}
        return Note(REBASELINE, text, Payload(details))

    def steps(self) -> tuple[int, int] | None:
        """Return the first and last step in the window, None when it is empty."""
        window = self._steps[self._first_index() :]
        return (window[0], window[-1]) if window else None

    def rewind(self, step: int) -> None:
        """Drop the samples after `step`, and forget which ones were flagged."""
        self._freeze.clear()
        while self._replaced and self._replaced[-1][0] > step:
            _, values, steps = self._replaced.pop()
            self._values, self._steps = values, steps
        self._drop()
        while self._steps and self._steps[-1] > step:
            del self._values[-1], self._steps[-1]
        self._ordered = None


def median_of_sorted(ordered: list[float]) -> float:
    """Return the median of ascending values: the mean of the middle two when their number is even.

    Halved before they are added, so that two huge values cannot overflow.
    """
    half = len(ordered) >> 1
    if len(ordered) & 1:
        return ordered[half]
    return 0.5 * ordered[half - 1] + 0.5 * ordered[half]


class BaselineWatch(Debounced):
    """A watch that compares samples with a baseline, in natural logs under `transform: log`.

    scale = max(1.4826 * MAD, rel_floor * |median|, abs_floor); in logs rel_floor is a floor itself.
    """

    pending_step = NEVER  # step of a sample that is to enter the window

    def __init__(self, spec: Any) -> None:
        """spec: a detector with the keys `transform`, `window`, `min`, `freeze` and the floors."""
        self.spec = spec
        self.log = spec.transform == "log"
        self.min_ = spec.min_
        self.unit: Unit = getattr(spec, "unit", "rows")
        self.least = spec.min_ if self.unit == "rows" else min(spec.min_, LEAST)
        super().__init__(spec.for_, spec.m_of_n, self.unit)

    def reset(self) -> None:
        super().reset()
        self.base = Baseline(self.spec.window, self.spec.freeze, self.unit)

    def forget_last(self) -> None:
        super().forget_last()
        self.numbers_before_refit: Reading = {}  # of the sample that replaced the baseline

    def scale_of(self, middle: float) -> float:
        """Return the scale of the window around its median."""
        spec = self.spec
        floor = spec.rel_floor if self.log else spec.rel_floor * abs(middle)
        mad = median_of_sorted(sorted([abs(value - middle) for value in self.base.ordered]))
        return float(max(NORMAL * mad, floor, spec.abs_floor))

    def refit(self) -> float:
        """Replace the baseline, leave a note about it, and return the new median."""
        self.numbers_before_refit = self.numbers()
        self.base.refit()
        middle = median_of_sorted(self.base.ordered)
        level = math.exp(middle) if self.log else middle
        reading_before = self.numbers_before_refit
        self.pending_note = self.base.refit_note(self.spec.metric, level, reading_before)
        return middle

    def drop_after(self, step: int) -> None:
        self.base.rewind(step)

    def lacks(self, spacing: int) -> str:
        if self.base.was_replaced:
            return ""
        metric, count = self.spec.metric, len(self.base.ordered)
        if count < self.least:  # and one more to be judged
            count += self.pending_step != NEVER
            return explain_lacks(count, self.least + 1, f"samples of {metric}")
        return explain_lacks(self.base.covers(), self.min_, f"steps of {metric}") * self.by_steps

    def baseline_numbers(self, z: float, middle: float, scale: float) -> Reading:
        """Return the numbers that all watches with a baseline have."""
        return {
            "z": z if self.raw != UNKNOWN else None,
            "median": math.exp(middle) if self.log else middle,
            "scale": scale,
            "transform": self.spec.transform,
            "samples": len(self.base.ordered),
            "steps": list(self.base.steps() or ()),
            **self.counts(),
        }


HUGE = 1e150  # larger samples are not fitted: their squares would overflow


def exact_mean(values: list[float]) -> float:
    """Return the mean; divided before it is summed, exactly rounded, whatever the order."""
    count = len(values)
    return math.fsum([value / count for value in values])


def pairwise_slopes(positions: list[float], values: list[float]) -> list[float]:
    """Return the slopes of all pairs, ascending; `positions` ascends strictly."""
    return sorted(
        [
            (values[j] - values[i]) / (positions[j] - positions[i])
            for j in range(1, len(positions))
            for i in range(j)
        ]
    )


def lower_rank(points: int, confidence: float) -> int:
    """Return the 0-based rank, among ascending slopes, of the one-sided lower bound.

    The upper bound has the same rank from the end. -1: too few points for this confidence.
    """
    pairs = points * (points - 1) // 2
    spread = math.sqrt(points * (points - 1) * (2 * points + 5) / 18.0)
    return math.floor((pairs - normal_quantile(confidence) * spread) / 2.0) - 1


def normal_quantile(p: float) -> float:
    """Return z with P(Z <= z) = p, by bisection: called once per detector."""
    low, high = -9.0, 9.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        if 0.5 * (1.0 + math.erf(middle / math.sqrt(2.0))) < p:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


Knots = tuple[tuple[float, float, float], ...]

BACK = 256  # samples that `rewind` can drop at least, beyond the window itself
MOST = 512  # knots; a policy stays readable


class Curve:
    """Immutable: copies of a watch share it."""

    __slots__ = ("_lines", "_xs")

    def __init__(self, knots: Knots) -> None:
        self._xs = [knot[0] for knot in knots]
        # From each knot on: where, level, spread, and how much these change per x.
        self._lines = [
            (
                x,
                level,
                spread,
                (ahead[1] - level) / (ahead[0] - x),
                (ahead[2] - spread) / (ahead[0] - x),
            )
            for (x, level, spread), ahead in pairwise(knots)
        ]

    def level_and_spread(self, x: float) -> tuple[float, float] | None:
        """Return level and spread at `x`, None outside of the knots."""
        xs = self._xs
        if not xs[0] <= x <= xs[-1]:
            return None
        begin, level, spread, slope, widening = self._lines[bisect_right(xs, x, 1, len(xs) - 1) - 1]
        ahead = x - begin
        return level + slope * ahead, spread + widening * ahead


def check_knots(
    knots: Knots, description: str, *, positive: bool, upper: float = math.inf
) -> list[tuple[str, str]]:
    """Return what is wrong with knots.

    Args:
        description: name of the first number of a knot. positive: levels must be above zero.
        upper: the largest first number there may be.
    """
    if not 2 <= len(knots) <= MOST:
        return [
            ("knots", f"must be 2 to {MOST} of [{description}, level, spread], not {len(knots)}")
        ]
    for i, (x, level, spread) in enumerate(knots):
        here = f"knot {i + 1}"
        if not all(math.isfinite(number) for number in (x, level, spread)):
            return [("knots", f"{here}: must be finite numbers, not {[x, level, spread]}")]
        if not 0.0 <= x <= upper:
            limit_text = "" if upper == math.inf else f" and at most {upper:g}"
            return [("knots", f"{here}: {description} must be at least 0{limit_text}, not {x:g}")]
        if i and x <= knots[i - 1][0]:
            return [
                ("knots", f"{here}: {description} {x:g} does not come after {knots[i - 1][0]:g}")
            ]
        if spread < 0.0:
            return [("knots", f"{here}: the spread must be zero or more, not {spread:g}")]
        if positive and level <= 0.0:
            return [("knots", f"{here}: the level must be above zero, not {level:g}")]
    return []


def cut_lists_after(step: int, steps: list[int], *columns: list[float]) -> None:
    """Drop the entries after `step` from parallel lists."""
    count = bisect_left(steps, step + 1)
    del steps[count:]
    for column in columns:
        del column[count:]


def trim_window(window: int, steps: list[int], *columns: list[float]) -> None:
    """Drop what neither the window needs, nor a rewind over 256 samples or one window."""
    keep = window + max(window, BACK)
    if len(steps) > 2 * keep:
        del steps[:-keep]
        for column in columns:
            del column[:-keep]
