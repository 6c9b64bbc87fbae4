"""Comparison of a job that was started again with the steps that it makes again.

A job that goes on as before has the rate that its schedule had there, the same batches, and updates
of the usual size. Only what its own settings can explain is compared: the weights are judged by the
loss. A difference of the batches alone is no fault: many loaders are shuffled from_start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from .model.events import Frame
from .run_notices import (
    BatchesDiffer,
    BatchesRepeat,
    Difference,
    EvaluationDiffers,
    GradientDiffers,
    RateDiffers,
    TokensDiffer,
    UpdateDiffers,
)

ENOUGH = 20  # steps that are compared before a recovery is believed; project default
STARTS = 64  # first steps of the run whose rate and batch are remembered
SOON = 5  # steps within which a difference is reported
ROW = 3  # steps in a row that show a shift of the batches
CLOSE = 1e-3  # of loss and gradient norm on the same batch, as after any other start
# Project defaults. A schedule may be off by a step, and one bad sample is no evidence.
RATE, TWICE = 0.05, 2
FACTOR = 1.5  # of the update where the gradient is the same: then only the moments can differ
FAR = 2.0  # times the largest of the updates before, where the batch is another one
# Times the largest loss of the repeated steps, in the first one: then the weights are others, and
# sizes of gradients and updates tell nothing of what else was loaded. Project default.
LOST = 1.25
UPDATES, LEAST = 64, 8  # newest updates before, and how many say what is usual
# An evaluation varies by what one differed from the next before, and a little in any case.
EVALUATIONS, NEARLY = 8, 0.05
NAMES = (
    *("learning_rate_scheduled", "learning_rate", "batch_fingerprint", "train_loss_raw"),
    *("grad_global_norm", "update_norm", "tokens_per_update", "val_loss"),
)


class Row(NamedTuple):
    """One step; None where it was not measured."""

    scheduled: float | None
    rate: float | None
    batch: float | None
    loss: float | None
    norm: float | None
    update: float | None
    tokens: float | None
    evaluation: float | None

    @property
    def update_per_rate(self) -> float | None:
        """The size of the update per learning rate, which a re-warm does not change."""
        if not self.update or not self.rate or not isfinite(self.update):
            return None
        return self.update / self.rate


def compared_columns(names: Sequence[str]) -> tuple[int, ...]:
    """Return where a table has what is compared, -1 for nowhere."""
    return tuple(names.index(name) if name in names else -1 for name in NAMES)


def compared_row(frame: Frame, positions: Sequence[int]) -> Row:
    """Return the part of a frame that is compared."""
    values = frame.values
    return Row(*(values[i] if 0 <= i < len(values) else None for i in positions))


class Overlap:
    """The steps that a launch makes again, compared one by one.

    Attributes:
        compared: how many were. wanted: how many must be before a recovery is believed.
        differences: found so far, in order.
    """

    def __init__(
        self, first_step: int, attempt: int, rows_before: dict[int, Row], starts: dict[int, Row]
    ) -> None:
        """Begin with `first_step`, made again; `rows_before` are those of the attempt before."""
        self.first, self.attempt = first_step, attempt
        self._before, self._starts = rows_before, starts
        self._last = max(rows_before)
        past = [
            r.update_per_rate for step, r in rows_before.items() if r.update_per_rate is not None
        ]
        self._moved = past[-UPDATES:]
        evaluations = [r.evaluation for r in rows_before.values() if r.evaluation is not None]
        losses = [loss for loss in evaluations if isfinite(loss)][-EVALUATIONS:]
        self._evaluations = [abs(b - a) for a, b in pairwise(losses)]
        earlier_rows = {
            step: r for step, r in {**starts, **rows_before}.items() if step < first_step
        }
        self._batches = {r.batch: step for step, r in earlier_rows.items() if r.batch is not None}
        self.wanted = min(ENOUGH, self._last - first_step + 1)
        losses = [r.loss for s, r in rows_before.items() if s >= first_step and r.loss is not None]
        self._highest = max(filter(isfinite, losses), default=inf)
        self._other_weights = False
        self.compared = 0
        self.differences: list[Difference] = []
        self._rates: deque[tuple[int, float, float]] = deque(maxlen=TWICE)
        self._shifts: deque[tuple[int, int]] = deque(maxlen=ROW)
        self._others = self._same_batches = 0
        self._norms: list[float] = []
        self._tokens: list[tuple[float, float]] = []

    def compare_step(self, step: int, now: Row, *, compare_numbers: bool) -> list[Difference]:
        """Compare a step; return what is found to differ, each once.

        Args:
            compare_numbers: False: the step before was part of a trouble, so only batches are
                compared.
        """
        was = self._before.get(step)
        if was is None:
            return []
        self.compared += 1
        if self.compared == 1 and now.loss is not None:
            self._other_weights = now.loss - self._highest > (LOST - 1.0) * abs(self._highest)
        differences = [self._batch(step, was, now)]
        if compare_numbers:
            differences.append(self._rate(step, was, now))
            if not self._other_weights:
                differences += [self._update(step, was, now), self._gradient(was, now)]
            differences += [self._tokens_of(was, now), self._evaluation(step, was, now)]
        known = {type(difference) for difference in self.differences}
        fresh = [
            difference
            for difference in differences
            if difference is not None and type(difference) not in known
        ]
        self.differences += fresh
        return fresh

    def _rate(self, step: int, was: Row, now: Row) -> Difference | None:
        previous, current = was.scheduled, now.scheduled
        if previous is None or current is None or abs(current - previous) <= RATE * abs(previous):
            self._rates.clear()
            return None
        self._rates.append((step, previous, current))
        if len(self._rates) < TWICE:
            return None
        from_start = all(self._is_start(s - self.first, rate) for s, _, rate in self._rates)
        return RateDiffers(
            step=step,
            value=current,
            before=previous,
            is_from_start=from_start,
            behind=self.first if from_start else 0,
        )

    def _is_start(self, step: int, rate: float) -> bool:
        """Whether the run had that rate so many steps after its begin, or a step off."""
        near = (self._starts.get(step + off) for off in (-1, 0, 1))
        rates = [r.scheduled for r in near if r is not None and r.scheduled is not None]
        return any(abs(rate - rate_near) <= RATE * abs(rate_near) for rate_near in rates)

    def _update(self, step: int, was: Row, now: Row) -> Difference | None:
        if step >= self.first + SOON or now.update_per_rate is None or not self._moved:
            return None
        if _is_same(was, now):
            usual = was.update_per_rate
            if usual is None or 1 / FACTOR <= now.update_per_rate / usual <= FACTOR:
                return None
        else:
            usual = median(self._moved)
            low, high = min(self._moved) / FAR, max(self._moved) * FAR
            if len(self._moved) < LEAST or low <= now.update_per_rate <= high:
                return None
        return UpdateDiffers(step=step, value=now.update_per_rate, before=usual)

    def _batch(self, step: int, was: Row, now: Row) -> Difference | None:
        if now.batch is None or was.batch is None:
            return None
        if now.batch == was.batch:
            self._same_batches += 1
            self._shifts.clear()
            return None
        self._others += 1
        earlier = self._batches.get(now.batch)
        if earlier is None:
            self._shifts.clear()
        else:
            self._shifts.append((step, earlier))
        shifts = {step_index - earlier for step_index, earlier in self._shifts}
        if len(self._shifts) == ROW and len(shifts) == 1:
            (shift,) = shifts
            return BatchesRepeat(step=self.first, earlier=self.first - shift)
        if self._others == SOON and not self._same_batches:
            return BatchesDiffer(step=self.first)
        return None

    def _gradient(self, was: Row, now: Row) -> Difference | None:
        if was.batch is None or was.batch != now.batch or not was.norm or not now.norm:
            return None
        if not (isfinite(was.norm) and isfinite(now.norm)) or len(self._norms) >= SOON:
            return None
        self._norms.append(now.norm / was.norm)
        ratio = median(self._norms)
        if len(self._norms) < SOON or 1 / FAR <= ratio <= FAR:
            return None
        return GradientDiffers(value=now.norm, before=was.norm)

    def _tokens_of(self, was: Row, now: Row) -> Difference | None:
        if not was.tokens or not now.tokens or len(self._tokens) >= SOON:
            return None
        self._tokens.append((was.tokens, now.tokens))
        if len(self._tokens) < SOON or len(set(self._tokens)) > 1 or was.tokens == now.tokens:
            return None
        return TokensDiffer(value=now.tokens, before=was.tokens)

    def _evaluation(self, step: int, was: Row, now: Row) -> Difference | None:
        previous, current = was.evaluation, now.evaluation
        if previous is None or current is None or not isfinite(previous):
            return None
        if abs(current - previous) <= max(NEARLY * abs(previous), *self._evaluations, 0.0):
            return None
        return EvaluationDiffers(step=step, value=current, before=previous)


def _is_same(was: Row, now: Row) -> bool:
    """Whether both steps had the same gradient."""
    if was.batch is not None and now.batch is not None and was.batch != now.batch:
        return False
    pairs = ((was.loss, now.loss), (was.norm, now.norm))
    return all(a is not None and b is not None and abs(a - b) <= CLOSE * abs(a) for a, b in pairs)


@dataclass(slots=True)
class RepeatedSteps:
    """The steps of the leading rank that a launch may make again.

    Attributes:
        starts: the first rows of the run, by step. before: those of a process that has ended.
        overlap: the comparison of the newest launch with them, None without one.
    """

    starts: dict[int, Row] = field(default_factory=dict)
    before: dict[int, Row] = field(default_factory=dict)
    overlap: Overlap | None = None
