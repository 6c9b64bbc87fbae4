"""Robust z: a sample far from the median of its own recent past, in units of its usual spread.

Median and MAD instead of mean and deviation: half the window may be garbage. The question "is it
further away than `gt` scales" is nearly always settled by two quartiles: the MAD is at least the
smaller of their distances to the median, as half the samples lie outside them. Only what may be a
breach pays for the formula itself, so the answer is always the formula's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import NOTE, Detector
from ._baseline import Baseline, median
from ._debounce import Debounced, check_quota, quota

NORMAL = 1.4826  # MAD of a normal sample times this is its standard deviation
A_LITTLE_LESS = 1.0 - 1e-9  # of the screen: rounding must never make it say no too early


@dataclass(frozen=True)
class RobustZ(Detector):
    """BREACH when a sample is more than `gt` scales from the median of the window before it.

    z = (x - median) / scale, scale = max(1.4826 * MAD, rel_floor * |median|, abs_floor), over the
    newest `window` samples that did not breach themselves; under `transform: log` all of it in
    natural logs, where rel_floor is a floor by itself. `side`: `high`, `low`, or `both`. It lasts
    until z is past `clear`. When `freeze` of the newest 2 * `window` samples breached, the newest
    `freeze` samples become the baseline, with a `rebaseline` note.

    UNKNOWN while the window holds fewer than `min` samples (the scale of one alone is its floor),
    for absent and NaN samples, and under `log` for samples that are not positive. `rewind` keeps
    the window of before.

    Example:
        {kind: robust_z, metric: update_norm, transform: log, gt: 8.0, clear: 4.0, m_of_n: [2, 3]}

    Blind to: drift slower than the window (use `trend`), the first `min` samples, NaN (use
        `nonfinite`), and whatever a rebaseline made usual.
    Source: Iglewicz and Hoaglin, 1993 (modified z-score); OLMo-core skips steps by 6 deviations
        over a window of 128.
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
    freeze: int = 64  # breaching samples that may be kept out of the window; project default

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def start(self) -> RobustZWatch:
        return RobustZWatch(self)

    def check(self) -> list[tuple[str, str]]:
        wrong = check_quota(self.for_, self.m_of_n)
        if not 0.0 < self.gt < math.inf:
            wrong.append(("gt", f"must be a positive number of scales, not {self.gt}"))
        if self.clear is not None and not 0.0 < self.clear < self.gt:
            wrong.append(("clear", f"must be above 0 and below `gt` ({self.gt}), not {self.clear}"))
        if not 1 <= self.min_ <= self.window:
            wrong.append(("min", f"must be 1 to `window` ({self.window}), not {self.min_}"))
        if not 1 <= self.freeze <= self.window:
            wrong.append(("freeze", f"must be 1 to `window` ({self.window}), not {self.freeze}"))
        for name, floor in (("rel_floor", self.rel_floor), ("abs_floor", self.abs_floor)):
            if not 0.0 <= floor < math.inf:
                wrong.append((name, f"must be zero or a positive number, not {floor}"))
        if self.abs_floor == 0.0:
            wrong.append(("abs_floor", "must not be 0: a series that is all zeros has no scale"))
        return wrong


class RobustZWatch(Debounced):
    """The window, and the last sample, which enters it only when the next one comes.

    So `numbers` shows the baseline by which the last sample was judged.
    """

    __slots__ = (
        "base",
        "due",
        "gt",
        "log",
        "min_",
        "note_",
        "release",
        "screen",
        "side",
        "spec",
        "value",
        "was",
        "x",
    )

    def __init__(self, spec: RobustZ) -> None:
        self.spec = spec
        self.gt = spec.gt
        self.release = spec.gt if spec.clear is None else spec.clear
        self.log = spec.transform == "log"
        self.min_ = spec.min_
        self.screen = spec.gt * NORMAL * A_LITTLE_LESS
        self.side = ("low", "both", "high").index(spec.side)
        super().__init__(*quota(spec.for_, spec.m_of_n))

    def reset(self) -> None:
        super().reset()
        self.base = Baseline(self.spec.window, self.spec.freeze)
        self._forget_last()

    def _forget_last(self) -> None:
        self.raw = UNKNOWN
        self.value: float | None = None
        self.x = 0.0
        self.due = -1  # step of the sample that is still to enter the window
        self.note_: dict[str, Any] = {}
        self.was: dict[str, Any] = {}  # the numbers of a sample that moved the baseline

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        base = self.base
        if self.due >= 0:
            base.accept(self.due, self.x)
            self.due = -1
        elif self.was:
            self.was = {}
        if sample is None or sample - sample != 0.0:
            return UNKNOWN
        if self.log:
            if sample <= 0.0:
                return UNKNOWN
            sample = math.log(sample)
        self.x = sample
        ordered = base.ordered
        count = len(ordered)
        if count < self.min_:
            self.due = step
            return UNKNOWN
        half = count >> 1
        middle = ordered[half] if count & 1 else 0.5 * ordered[half - 1] + 0.5 * ordered[half]
        distance = sample - middle
        if self.side < 2 and (self.side == 0 or distance < 0.0):
            distance = -distance
        quarter = (count - half) >> 1
        below, above = middle - ordered[quarter], ordered[quarter + half] - middle
        breach = distance > self.screen * (below if below < above else above)
        held = False
        if breach or self.firing:
            scale = self._scale(middle)
            breach = distance > self.gt * scale
            held = distance > self.release * scale
        if not breach:
            self.raw = OK
            self.due = step
            return self.settle(False, held) if self.bits or self.firing else OK
        self.raw = BREACH
        code = self.settle(True, True)
        if base.flag(step, sample):
            self._refit()
            code |= NOTE
        return code

    def _scale(self, middle: float) -> float:
        spec = self.spec
        floor = spec.rel_floor if self.log else spec.rel_floor * abs(middle)
        mad = median(sorted([abs(value - middle) for value in self.base.ordered]))
        return max(NORMAL * mad, floor, spec.abs_floor)

    def _refit(self) -> None:
        base = self.base
        self.was = self.numbers()
        base.refit()
        middle = median(base.ordered)
        level = math.exp(middle) if self.log else middle
        self.note_ = base.refitted(self.spec.metric, level, self.was)

    def note(self) -> dict[str, Any]:
        note, self.note_ = self.note_, {}
        return note

    def rewind(self, step: int) -> None:
        if 0 <= self.due <= step:
            self.base.accept(self.due, self.x)
        self.base.rewind(step)
        self.acquit()
        self._forget_last()
        self.last = min(self.last, step)

    def numbers(self) -> dict[str, Any]:
        if self.was:
            return self.was
        ordered = self.base.ordered
        middle = median(ordered) if ordered else math.nan
        scale = self._scale(middle) if ordered else math.nan
        known = self.raw != UNKNOWN
        return {
            "step": self.last,
            "value": self.value,
            "threshold": self.gt,
            "clear": self.release,
            "z": (self.x - middle) / scale if known else None,
            "median": math.exp(middle) if self.log and ordered else middle,
            "scale": scale,
            "transform": self.spec.transform,
            "samples": len(ordered),
            "steps": list(self.base.steps() or ()),
            "breaching": self.bits.bit_count(),
            "needed": self.need,
            "of": self.mask.bit_length(),
        }
