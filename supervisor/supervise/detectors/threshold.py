"""Threshold: a metric beyond a fixed bound.

Upper and lower, open and closed bounds are one comparison: a lower bound is an upper bound of the
negated value, and `x >= b` is `x > c` with c the largest float below b, which is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ..core.model.values import Unit
from ._watch import Debounced, MetricDetector, check_bounds, check_quota


@dataclass(frozen=True)
class Threshold(MetricDetector):
    """BREACH when the metric is beyond `gt`, `gte`, `lt` or `lte`: give exactly one.

    `for` samples in a row, or m of the last n, make it a BREACH; it lasts until a sample is past
    `clear`, which stands in for the bound until then. Absent and NaN samples are UNKNOWN and are
    not counted. With `unit: steps` a sample stands for the steps since the one before.

    Example:
        {kind: threshold, metric: train_loss_raw, gt: 12.0, clear: 11.0, for: 2}

    Blind to: everything inside the bound, however unusual (use `robust_z`), and to NaN (use
        `nonfinite`).
    Source: Prometheus alerting rules (`for`), CloudWatch alarms (m out of n), Schmitt trigger.
    """

    metric: str
    gt: float | None = None  # units of the metric
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None
    clear: float | None = None  # units of the metric, on the safe side; None: the bound itself
    for_: int = 1  # samples in a row; project default
    m_of_n: tuple[int, int] | None = None  # breaching samples among the newest n
    unit: Unit = "rows"  # of `for` and `m_of_n`; steps: of the job, for a sampled metric

    @property
    def bound(self) -> tuple[str, float]:
        """The name and value of the bound that was given."""
        for name in ("gt", "gte", "lt"):
            value: float | None = getattr(self, name)
            if value is not None:
                return name, value
        return "lte", math.nan if self.lte is None else self.lte

    def start(self) -> ThresholdWatch:
        return ThresholdWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        bounds = {"gt": self.gt, "gte": self.gte, "lt": self.lt, "lte": self.lte}
        return check_bounds(bounds, self.clear) + check_quota(self.for_, self.m_of_n)


class ThresholdWatch(Debounced):
    """Compares; `value` is the last sample."""

    def __init__(self, spec: Threshold) -> None:
        self.spec = spec
        name, limit = spec.bound
        clear = limit if spec.clear is None else spec.clear
        self.upper = name in ("gt", "gte")
        self.bound = _as_open(name, limit)
        self.release = _as_open(name, clear)
        super().__init__(spec.for_, spec.m_of_n, spec.unit)

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if self.by_steps:
            self.measure_sample_spacing(sample, step)
        if sample is None or sample - sample != 0.0:
            self.raw = UNKNOWN
            return UNKNOWN
        value = sample if self.upper else -sample
        if value > self.bound:
            self.raw = BREACH
            return self.debounce(True, True)
        self.raw = OK
        if self.bits or self.firing:
            return self.debounce(False, value > self.release)
        return OK

    def numbers(self) -> Reading:
        name, limit = self.spec.bound
        return {
            "step": self.last,
            "value": self.value,
            name: limit,
            "threshold": limit,
            "clear": limit if self.spec.clear is None else self.spec.clear,
            **self.counts(),
        }


def _as_open(name: str, limit: float) -> float:
    """Return c such that the bound is `x > c`, of the negated value when it is a lower one."""
    upper = limit if name in ("gt", "gte") else -limit
    return math.nextafter(upper, -math.inf) if name in ("gte", "lte") else upper
