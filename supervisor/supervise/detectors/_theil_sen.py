"""The Theil-Sen line: a slope that is robust to a quarter of outliers, with its confidence.

Used on block means: the noise of single steps is autocorrelated, which makes the interval of a
per-step fit meaningless. Source: Sen, 1968 (JASA 63:1379-1389), with the ranks as in Gilbert, 1987,
section 16.5.
"""

from __future__ import annotations

import math

HUGE = 1e150  # larger samples are not fitted: their squares would overflow


def mean(values: list[float]) -> float:
    """Return the mean; divided before it is summed, exactly rounded, whatever the order."""
    count = len(values)
    return math.fsum([value / count for value in values])


def slopes(positions: list[float], values: list[float]) -> list[float]:
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
