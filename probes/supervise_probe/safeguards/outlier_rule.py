"""Detection of an outlier batch by its loss and gradient norm before its update is made.

Both are compared with the newest rows that were applied. A loss is out where it is above their
level by 6 spreads, by 1.5 times the greatest rise among the last 4096 of them, and by 15 % of the
level: all three. Half of the spreads and the greatest rise itself will do behind another outlier,
and where the logarithm of the gradient norm is as unusual: 6 spreads up, and above its own greatest
rise.

The level is the lower one of the medians of the newest 128 and 32 rows, so that a falling loss is
not compared with what it was; the spread is that around a parabola through the 128. What was
skipped teaches nothing, so that a source of bad batches never becomes usual.

Source: `benchmarks/proving/skips.md` has what it finds and what it costs. OLMo-core's
SkipStepOptimizer takes 6 standard deviations of 128 rows, of the loss or the norm; one outlier
widens those, and of noisy losses they are soon surpassed.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from operator import mul
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

WINDOW, LEAST = 128, 48  # rows; OLMo-core's window, and as many as the detector kind `harm` waits
NEWEST = 32  # rows of the second median
KEPT = 2 * WINDOW  # rows, so that a rollback leaves enough of them
REFIT = 8  # rows between two fits
SPREADS, RISE, HARDER = 6.0, 0.15, 1.5
AGES, AGE = 16, 256  # records are kept for 16 ages of 256 rows
NORMAL = 1.4826  # of the median absolute deviation, for a normal distribution's standard deviation
FLOOR, TINY = 0.002, 1e-12  # share of the level, and units: spread of what hardly varies
SLOW = 1 / 16  # weight of a new spread in the usual one


class Limits(NamedTuple):
    """How far out a loss must be: in spreads, and as a share of its level."""

    spreads: float = SPREADS
    rise: float = RISE


class Band:
    """Level and spread of one series, and the greatest rise of its rows above it.

    Attributes:
        level, spread: 0 before there are enough rows.
    """

    def __init__(self) -> None:
        self._rows: Deque[Tuple[int, float]] = deque(maxlen=KEPT)
        self._records: Deque[float] = deque([0.0], maxlen=AGES)
        self._fit_in = self._age = 0
        self.level = self.spread = self._usual = 0.0

    @property
    def known(self) -> bool:
        """Whether there are enough rows to judge one."""
        return len(self._rows) >= LEAST

    @property
    def record(self) -> float:
        """The greatest rise of late, in spreads."""
        return max(self._records)

    def rise(self, value: float) -> float:
        """Return how far a value is above the level, in spreads; 0 before that is known."""
        return (value - self.level) / self.spread if self.known else 0.0

    def add(self, step: int, value: float, *, usual: bool) -> None:
        """Add a row; what is not `usual` does not count for the record."""
        if usual:
            self._records[-1] = max(self._records[-1], self.rise(value))
            self._age += 1
            if self._age >= AGE:
                self._age = 0
                self._records.append(0.0)
        self._rows.append((step, value))
        self._fit_in -= 1
        if self.known and self._fit_in <= 0:
            self._fit()

    def back_to(self, step: int) -> None:
        """The weights are those behind `step` again: forget the rows since."""
        while self._rows and self._rows[-1][0] > step:
            self._rows.pop()
        if self.known:
            self._fit()

    def _fit(self) -> None:
        self._fit_in = REFIT
        rows = [value for _, value in self._rows][-WINDOW:]
        self.level = min(_median(rows), _median(rows[-NEWEST:]))
        spread = NORMAL * _median([abs(rest) for rest in _around_parabola(rows)])
        self._usual += (spread - self._usual) * (SLOW if self._usual else 1.0)
        self.spread = max(spread, self._usual, FLOOR * abs(self.level), TINY)


class OutlierRule:
    """The past of a job's losses and gradient norms."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.loss, self.norm = Band(), Band()

    def why_out(self, loss: float, norm: Optional[float], *, follows: bool = False) -> str:
        """Return why a batch is an outlier, "" when it is none or too little is known.

        Args:
            loss: finite. norm: of the gradient; None where it is unknown, else finite.
            follows: the batch before it was an outlier.
        """
        band, (spreads, rise) = self.loss, self._limits
        far = band.rise(loss)
        if far <= spreads / 2 or loss - band.level <= rise * abs(band.level) or far <= band.record:
            return ""
        why = f"the loss is {loss:.4g}, {far:.1f} spreads above its level of {band.level:.4g}"
        if follows or (far > spreads and far > HARDER * band.record):
            return why
        steep = self.norm.rise(math.log(norm)) if norm else 0.0
        if steep <= SPREADS or steep <= self.norm.record:
            return ""
        return f"{why}, and the gradient norm {norm:.4g}, {steep:.1f} spreads above its own"

    def applied(self, step: int, loss: float, norm: Optional[float], *, usual: bool) -> None:
        """Learn from a batch whose update is made; `usual`: it is no outlier."""
        self.loss.add(step, loss, usual=usual)
        if norm:
            self.norm.add(step, math.log(norm), usual=usual)

    def back_to(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.loss.back_to(step)
        self.norm.back_to(step)


def _median(values: Sequence[float]) -> float:
    ascending = sorted(values)
    half = len(ascending) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2


def _around_parabola(rows: Sequence[float]) -> List[float]:
    """Return what a least-squares parabola leaves of evenly spaced rows."""
    line, curve, lines, curves = _axes(len(rows))
    mean = sum(rows) / len(rows)
    slope = sum(map(mul, line, rows)) / lines
    bend = sum(map(mul, curve, rows)) / curves
    return [row - mean - slope * t - bend * c for row, t, c in zip(rows, line, curve)]


@lru_cache(maxsize=2)
def _axes(count: int) -> Tuple[List[float], List[float], float, float]:
    """Return two orthogonal axes, a line and a parabola, and the sums of their squares."""
    line = [at - (count - 1) / 2 for at in range(count)]
    lines = sum(map(mul, line, line))
    curve = [t * t - lines / count for t in line]
    return line, curve, lines, sum(map(mul, curve, curve))
