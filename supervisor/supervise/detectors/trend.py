"""Trend: a slow climb or fall that no single step shows.

A Theil-Sen line through the means of 16 blocks, evaluated once per block: in between the verdict
remains. A line through single steps would be overconfident, as their noise is autocorrelated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Reading
from ..core.model.values import Unit
from ._baseline import HUGE, exact_mean, lower_rank, pairwise_slopes
from ._watch import UNBEGUN, Memory, MetricDetector, check_bounds, explain_lacks

BLOCKS = 16
PAIRS = BLOCKS * (BLOCKS - 1) // 2  # slopes; enough for a bound at 95 %
LEAST = 2 * BLOCKS


@dataclass(frozen=True)
class Trend(MetricDetector):
    """BREACH when the slope per 1000 steps is beyond the bound with `confidence`, one-sided.

    Give one of `slope_per_1k_gt`, `slope_per_1k_lt`, in units of the metric. A block is a sixteenth
    of the `window`, in known samples; with `unit: steps` in steps, of one sample at least. UNKNOWN
    until the window was full once, and for absent and NaN samples, which belong to no block.
    `rewind` drops the blocks that end after the step and keeps a spare window of older ones.

    Example:
        {kind: trend, metric: train_loss_raw, window: 400, slope_per_1k_gt: 0.02, confidence: 0.95}

    Blind to: spikes (use `robust_z`), a climb shorter than half the window, and a climb that the
        usual fall of the loss hides.
    Source: Sen, 1968, JASA 63:1379-1389; block means against autocorrelation are a project default.
    """

    metric: str
    window: int = 400  # samples; project default
    unit: Unit = "rows"  # of `window`; steps: of the job, for a sampled metric
    slope_per_1k_gt: float | None = None  # units of the metric per 1000 steps
    slope_per_1k_lt: float | None = None
    confidence: float = 0.95  # one-sided

    def start(self) -> TrendWatch:
        return TrendWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_bounds(
            {"slope_per_1k_gt": self.slope_per_1k_gt, "slope_per_1k_lt": self.slope_per_1k_lt}
        )
        if self.window < LEAST:
            wrong.append(("window", f"must be at least {LEAST} samples, not {self.window}"))
        if not 0.5 < self.confidence < 1.0:
            wrong.append(("confidence", f"must be between 0.5 and 1, not {self.confidence}"))
        elif lower_rank(BLOCKS, self.confidence) < 0:
            wrong.append(("confidence", f"too high for {BLOCKS} blocks: {self.confidence}"))
        return wrong


class TrendWatch(Memory):
    """Blocks as parallel lists: centre and mean, and the first and last step of each."""

    def __init__(self, spec: Trend) -> None:
        self.spec = spec
        self.size = spec.window // BLOCKS
        self.by_steps = spec.unit == "steps"
        self.rank = lower_rank(BLOCKS, spec.confidence)
        self.upper = spec.slope_per_1k_gt is not None
        limit = spec.slope_per_1k_lt if spec.slope_per_1k_gt is None else spec.slope_per_1k_gt
        self.limit = math.nan if limit is None else limit
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.at: list[float] = []
        self.means: list[float] = []
        self.first: list[int] = []
        self.until: list[int] = []
        self.samples: list[int] = []
        self.block_start = UNBEGUN  # the step before the open block

    def forget_last(self) -> None:
        super().forget_last()
        self.open: list[float] = []  # samples of the block that is not full
        self.open_at: list[int] = []
        self.verdict = UNKNOWN

    def feed(self, sample: Any, step: int) -> int:
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if self.block_start == UNBEGUN:
            self.block_start = step - 1
        if sample is None or not abs(sample) < HUGE:
            self.raw = UNKNOWN
            return UNKNOWN
        self.open.append(sample)
        self.open_at.append(step)
        if (step - self.block_start if self.by_steps else len(self.open)) >= self.size:
            self._close()
        self.raw = self.verdict
        return self.verdict

    def _close(self) -> None:
        steps = self.open_at
        self.at.append(sum(steps) / len(steps))
        self.means.append(exact_mean(self.open))
        self.first.append(steps[0])
        self.until.append(steps[-1])
        self.samples.append(len(steps))
        self.block_start = steps[-1]
        self.open, self.open_at = [], []
        if len(self.at) > 2 * BLOCKS:
            for blocks in self._lists():
                del blocks[0]
        self._judge()

    def _lists(self) -> tuple[list[Any], ...]:
        return self.at, self.means, self.first, self.until, self.samples

    def _judge(self) -> None:
        if len(self.at) >= BLOCKS:
            _, slope_bound = self._slope_and_bound()
            beyond = slope_bound > self.limit if self.upper else slope_bound < self.limit
            self.verdict = BREACH if beyond else OK

    def _slope_and_bound(self) -> tuple[float, float]:
        """Return the median slope of the newest blocks and its confidence bound, per 1000 steps."""
        slope_values = pairwise_slopes(self.at[-BLOCKS:], self.means[-BLOCKS:])
        slope_bound = slope_values[self.rank if self.upper else -1 - self.rank]
        return 1000.0 * slope_values[PAIRS // 2], 1000.0 * slope_bound

    def rewind(self, step: int) -> None:
        super().rewind(step)
        self._judge()

    def drop_after(self, step: int) -> None:
        while self.until and self.until[-1] > step:
            for blocks in self._lists():
                del blocks[-1]
        self.block_start = step

    def lacks(self, spacing: int) -> str:
        return explain_lacks(len(self.at), BLOCKS, f"blocks of {self.spec.metric}")

    def numbers(self) -> Reading:
        blocks = min(len(self.at), BLOCKS)
        slope = slope_bound = math.nan
        if blocks == BLOCKS:
            slope, slope_bound = self._slope_and_bound()
        return {
            "step": self.last,
            "value": slope,
            "bound": slope_bound,
            "threshold": self.limit,
            "confidence": self.spec.confidence,
            "last_block": self.means[-1] if blocks else None,
            "blocks": blocks,
            "samples": sum(self.samples[-blocks:]) if blocks else 0,
            "steps": [self.first[-blocks], self.until[-1]] if blocks else [],
        }
