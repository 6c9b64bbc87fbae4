"""Paired: consecutive evaluations of the same pinned input.

Most of the noise of an evaluation is its data. On the same data the difference of two evaluations
is a small number with a meaning, as long as nothing but the weights has changed in between.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
from ._baseline import cut_lists_after
from ._watch import NEVER, Debounced, check_quota, explain_lacks

KEPT = 64  # evaluations, and changes of the key, that `rewind` can drop


@dataclass(frozen=True)
class Paired(Detector):
    """BREACH when an evaluation rose by more than `gt` and `rel_gt`, or fell below `lt`.

    The difference is to the evaluation before. `rel_gt` is a share of the one before; where both
    are given, the rise must be beyond both. `lt` is negative: a sudden gain is a leak suspect.

    A step without a sample is a step without an evaluation: the reading stands until the next one,
    or for `stands` steps, after which it is UNKNOWN. `for` and `m_of_n` count evaluations. `key` is
    a metric that names the artefact, such as a hash: when it changes, what was before is not
    compared any more, and without a value of it nothing is. After a start or a change of the key
    the first evaluation has nothing before it, and the `settle` next ones are not judged: UNKNOWN,
    and so is NaN, which is not compared with either. `rewind` keeps the evaluations of before, 64
    at least.

    A rule over it should say `unknown: ignore`: a run that has not evaluated yet is not blind.

    Example:
        {kind: paired, metric: fixed_probe_loss, key: eval_artifact_hash, gt: 0.05, rel_gt: 0.01}

    Blind to: a slow rise, of which no two evaluations differ much (use `trend`), and to what is not
        in the pinned input.
    Source: the paired comparison of textbooks; metrics of pinned probes in LM evaluation harnesses;
        bounds depend on the input and have no default.
    """

    reads: ClassVar[str] = "metrics"

    metric: str
    key: str | None = None  # metric that names the pinned input
    gt: float | None = None  # units of the metric, above zero
    rel_gt: float | None = None  # share of the evaluation before, above zero
    lt: float | None = None  # units of the metric, below zero
    settle: int = 0  # differences that are not judged
    stands: int | None = None  # steps; None: until the next evaluation
    for_: int = 1  # evaluations in a row
    m_of_n: tuple[int, int] | None = None  # breaching evaluations among the newest n

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.key is None else (self.metric, self.key)

    def start(self) -> PairedWatch:
        return PairedWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_quota(self.for_, self.m_of_n)
        if self.gt is None and self.rel_gt is None and self.lt is None:
            wrong.append(("gt", "give at least one of `gt`, `rel_gt`, `lt`"))
        for name, limit in (("gt", self.gt), ("rel_gt", self.rel_gt)):
            if limit is not None and not 0.0 < limit < math.inf:
                wrong.append((name, f"must be above zero, not {limit}"))
        if self.lt is not None and not -math.inf < self.lt < 0.0:
            wrong.append(("lt", f"must be below zero, not {self.lt}"))
        if self.key == self.metric:
            wrong.append(("key", f"is `{self.metric}` itself"))
        if not 0 <= self.settle < KEPT:
            wrong.append(("settle", f"must be 0 to {KEPT - 1} evaluations, not {self.settle}"))
        if self.stands is not None and self.stands < 1:
            wrong.append(("stands", f"must be at least 1 step, not {self.stands}"))
        return wrong


class PairedWatch(Debounced):
    """Evaluations and changes of the key, ascending by step; `standing` is the reading since."""

    def __init__(self, spec: Paired) -> None:
        self.spec = spec
        super().__init__(spec.for_, spec.m_of_n)

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []
        self.key_steps: list[int] = []
        self.keys: list[float] = []

    def forget_last(self) -> None:
        super().forget_last()
        self.standing = UNKNOWN
        self.evaluated = NEVER  # step of the evaluation behind the standing reading
        self.before: float | None = None

    def feed(self, sample: Any, step: int) -> int:
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        value = sample[0]
        if self.spec.key is not None:
            self._check_key(sample[1], step)
        if value is None:
            stands = self.spec.stands
            if stands is not None and step - self.evaluated > stands:
                self.standing = UNKNOWN
            return self.standing
        self.value, self.before, self.evaluated = value, None, step
        self.standing = UNKNOWN
        if value - value != 0.0 or (self.spec.key is not None and not self.keys):
            return UNKNOWN
        reference = self._reference()
        self.steps.append(step)
        self.values.append(value)
        _trim(self.steps, self.values)
        if reference is None:
            return UNKNOWN
        self.before = reference
        breach = self._beyond(value - reference, reference)
        self.raw = BREACH if breach else OK
        self.standing = self.debounce(breach, False)
        return self.standing

    def _check_key(self, key: float | None, step: int) -> None:
        """Forget the last evaluation when the pinned input changed."""
        if key is None or key - key != 0.0 or (self.keys and key == self.keys[-1]):
            return
        self.key_steps.append(step)
        self.keys.append(key)
        _trim(self.key_steps, self.keys)
        self.forget_last()

    def _reference(self) -> float | None:
        """Return the evaluation to compare with, None when there are too few of this input."""
        since = self.key_steps[-1] if self.key_steps else 0
        count = len(self.steps) - bisect_left(self.steps, since)
        return self.values[-1] if count > self.spec.settle else None

    def _beyond(self, rise: float, reference: float) -> bool:
        spec = self.spec
        if spec.lt is not None and rise < spec.lt:
            return True
        if spec.gt is None and spec.rel_gt is None:
            return False
        return (spec.gt is None or rise > spec.gt) and (
            spec.rel_gt is None or rise > spec.rel_gt * abs(reference)
        )

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.values)
        cut_lists_after(step, self.key_steps, self.keys)

    def lacks(self, spacing: int) -> str:
        return explain_lacks(
            len(self.steps), self.spec.settle + 2, f"evaluations of {self.spec.metric}"
        )

    def numbers(self) -> Reading:
        spec, value, reference = self.spec, self.value, self.before
        rise = None if value is None or reference is None else value - reference
        bounds = {"gt": spec.gt, "rel_gt": spec.rel_gt, "lt": spec.lt}
        limits = {name: limit for name, limit in bounds.items() if limit is not None}
        return {
            "step": self.last,
            "value": value,
            "before": reference,
            "difference": rise,
            "share": rise / abs(reference) if rise is not None and reference else None,
            "threshold": next(iter(limits.values())),
            **limits,
            "evaluated": None if self.evaluated == NEVER else self.evaluated,
            "key": self.keys[-1] if self.keys else None,
            "evaluations": len(self.steps),
            **self.counts(),
        }


def _trim(steps: list[int], values: list[float]) -> None:
    if len(steps) > 2 * KEPT:
        del steps[:-KEPT]
        del values[:-KEPT]
