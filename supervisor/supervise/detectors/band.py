"""Band: the distance to the curve of an earlier, healthy run.

A comparison with the recent past misses slow changes: the past moves along. An earlier run does
not. Its curve is part of the policy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ..core.model.values import Unit
from ._baseline import HUGE, Curve, check_knots, cut_lists_after, trim_window
from ._watch import (
    LONGEST,
    UNBEGUN,
    Debounced,
    MetricDetector,
    check_clear,
    check_floors,
    check_quota,
    explain_lacks,
)


@dataclass(frozen=True)
class Band(MetricDetector):
    """BREACH when the metric is more than `width` spreads from a reference curve.

    The curve is made of `knots`, `[step, level, spread]`, with straight lines between them: the
    level in units of the metric, the spread too, or in natural logs under `transform: log`. What is
    compared is the mean, over the newest `smooth` samples, of the distance to the curve at each
    one's own step; the spread is at least `rel_floor` of the level (under `log`, `rel_floor`
    itself) and `abs_floor`. `side`: `high`, `low`, or `both`. It lasts until the distance is past
    `clear`. With `unit: steps` what counts samples counts steps of the job, by one sample at least.

    UNKNOWN outside of the knots, until `smooth` samples were inside, for absent and NaN samples,
    and under `log` for samples that are not positive. `rewind` is exact over 256 samples.

    Take the spread from samples that were smoothed alike, and from several runs: one run alone does
    not show how much runs differ.

    Example:
        {kind: band, metric: train_loss, knots: [[100, 3.1, 0.05], [900, 2.4, 0.04]], for: 3}

    Blind to: what the earlier run did as well, and everything where it has no knots. A change of
        data, schedule or batch size looks like a fault.
    Source: project defaults. On recorded byte-level runs of 0.5 M parameters the mean of 20 losses
        stayed within 5.2 spreads of another healthy seed's curve (3.1 of both), and saw rotting
        data in 24 steps, a ramped learning rate in 130. Gradient norms of two seeds differ by 8,
        statistics of attention by 290: for these give several runs.
    """

    metric: str
    knots: tuple[tuple[float, float, float], ...]  # [step, level, spread]
    width: float = 6.0  # spreads
    clear: float | None = None  # spreads; None: `width`
    side: Literal["high", "low", "both"] = "both"
    transform: Literal["none", "log"] = "none"  # log for what varies by factors: norms, times
    smooth: int = 1  # samples; 20 is usual for what is measured at each step
    for_: int = 1  # samples in a row
    m_of_n: tuple[int, int] | None = None  # breaching samples among the newest n
    rel_floor: float = 1e-3  # share of the level; a flat curve cannot page on rounding
    abs_floor: float = 1e-9  # units of the metric; matters only around zero; project default
    unit: Unit = "rows"  # of `smooth`, `for`, `m_of_n`; steps: of the job, for a sampled metric

    def start(self) -> BandWatch:
        return BandWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_knots(self.knots, "step", positive=self.transform == "log")
        wrong += check_quota(self.for_, self.m_of_n)
        wrong += check_clear(self.clear, "width", self.width, "spreads")
        if not 1 <= self.smooth <= LONGEST:
            wrong.append(("smooth", f"must be 1 to {LONGEST} samples, not {self.smooth}"))
        why = "a curve without spread has no width"
        return wrong + check_floors(self.rel_floor, self.abs_floor, why)


class BandWatch(Debounced):
    """The newest distances to the curve, for a while, ascending by step."""

    def __init__(self, spec: Band) -> None:
        self.spec = spec
        self.log = spec.transform == "log"
        knots = spec.knots
        if self.log:
            knots = tuple((x, math.log(level), spread) for x, level, spread in knots)
        self.curve = Curve(knots)
        self.width, self.floor, self.least = spec.width, spec.rel_floor, spec.abs_floor
        self.release = spec.width if spec.clear is None else spec.clear
        self.side = {"low": -1, "both": 0, "high": 1}[spec.side]
        self.smooth = spec.smooth
        super().__init__(spec.for_, spec.m_of_n, spec.unit)

    def reset(self) -> None:
        super().reset()
        self.since = UNBEGUN  # the step before the first one in the curve
        self.steps: list[int] = []
        self.away: list[float] = []

    def forget_last(self) -> None:
        super().forget_last()
        self.distance = self.level = self.spread = math.nan

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if self.by_steps:
            self.measure_sample_spacing(sample, step)
        knot = self.curve.level_and_spread(step)
        if knot is not None and self.since == UNBEGUN:
            self.since = step - 1
        if knot is None or sample is None or not abs(sample) < HUGE:
            return UNKNOWN
        if self.log:
            if sample <= 0.0:
                return UNKNOWN
            sample = math.log(sample)
        level, spread = self.level, self.spread = knot
        away = sample - level
        if self.smooth > 1:
            self.steps.append(step)
            self.away.append(away)
            newest = self._newest(step)
            if not newest:
                return UNKNOWN
            trim_window(self.smooth, self.steps, self.away)
            away = math.fsum(newest) / len(newest)
        spreads = self.distance = away / self._floored(level, spread)
        beyond = abs(spreads) if self.side == 0 else self.side * spreads
        if beyond > self.width:
            self.raw = BREACH
            return self.debounce(True, True)
        self.raw = OK
        return self.debounce(False, beyond > self.release) if self.bits or self.firing else OK

    def _newest(self, step: int) -> list[float]:
        """Return what is smoothed, nothing while there is too little of it."""
        if not self.by_steps:
            return self.away[-self.smooth :] if len(self.away) >= self.smooth else []
        covered = step - self.since >= self.smooth
        return self.away[bisect_right(self.steps, step - self.smooth) :] if covered else []

    def lacks(self, spacing: int) -> str:
        if self.smooth == 1:
            return ""
        if self.by_steps:
            return explain_lacks(
                self.last - self.since, self.smooth, f"steps of {self.spec.metric}"
            )
        return explain_lacks(len(self.away), self.smooth, f"samples of {self.spec.metric}")

    def _floored(self, level: float, spread: float) -> float:
        floor = self.floor if self.log else self.floor * abs(level)
        return max(spread, floor, self.least)

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.away)
        self.since = min(self.since, step)

    def numbers(self) -> Reading:
        is_known = self.raw != UNKNOWN
        reach = self.spec.width * self._floored(self.level, self.spread)
        low, high = self.level - reach, self.level + reach
        return {
            "step": self.last,
            "value": self.value,
            "distance": self.distance if is_known else None,
            "threshold": self.spec.width,
            "clear": self.release,
            "level": _exp(self.level) if self.log else self.level,
            "spread": self.spread,
            "low": _exp(low) if self.log else low,
            "high": _exp(high) if self.log else high,
            "transform": self.spec.transform,
            "smooth": self.smooth,
            **self.counts(),
        }


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # beyond, a float is infinite
