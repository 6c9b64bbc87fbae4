"""Descent: whether a run has made progress in a metric, so that it is an objective to protect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ._excess import ExcessWatch
from ._watch import MetricDetector

ARL, MARGIN = 1e6, 0.02  # what an excursion is, as in `harm`


@dataclass(frozen=True)
class Descent(MetricDetector):
    """BREACH while the metric is an objective: in this run it has fallen beyond its own noise.

    Its level, the lower one of the medians of the newest `window` and of the newest 32 quiet rows,
    fell by more than four of its errors, and by twice what it ever climbed by itself. Rows of an
    excursion, as `harm` knows them, count for neither, and a step up is no climb: a run that was
    harmed stays an objective.

    UNKNOWN until half of `window` rows were quiet, and for absent and NaN samples; BREACH for the
    first half of `window` rows with `presumed`. `rewind` keeps what was before.

    Example:
        {kind: descent, metric: train_loss_raw}

    Blind to: falls within the noise, as of a fine-tuning that was done before it began, or of a run
        that was started again at the level where it stays.
    Source: losses of GANs and of reinforcement learning, which go up and down as the policy or the
        other network moves; the limits are those of `harm`, from 120 losses of 60 small GANs.
    """

    tells_descent: ClassVar[bool] = True

    metric: str
    window: int = 128  # rows
    presumed: bool = False  # the first rows are taken for those of an objective

    def start(self) -> DescentWatch:
        return DescentWatch(self)

    def check(self) -> list[tuple[str, str]]:
        if 32 <= self.window <= 1024:
            return []
        return [("window", f"must be 32 to 1024 rows, not {self.window}")]


class DescentWatch(ExcessWatch):
    """The level of the quiet rows, and how far it fell and rose."""

    def __init__(self, spec: Descent) -> None:
        self.spec = spec
        super().__init__(ARL, MARGIN, spec.window)

    def feed(self, sample: Any, step: int) -> int:
        if self.take(sample, step) is None:
            return UNKNOWN
        if self.excess.knows_descent:
            self.raw = BREACH if self.excess.has_descended else OK
        elif self.spec.presumed and len(self.series.rows) < self.spec.window // 2:
            self.raw = BREACH
        return self.raw

    def lacks(self, spacing: int) -> str:
        return self.needs_rows(self.spec.metric)

    def numbers(self) -> Reading:
        excess = self.excess
        return {
            "step": self.last,
            "value": None,
            "level": excess.level,
            "fallen": excess.drop,
            "risen": excess.rise,
            "error": excess.error,
            "samples": len(excess.ref),
        }
