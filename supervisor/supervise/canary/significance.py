"""The statistics of the gate: Student quantiles, alpha spending, autocorrelation, block means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import mul
from statistics import NormalDist, fmean

WINDOW = 5.0  # Sokal's c: the sum of autocorrelations ends at so many times its own value
ROUNDING = 1e-20  # of the squares: what is left of a line or a constant
BISECTIONS = 80  # of an interval below 1e9: more than a float64 can tell apart


def student_cdf(t: float, freedom: int) -> float:
    """Return P(T <= t) of Student's t with a whole number of degrees of freedom.

    The finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    inner = math.sin(angle) * total
    return 0.5 + 0.5 * ((angle + inner) * 2.0 / math.pi if odd else inner)


@lru_cache(maxsize=1024)
def student_quantile(p: float, freedom: int) -> float:
    """Return t with P(T <= t) = p, for 0.5 <= p < 1 and at least one degree of freedom."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p and high < 1e9:
        high *= 2.0
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return high


def spent_alpha(share: float, alpha: float) -> float:
    """Return how much of `alpha` (one-sided) may be spent once `share` of the data is there.

    The spending function of Lan and DeMets (Biometrika 70, 1983) that is close to the bounds of
    O'Brien and Fleming: almost nothing early, all of it at 1.
    """
    if share >= 1.0:
        return alpha
    normal = NormalDist()
    return 2.0 * (1.0 - normal.cdf(normal.inv_cdf(1.0 - alpha / 2.0) / math.sqrt(share)))


def look_levels(shares: Sequence[float], alpha: float) -> list[float]:
    """Return the level of each planned look; they sum to `alpha`.

    Each look gets what was spent since the one before. By the union bound the chance of any false
    alarm is at most `alpha`, whatever the correlation of the looks.
    """
    spent = [spent_alpha(share, alpha) for share in shares]
    return [now - before for before, now in zip([0.0, *spent], spent, strict=False)]


def autocorrelation_time(series: Sequence[float]) -> float:
    """Return the integrated autocorrelation time in samples: 1 for white noise, never less.

    1 + 2 sum(rho_k), up to the first lag beyond `WINDOW` times the sum so far (A. Sokal, Monte
    Carlo Methods in Statistical Mechanics, 1997, section 3). `WINDOW` keeps the noise of high lags
    out. It is that of the residuals of a fitted line: a difference that shrinks steadily is no
    memory, and would leave too few blocks to establish it.
    """
    rest = _without_line(series)
    variance = sum(map(mul, rest, rest))
    if variance <= ROUNDING * sum(map(mul, series, series)):
        return 1.0
    tau = 1.0
    for lag in range(1, len(rest) // 2):
        tau += 2.0 * sum(map(mul, rest, rest[lag:])) / variance
        if lag >= WINDOW * tau:
            break
    return max(1.0, tau)


def _without_line(series: Sequence[float]) -> list[float]:
    """Return the residuals of the least-squares line."""
    count = len(series)
    if count < 2:
        return [0.0] * count
    middle, centre = fmean(series), (count - 1) / 2.0
    at = [n - centre for n in range(count)]
    slope = sum(map(mul, at, series)) / sum(map(mul, at, at))
    return [value - middle - slope * x for value, x in zip(series, at, strict=True)]


def block_means(series: Sequence[float], length: int) -> list[float]:
    """Return the means of the newest whole blocks; the first samples that fill none are left out.

    Means of blocks longer than the memory of a series are nearly independent (G. S. Fishman,
    Discrete-Event Simulation, 2001, batch means); single steps are not, and a test that takes them
    so has several times its nominal rate of false alarms.
    """
    count = len(series) // length
    first = len(series) - count * length
    return [fmean(series[at : at + length]) for at in range(first, len(series), length)]


def successive_variance(series: Sequence[float]) -> float:
    """Return the variance of a series around its own trend; 0 for fewer than two values.

    Half the mean square of successive differences (J. von Neumann, Annals of Mathematical
    Statistics 12, 1941): a falling loss does not count as noise.
    """
    steps = [b - a for a, b in pairwise(series)]
    return sum(map(mul, steps, steps)) / (2.0 * len(steps)) if steps else 0.0
