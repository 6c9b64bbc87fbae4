"""Harm: a loss above its own prediction for long enough, or by enough, that something is lost.

One loss far out says little, a few percent for hundreds of rows a lot. What counts is the sum of
the excess, in units of what the run's own noise would make of it: see `_excess`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import HAS_NOTE, REBASELINE, Note, Reading
from ..core.model.payload import Json, Payload
from ._excess import ESTABLISHED, LASTED, LASTING, LEARNING, SUSPECTED, ExcessWatch
from ._watch import NEVER, MetricDetector


@dataclass(frozen=True)
class Harm(MetricDetector):
    """BREACH when the summed excess over the prediction is more than noise, and while it lasts.

    The prediction is the lower one of the medians of the newest `window` and of the newest 32 quiet
    rows. An excess u, in spreads, adds u - k to a sum that never falls below zero, at most a third
    of its limit a row. k and the limit follow from the run's own variance, correlation and greatest
    sum that was over by itself, for one false alarm in `arl` rows; `level: suspected` takes one in
    1000. It must also be above `margin` times the prediction on average. Two rows in a row 8
    spreads, a quarter of the prediction and twice every quiet row of the last 4096 up will do.

    Rows of an excursion never enter their own reference. It is over when the sum is back at zero.
    After 512 rows it is the new level, with a `rebaseline` note that says what was lost. An excess
    below `margin`, or a sum that takes more than half of `window`, becomes the level unsaid.

    With `step` it is BREACH only of an excess that came within few rows. Whether the metric is an
    objective at all, which a generator's loss is not, is asked of the kind `descent`.

    UNKNOWN for the first three eighths of `window` rows, and for absent and NaN samples. `rewind`
    keeps what was before, and forgets an excursion.

    Example:
        {kind: harm, metric: train_loss_raw, level: established}

    Blind to: excesses below one spread of the noise or `margin`, the first rows, the steepest fall,
        rises slower than the window (use `trend`), and losses smoothed at 0.9 and
        more: there a step of 8 spreads takes 50 rows.
    Source: Page, 1954, with the exponential tail of excursions as limit; our own simulations and
        recordings, `benchmarks/harm.md`. Where a higher loss is not worse (GAN, RL) it means
        nothing.
    """

    metric: str
    level: Literal["suspected", "established"] = "established"
    arl: float = 1e6  # rows between two false alarms, as the noise promises; project default
    margin: float = 0.02  # share of the prediction that matters; project default
    window: int = 128  # rows
    step: bool = False  # only of an excess that came at once

    def start(self) -> HarmWatch:
        return HarmWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 1e3 <= self.arl <= 1e12:
            wrong.append(("arl", f"must be 1e3 to 1e12 rows, not {self.arl}"))
        if not 0.0 <= self.margin < math.inf:
            wrong.append(("margin", f"must be zero or a positive share, not {self.margin}"))
        if not 32 <= self.window <= 1024:
            wrong.append(("window", f"must be 32 to 1024 rows, not {self.window}"))
        return wrong


class HarmWatch(ExcessWatch):
    """`since` is the first step of the excursion under way, NEVER when there is none."""

    def __init__(self, spec: Harm) -> None:
        self.spec = spec
        self.least = SUSPECTED if spec.level == "suspected" else ESTABLISHED
        super().__init__(spec.arl, spec.margin, spec.window)

    def forget_last(self) -> None:
        super().forget_last()
        self.since = NEVER

    def feed(self, sample: Any, step: int) -> int:
        verdict = self.feed_statistic(sample, step)
        if verdict is None:
            return UNKNOWN
        series = self.series
        excess = series.excess
        if excess.rows <= 1:
            self.since = step if excess.rows else NEVER
        if verdict == LEARNING:
            return UNKNOWN
        counts = excess.is_step or not self.spec.step
        self.raw = BREACH if self.least <= verdict <= ESTABLISHED and counts else OK
        if verdict == LASTED:
            self.pending_note = self._lasted(series.lost + sample - series.level, series.level)
            return self.raw | HAS_NOTE
        return self.raw

    def _lasted(self, lost: float, level: float) -> Note:
        metric, now = self.spec.metric, self.excess.level
        text = f"{metric}: worse by {now - level:.4g} for {LASTING} rows, {lost:.4g} lost; "
        text += f"{now:.6g} is its level now"
        details: dict[str, Json] = {"metric": metric, "median": now, "lost": lost}
        return Note(REBASELINE, text, Payload({**details, "before": {"median": level}}))

    def lacks(self, spacing: int) -> str:
        return self.needs_rows(self.spec.metric)

    def numbers(self) -> Reading:
        excess = self.excess
        suspected = self.least == SUSPECTED
        return {
            "step": self.last,
            "value": self.value,
            "sum": excess.total,
            "threshold": excess.suspect if suspected else excess.limit,
            "since": self.since if excess.rows else None,
            "lost": excess.lost,
            "rows": excess.rows,
            "median": excess.level,
            "scale": excess.spread,
            "samples": len(excess.ref),
        }
