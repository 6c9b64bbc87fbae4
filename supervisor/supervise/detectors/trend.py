"""Trend: a slow climb or fall that no single step shows.

A Theil-Sen line through the means of 16 blocks, looked at once per block: between two looks the
verdict stands. A straight line through single steps would believe itself, as their noise remembers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector
from ._debounce import check_bounds
from ._memory import Memory
from ._theil_sen import HUGE, lower_rank, mean, slopes

BLOCKS = 16
PAIRS = BLOCKS * (BLOCKS - 1) // 2  # slopes; enough for a bound at 95 %
LEAST = 2 * BLOCKS


@dataclass(frozen=True)
class Trend(Detector):
    """BREACH when the slope per 1000 steps is beyond the bound with `confidence`, one-sided.

    Give one of `slope_per_1k_gt`, `slope_per_1k_lt`, in units of the metric. A block is a sixteenth
    of the `window`, in known samples. UNKNOWN until the window was full once, and for absent and
    NaN samples, which belong to no block. `rewind` drops the blocks that end after the step and
    keeps a spare window of older ones.

    Example:
        {kind: trend, metric: train_loss_raw, window: 400, slope_per_1k_gt: 0.02, confidence: 0.95}

    Blind to: spikes (use `robust_z`), a climb shorter than half the window, and a climb that the
        usual fall of the loss hides.
    Source: Sen, 1968, JASA 63:1379-1389; block means against autocorrelation are a project default.
    """

    metric: str
    window: int = 400  # samples; project default
    slope_per_1k_gt: float | None = None  # units of the metric per 1000 steps
    slope_per_1k_lt: float | None = None
    confidence: float = 0.95  # one-sided

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def start(self) -> TrendWatch:
        return TrendWatch(self)

    def check(self) -> list[tuple[str, str]]:
        wrong = check_bounds(
            {"slope_per_1k_gt": self.slope_per_1k_gt, "slope_per_1k_lt": self.slope_per_1k_lt}
        )
        if self.window < LEAST:
            wrong.append(("window", f"must be at least {LEAST} samples, not {self.window}"))
        if not 0.5 < self.confidence < 1.0:
            wrong.append(("confidence", f"must be between 0.5 and 1, not {self.confidence}"))
        elif lower_rank(BLOCKS, self.confidence) < 0:
            wrong.append(("confidence", f"{BLOCKS} blocks cannot be that sure: {self.confidence}"))
        return wrong


class TrendWatch(Memory):
    """Blocks as parallel lists: centre and mean, and the first and last step of each."""

    __slots__ = (
        "at",
        "beyond",
        "first",
        "limit",
        "means",
        "open",
        "open_at",
        "rank",
        "size",
        "spec",
        "until",
        "upper",
        "verdict",
    )

    def __init__(self, spec: Trend) -> None:
        self.spec = spec
        self.size = spec.window // BLOCKS
        self.rank = lower_rank(BLOCKS, spec.confidence)
        self.upper = spec.slope_per_1k_gt is not None
        bound = spec.slope_per_1k_lt if spec.slope_per_1k_gt is None else spec.slope_per_1k_gt
        self.limit = math.nan if bound is None else bound
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.at: list[float] = []
        self.means: list[float] = []
        self.first: list[int] = []
        self.until: list[int] = []
        self.beyond = 0  # slopes between the newest blocks that are beyond the limit
        self._forget_verdict()

    def _forget_verdict(self) -> None:
        self.open: list[float] = []  # samples of the block that is not full
        self.open_at: list[int] = []
        self.verdict = self.raw = UNKNOWN

    def feed(self, sample: Any, step: int) -> int:
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if sample is None or not abs(sample) < HUGE:
            self.raw = UNKNOWN
            return UNKNOWN
        self.open.append(sample)
        self.open_at.append(step)
        if len(self.open) >= self.size:
            self._close()
        self.raw = self.verdict
        return self.verdict

    def _close(self) -> None:
        steps = self.open_at
        self.at.append(sum(steps) / len(steps))
        self.means.append(mean(self.open))
        self.first.append(steps[0])
        self.until.append(steps[-1])
        self.open, self.open_at = [], []
        if self.beyond:  # those of the block that leaves
            self.beyond -= self._slopes_beyond(-1 - BLOCKS, -BLOCKS)
        self.beyond += self._slopes_beyond(-1, -BLOCKS)
        if len(self.at) > 2 * BLOCKS:
            for blocks in (self.at, self.means, self.first, self.until):
                del blocks[0]
        self._judge()

    def _slopes_beyond(self, block: int, begin: int, end: int = -1) -> int:
        """Count the slopes beyond the limit from a block to those in [begin, end)."""
        if len(self.at) < -block:
            return 0
        x, y, limit = self.at[block], self.means[block], self.limit
        others = zip(self.at[begin:end], self.means[begin:end], strict=True)
        if self.upper:
            return len([1 for at, mean in others if 1000.0 * ((mean - y) / (at - x)) > limit])
        return len([1 for at, mean in others if 1000.0 * ((mean - y) / (at - x)) < limit])

    def _judge(self) -> None:
        """The bound is the slope of a rank: it is beyond the limit when enough slopes are."""
        if len(self.at) >= BLOCKS:
            self.verdict = BREACH if self.beyond >= PAIRS - self.rank else OK

    def rewind(self, step: int) -> None:
        while self.until and self.until[-1] > step:
            for blocks in (self.at, self.means, self.first, self.until):
                del blocks[-1]
        self._forget_verdict()
        newest = range(-min(len(self.at), BLOCKS), 0)
        self.beyond = sum(self._slopes_beyond(block, newest[0], block) for block in newest)
        self._judge()
        self.last = min(self.last, step)

    def numbers(self) -> dict[str, Any]:
        blocks = min(len(self.at), BLOCKS)
        slope = bound = math.nan
        if blocks == BLOCKS:
            found = slopes(self.at[-BLOCKS:], self.means[-BLOCKS:])
            slope = 1000.0 * found[PAIRS // 2]
            bound = 1000.0 * found[self.rank if self.upper else -1 - self.rank]
        return {
            "step": self.last,
            "value": slope,
            "bound": bound,
            "threshold": self.limit,
            "confidence": self.spec.confidence,
            "last_block": self.means[-1] if blocks else None,
            "blocks": blocks,
            "samples": blocks * self.size,
            "steps": [self.first[-blocks], self.until[-1]] if blocks else [],
        }
