"""Departure of a series from the band of its healthy control, and the loss of a run against it.

The control is the healthy run of the same seed: it reads the same batches, so most of the noise of
a batch is in both. The band around its loss is as wide as that of one run around its own trend
(`core.analysis.loss_band`): 6 spreads and 5 % for one loss, 4 spreads and 1 % for the median of 20.
Steps at which the control is not finite tell nothing and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..core.analysis.loss_band import (
    BAND_MADS,
    BAND_SHARE,
    STEP_MADS,
    STEP_SHARE,
    spread,
)

Series = Mapping[int, float]

TOGETHER = 20  # steps of a median
RECENT = 64  # healthy values before a fault that tell how wide a band is
LEAST = 8  # of these, to tell at all
STILL_MADS = 6.0  # of a metric that a fault should leave alone: as for one loss
# A metric that never varies has no spread; rounding on another path of the program is no move.
STILL_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class Departure:
    """The loss left its band.

    Attributes:
        step: of the first loss outside, or of the last one of a median outside.
        size: difference to the control there, in the unit of the loss; NaN: it was not finite.
    """

    step: int
    size: float


def spread_of(series: Series, onset: int) -> float:
    """Return the spread of a series around its trend before `onset`; NaN: too few values.

    By successive differences, which a trend hardly touches (von Neumann, 1941): 1.4826 x the median
    deviation of those, over the root of 2.
    """
    before = [series[step] for step in sorted(series) if step < onset]
    values = [value for value in before if math.isfinite(value)][-RECENT:]
    if len(values) < LEAST:
        return math.nan
    steps = [b - a for a, b in pairwise(values)]
    return spread(steps, median(steps)) / math.sqrt(2.0)


def departure(run: Series, control: Series, onset: int) -> Departure | None:
    """Return when a loss left the band of its control, at or after `onset`; None: it never did.

    None, too, where the control has fewer than 8 losses before the onset: it has no band.
    """
    noise = spread_of(control, onset)
    if math.isnan(noise):
        return None
    recent: list[float] = []
    for step in sorted(run):
        if step < onset or not math.isfinite(control.get(step, math.nan)):
            continue
        if not math.isfinite(run[step]):
            return Departure(step, math.nan)
        level, away = abs(control[step]), run[step] - control[step]
        recent = [*recent[1 - TOGETHER :], away]
        if abs(away) > max(STEP_MADS * noise, STEP_SHARE * level):
            return Departure(step, away)
        width = max(BAND_MADS * noise / math.sqrt(TOGETHER / 4.0), BAND_SHARE * level)
        if len(recent) == TOGETHER and abs(median(recent)) > width:
            return Departure(step, median(recent))
    return None


def lost(run: Series, control: Series, onset: int) -> float:
    """Return the sum of the loss minus that of the control from `onset` on, nats x steps.

    Over the steps that both have; infinite once a loss is not finite. Below 0 the run did better.
    """
    total = 0.0
    for step, value in run.items():
        if step < onset or not math.isfinite(control.get(step, math.nan)):
            continue
        if not math.isfinite(value):
            return math.inf
        total += value - control[step]
    return total


def moved(run: Series, control: Series, onset: int, until: int) -> int | None:
    """Return the first step from `onset` to `until` (excluded) at which a metric left its control.

    By more than 6 spreads of the control around its trend, and of the difference before the onset.
    None: it did not, or there are too few values before the onset to tell.
    """
    differences = {step: run[step] - control[step] for step in run if step in control}
    own, apart = spread_of(control, onset), spread_of(differences, onset)
    if math.isnan(own) or math.isnan(apart):
        return None
    noise = STILL_MADS * max(own, apart)
    for step in sorted(differences):
        limit = max(noise, STILL_SHARE * abs(control[step]))
        if onset <= step < until and not abs(differences[step]) <= limit:
            return step
    return None


def last_mean(series: Series, count: int) -> float:
    """Return the mean of the last `count` values; NaN without any."""
    tail: Sequence[float] = [series[step] for step in sorted(series)[-count:]]
    return sum(tail) / len(tail) if tail else math.nan
