"""Collapse: the loss leaves the curve that all runs of a recipe share.

Loss curves of one recipe (tokens per parameter, schedule, time scale of the optimizer) fall onto
one curve when each is divided by its final loss. A run need not end for a comparison: the
best-fitting final loss is estimated early, and from then on the residual is small and shows a fault
long before the loss itself does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ._baseline import HUGE, Curve, check_knots, cut_lists_after, median_of_sorted, trim_window
from ._watch import LONGEST, NEVER, Memory, MetricDetector

BINS = 32  # parts of the `align` interval
FEWEST = 8  # parts with samples that a scale needs


@dataclass(frozen=True)
class Collapse(MetricDetector):
    """BREACH when the residual to a shared loss curve is above `width` spreads and `margin`.

    The curve is made of `knots`, `[fraction of training, normalised loss, spread]`; the fraction is
    (step + 1) / `total_steps`. The scale is the median, over 32 equal parts of the fractions
    `align`, of the mean of loss / curve in each: the final loss, if the curve ends at 1. The
    residual is the mean over the newest `smooth` samples of loss / scale - curve.

    It must be beyond for `lasting` of the training, in steps, without a known sample below, and
    lasts until a residual is below `clear` times the bound.

    UNKNOWN until `align` is over and outside of the knots, until `smooth` samples were inside, for
    absent and NaN samples, and without samples in at least 8 of the 32 parts. `rewind` keeps the
    samples of before and drops the parts that end after the step.

    Example:
        {kind: collapse, metric: train_loss, total_steps: 2000, knots: [[0.1, 1.6, 0.002], [1,
         1, 0.002]]}

    Blind to: everything before `align` is over, and to a fault in it, which becomes the scale.
        A run of another recipe leaves the curve and is healthy.
    Source: "Scaling with Collapse" (early align on 25 to 50 % of training, mean of 100); the margin
        of 0.005 for 2 % of training and three spreads are project defaults. The spread must know
        how much runs differ: on recorded byte-level runs of 0.5 M parameters a curve of one seed
        fired on another (0.011), a curve of both on neither.
    """

    metric: str
    knots: tuple[tuple[float, float, float], ...]  # [fraction, normalised loss, spread]
    total_steps: int  # of the whole training
    width: float = 3.0  # spreads
    margin: float = 0.005  # shares of the final loss
    lasting: float = 0.02  # share of the training
    smooth: int = 100  # samples
    align: tuple[float, float] = (0.25, 0.5)  # fractions of training
    clear: float = 0.5  # times the bound; project default

    def start(self) -> CollapseWatch:
        return CollapseWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_knots(self.knots, "fraction", positive=True, upper=1.0)
        begin, end = self.align
        if not 0.0 <= begin < end < 1.0:
            wrong.append(
                (
                    "align",
                    f"must be [first, last] with 0 <= first < last < 1, not {begin:g}, {end:g}",
                )
            )
        elif not wrong and not self.knots[0][0] <= begin < end < self.knots[-1][0]:
            wrong.append(("align", f"{begin:g} to {end:g} must be inside of the knots"))
        if self.total_steps < 2:
            wrong.append(("total_steps", f"must be at least 2, not {self.total_steps}"))
        if not 1 <= self.smooth <= LONGEST:
            wrong.append(("smooth", f"must be 1 to {LONGEST} samples, not {self.smooth}"))
        if not 0.0 < self.width < math.inf:
            wrong.append(("width", f"must be a positive number of spreads, not {self.width}"))
        if not 0.0 < self.margin < math.inf:
            wrong.append(("margin", f"must be above zero, not {self.margin}"))
        if not 0.0 <= self.lasting < 1.0:
            wrong.append(("lasting", f"must be at least 0 and below 1, not {self.lasting}"))
        if not 0.0 < self.clear <= 1.0:
            wrong.append(("clear", f"must be above 0 and at most 1, not {self.clear}"))
        return wrong


class CollapseWatch(Memory):
    """Newest samples with the curve at each, and the parts of `align` as sums and counts.

    `above` is the step since which the residual was beyond; `scale` is NaN until it is known.
    """

    def __init__(self, spec: Collapse) -> None:
        self.spec = spec
        self.curve = Curve(spec.knots)
        self.need = spec.lasting * spec.total_steps  # steps
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []
        self.shape: list[float] = []  # the curve at each of these steps
        self.sums = [0.0] * BINS
        self.counts = [0] * BINS

    def forget_last(self) -> None:
        super().forget_last()
        self.scale = self.residual = self.bound = math.nan
        self.above = NEVER
        self.firing = False

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        fraction = (step + 1) / self.spec.total_steps
        knot = self.curve.level_and_spread(fraction)
        if knot is None or sample is None or not abs(sample) < HUGE:
            return UNKNOWN
        shape, spread = knot
        self.steps.append(step)
        self.values.append(sample)
        self.shape.append(shape)
        trim_window(self.spec.smooth, self.steps, self.values, self.shape)
        begin, end = self.spec.align
        if fraction <= end:
            if fraction >= begin:
                part = min(BINS - 1, int(BINS * (fraction - begin) / (end - begin)))
                self.sums[part] += sample / shape
                self.counts[part] += 1
            return UNKNOWN
        return self._judge(spread, step)

    def _judge(self, spread: float, step: int) -> int:
        spec = self.spec
        if math.isnan(self.scale):
            self.scale = self._align()
        if not self.scale > 0.0 or len(self.values) < spec.smooth:
            return UNKNOWN
        newest = math.fsum(self.values[-spec.smooth :]) / self.scale
        self.residual = (newest - math.fsum(self.shape[-spec.smooth :])) / spec.smooth
        self.bound = max(spec.width * spread, spec.margin)
        if self.residual > self.bound:
            self.raw = BREACH
            if self.above == NEVER:
                self.above = step
            if step - self.above >= self.need:
                self.firing = True
        else:
            self.raw = OK
            self.above = NEVER
            if self.residual <= spec.clear * self.bound:
                self.firing = False
        return BREACH if self.firing else OK

    def _align(self) -> float:
        """Return the scale, -1 with too few samples."""
        parts = zip(self.sums, self.counts, strict=True)
        means = sorted([total / count for total, count in parts if count])
        return median_of_sorted(means) if len(means) >= FEWEST else -1.0

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.values, self.shape)
        begin, end = self.spec.align
        width = (end - begin) / BINS
        for part in range(BINS):
            if (step + 1) / self.spec.total_steps < begin + width * (part + 1):
                self.sums[part], self.counts[part] = 0.0, 0

    def numbers(self) -> Reading:
        aligned = self.scale > 0.0
        return {
            "step": self.last,
            "value": self.value,
            "residual": self.residual if self.raw != UNKNOWN else None,
            "threshold": self.bound,
            "fraction": (self.last + 1) / self.spec.total_steps,
            "scale": self.scale if aligned else None,  # the final loss that it points to
            "since": None if self.above == NEVER else self.above,
            "lasting": math.ceil(self.need),
            "parts": sum(1 for count in self.counts if count),
            "smooth": self.spec.smooth,
        }
