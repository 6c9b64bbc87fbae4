"""Robust z: a sample far from the median of its recent past, in units of its usual spread.

Median and MAD instead of mean and deviation: half of the window may be outliers. Two quartiles
usually decide whether a sample is further away than `gt` scales: the MAD is at least the smaller of
their distances to the median, as half of the samples lie outside them. The formula itself is
computed only for a possible breach, so the answer is always that of the formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import HAS_NOTE, Reading
from ..core.model.values import Unit
from ._baseline import NORMAL, BaselineWatch, median_of_sorted
from ._watch import NEVER, MetricDetector, check_clear, check_quota, check_window

A_LITTLE_LESS = 1.0 - 1e-9  # of the screen: rounding must not hide a breach


@dataclass(frozen=True)
class RobustZ(MetricDetector):
    """BREACH when a sample is more than `gt` scales from the median of the window before it.

    z = (x - median) / scale, scale = max(1.4826 * MAD, rel_floor * |median|, abs_floor), over the
    newest `window` samples that did not breach themselves; under `transform: log` all of it in
    natural logs, where rel_floor is a floor by itself. `side`: `high`, `low`, or `both`. It lasts
    until z is past `clear`. When `freeze` of the newest 2 * `window` samples breached, the newest
    `freeze` samples become the baseline, with a `rebaseline` note. With `rel_jitter` nothing
    breaches where the usual change from one sample of the window to the next, 1.4826 / sqrt(2)
    times its median, is above rel_jitter * |median|, under `log` above rel_jitter: a trend widens
    the scale, but not this.

    With `unit: steps` these are steps of the job, and 12 samples at least, or as many as asked.
    UNKNOWN while the window holds fewer than `min` samples (the scale of one alone is its floor),
    for absent and NaN samples, and under `log` for samples that are not positive. `rewind` keeps
    the window of before.

    Example:
        {kind: robust_z, metric: update_norm, transform: log, gt: 8.0, clear: 4.0, m_of_n: [2, 3]}

    Blind to: drift slower than the window (use `trend`), the first `min` samples, NaN (use
        `nonfinite`), and levels that a rebaseline accepted.
    Source: Iglewicz and Hoaglin, 1993 (modified z-score); OLMo-core skips steps by 6 deviations
        over a window of 128. Jitter: von Neumann, 1941 (successive differences).
    """

    metric: str
    gt: float = 8.0  # scales; a public watcher pages at 8, OLMo-core skips at 6
    clear: float | None = None  # scales; None: `gt`
    side: Literal["high", "low", "both"] = "high"
    transform: Literal["none", "log"] = "none"  # log for what varies by factors: norms, times
    window: int = 128  # samples; OLMo-core
    min_: int = 64  # samples; project default
    for_: int = 1  # samples in a row
    m_of_n: tuple[int, int] | None = None  # breaching samples among the newest n
    rel_floor: float = 1e-3  # share of |median|; a flat series cannot page on rounding
    abs_floor: float = 1e-9  # units of the metric; matters only around zero; project default
    rel_jitter: float | None = None  # share of |median|; None: no limit
    freeze: int = 64  # breaching samples that may be kept out of the window; project default
    unit: Unit = "rows"  # of these; steps: of the job, for a sampled metric

    def start(self) -> RobustZWatch:
        return RobustZWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        jitter = self.rel_jitter
        wrong = []
        if jitter is not None and not 0.0 < jitter < math.inf:
            wrong.append(("rel_jitter", f"must be a positive number, not {jitter}"))
        return (
            wrong
            + check_quota(self.for_, self.m_of_n)
            + check_clear(self.clear, "gt", self.gt, "scales")
            + check_window(
                self.window, self.min_, self.freeze, self.rel_floor, self.abs_floor, least=1
            )
        )


class RobustZWatch(BaselineWatch):
    """The window, and the last sample, which enters it only when the next one arrives.

    So `numbers` shows the baseline of the last verdict.
    """

    def __init__(self, spec: RobustZ) -> None:
        self.gt = spec.gt
        self.release = spec.gt if spec.clear is None else spec.clear
        self.screen = spec.gt * NORMAL * A_LITTLE_LESS
        self.side = ("low", "both", "high").index(spec.side)
        super().__init__(spec)

    def forget_last(self) -> None:
        super().forget_last()
        self.x = 0.0  # the last sample, or its log
        self.pending_step = NEVER  # step of the sample that is to enter the window

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if self.by_steps:
            self.measure_sample_spacing(sample, step)
        base = self.base
        if self.pending_step >= 0:
            base.accept(self.pending_step, self.x)
            self.pending_step = NEVER
        elif self.numbers_before_refit:
            self.numbers_before_refit = {}
        if sample is None or sample - sample != 0.0:
            return UNKNOWN
        if self.log:
            if sample <= 0.0:
                return UNKNOWN
            sample = math.log(sample)
        self.x = sample
        ordered = base.ordered
        count = len(ordered)
        if count < self.least or (self.by_steps and base.covers() < self.min_):
            self.pending_step = step
            return UNKNOWN
        half = count >> 1
        middle = ordered[half] if count & 1 else 0.5 * ordered[half - 1] + 0.5 * ordered[half]
        distance = sample - middle
        if self.side < 2 and (self.side == 0 or distance < 0.0):
            distance = -distance
        quarter = (count - half) >> 1
        below, above = middle - ordered[quarter], ordered[quarter + half] - middle
        breach = distance > self.screen * (below if below < above else above)
        is_held = False
        if breach or self.firing:
            scale = self.scale_of(middle)
            breach = distance > self.gt * scale and not self.exceeds_jitter_limit(middle)
            is_held = distance > self.release * scale
        if not breach:
            self.raw = OK
            self.pending_step = step
            return self.debounce(False, is_held) if self.bits or self.firing else OK
        self.raw = BREACH
        code = self.debounce(True, True)
        if base.add_flagged(step, sample):
            self.refit()
            code |= HAS_NOTE
        return code

    def exceeds_jitter_limit(self, middle: float) -> bool:
        """Return whether the window varies from sample to sample by more than `rel_jitter`."""
        limit: float | None = self.spec.rel_jitter
        if limit is None:
            return False
        changes = sorted(abs(later - value) for value, later in pairwise(self.base.newest))
        jitter = NORMAL / math.sqrt(2.0) * median_of_sorted(changes) if changes else 0.0
        return bool(jitter > (limit if self.log else limit * abs(middle)))

    def drop_after(self, step: int) -> None:
        if 0 <= self.pending_step <= step:
            self.base.accept(self.pending_step, self.x)
        super().drop_after(step)

    def numbers(self) -> Reading:
        if self.numbers_before_refit:
            return self.numbers_before_refit
        ordered = self.base.ordered
        middle = median_of_sorted(ordered) if ordered else math.nan
        scale = self.scale_of(middle) if ordered else math.nan
        return {
            "step": self.last,
            "value": self.value,
            "threshold": self.gt,
            "clear": self.release,
            **self.baseline_numbers((self.x - middle) / scale, middle, scale),
        }
