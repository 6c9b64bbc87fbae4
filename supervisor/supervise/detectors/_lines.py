"""Straight lines: the robust slope of samples, and the reference curve of a policy.

The Theil-Sen slope is robust to a quarter of outliers. It is used on block means: the noise of
single steps is autocorrelated, which makes the interval of a per-step fit meaningless. Source: Sen,
1968 (JASA 63:1379-1389), with the ranks as in Gilbert, 1987, section 16.5.

A reference curve has knots `[x, level, spread]`, with straight lines between them. They are part of
the policy, so its digest covers them and a run can be replayed without the files they came from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise

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

    def at(self, x: float) -> tuple[float, float] | None:
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
