"""The Theil-Sen line: a slope that is robust to a quarter of outliers, with its confidence.

Used on block means: the noise of single steps is autocorrelated, which makes the interval of a
per-step fit meaningless. Source: Sen, 1968 (JASA 63:1379-1389), with the ranks as in Gilbert, 1987,
section 16.5; Student's t from the normal quantile by Abramowitz and Stegun 26.7.5.
"""

from __future__ import annotations

import math

from ._baseline import median

HUGE = 1e150  # larger samples are not fitted: their squares would overflow


def mean(values: list[float]) -> float:
    """Return the mean; divided before it is summed, exactly rounded, whatever the order."""
    count = len(values)
    return math.fsum([value / count for value in values])


def slopes(at: list[float], values: list[float]) -> list[float]:
    """Return the slopes of all pairs, ascending; `at` ascends strictly."""
    return sorted(
        [(values[j] - values[i]) / (at[j] - at[i]) for j in range(1, len(at)) for i in range(j)]
    )


def line(at: list[float], values: list[float]) -> tuple[float, float]:
    """Return slope and intercept: the medians of the pairs' slopes and of what these leave."""
    slope = median(slopes(at, values))
    return slope, median(sorted([y - slope * x for x, y in zip(at, values, strict=True)]))


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


def student_quantile(p: float, freedom: int) -> float:
    """Return t with P(T <= t) = p for 0.5 < p < 1; 1 % off at 3 degrees of freedom, less above."""
    z = normal_quantile(p)
    z3, z5, z7 = z * z * z, z * z * z * z * z, z * z * z * z * z * z * z
    return (
        z
        + (z3 + z) / (4 * freedom)
        + (5 * z5 + 16 * z3 + 3 * z) / (96 * freedom * freedom)
        + (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * freedom * freedom * freedom)
    )
