"""Cusum: a drift in many small steps, none of which is unusual by itself.

A window of the recent past moves along with a drift. The sum of the distances above it does not: it
grows while the level stays ahead of the window. Half a scale per sample is subtracted, so noise
alone does not accumulate. Noise that is autocorrelated does: its samples count for less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import HAS_NOTE, Reading
from ..core.model.values import Unit
from ._baseline import HUGE, BaselineWatch, median_of_sorted
from ._watch import NEVER, MetricDetector, check_quota, check_window

FITS = 8  # fits of level and scale per window
CEILING = 2.0  # times `h`: the sum stops here, so that the end of a drift shows soon
CORRELATED = 0.3  # lag-1 correlation: 64 independent samples reach 0.3 in 1 of 100 windows
CLIPPED = 3.0  # scales: one outlier makes no correlation, and hides none
MOST_CORRELATED = 0.98  # what 128 samples can tell from 1


@dataclass(frozen=True)
class Cusum(MetricDetector):
    """BREACH when the running sum of z - `k` is above `h`; the sum never falls below zero.

    z = (x - median) / scale, scale = max(1.4826 * MAD, rel_floor * |median|, abs_floor), over the
    newest `window` accepted samples, fitted again every eighth of a window; under
    `transform: log` all of it in natural logs. One sample counts for at most `most` scales, and the
    sum stops at 2 * `h`. `side`: `high`, `low`, or `both`, each with a sum of its own. It lasts
    until the sum has come down to `clear`.

    Where the samples of the window have a lag-1 correlation r above 0.3, what is added is divided
    by (1 + r) / (1 - r), the samples per independent one. r is fitted while the sums are zero: a
    drift is no correlation.

    Samples in breach stay out of the window. When `freeze` of the newest 2 * `window` samples were
    in breach, the newest `freeze` samples become the baseline and the sums restart at zero, with a
    `rebaseline` note: a drift that goes on breaches again.

    With `unit: steps` these are steps of the job, and 12 samples at least; a sample is still one
    step of the sum. UNKNOWN while the window holds fewer than `min` samples, for absent and NaN
    samples, and under `log` for samples that are not positive. `rewind` keeps the window of before;
    the sums restart at zero.

    For notifications, not for actions: a healthy run drifts too, by warmup and schedule.

    Example:
        {kind: cusum, metric: train_loss_raw, side: high, k: 0.5, h: 8.0, clear: 2.0}

    Blind to: drift of less than two `k` scales per window, small drifts of a metric that is
        smoothed, a lone spike (use `robust_z`), NaN (use `nonfinite`), and whatever a rebaseline
        made usual.
    Source: Page, 1954, Biometrika 41:100-115; k 0.5 and h 8 on independent normal samples are one
        false alarm in some 19 000 (Siegmund's approximation); limiting single samples is Hawkins,
        1993, Journal of Quality Technology 25:248-261; the samples per independent one are those
        of an autoregression of order 1; the rest are project defaults. On the losses
        of 112 000 healthy public steps of one rank: 30 alarms; none with `k: 1.0`, which on runs of
        0.5 M parameters still saw tripled learning rates and rotting data within 25 steps.
    """

    metric: str
    k: float = 0.5  # scales taken off per sample: half of the shift that is looked for
    h: float = 8.0  # scales
    clear: float | None = None  # scales; None: `h`
    side: Literal["high", "low", "both"] = "high"
    transform: Literal["none", "log"] = "none"  # log for what varies by factors: norms, times
    window: int = 128  # samples
    min_: int = 64  # samples; project default
    for_: int = 1  # samples in a row
    m_of_n: tuple[int, int] | None = None  # breaching samples among the newest n
    most: float = 2.5  # scales that one sample counts for; project default
    rel_floor: float = 1e-3  # share of |median|; a flat series cannot page on rounding
    abs_floor: float = 1e-9  # units of the metric; matters only around zero; project default
    freeze: int = 64  # breaching samples that may be kept out of the window; project default
    unit: Unit = "rows"  # of these; steps: of the job, for a sampled metric

    def start(self) -> CusumWatch:
        return CusumWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_quota(self.for_, self.m_of_n)
        if not 0.0 <= self.k < math.inf:
            wrong.append(("k", f"must be zero or a positive number of scales, not {self.k}"))
        if not 0.0 < self.h < math.inf:
            wrong.append(("h", f"must be a positive number of scales, not {self.h}"))
        if self.clear is not None and not 0.0 <= self.clear < self.h:
            wrong.append(
                ("clear", f"must be at least 0 and below `h` ({self.h}), not {self.clear}")
            )
        if not self.k < self.most < math.inf:
            wrong.append(("most", f"must be above `k` ({self.k}), not {self.most}"))
        return wrong + check_window(
            self.window, self.min_, self.freeze, self.rel_floor, self.abs_floor, least=2
        )


class CusumWatch(BaselineWatch):
    """The window, its last fit, and the two sums with the steps at which they left zero."""

    def __init__(self, spec: Cusum) -> None:
        self.k, self.h, self.most, self.ceiling = spec.k, spec.h, spec.most, CEILING * spec.h
        self.release = spec.h if spec.clear is None else spec.clear
        self.upward, self.downward = spec.side != "low", spec.side != "high"
        super().__init__(spec)

    def forget_last(self) -> None:
        super().forget_last()
        self.z = self.level = self.scale = math.nan
        self.fit_in = 0  # accepted samples until level and scale are fitted again
        self.per_independent = 1.0  # samples per independent one
        self._zero()

    def _zero(self) -> None:
        self.high = self.low = 0.0
        self.since_high = self.since_low = NEVER

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if self.by_steps:
            self.measure_sample_spacing(sample, step)
        if self.numbers_before_refit:
            self.numbers_before_refit = {}
        if sample is None or not abs(sample) < HUGE:
            return UNKNOWN
        if self.log:
            if sample <= 0.0:
                return UNKNOWN
            sample = math.log(sample)
        base = self.base
        few = len(base.ordered) < self.least
        if few or (self.by_steps and base.covers() < self.min_):
            base.accept(step, sample)
            return UNKNOWN
        if self.fit_in <= 0:
            self._fit()
        z = self.z = (sample - self.level) / self.scale
        total = self._add(z if -self.most < z < self.most else math.copysign(self.most, z), step)
        if total <= self.h:
            self.raw = OK
            base.accept(step, sample)
            self.fit_in -= 1
            return self.debounce(False, total > self.release) if self.bits or self.firing else OK
        self.raw = BREACH
        code = self.debounce(True, True)
        if base.add_flagged(step, sample):
            self.refit()
            self._zero()
            self._fit()
            code |= HAS_NOTE
        return code

    def _add(self, z: float, step: int) -> float:
        """Add a sample to the sums; return the larger one of the watched sides."""
        total, share = 0.0, 1.0 / self.per_independent
        if self.upward:
            previous_sum = self.high
            if previous_sum == 0.0:
                self.since_high = step
            total = previous_sum + (z - self.k) * share
            self.high = total = 0.0 if total < 0.0 else min(total, self.ceiling)
        if self.downward:
            previous_sum = self.low
            if previous_sum == 0.0:
                self.since_low = step
            down = previous_sum - (z + self.k) * share
            self.low = down = 0.0 if down < 0.0 else min(down, self.ceiling)
            return max(total, down)
        return total

    def _fit(self) -> None:
        """Fit level and scale to the window."""
        self.level = median_of_sorted(self.base.ordered)
        self.scale = self.scale_of(self.level)
        window = len(self.base.ordered) if self.by_steps else self.spec.window
        self.fit_in = max(1, window // FITS)
        if self.high == self.low == 0.0:
            self._fit_correlation()

    def _fit_correlation(self) -> None:
        """Fit the samples per independent one to the window."""
        limit = CLIPPED * self.scale
        off = [max(-limit, min(limit, value - self.level)) for value in self.base.newest]
        square = sum(x * x for x in off)
        r = sum(x * y for x, y in pairwise(off)) / square if square else 0.0
        r = min(r, MOST_CORRELATED) if r > CORRELATED else 0.0
        self.per_independent = (1.0 + r) / (1.0 - r)

    def numbers(self) -> Reading:
        if self.numbers_before_refit:
            return self.numbers_before_refit
        down = self.low > self.high
        total = self.low if down else self.high
        since = self.since_low if down else self.since_high
        return {
            "step": self.last,
            "value": self.value,
            "sum": total,
            "threshold": self.spec.h,
            "clear": self.release,
            "direction": "low" if down else "high",
            "since": since if total > 0.0 else None,  # the drift began here or before
            "per_independent": self.per_independent,
            **self.baseline_numbers(self.z, self.level, self.scale),
        }
