"""Test that the mean of many short runs is below a target, as leaderboards of speed runs ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from .significance import student_quantile

RUNS = 3  # the least that a standard deviation is estimated from


@dataclass(frozen=True, slots=True)
class TargetEffect:
    """The outcome.

    Attributes:
        score: (target - mean) * sqrt(runs), in the unit of the values; NaN where a value is.
        needed: what the score must reach.
        reached: whether it does; never with a value that is not finite, or too few runs.
    """

    runs: int
    mean: float
    score: float
    needed: float
    reached: bool


def against_target(
    values: Sequence[float], target: float, alpha: float = 0.01, needed: float | None = None
) -> TargetEffect:
    """Judge the final losses of runs that differ in the seed alone.

    (target - mean) * sqrt(n) >= needed is a one-sided test that the mean is below the target: the
    rule of the NanoGPT speed runs, with 3.28 as target and 0.004 for a standard deviation of
    0.0013. Without `needed` the standard deviation is estimated: Student's t with n - 1 degrees of
    freedom.

    Args:
        needed: fixed before the runs are made, in the unit of the values.
    """
    count = len(values)
    mean = fmean(values) if values else math.nan
    score = (target - mean) * math.sqrt(count)
    enough = count >= (1 if needed is not None else RUNS)
    if needed is None:
        usable = enough and all(map(math.isfinite, values))
        needed = student_quantile(1.0 - alpha, count - 1) * stdev(values) if usable else math.inf
    reached = enough and math.isfinite(score) and score >= needed
    return TargetEffect(count, mean, score, needed, reached)
