"""The band that the loss had: its own trend before an onset, and what may be left of it.

A falling loss that comes back to where it was has not come back: the band follows a Theil-Sen line
over ln(step). All lengths are frames. Source: Sen, 1968 (JASA 63:1379-1389); the median and its
spread are those of `robust_z`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRE, EXCLUDED = 256, 10  # frames the trend is fitted to; left out just before the onset
LEAST = 8  # frames for any band at all
BLOCK = 4  # frames per point of the fit: a quarter of the points, a sixteenth of the pairs
# A loss falls ever slower, also over ln(step): the whole slope, carried on for 350 frames, called
# 1 to 10 % of quiet places in healthy recordings a plateau; half of it, 0.1 %. The same for a slope
# from fewer than 256 frames (a warm-up is in it): up to 5 %. So there the level alone is taken.
TRUST = 0.5
STEP_MADS, STEP_SHARE = 6.0, 0.05  # one loss is in the band: no healthy nano loss was out of 6
BAND_MADS, BAND_SHARE = 4.0, 0.01  # a median of losses is; its scale is divided by sqrt(n / 4)


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def spread(values: Sequence[float], middle: float) -> float:
    """Return 1.4826 x the median absolute deviation from `middle`."""
    return 1.4826 * median([abs(value - middle) for value in values])


@dataclass(frozen=True, slots=True)
class Band:
    """Where the loss was going before `onset`: `level` there, `slope` per unit of ln(step + 1).

    Attributes:
        spread: robust standard deviation of what the trend leaves.
        samples: losses it was fitted to; fewer than 256 give a level and no slope.
        limit: what a single loss at the onset must stay under.
    """

    onset: int
    level: float
    slope: float
    spread: float
    samples: int

    @property
    def limit(self) -> float:
        return self.limit_at(self.onset)

    def forecast(self, step: int) -> float:
        """Return the loss expected at `step`; after the onset, half of the slope is trusted.

        A loss above zero falls by shares of itself: on a straight line that of a small model, which
        has nearly learned its data by heart, would be expected below zero.
        """
        away = math.log(step + 1.0) - math.log(self.onset + 1.0)
        if away <= 0.0:
            return self.level + self.slope * away
        moved = TRUST * self.slope * away
        return self.level * math.exp(moved / self.level) if self.level > 0.0 else self.level + moved

    def limit_at(self, step: int) -> float:
        """Return what a single loss at `step` must stay under to be in the band."""
        return self.forecast(step) + max(STEP_MADS * self.spread, STEP_SHARE * abs(self.level))

    def width(self, frames: int) -> float:
        """Return the half width for the median of `frames` losses in a row."""
        noise = BAND_MADS * self.spread / math.sqrt(frames / 4.0)  # 4: they remember each other
        return max(noise, BAND_SHARE * abs(self.level))


def band_of(losses: Sequence[tuple[int, float]], onset: int) -> Band | None:
    """Fit the losses `(step, loss)` before `onset`; None with fewer than 8 of them.

    A slope upwards is taken for none: a loss that was rising is no trend to come back to.
    """
    before = [(step, loss) for step, loss in losses if step < onset]
    pre = [(step, loss) for step, loss in before if step < onset - EXCLUDED][-PRE:]
    if len(pre) < PRE:
        pre, down = before[-PRE:], 0.0
        if len(pre) < LEAST:
            return None
    else:
        down = min(0.0, slope(pre))
    at = math.log(onset + 1.0)
    moved = [loss - down * (math.log(step + 1.0) - at) for step, loss in pre]
    level = median(moved)
    return Band(onset, level, down, spread(moved, level), len(pre))


def slope(points: Sequence[tuple[int, float]], block: int = BLOCK) -> float:
    """Return the Theil-Sen slope over ln(step + 1), of the medians of blocks of points."""
    first = len(points) % block
    blocks = [points[i : i + block] for i in range(first, len(points), block)]
    at = [math.fsum(math.log(step + 1.0) for step, _ in one) / block for one in blocks]
    values = [median([loss for _, loss in one]) for one in blocks]
    pairs = ((i, j) for j in range(1, len(at)) for i in range(j) if at[j] > at[i])
    return median([(values[j] - values[i]) / (at[j] - at[i]) for i, j in pairs])
