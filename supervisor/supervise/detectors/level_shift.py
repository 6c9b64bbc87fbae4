"""Level shift: the level after a spike is worse than the forecast from before it.

Most spikes recover; some leave lasting damage. A comparison with the level before would miss it, as
a falling loss hides it: the line through the blocks before the spike is extrapolated, and the
blocks after it are compared with that. The line is drawn over log(step + 1), in which a loss that
falls by a power law is nearly straight; over steps its own curve would look like damage. The
remaining curvature shows as a disagreement of the two halves of the line, and widens the interval.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import NOTE
from ._curve import cut
from ._theil_sen import HUGE, line, mean, student_quantile
from ._watch import NEVER, Memory, MetricDetector

GUARD = 8  # steps before the trigger that may belong to it already; project default
BLOCKS = 10  # of a window
FEWEST = 8  # blocks that hold samples, before and after
CONFIDENCE = 0.95  # one-sided

IDLE, SETTLING, GATHERING, SHIFTED = range(4)


@dataclass(frozen=True)
class LevelShift(MetricDetector):
    """BREACH when the metric stays above its own forecast by more than `margin` after a trigger.

    The trigger is a raw breach of the detector `after`, at step s. Before: the `window` steps that
    end 8 steps before s. After: the `window` steps from s + `settle` on; a further breach while
    settling starts it again, for `window` steps at most. Both are cut into 10 blocks. The forecast
    is the Theil-Sen line of the blocks before, over log(step + 1), and d = blocks after - forecast.

    BREACH if the 95 % lower bound of mean d is above 0 and mean d is above `margin`; OK if the
    upper bound is below `margin`; else the time after is doubled, once, and then it is left
    undecided with a `near_miss` note. The interval holds the scatter of d, the line's own
    uncertainty, and its bend: the slope of its second half less that of its first, times the
    distance of the forecast. A BREACH is tried again each `window` steps, until the level is back.

    UNKNOWN until it is decided, and while `after` or the sample is. `rewind` keeps the samples and
    drops a trigger.

    Example:
        {kind: level_shift, metric: train_loss_raw, after: chain, settle: 40, window: 100}

    Blind to: what happened without a trigger (use `trend`), scars below `margin`, and planned
        changes of data or schedule, which look the same.
    Source: the interval of a forecast, as in any textbook on regression; the rest are project
        defaults. On recorded byte-level runs of 0.5 M parameters they were never wrong at 450
        places of healthy ones, and separated lasting damage above 0.15 nats from spikes that
        recovered.
    """

    reads: ClassVar[str] = "metric+detector"

    metric: str
    after: str  # name of a detector
    settle: int = 40  # steps; project default
    window: int = 100  # steps; project default
    margin: float = 0.1  # units of the metric; project default, nats of train_loss

    @property
    def detectors(self) -> tuple[str, ...]:
        return (self.after,)

    def start(self) -> LevelShiftWatch:
        return LevelShiftWatch(self)

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if self.settle < 0:
            wrong.append(("settle", f"must be zero or more steps, not {self.settle}"))
        if self.window < 2 * BLOCKS:
            wrong.append(("window", f"must be at least {2 * BLOCKS} steps, not {self.window}"))
        if not 0.0 < self.margin < math.inf:
            wrong.append(("margin", f"must be above zero, not {self.margin}"))
        return wrong


class LevelShiftWatch(Memory):
    """All known samples of the last while, ascending by step, and the trigger that is followed up.

    `start_step` (included) and `end_step` (excluded) bound the evaluated steps after the trigger.
    """

    def __init__(self, spec: LevelShift) -> None:
        self.spec = spec
        self.keep = 4 * (spec.window + GUARD) + spec.settle  # samples; twice what is ever needed
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []

    def forget_last(self) -> None:
        super().forget_last()
        self.stage, self.trigger = IDLE, NEVER
        self.start_step = self.end_step = NEVER
        self.fit: tuple[float, ...] = ()
        self.found: dict[str, Any] = {}

    def feed(self, sample: Any, step: int) -> int:
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        value, trigger = sample
        if self.stage == IDLE:
            code: int = OK if trigger == OK else self._start(trigger, step)
        else:
            code = self._follow(trigger, step)
        if value is None or not abs(value) < HUGE:
            code = UNKNOWN | code & NOTE
        else:
            self.steps.append(step)
            self.values.append(value)
            if len(self.steps) > 2 * self.keep:
                del self.steps[: self.keep]
                del self.values[: self.keep]
        self.raw = code & ~NOTE
        return code

    def _start(self, trigger: int, step: int) -> int:
        """Fit the line to the blocks before a breach at `step`."""
        if trigger != BREACH:
            return UNKNOWN
        self.trigger = step
        self.found = {}
        before = step - GUARD
        at, means = self._blocks(before - self.spec.window, before)
        if len(at) < FEWEST:
            return self._undecided("too few samples before the trigger")
        slope, intercept = line(at, means)
        rest = [y - (intercept + slope * x) for x, y in zip(at, means, strict=True)]
        variance = mean([r * r for r in rest]) * len(rest) / (len(rest) - 2)
        centre = mean(at)
        spread = math.fsum([(x - centre) * (x - centre) for x in at])
        half = len(at) // 2
        bend = line(at[half:], means[half:])[0] - line(at[:half], means[:half])[0]
        self.fit = (slope, intercept, variance, centre, spread, float(len(at)), bend)
        self.stage = SETTLING
        self.start_step = step + self.spec.settle
        self.end_step = self.start_step + self.spec.window
        return UNKNOWN

    def _follow(self, trigger: int, step: int) -> int:
        """Follow up a trigger: settle, gather, and judge at the end."""
        if self.stage == SETTLING:
            if trigger == BREACH and step <= self.trigger + self.spec.window:
                self.start_step = step + self.spec.settle
                self.end_step = self.start_step + self.spec.window
            if step >= self.start_step:
                self.stage = GATHERING
        if step < self.end_step:
            return BREACH if self.stage == SHIFTED else UNKNOWN
        return self._judge(step)

    def _judge(self, step: int) -> int:
        """Compare the blocks after the trigger with the line of those before it."""
        at, means = self._blocks(self.start_step, self.end_step)
        verdict = UNKNOWN
        if len(at) >= FEWEST:
            verdict = self._verdict(at, means)
        shifted = self.stage == SHIFTED
        if verdict == OK:
            self.stage = IDLE
            return OK
        if verdict == BREACH or shifted:
            self.stage = SHIFTED
            self.start_step, self.end_step = step, step + self.spec.window
            return BREACH
        if self.end_step - self.start_step <= self.spec.window:
            self.end_step += self.spec.window
            return UNKNOWN
        return self._undecided("the level is neither within the margin nor clearly above it")

    def _verdict(self, at: list[float], means: list[float]) -> int:
        slope, intercept, variance, centre, spread, count, bend = self.fit
        above = [y - (intercept + slope * x) for x, y in zip(at, means, strict=True)]
        shift = mean(above)
        blocks = len(above)
        scatter = mean([(d - shift) * (d - shift) for d in above]) / (blocks - 1)
        ahead = mean(at) - centre
        own = variance * (1.0 / count + ahead * ahead / spread) + bend * bend * ahead * ahead
        error = math.sqrt(scatter + own)
        reach = student_quantile(CONFIDENCE, blocks - 1) * error
        self.found = {
            "shift": shift,
            "lower": shift - reach,
            "upper": shift + reach,
            "blocks": blocks,
            "steps": [self.start_step, self.end_step - 1],
        }
        if shift - reach > 0.0 and shift > self.spec.margin:
            return BREACH
        return OK if shift + reach < self.spec.margin else UNKNOWN

    def _undecided(self, why: str) -> int:
        self.stage = IDLE
        self.pending_note = {
            "kind": "near_miss",
            "reason": f"{self.spec.metric} after step {self.trigger}: no verdict, {why}",
            "trigger": self.trigger,
            **self.found,
        }
        return UNKNOWN | NOTE

    def _blocks(self, begin: int, end: int) -> tuple[list[float], list[float]]:
        """Return log(step + 1) and mean of the blocks with known samples in [begin, end)."""
        at, means = [], []
        width = (end - begin) / BLOCKS
        left = bisect_left(self.steps, begin)
        for block in range(1, BLOCKS + 1):
            right = bisect_left(self.steps, begin + width * block)
            if right > left:
                at.append(mean([math.log(step + 1.0) for step in self.steps[left:right]]))
                means.append(mean(self.values[left:right]))
            left = right
        return at, means

    def drop_after(self, step: int) -> None:
        cut(step, self.steps, self.values)

    def numbers(self) -> dict[str, Any]:
        return {
            "step": self.last,
            "value": self.found.get("shift"),
            "threshold": self.spec.margin,
            "trigger": self.trigger,
            "stage": ("idle", "settling", "gathering", "shifted")[self.stage],
            **self.found,
        }
