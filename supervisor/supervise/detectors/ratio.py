"""Ratio: a short average of a metric over a long one.

Averages are exponential, by span (alpha = 2 / (span + 1)) and bias-corrected: written as a running
mean whose sample count saturates, n <- 1 + (1 - alpha) * n, m <- m + (x - m) / n, the first sample
counts as one sample, not as a long past.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import HAS_NOTE, REBASELINE, Note, Reading
from ..core.model.payload import Json, Payload
from ..core.model.values import Unit
from ._baseline import Baseline, FlaggedSamples, cut_lists_after, median_of_sorted
from ._watch import LEAST, NEVER, Memory, MetricDetector, check_bounds, explain_lacks

MARK_EVERY = 16  # known samples between two states kept for `rewind`
FEW = 3  # samples in `fast` at least, if it is in steps: one strange sample is no average
MARKS = 16  # states kept: 256 samples


@dataclass(frozen=True)
class Ratio(MetricDetector):
    """BREACH when the `fast` average is more than `gt` (less than `lt`) times the reference.

    The reference is the `slow` average, or the median of the `ref` samples before this one: give
    one of them. Samples that breach do not enter it; when `freeze` of the newest 2 * `slow` (or
    `ref`) samples breached, it starts again from the newest `freeze`, with a `rebaseline` note. It
    lasts until the ratio is past `clear`. With `precedent` a ratio of at most so many times the
    greatest step by which the reference was replaced before is OK: the next stage of a ramp.

    It answers after `min` samples, long before the reference is full: a ratio needs no scale.
    With `unit: steps` all are steps of the job, the median is over steps, and 12 samples (3 for
    `fast`) at least, or as many as asked. UNKNOWN before, for absent, NaN and negative samples, and
    while the reference is zero. `rewind` returns to a state at most 15 samples before the step,
    over 256 samples at most.

    Example:
        {kind: ratio, metric: update_norm, fast: 4, slow: 256, gt: 2.0, clear: 1.5}

    Blind to: anything slower than the reference, metrics that change sign, and the spread: a noisy
        metric crosses any fixed ratio (use `robust_z`). A learning-rate warmup looks like growth.
    Source: bias correction as in Adam, arXiv:1412.6980, section 3.
    """

    metric: str
    fast: int = 4  # span in steps; project default
    slow: int | None = None  # span in steps; 256 is usual here
    ref: int | None = None  # samples in the median's window
    gt: float | None = None
    lt: float | None = None
    clear: float | None = None  # a ratio too; None: the bound itself
    min_: int = 8  # samples; project default
    freeze: int = 64  # breaching samples that may be kept out; project default
    precedent: float | None = None  # times a step up that stayed; needs `gt` and `ref`
    unit: Unit = "rows"  # of these; steps: of the job, for a sampled metric, and needs `ref`

    def start(self) -> RatioWatch:
        return RatioWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_bounds({"gt": self.gt, "lt": self.lt}, self.clear)
        if (self.slow is None) == (self.ref is None):
            wrong.append(("slow", "give exactly one of `slow`, `ref`"))
        elif self.unit == "steps" and self.ref is None:
            wrong.append(("unit", "steps needs `ref`"))
        if self.precedent is not None and not 0.0 < self.precedent < math.inf:
            wrong.append(("precedent", f"must be a positive number, not {self.precedent}"))
        elif self.precedent is not None and (self.gt is None or self.ref is None):
            wrong.append(("precedent", "needs `gt` and `ref`"))
        if self.fast < 1:
            wrong.append(("fast", f"must be at least 1 step, not {self.fast}"))
        reference = self.slow or self.ref or 0
        name = "ref" if self.slow is None else "slow"
        if reference <= self.fast:
            wrong.append((name, f"must be longer than `fast` ({self.fast}), not {reference}"))
        for key, samples in (("min", self.min_), ("freeze", self.freeze)):
            if not 1 <= samples <= reference:
                wrong.append((key, f"must be 1 to `{name}` ({reference}), not {samples}"))
        return wrong


class RatioWatch(Memory):
    """Two averages, or one and a window.

    `fast_n` and `slow_n` are the effective numbers of samples, `marks` old states to go back to.
    `stages` are the steps at which the reference was replaced, `steps_up` by which ratio.
    """

    def __init__(self, spec: Ratio) -> None:
        self.spec = spec
        self.min_ = spec.min_
        self.upper = spec.gt is not None
        limit = spec.gt if spec.gt is not None else spec.lt
        self.bound = math.nan if limit is None else limit
        self.release = self.bound if spec.clear is None else spec.clear
        self.by_steps = spec.unit == "steps"
        self.least = min(spec.min_, LEAST) if self.by_steps else spec.min_
        self.fast_keep = 1.0 - 2.0 / (spec.fast + 1.0)
        self.keep_least = 1.0 - 2.0 / (min(spec.fast, FEW) + 1.0)
        self.slow_keep = 1.0 - 2.0 / ((spec.slow or 1) + 1.0)
        super().__init__()

    def reset(self) -> None:
        super().reset()
        spec = self.spec
        self.base = Baseline(spec.ref, spec.freeze, spec.unit) if spec.ref else None
        self.since = NEVER  # the step before the first known sample
        self.known = NEVER  # the newest known sample, or the step gone back to
        self.freeze = FlaggedSamples(2 * (self.spec.slow or 1), self.spec.freeze)
        self.marks: list[tuple[int, int, float, float, float, float]] = []
        self.stages: list[int] = []
        self.steps_up: list[float] = []
        self._restore((-1, 0, 0.0, 0.0, 0.0, 0.0))

    def _restore(self, mark: tuple[int, int, float, float, float, float]) -> None:
        _, self.count, self.fast, self.fast_n, self.slow, self.slow_n = mark
        self.freeze.clear()

    def forget_last(self) -> None:
        super().forget_last()
        self.firing = False
        self.now = self.reference = math.nan  # the last ratio, and its denominator

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if sample is None or not 0.0 <= sample < math.inf:
            return UNKNOWN
        keep = self.fast_keep
        if self.by_steps:
            keep = max(keep ** (step - self.known), self.keep_least) if self.known >= 0 else keep
            self.known = step
            if not self.count:
                self.since = step - 1
        fast_n = self.fast_n = 1.0 + keep * self.fast_n
        fast = self.fast = self.fast + (sample - self.fast) / fast_n
        slow, slow_n = self.slow, self.slow_n
        if self.base is None:
            slow_n = 1.0 + self.slow_keep * slow_n
            reference = slow = slow + (sample - slow) / slow_n
        else:
            base = self.base
            middle = base.middle_over_steps() if self.by_steps else base.middle()
            reference = sample if middle is None else middle
        count = self.count = self.count + 1
        code, breach = UNKNOWN, False
        ready = count > self.least and (not self.by_steps or step - self.since > self.min_)
        if ready and reference > 0.0:
            now = self.now = fast / reference
            self.reference = reference
            breach = now > self.bound if self.upper else now < self.bound
            is_news = breach and not self._has_precedent(now)
            self.raw = BREACH if is_news else OK
            if self.firing or is_news:
                is_held = now > self.release if self.upper else now < self.release
                self.firing = is_news or is_held
            code = BREACH if self.firing else OK
        if breach:
            code |= self._flag(sample, step)
        elif self.base is None:
            self.slow, self.slow_n = slow, slow_n
            if self.freeze.flags:
                self.freeze.add_and_check_limit(step, sample, False)
        else:
            self.base.accept(step, sample)
        if not count % MARK_EVERY:
            self._mark(step)
        return code

    def _has_precedent(self, ratio: float) -> bool:
        factor = self.spec.precedent
        return factor is not None and ratio <= factor * max(self.steps_up, default=0.0)

    def _flag(self, sample: float, step: int) -> int:
        """Keep the sample out of the reference; NOTE if the reference was replaced."""
        if self.base is not None:
            if not self.base.add_flagged(step, sample):
                return 0
            self.base.refit()
            level = median_of_sorted(self.base.ordered)
            if self.spec.precedent is not None:
                self.stages.append(step)
                self.steps_up.append(level / self.reference)
        else:
            if not self.freeze.add_and_check_limit(step, sample, True):
                return 0
            self.slow = self.slow_n = 0.0
            for _, value in self.freeze.drain():
                self.slow_n = 1.0 + self.slow_keep * self.slow_n
                self.slow += (value - self.slow) / self.slow_n
            level = self.slow
        metric, count = self.spec.metric, self.spec.freeze
        text = f"{metric}: {count} samples were flagged; "
        text += f"the new reference is the level of the newest, {level:.6g}"
        details: dict[str, Json] = {"metric": metric, "reference": level, "samples": count}
        self.pending_note = Note(REBASELINE, text, Payload({**details, "before": self.numbers()}))
        return HAS_NOTE

    def _mark(self, step: int) -> None:
        self.marks.append((step, self.count, self.fast, self.fast_n, self.slow, self.slow_n))
        if len(self.marks) > MARKS:
            del self.marks[0]

    def drop_after(self, step: int) -> None:
        while self.marks and self.marks[-1][0] > step:
            self.marks.pop()
        self._restore(self.marks[-1] if self.marks else (-1, 0, 0.0, 0.0, 0.0, 0.0))
        self.known = step
        cut_lists_after(step, self.stages, self.steps_up)
        if self.base is not None:
            self.base.rewind(step)

    def lacks(self, spacing: int) -> str:
        few = explain_lacks(self.count, self.least + 1, f"samples of {self.spec.metric}")
        if few or not self.by_steps:
            return few
        return explain_lacks(self.known - self.since, self.min_ + 1, f"steps of {self.spec.metric}")

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "value": self.value,
            "ratio": self.now if self.raw != UNKNOWN else None,
            "threshold": self.bound,
            "clear": self.release,
            "fast": self.fast,
            "reference": self.reference,
            "samples": self.count,
            "steps": list(self.base.steps() or ()) if self.base is not None else [],
        }
