"""Record: a sample further above its past than any other recent one.

A MAD measures the spread of one mode only: with two alternating tasks, or one hard batch in a
hundred, the rarer mode is always many scales up. A rise that occurred before and ended by itself is
no anomaly. So the rise of a sample above the median of its past is compared with the greatest
recent rise, in the metric's own units and without any assumption about its distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ._baseline import median_of_sorted
from ._watch import Memory, MetricDetector, explain_lacks

KEPT = 2  # windows that `rewind` can restore
SLACK = 1  # further windows before the oldest samples are dropped in one go


@dataclass(frozen=True)
class Record(MetricDetector):
    """BREACH when a sample's rise is more than `gt` times the greatest recent rise.

    A rise is the distance above the median of the `ref` samples before; the greatest one is that of
    the `window` samples before, or 0. A sample that breaches, and what follows it, is compared with
    later ones only when `calm` samples in a row did not breach: an excursion is no precedent of its
    own. It ends at the latest when the median has followed, half of `ref` later.

    UNKNOWN before `min` samples, and for absent and NaN samples. `rewind` keeps what was before.

    Example:
        {kind: record, metric: train_loss_raw, gt: 2.0, window: 256}

    Blind to: whatever has come before of that size, trouble or not; slow growth.
    Source: record values (Chandler, 1952): without trend the k-th of independent samples is one
        with probability 1 / k, whatever their distribution.
    """

    metric: str
    gt: float = 2.0  # times the greatest rise; project default
    ref: int = 64  # samples of the median; project default
    window: int = 256  # samples; project default
    min_: int = 16  # samples; project default
    calm: int = 4  # samples in a row that end an excursion; project default

    def start(self) -> RecordWatch:
        return RecordWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.gt < math.inf:
            wrong.append(("gt", f"must be a positive number, not {self.gt}"))
        if not 1 <= self.ref <= self.window:
            wrong.append(("ref", f"must be 1 to `window` ({self.window}), not {self.ref}"))
        if not 1 <= self.min_ <= self.window:
            wrong.append(("min", f"must be 1 to `window` ({self.window}), not {self.min_}"))
        if not 1 <= self.calm <= self.window:
            wrong.append(("calm", f"must be 1 to `window` ({self.window}), not {self.calm}"))
        return wrong


class RecordWatch(Memory):
    """The samples, their rises, and which of them breached, oldest first.

    `ordered` are the newest `ref` values, ascending. `since` is where the excursion under way
    began, -1 when there is none, and `low` counts what did not breach since. `most` is the greatest
    rise of the window, known until there are more than `until` samples.
    """

    def __init__(self, spec: Record) -> None:
        self.spec = spec
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []
        self.rises: list[float] = []
        self.flags: list[bool] = []
        self.ordered: list[float] = []
        self.since, self.low = -1, 0
        self.most, self.until = 0.0, -1

    def forget_last(self) -> None:
        super().forget_last()
        self.rise = self.judged = self.limit = math.nan

    def feed(self, sample: Any, step: int) -> int:
        self.value, self.raw = sample, UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if sample is None or sample - sample != 0.0:
            return UNKNOWN
        count, ordered = len(self.values), self.ordered
        middle = median_of_sorted(ordered) if ordered else sample
        rise = self.rise = sample - middle
        if count > self.until:
            self._find(count)
        breach = False
        if count >= self.spec.min_:
            self.judged = self.most
            self.limit = middle + self.spec.gt * self.most
            breach = rise > self.spec.gt * self.most
            self.raw = BREACH if breach else OK
        self._append(sample, rise, breach, step)
        return self.raw

    def _find(self, count: int) -> None:
        """Find the greatest rise again: the last one found left the window."""
        begin, end = max(count - self.spec.window, 0), count if self.since < 0 else self.since
        earlier = self.rises[begin:end]
        self.most = max(max(earlier, default=0.0), 0.0)
        position = begin + earlier.index(self.most) if self.most > 0.0 else count
        self.until = position + self.spec.window

    def _append(self, sample: float, rise: float, breach: bool, step: int) -> None:
        values, ordered, ref = self.values, self.ordered, self.spec.ref
        if len(values) >= ref:
            del ordered[bisect_left(ordered, values[-ref])]
        insort(ordered, sample)
        index, under_way = len(values), self.since >= 0
        self._count(breach, index)
        if self.since < 0:
            if under_way:  # the samples that were left out count from now on
                self.until = -1
            elif rise >= self.most:
                self.most, self.until = rise, index + self.spec.window
        values.append(sample)
        self.rises.append(rise)
        self.flags.append(breach)
        self.steps.append(step)
        if len(values) >= (KEPT + SLACK) * self.spec.window + ref:
            self._drop(SLACK * self.spec.window)

    def _count(self, breach: bool, index: int) -> None:
        if breach:
            self.low = 0
            if self.since < 0:
                self.since = index
        elif self.since >= 0:
            self.low += 1
            if self.low >= self.spec.calm:
                self.since, self.low = -1, 0

    def _drop(self, count: int) -> None:
        """Drop what is too old for any rewind."""
        for column in (self.steps, self.values, self.rises, self.flags):
            del column[:count]
        if self.since >= 0:
            self.since = max(self.since - count, 0)
        self.until -= count

    def drop_after(self, step: int) -> None:
        while self.steps and self.steps[-1] > step:
            for column in (self.steps, self.values, self.rises, self.flags):
                column.pop()
        self.ordered = sorted(self.values[-self.spec.ref :])
        self.since, self.low = -1, 0
        for index, breach in enumerate(self.flags):
            self._count(breach, index)
        self.until = -1

    def lacks(self, spacing: int) -> str:
        return explain_lacks(len(self.values), self.spec.min_ + 1, f"samples of {self.spec.metric}")

    def numbers(self) -> Reading:
        is_known = self.raw != UNKNOWN
        return {
            "step": self.last,
            "value": self.value,
            "rise": self.rise if is_known else None,
            "greatest": self.judged if is_known else None,
            "threshold": self.limit if is_known else None,
            "samples": len(self.values),
        }
