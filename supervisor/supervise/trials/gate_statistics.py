"""Statistics of the gate: Student quantiles, alpha spending, block means, differences of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import mul
from statistics import NormalDist, fmean, variance

from .arms import Arm

WINDOW = 5.0  # Sokal's c: the sum of autocorrelations ends at so many times its own value
ROUNDING = 1e-20  # of the squares: what is left of a line or a constant
BISECTIONS = 80  # of an interval below 1e9: more than a float64 can tell apart
BLOCK = 25  # steps, the least; the blocks are longer where the series remembers longer
MEMORIES = 5.0  # a block is at least so many autocorrelation times long
BLOCKS = 6  # the least that a variance is estimated from
REPLICATES = 2  # degrees of freedom, the least that seeds and A/A pairs must give
AGREEING = 0.99  # share of the steps whose batches must be the same, to count as paired


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
    return [now - previous for previous, now in zip([0.0, *spent], spent, strict=False)]


def autocorrelation_time(series: Sequence[float]) -> float:
    """Return the integrated autocorrelation time in samples: 1 for white noise, never less.

    1 + 2 sum(rho_k), up to the first lag beyond `WINDOW` times the sum so far (A. Sokal, Monte
    Carlo Methods in Statistical Mechanics, 1997, section 3). `WINDOW` keeps the noise of high lags
    out. It is that of the residuals of a fitted line: a difference that shrinks steadily is no
    memory, and would leave too few blocks to establish it.
    """
    residuals = _without_line(series)
    variance = sum(map(mul, residuals, residuals))
    if variance <= ROUNDING * sum(map(mul, series, series)):
        return 1.0
    tau = 1.0
    for lag in range(1, len(residuals) // 2):
        tau += 2.0 * sum(map(mul, residuals, residuals[lag:])) / variance
        if lag >= WINDOW * tau:
            break
    return max(1.0, tau)


def _without_line(series: Sequence[float]) -> list[float]:
    """Return the residuals of the least-squares line."""
    count = len(series)
    if count < 2:
        return [0.0] * count
    middle, centre = fmean(series), (count - 1) / 2.0
    positions = [n - centre for n in range(count)]
    slope = sum(map(mul, positions, series)) / sum(map(mul, positions, positions))
    return [value - middle - slope * x for value, x in zip(series, positions, strict=True)]


def block_means(series: Sequence[float], length: int) -> list[float]:
    """Return the means of the newest whole blocks; the first samples that fill none are left out.

    Means of blocks longer than the memory of a series are nearly independent (G. S. Fishman,
    Discrete-Event Simulation, 2001, batch means); single steps are not, and a test that takes them
    so has several times its nominal rate of false alarms.
    """
    count = len(series) // length
    skipped = len(series) - count * length
    return [
        fmean(series[offset : offset + length]) for offset in range(skipped, len(series), length)
    ]


def successive_variance(series: Sequence[float]) -> float:
    """Return the variance of a series around its own trend; 0 for fewer than two values.

    Half the mean square of successive differences (J. von Neumann, Annals of Mathematical
    Statistics 12, 1941): a falling loss does not count as noise.
    """
    steps = [b - a for a, b in pairwise(series)]
    return sum(map(mul, steps, steps)) / (2.0 * len(steps)) if steps else 0.0


@dataclass(frozen=True, slots=True)
class Differences:
    """Candidate minus baseline, step by step.

    Attributes:
        steps: of the differences, ascending.
        values: in the unit of the metric; all finite.
        paired: the batches of both arms agree on (nearly) all steps.
        compared: share of the steps on which both arms have a fingerprint.
        excess: by how much the variance of a block mean must grow: 1 where paired, more where the
            noise of the arms happens to cancel without a reason.
        missing: share of the planned steps without a finite value in both arms.
    """

    steps: Sequence[int]
    values: Sequence[float]
    paired: bool
    compared: float
    excess: float
    missing: float


@dataclass(frozen=True, slots=True)
class Effect:
    """An estimate over all pairs.

    Attributes:
        mean: of the differences, in the unit of the metric; above 0 the candidate is worse.
        low, high: the interval, each end at the one-sided `level`.
        blocks: how many blocks per pair; length: their length in steps, the longest.
        tau: integrated autocorrelation time in steps, the longest.
        freedom: degrees of freedom of the interval that counts.
        basis: "blocks" within the runs, "seeds" (and A/A pairs), "steps" where a run has too few
            blocks, or "insufficient": then the ends are infinite.
    """

    mean: float
    low: float
    high: float
    level: float
    blocks: int
    length: int
    tau: float
    freedom: int
    basis: str


def arm_differences(
    baseline: Arm, candidate: Arm, metric: str, start: int, end: int
) -> Differences:
    """Return the differences of two arms on the steps from `start` up to `end` (excluded).

    Steps are aligned by number, which removes the trend that both share. Where the batches differ,
    the arms count as independent: see `Differences.excess`.
    """
    a = baseline.series(metric, start, end)
    b = candidate.series(metric, start, end)
    steps = [s for s in a if s in b and math.isfinite(a[s]) and math.isfinite(b[s])]
    values = [b[s] - a[s] for s in steps]
    same_batch = [
        baseline.fingerprints[s] == candidate.fingerprints[s]
        for s in steps
        if baseline.fingerprints.get(s) and candidate.fingerprints.get(s)
    ]
    compared = len(same_batch) / len(steps) if steps else 0.0
    paired = (
        bool(same_batch) and compared >= AGREEING and sum(same_batch) >= AGREEING * len(same_batch)
    )
    excess = 1.0
    if not paired and steps:
        length = block_length(values)
        alone = sum(
            successive_variance(block_means([arm[s] for s in steps], length)) for arm in (a, b)
        )
        together = successive_variance(block_means(values, length))
        excess = max(1.0, alone / together) if together > 0.0 else 1.0
    missing = 1.0 - len(steps) / max(1, end - start)
    return Differences(steps, values, paired, compared, excess, missing)


def block_length(values: Sequence[float]) -> int:
    """Return the length of a block in steps: longer than the memory of the series."""
    return max(BLOCK, math.ceil(MEMORIES * autocorrelation_time(values)))


def estimate_difference(
    pairs: Sequence[Differences], level: float, calibration: Sequence[Differences] = ()
) -> Effect:
    """Estimate the mean difference with an interval.

    Within a run, the noise is that of block means. Where seeds or A/A pairs give at least
    `REPLICATES` degrees of freedom, they count, too, and the wider interval is used: two runs of
    the same program drift apart, which no block of one run can show. A/A pairs have the mean zero,
    so each gives one degree of freedom to the pooled variance.

    With too few blocks and no seeds, the steps count as so many independent ones as they have
    autocorrelation times. That may establish a large regression, and is too rough for a PASS.

    Args:
        pairs: one per seed, none of them empty.
        level: one-sided, of each end of the interval.
        calibration: A/A pairs on the same steps; those paired otherwise than `pairs` are left out.
    """
    means = [fmean(pair.values) for pair in pairs]
    mean = fmean(means)
    lengths = [block_length(pair.values) for pair in pairs]
    blocks = [block_means(pair.values, length) for pair, length in zip(pairs, lengths, strict=True)]
    count = min(map(len, blocks))
    intervals: list[tuple[float, int, str]] = []  # half of the interval, freedom, basis
    if count >= BLOCKS:
        freedom = sum(len(block) - 1 for block in blocks)
        squares = sum(
            pair.excess * variance(means) / len(means)
            for pair, means in zip(pairs, blocks, strict=True)
        )
        half = student_quantile(1.0 - level, freedom) * math.sqrt(squares) / len(pairs)
        intervals.append((half, freedom, "blocks"))
    paired = all(pair.paired for pair in pairs)
    zeros = [fmean(p.values) for p in calibration if p.values and p.paired == paired]
    freedom = len(means) - 1 + len(zeros)
    if freedom >= REPLICATES:
        squares = sum((deviation_of_mean - mean) ** 2 for deviation_of_mean in means) + sum(
            zero * zero for zero in zeros
        )
        deviation = math.sqrt(squares / freedom / len(means))
        intervals.append((student_quantile(1.0 - level, freedom) * deviation, freedom, "seeds"))
    taus = [autocorrelation_time(pair.values) for pair in pairs]
    sizes = [len(pair.values) / tau for pair, tau in zip(pairs, taus, strict=True)]
    if not intervals and min(sizes) >= BLOCKS:
        freedom = sum(int(size) - 1 for size in sizes)
        squares = sum(
            pair.excess * variance(pair.values) / size
            for pair, size in zip(pairs, sizes, strict=True)
        )
        half = student_quantile(1.0 - level, freedom) * math.sqrt(squares) / len(pairs)
        intervals.append((half, freedom, "steps"))
    half, freedom, basis = max(intervals, default=(math.inf, 0, "insufficient"))
    tau = max(taus)
    length = max(lengths)
    return Effect(mean, mean - half, mean + half, level, count, length, tau, freedom, basis)
