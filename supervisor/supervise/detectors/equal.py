"""Equal: a metric that must equal another number, exactly or to rounding.

Identities catch faults of configuration and resume earlier than any statistic: the learning rate
follows its schedule, a counter never decreases, a file keeps its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
from ..core.model.values import Unit
from ._baseline import cut_lists_after, trim_window
from ._watch import Debounced, check_quota

KEPT = 256  # changes of the value that `rewind` can drop
FLOAT32 = 2.0**-23  # the distance of 1 to the next float32
# Of `unlike_past`, project defaults. A value that repeats itself by chance twice in three samples
# does so for 32 once in 400 000, and had 4 repetitions in a row long before.
CHANGES, NEWEST, LONGER, LARGER = 32, 8, 8, 4
USUAL = 2  # of the newest 8, that stayed for too long: then such stays are no exception
FEWEST = 2  # values before one that stays; the first step of a training may read others beside it
UNPROVEN = 2  # of `longest`, times the longest, before the newest 8 show how much lengths differ


@dataclass(frozen=True)
class Equal(Detector):
    """BREACH when the metric is not what it must be: give exactly one of `to` and `with`.

    `to` is a number, `first` (the first known sample), or `previous` (the one before); `with` names
    another metric, of the same step. They are equal when they differ by no more than the larger of
    `tolerance` times the size of what is referred to, and `abs_tolerance`.

    `law` is about `first` and `previous`: `constant`, `nondecreasing` (no less than it), or
    `increasing` (above it); the tolerances soften each. `changing` turns `constant` around: with
    `for: 20` a metric that died and repeats its last value is a BREACH. With `unlike_past` it must
    also have moved before: 32 changes, no repetition in them longer than an eighth of this one in
    steps, so that neither rounding nor rare samples explain it; the newest 8 changes mostly at
    least 4 times the smallest, so that it did not converge; and a value of more than two digits,
    so that it is no limit. With `longest` it need only stay for longer than ever in the last 256
    changes: what takes four steps with each batch repeats them all. Where the newest 8 values
    mostly stayed, it must be longer by as much as all of them differed, and thrice as long while
    there are fewer than 8: of ten lengths by chance, one is the longest so far. A stay that was a
    BREACH is no measure for the next, unless it is one of two in 8 values. After `previous`
    the next sample is compared with this one, whatever it was: a counter that fell back is a BREACH
    for one sample.

    UNKNOWN for absent and NaN samples of either metric, and for the first sample where it is the
    reference. `rewind` gives the reference of then back, over 256 changes of the value.

    Example:
        {kind: equal, metric: learning_rate, with: learning_rate_expected, tolerance: 1.0e-6}

    Blind to: whether what is referred to is right. An identity is exact unless a tolerance says
        otherwise: give one to what is computed twice, in other orders or other precisions.
    Source: PyTorch's schedulers, whose rate follows from their step alone.
    """

    reads: ClassVar[str] = "metrics"

    metric: str
    to: float | Literal["first", "previous"] | None = None  # number in units of the metric
    with_: str | None = None  # another metric
    law: Literal["constant", "nondecreasing", "increasing", "changing"] = "constant"
    tolerance: float = 0.0  # share of what is referred to
    abs_tolerance: float = 0.0  # units of the metric
    unlike_past: bool = False  # with `changing`: never did it repeat itself for nearly so long
    longest: bool = False  # with `changing`: never did it repeat itself for as long
    for_: int = 1  # samples in a row
    m_of_n: tuple[int, int] | None = None  # breaching samples among the newest n
    unit: Unit = "rows"  # of `for` and `m_of_n`; steps: of the job, for a sampled metric

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.with_ is None else (self.metric, self.with_)

    def start(self) -> EqualWatch:
        return EqualWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = check_quota(self.for_, self.m_of_n)
        if (self.to is None) == (self.with_ is None):
            wrong.append(("to", "give exactly one of `to`, `with`"))
        elif self.with_ == self.metric:
            wrong.append(("with", f"is `{self.metric}` itself, which it always equals"))
        elif isinstance(self.to, float | int) and not math.isfinite(self.to):
            wrong.append(("to", f"must be a finite number, not {self.to}"))
        elif self.law != "constant" and self.to not in ("first", "previous"):
            wrong.append(("law", f"{self.law} needs `to: first` or `to: previous`"))
        elif self.law == "changing" and self.to == "first":
            wrong.append(("law", "changing needs `to: previous`"))
        if self.unlike_past and self.law != "changing":
            wrong.append(("unlike_past", "needs `law: changing`"))
        if self.longest and self.law != "changing":
            wrong.append(("longest", "needs `law: changing`"))
        for name, share in (("tolerance", self.tolerance), ("abs_tolerance", self.abs_tolerance)):
            if not 0.0 <= share < math.inf:
                wrong.append((name, f"must be zero or a positive number, not {share}"))
        return wrong


class EqualWatch(Debounced):
    """`steps` and `values` hold the samples that differ from the one before, as far as needed."""

    def __init__(self, spec: Equal) -> None:
        self.spec = spec
        self.law = ("constant", "nondecreasing", "increasing", "changing").index(spec.law)
        super().__init__(spec.for_, spec.m_of_n, spec.unit)

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []
        self.breaches: list[int] = []  # of `steps`: those of values that stayed for too long

    def forget_last(self) -> None:
        super().forget_last()
        self.reference: float | None = None  # what the last sample was compared with
        self.slack = 0.0

    def feed(self, sample: Any, step: int) -> int:
        value = self.value = sample[0]
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if self.by_steps:
            self.measure_sample_spacing(value, step)
        if value is None or value - value != 0.0:
            return UNKNOWN
        reference = self.reference = self._reference(sample, value, step)
        if reference is None or reference - reference != 0.0:
            return UNKNOWN
        spec = self.spec
        slack = spec.abs_tolerance
        if spec.tolerance:
            slack = max(spec.tolerance * abs(reference), slack)
        self.slack = slack
        above = value - reference
        if self.law in (0, 3):
            breach = (abs(above) > slack) == (self.law == 0)
        else:
            breach = above < -slack or (self.law == 2 and above == -slack)
        self.raw = BREACH if breach else OK
        code = self.debounce(breach, False) if breach or self.bits or self.firing else OK
        if code == BREACH and spec.longest:
            if not self._is_longest():
                return OK
            if len(self.steps) > 1 and self.breaches[-1:] != self.steps[-1:]:
                self.breaches.append(self.steps[-1])
                trim_window(KEPT, self.breaches)
        return OK if code == BREACH and spec.unlike_past and not self._is_unlike_past() else code

    def _is_longest(self) -> bool:
        """Whether the value stays for longer than any before it did, and not by chance.

        The first may have been there before the first sample.
        """
        if len(self.steps) <= FEWEST:
            return False
        starts = [self.steps[0] - 1, *self.steps[1:]]
        strange = {*self.breaches} if len(self._recent_breaches()) < USUAL else ()
        spans = [
            later - earlier
            for (earlier, later), start in zip(pairwise(starts), self.steps, strict=False)
            if start not in strange
        ]
        newest = spans[-NEWEST:]
        if not newest:
            return True
        longest = max(spans)
        margin = longest - min(spans) if len(newest) == NEWEST else UNPROVEN * longest
        mostly_stay = sorted(newest)[len(newest) // 2] > 1
        return self.last - self.steps[-1] >= longest + margin * mostly_stay

    def _recent_breaches(self) -> list[int]:
        """Return which of the newest values before this one stayed for too long."""
        return [start for start in self.steps[-NEWEST - 1 : -1] if start in self.breaches]

    def _is_unlike_past(self) -> bool:
        """Whether neither rounding, rare samples, convergence nor a limit explains a repetition."""
        steps, values, last_step = self.steps, self.values, self.last
        if len(steps) <= CHANGES or abs(float(f"{values[-1]:.1e}") - values[-1]) <= FLOAT32 * abs(
            values[-1]
        ):
            return False
        longest = max(later - earlier for earlier, later in pairwise(steps))
        moves = [abs(later - earlier) for earlier, later in pairwise(values)]
        moved = sorted(moves[-NEWEST:])[NEWEST // 2]
        return last_step - steps[-1] >= LONGER * longest and moved >= LARGER * min(moves)

    def _reference(self, sample: Any, value: float, step: int) -> float | None:
        """Return what `value` must equal; keep the value if it is a later reference."""
        to = self.spec.to
        if to is None:
            reference_sample: float | None = sample[1]
            return reference_sample
        if to == "previous":
            previous_value = self.values[-1] if self.values else None
            if value != previous_value:
                self.steps.append(step)
                self.values.append(value)
                if len(self.steps) > 2 * KEPT:
                    del self.steps[:-KEPT]
                    del self.values[:-KEPT]
            return previous_value
        if to != "first":
            return float(to)
        if self.values:
            return self.values[0]
        self.steps.append(step)
        self.values.append(value)
        return None

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.values)
        cut_lists_after(step, self.breaches)

    def numbers(self) -> Reading:
        is_known = self.value is not None and self.reference is not None
        return {
            "step": self.last,
            "value": self.value,
            "threshold": self.reference,
            "reference": self.spec.with_ or ("number" if self._fixed else self.spec.to),
            "difference": self.value - self.reference if is_known else None,
            "slack": self.slack,
            "law": self.spec.law,
            **self.counts(),
        }

    @property
    def _fixed(self) -> bool:
        return self.spec.to not in ("first", "previous", None)
