"""The safeguard `skip_outliers`: the update of a batch that is far out of its band is not made.

The decision is made in the process, right before the update, from a loss and a gradient norm that
the host has anyway. On an accelerator they are not there in time, and several ranks would have to
skip alike: then it does not act, and the status says so.

A loss out of its band cannot tell whether the batch is bad or the weights are. Two updates in a row
are skipped at once. Before a third, and then before every second one, the probe batch is asked:
where it has its loss of before, the batches are bad, and skipping goes on. Where it has not, or
nobody can say, the next updates are made as they come, until the loss is back in its band: to skip
with bad weights would keep them bad. So it is after `max` skips in `per` steps.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from math import isfinite
from operator import mul
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Deque,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from ..context import Refused
from .nonfinite import ARMED, MAX_SKIPS, SKIP_WINDOW, RateLimit

if TYPE_CHECKING:
    from ..torch_state.records import InForce

WINDOW, LEAST = 128, 48  # rows; OLMo-core's window, and as many as the detector kind `harm` waits
NEWEST = 32  # rows of the second median
KEPT = 2 * WINDOW  # rows, so that a rollback leaves enough of them
REFIT = 8  # rows between two fits
SPREADS, RISE, HARDER = 6.0, 0.15, 1.5
AGES, AGE = 16, 256  # records are kept for 16 ages of 256 rows
NORMAL = 1.4826  # of the median absolute deviation, for a normal distribution's standard deviation
FLOOR, TINY = 0.002, 1e-12  # share of the level, and units: spread of what hardly varies
SLOW = 1 / 16  # weight of a new spread in the usual one


class Limits(NamedTuple):
    """How far out a loss must be: in spreads, and as a share of its level."""

    spreads: float = SPREADS
    rise: float = RISE


class Band:
    """Level and spread of one series, and the greatest rise of its rows above it.

    Attributes:
        level, spread: 0 before there are enough rows.
    """

    def __init__(self) -> None:
        self._rows: Deque[Tuple[int, float]] = deque(maxlen=KEPT)
        self._records: Deque[float] = deque([0.0], maxlen=AGES)
        self._fit_in = self._age = 0
        self.level = self.spread = self._usual = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there are enough rows to judge one."""
        return len(self._rows) >= LEAST

    @property
    def record(self) -> float:
        """The greatest rise of late, in spreads."""
        return max(self._records)

    def rise(self, value: float) -> float:
        """Return how far a value is above the level, in spreads; 0 before that is known."""
        return (value - self.level) / self.spread if self.is_known else 0.0

    def add(self, step: int, value: float, *, usual: bool) -> None:
        """Add a row; what is not `usual` does not count for the record."""
        if usual:
            self._records[-1] = max(self._records[-1], self.rise(value))
            self._age += 1
            if self._age >= AGE:
                self._age = 0
                self._records.append(0.0)
        self._rows.append((step, value))
        self._fit_in -= 1
        if self.is_known and self._fit_in <= 0:
            self._fit()

    def back_to(self, step: int) -> None:
        """The weights are those behind `step` again: forget the rows since."""
        while self._rows and self._rows[-1][0] > step:
            self._rows.pop()
        if self.is_known:
            self._fit()

    def _fit(self) -> None:
        self._fit_in = REFIT
        rows = [value for _, value in self._rows][-WINDOW:]
        self.level = min(_median(rows), _median(rows[-NEWEST:]))
        spread = NORMAL * _median([abs(residual) for residual in _around_parabola(rows)])
        self._usual += (spread - self._usual) * (SLOW if self._usual else 1.0)
        self.spread = max(spread, self._usual, FLOOR * abs(self.level), TINY)


class OutlierRule:
    """The past of a job's losses and gradient norms."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.loss, self.norm = Band(), Band()

    def why_out(self, loss: float, norm: Optional[float], *, follows: bool = False) -> str:
        """Return why a batch is an outlier, "" when it is none or too little is known.

        Args:
            loss: finite. norm: of the gradient; None where it is unknown, else finite.
            follows: the batch before it was an outlier.
        """
        band, (spreads, rise) = self.loss, self._limits
        far = band.rise(loss)
        if far <= spreads / 2 or loss - band.level <= rise * abs(band.level) or far <= band.record:
            return ""
        reason = f"the loss is {loss:.4g}, {far:.1f} spreads above its level of {band.level:.4g}"
        if follows or (far > spreads and far > HARDER * band.record):
            return reason
        steep = self.norm.rise(math.log(norm)) if norm else 0.0
        if steep <= SPREADS or steep <= self.norm.record:
            return ""
        return f"{reason}, and the gradient norm {norm:.4g}, {steep:.1f} spreads above its own"

    def applied(self, step: int, loss: float, norm: Optional[float], *, usual: bool) -> None:
        """Learn from a batch whose update is made; `usual`: it is no outlier."""
        self.loss.add(step, loss, usual=usual)
        if norm:
            self.norm.add(step, math.log(norm), usual=usual)

    def back_to(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.loss.back_to(step)
        self.norm.back_to(step)


def _median(values: Sequence[float]) -> float:
    ascending = sorted(values)
    half = len(ascending) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2


def _around_parabola(rows: Sequence[float]) -> List[float]:
    """Return what a least-squares parabola leaves of evenly spaced rows."""
    line, curve, lines, curves = _axes(len(rows))
    mean = sum(rows) / len(rows)
    slope = sum(map(mul, line, rows)) / lines
    bend = sum(map(mul, curve, rows)) / curves
    return [row - mean - slope * t - bend * c for row, t, c in zip(rows, line, curve)]


@lru_cache(maxsize=2)
def _axes(count: int) -> Tuple[List[float], List[float], float, float]:
    """Return two orthogonal axes, a line and a parabola, and the sums of their squares."""
    line = [index - (count - 1) / 2 for index in range(count)]
    lines = sum(map(mul, line, line))
    curve = [t * t - lines / count for t in line]
    return line, curve, lines, sum(map(mul, curve, curve))


if TYPE_CHECKING:
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import InForce, Update

    Doubt = Callable[[int, float], str]

NAME = "skip_outliers"
MOST, PER = 32, 2000  # skips, steps: a bad source may last; project defaults
UNASKED = 2  # skips in a row for which nobody is asked
WITHIN = 1.1  # times the loss of before: the weights are good. As the runbooks' `check_weights`
ON_DEVICE = "the loss lives on a device, and would have to be waited for"
NO_LOSS = "no loss of the job is seen"


class SkipOutliers:
    """The order `{"max": 32, "per": 2000, "spreads": 6, "rise": 0.15}`.

    Attributes:
        state: for the status: `armed`, why it has stopped, or why it cannot act; "" without an
            order.
    """

    def __init__(self, context: ProbeContext, in_force: InForce, loss: LossCollector) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._in_force, self._loss = in_force, loss
        self._rule: Optional[OutlierRule] = None
        self.state = ""
        self._doubt: Doubt = lambda before_step, within: "there is no probe batch to ask"
        order: Optional[Mapping[str, Any]] = context.config.safeguards.get(NAME)
        if order is None:
            return
        limits = Limits(float(order.get("spreads", SPREADS)), float(order.get("rise", RISE)))
        self._rule = OutlierRule(limits)
        limit, per = int(order.get("max", MOST)), int(order.get("per", PER))
        self._limit, self._spent = RateLimit(limit, per), f"{limit} of {per} updates were skipped"
        self._judged = -1  # the newest step: it is judged once, for all its optimizers
        self._began = 0  # the first step of the outliers under way
        self._unasked = 0  # of them, skipped since the probe batch was asked
        in_force.outlier = 0.0
        self._set_state(ARMED)

    def connect(self, doubt: Doubt) -> None:
        """Ask `doubt(before_step, within)` why the weights are not good, "" if they are."""
        self._doubt = doubt

    @property
    def busy(self) -> bool:
        """Whether the end of a step counts."""
        return self._rule is not None

    def judge(self, update: Update) -> None:
        """Skip the update whose gradients are final, if its batch is an outlier."""
        rule, step = self._rule, self._position.step
        if rule is None or step == self._judged:
            return
        self._judged = step
        loss: Any = self._loss.total
        norm: Any = update.gradient_norm
        why_not = self._why_not(loss)
        if why_not:
            self.cannot(why_not)
            return
        if not isfinite(loss):  # another safeguard's
            return
        finite_norm = norm if type(norm) is float and norm > 0.0 and isfinite(norm) else None
        reason = rule.why_out(loss, finite_norm, follows=self._unasked > 0)
        if reason and self._skips(step):
            update.skip = "outlier"
            self._in_force.outlier = 1.0
            numbers = {"loss": loss, "gradient_norm": finite_norm}
            self._notice(f"skipped the update of step {step}: {reason}", **numbers)
            return
        rule.applied(step, loss, finite_norm, usual=not reason)
        if not reason:
            self._in_band()

    def _why_not(self, loss: Any) -> str:
        ranks = self._position.world_size
        if ranks > 1:
            return f"{ranks} ranks would have to skip the same steps"
        if loss is None:
            return NO_LOSS
        return "" if type(loss) is float else ON_DEVICE

    def _skips(self, step: int) -> bool:
        """Return whether the update of an outlier is skipped."""
        if self.state != ARMED:
            return False
        if not self._unasked:
            self._began = step
        if self._unasked >= UNASKED:
            doubt = self._doubt(self._began, WITHIN)
            if doubt:
                self._stop(f"no more update is skipped: {doubt}")
                return False
            self._unasked = 0
        if not self._limit.take():
            self._stop(self._spent)
            return False
        self._unasked += 1
        return True

    def _stop(self, reason: str) -> None:
        self._set_state(f"stopped: {reason}")
        self._notice(f"makes updates as they come: {reason}", stopped=reason)

    def _in_band(self) -> None:
        """A usual batch: whatever there was is over."""
        self._unasked = 0
        if self.state != ARMED and not self._limit.is_full:
            self._set_state(ARMED)

    def restored(self, step: int) -> None:
        """The weights are those behind `step` again."""
        if self._rule is not None:
            self._rule.back_to(step)
            self._judged, self._unasked = -1, 0

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the count."""
        if self._rule is not None:
            self._limit.step_ended()
            self._in_force.outlier = 0.0

    def cannot(self, reason: str) -> None:
        """Nothing can be judged, for that reason; "": it can again."""
        if self._rule is not None:
            self._set_state(f"cannot act: {reason}" if reason else ARMED)

    def _set_state(self, state: str) -> None:
        if state == self.state:
            return
        self.state = state
        self._in_force.guards[NAME] = state == ARMED
        self._reporter.status_changed()

    def _notice(self, event: str, **data: Any) -> None:
        self._in_force.acting = True
        self._reporter.notice("safeguard", f"{NAME} {event}", {"order": NAME, **data})


class Skip:
    """Counts commanded skips; those of safeguards have a limit of their own."""

    def __init__(self, in_force: InForce) -> None:
        self._in_force = in_force
        self._left = 0
        self._now = 0
        self._taken: Deque[int] = deque()  # skipped steps among the newest SKIP_WINDOW

    def do_skip_step(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Skip the next `count` steps; no more than `most` in any SKIP_WINDOW of them."""
        count, limit = max(0, int(args.get("count", 1))), int(args.get("most", MAX_SKIPS))
        spent = len(self._taken)
        if spent + count > limit:
            raise Refused(
                f"skip_step of {count}: {limit} updates may be skipped in {SKIP_WINDOW} steps, "
                f"and {spent} were"
            )
        self._left = count
        self._in_force.acting = True
        return {"will_skip": count}

    def take(self) -> str:
        """Return why the next step is skipped, "" when it is not."""
        if not self._left:
            return ""
        self._left -= 1
        self._taken.append(self._now)
        return "command"

    @property
    def busy(self) -> bool:
        """Whether steps are to be skipped, or recent skips still count."""
        return self._left > 0 or bool(self._taken)

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the count."""
        self._now += 1
        while self._taken and self._now - self._taken[0] >= SKIP_WINDOW:
            self._taken.popleft()
