"""Difference of the losses of candidate and baseline, with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from .arms import Arm
from .significance import (
    autocorrelation_time,
    block_means,
    student_quantile,
    successive_variance,
)

BLOCK = 25  # steps, the least; the blocks are longer where the series remembers longer
MEMORIES = 5.0  # a block is at least so many autocorrelation times long
BLOCKS = 6  # the least that a variance is estimated from
REPLICATES = 2  # degrees of freedom, the least that seeds and A/A pairs must give
AGREEING = 0.99  # share of the steps whose batches must be the same, to count as paired


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


def differences(baseline: Arm, candidate: Arm, metric: str, start: int, end: int) -> Differences:
    """Return the differences of two arms on the steps from `start` up to `end` (excluded).

    Steps are aligned by number, which removes the trend that both share. Where the batches differ,
    the arms count as independent: see `Differences.excess`.
    """
    a = baseline.series(metric, start, end)
    b = candidate.series(metric, start, end)
    steps = [s for s in a if s in b and math.isfinite(a[s]) and math.isfinite(b[s])]
    values = [b[s] - a[s] for s in steps]
    known = [
        baseline.fingerprints[s] == candidate.fingerprints[s]
        for s in steps
        if baseline.fingerprints.get(s) and candidate.fingerprints.get(s)
    ]
    compared = len(known) / len(steps) if steps else 0.0
    paired = bool(known) and compared >= AGREEING and sum(known) >= AGREEING * len(known)
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


def block_length(values: Sequence[float], least: int = BLOCK) -> int:
    """Return the length of a block in steps: longer than the memory of the series."""
    return max(least, math.ceil(MEMORIES * autocorrelation_time(values)))


def estimate(
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
    found: list[tuple[float, int, str]] = []  # half of the interval, freedom, basis
    if count >= BLOCKS:
        freedom = sum(len(one) - 1 for one in blocks)
        squares = sum(
            pair.excess * variance(one) / len(one) for pair, one in zip(pairs, blocks, strict=True)
        )
        half = student_quantile(1.0 - level, freedom) * math.sqrt(squares) / len(pairs)
        found.append((half, freedom, "blocks"))
    paired = all(pair.paired for pair in pairs)
    zeros = [fmean(one.values) for one in calibration if one.values and one.paired == paired]
    freedom = len(means) - 1 + len(zeros)
    if freedom >= REPLICATES:
        squares = sum((one - mean) ** 2 for one in means) + sum(one * one for one in zeros)
        deviation = math.sqrt(squares / freedom / len(means))
        found.append((student_quantile(1.0 - level, freedom) * deviation, freedom, "seeds"))
    taus = [autocorrelation_time(pair.values) for pair in pairs]
    sizes = [len(pair.values) / tau for pair, tau in zip(pairs, taus, strict=True)]
    if not found and min(sizes) >= BLOCKS:
        freedom = sum(int(size) - 1 for size in sizes)
        squares = sum(
            pair.excess * variance(pair.values) / size
            for pair, size in zip(pairs, sizes, strict=True)
        )
        half = student_quantile(1.0 - level, freedom) * math.sqrt(squares) / len(pairs)
        found.append((half, freedom, "steps"))
    half, freedom, basis = max(found, default=(math.inf, 0, "insufficient"))
    tau = max(taus)
    length = max(lengths)
    return Effect(mean, mean - half, mean + half, level, count, length, tau, freedom, basis)
