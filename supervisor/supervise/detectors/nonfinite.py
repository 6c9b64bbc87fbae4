"""Nonfinite: NaN or infinity in a metric, or nothing at all where there was a number.

The only detector for which NaN is data; for all others it is UNKNOWN. Without `m_of_n` it keeps no
samples, so a repeated step id cannot hide a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import inf, isfinite
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
from ..core.model.values import Steps
from ._baseline import cut_lists_after, trim_window
from ._watch import NEVER, Debounced, Memory, check_quota

# Of `gap`, project defaults: samples that show a spacing, and how much longer than usual it may be.
FEWEST, NEWEST, LONGEST_SHARE = 32, 64, 8
FEWEST_TOGETHER = 2  # samples: in one step, turns may meet
LATELY = 32  # steps; twice the longest spacing of what the probe measures in some steps only


@dataclass(frozen=True)
class Nonfinite(Detector):
    """BREACH when any of `metrics` is NaN or infinite, on from the first step, without a baseline.

    With `m_of_n` it takes m such samples among the newest n. The first `startup` steps are not
    judged: a grad scaler overflows while it looks for its scale. Where any metric of `without` is
    present, or was in the 32 steps before, no value is a BREACH: that one tells more, and may come
    in some steps only.

    Absent metrics are left out; UNKNOWN when all of them are absent. With `gap` absence is what is
    judged, of one metric: a BREACH when it is absent for `gap` times its own usual spacing in
    steps, and an eighth of `gap` times the longest of the newest 64, after 32 samples. `without`
    may take turns with it, as other optimizers do: a step with any of them is no gap, unless they
    were in its own newest two steps, too, or it is absent for an eighth of `gap` times its longest
    absence in such a turn.

    Example:
        {kind: nonfinite, metrics: [train_loss_raw, grad_global_norm]}

    Blind to: values that are wrong but finite, and whatever the probe does not see: one bad weight
        shows up only when it reaches the loss or a gradient.
    Source: torch.amp.GradScaler's found_inf and Megatron-LM's check for NaN in the loss, which
        are on by default as well.
    """

    reads: ClassVar[str] = "metrics"

    metrics_: tuple[str, ...] = ("train_loss_raw", "grad_global_norm")  # both pass the host anyway
    m_of_n: tuple[int, int] | None = None  # samples that are not finite among the newest n
    startup: Steps = 0  # of the job, on from its first
    without: tuple[str, ...] = ()  # other metrics
    gap: int | None = None  # times the usual spacing of a metric

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.metrics_, *self.without)

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.metrics_

    @property
    def needs_all(self) -> bool:
        return False

    def start(self) -> NonfiniteWatch | GapWatch:
        return NonfiniteWatch(self) if self.gap is None else GapWatch(self, self.gap)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_quota(1, self.m_of_n)
        if not self.metrics_:
            wrong.append(("metrics", "names no metric"))
        if self.gap is not None and self.gap < LONGEST_SHARE:
            wrong.append(("gap", f"must be at least {LONGEST_SHARE}, not {self.gap}"))
        elif self.gap is not None and (len(self.metrics_) != 1 or self.m_of_n or self.startup):
            wrong.append(("gap", "is about one metric, without other keys but `without`"))
        if self.startup < 0:
            wrong.append(("startup", f"must be zero or more steps, not {self.startup}"))
        return wrong


class NonfiniteWatch(Debounced):
    """Keeps the last sample for its numbers.

    Attributes:
        first: the first step, where `startup` begins. present_at: the newest with one of `without`.
    """

    def __init__(self, spec: Nonfinite) -> None:
        self.spec = spec
        self.counted = spec.m_of_n is not None
        super().__init__(1, spec.m_of_n)

    def reset(self) -> None:
        super().reset()
        self.first = self.present_at = NEVER

    def forget_last(self) -> None:
        super().forget_last()
        self.sample: Sequence[float | None] = ()

    def feed(self, sample: Any, step: int) -> int:
        if self.counted and step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        self.sample = sample
        spec, metric_count = self.spec, len(self.spec.metrics_)
        if spec.without and any(value is not None for value in sample[metric_count:]):
            self.present_at = step
        if spec.startup:
            if self.first == NEVER:
                self.first = step
            if step < self.first + spec.startup:
                self.raw = OK
                return OK
        try:
            if sample and isfinite(sum(sample)):  # then all of them are
                self.raw = OK
                return self.debounce(False, False) if self.bits or self.firing else OK
        except TypeError:  # one of them is absent
            pass
        code = UNKNOWN
        for index, value in enumerate(sample):
            if value is None:
                continue
            if index >= metric_count:
                code = OK
                break
            if value - value != 0.0:  # NaN and both infinities
                code = BREACH
            elif code == UNKNOWN:
                code = OK
        if code == BREACH and self.present_at != NEVER and step - self.present_at <= LATELY:
            code = OK
        self.raw = code
        if code == UNKNOWN or not self.counted:
            return code
        return self.debounce(code == BREACH, False)

    def numbers(self) -> Reading:
        values = dict(zip(self.spec.metrics_, self.sample, strict=False))
        bad = [name for name, value in values.items() if value is not None and value - value != 0.0]
        counts = self.counts() if self.counted else {}
        return {"step": self.last, "values": values, "nonfinite": bad, **counts}


class GapWatch(Memory):
    """The steps of the samples that were there, or were others' turn, oldest first.

    Attributes:
        dropped: for each time that the run went back, the step that it went back to and the next
            one. Its steps are counted on: those between are no part of a gap.
        resumed: the step that was gone back to, NEVER when that is behind.
        own_steps: those of the metric itself; `together`: which had any of `without` beside it.
        turn_ends, turns: where its absences ended in which others took their turn, and how long
            they were, each longer than the one before.
        missing, limit: steps since its newest sample.
    """

    def __init__(self, spec: Nonfinite, gap: int) -> None:
        self.spec, self.gap = spec, gap
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.dropped: list[tuple[int, int]] = []
        self.resumed = NEVER
        self.own_steps: list[int] = []
        self.together: list[float] = []
        self.turn_ends: list[int] = []
        self.turns: list[float] = []

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps)
        cut_lists_after(step, self.own_steps, self.together)
        cut_lists_after(step, self.turn_ends, self.turns)
        oldest = min((step, *self.steps[:1], *self.own_steps[:1]))
        self.dropped = [span for span in self.dropped if oldest < span[1] <= step]
        self.resumed = step

    def _distance(self, earlier: int, later: int) -> int:
        """Return how many steps of the run lie between two of its numbers."""
        dropped = [after - back - 1 for back, after in self.dropped if earlier <= back < later]
        return later - earlier - sum(dropped)

    def forget_last(self) -> None:
        super().forget_last()
        self.missing = self.limit = 0

    def feed(self, sample: Any, step: int) -> int:
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last, self.missing, self.limit = step, 0, 0
        if self.resumed != NEVER:
            self.dropped.append((self.resumed, step))
            self.resumed = NEVER
        others = any(value is not None for value in sample[1:])
        if sample[0] is not None or (others and self._is_turn(step)):
            self._take_sample(step, own=sample[0] is not None, others=others)
            self.raw = OK
            return OK
        if len(self.steps) < FEWEST:
            return UNKNOWN
        missing = self._distance(self.steps[-1], step)
        self.missing = self._distance(self.own_steps[-1], step) if self.own_steps else missing
        if missing >= self.gap:
            spaces = sorted(starmap(self._distance, pairwise(self.steps[-NEWEST:])))
            longest = self.gap * spaces[-1] // LONGEST_SHARE
            limit = max(self.gap * spaces[len(spaces) // 2], longest)
            self.limit = limit + self.missing - missing  # others' turns are no gap
            if missing >= limit:
                self.raw = BREACH
        return self.raw

    def _is_turn(self, step: int) -> bool:
        """Return whether others are there instead of it, and not as long as if it had stopped."""
        newest = self.together[-FEWEST_TOGETHER:]
        if len(newest) == FEWEST_TOGETHER and all(newest):
            return False
        longest = self.turns[-1] if self.turns else inf
        most = self.gap * longest / LONGEST_SHARE
        return not self.own_steps or self._distance(self.own_steps[-1], step) < most

    def _take_sample(self, step: int, *, own: bool, others: bool) -> None:
        if own:
            if self.own_steps and self.steps and self.steps[-1] > self.own_steps[-1]:
                turn = self._distance(self.own_steps[-1], step)
                if not self.turns or turn > self.turns[-1]:
                    self.turn_ends.append(step)
                    self.turns.append(turn)
            self.own_steps.append(step)
            self.together.append(others)
            trim_window(NEWEST, self.own_steps, self.together)
        self.steps.append(step)
        trim_window(NEWEST, self.steps)

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "signal": self.spec.metrics_[0],
            "unit": "steps",
            "value": float(self.missing),
            "threshold": self.limit,
        }
