"""Safeguards that keep a bad step from the weights, inside the job, without the supervisor's delay.

`skip_nonfinite`: a step whose loss or gradient norm is NaN or Inf does not change the weights. It
acts only on values that are on the host; on an accelerator it cannot act, and the status says so.
With several ranks the loss of one, and the norm of a shard, tell only that rank: if it skipped
alone, the weights would part. So there the norm decides, where DistributedDataParallel has made
the gradients the same on all ranks. Where all are divided by the norm of all ranks' shards, as the
clips of FSDP do, a NaN in one has made each element of each shard NaN: that decides. Elsewhere it
cannot act, nor for an Inf in one shard, which makes zeros of the others.

`zero_nonfinite`: NaN and Inf in the gradients are set to zero, and the step is made with the rest.
It acts on an accelerator too, without waiting for it: one more pass over the gradients in each
step, and the frame shows where it fired. Where the job clips by norm, one NaN makes all gradients
NaN before that: such a step has no gradient at all, only momentum and decay. Under DDP the reduced
gradients are the same on all ranks, so all ranks act alike.

`skip_outliers`: the update of a batch that is far out of its normal range is not made.
The decision is made in the process, right before the update, from a loss and a gradient norm that
the host has anyway. On an accelerator they are not there in time, and several ranks would have to
skip alike: then it does not act, and the status says so.

A loss out of its normal range cannot tell whether the batch is bad or the weights are. Two updates
in a row are skipped at once. Before a third, and then before every second one, the probe batch is
asked: where it has its loss of before, the batches are bad, and skipping goes on. Where it has not,
or nobody can say, the next updates are made as they come, until the loss is back in its range: to
skip with bad weights would keep them bad. So it is after `max` skips in `per` steps.

Each at most `max` times in `per` steps, so that a run that stays non-finite does not idle on. Where
non-finite steps come apart, as from one bad sample among many, `skip_nonfinite` goes on beyond
that: the weights are whole, and one such update would end that for good. Then only more than `max`
in a row are made. Neither acts under a GradScaler, which skips such steps itself.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from math import isfinite
from operator import mul
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional, Sequence

from ..context import Refused
from ..runtime.scalars import Number
from ..torch_state.structure import Replicas

if TYPE_CHECKING:
    from ..collectors.gradient import GradientCollector
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import SafeguardState, Update

APART = (
    "each of {} ranks would decide alone: only under DistributedDataParallel, or behind a clip by "
    "the norm of all shards, all see the same"
)

MAX_SKIPS, SKIP_WINDOW = 3, 128  # skips without supervision, as in the list of actions
ON_DEVICE = "the values live on a device"


class RateLimit:
    """At most `most` times in `per` steps. A rollback does not reset the count."""

    def __init__(self, limit: int, per: int) -> None:
        self._per = max(1, per)
        self._taken: deque[int] = deque(maxlen=max(1, limit))
        self._now = 0

    @property
    def used(self) -> bool:
        """Whether anything was counted: before, no steps need counting."""
        return bool(self._taken)

    @property
    def is_full(self) -> bool:
        """Whether no use is left for now."""
        full = len(self._taken) == self._taken.maxlen
        return full and self._now - self._taken[0] < self._per

    def step_ended(self) -> None:
        """Count a step."""
        self._now += 1

    def take_if_allowed(self, *, beyond: bool = False) -> bool:
        """Count one use, also `beyond` the limit; False when that is reached."""
        if self.is_full and not beyond:
            return False
        self._taken.append(self._now)
        return True


class SkipNonfinite:
    """The order `{"max": 3, "per": 128}`, in steps; `max` in a row at any time.

    Attributes:
        why_not: why it cannot act, "" while it can.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._most_in_row = max(1, int(order.get("max", MAX_SKIPS)))
        self.limit = RateLimit(self._most_in_row, int(order.get("per", SKIP_WINDOW)))
        self.why_not = ""
        self._in_row = 0  # newest updates that were not finite, skipped or not

    def explain_skip(self, values: tuple[Optional[Number], Optional[Number]]) -> Optional[str]:
        """Return why the update must not happen, or None.

        Args:
            values: loss and gradient norm of this update; None where unknown.
        """
        loss, norm = values
        if type(loss) is float and type(norm) is float and isfinite(loss) and isfinite(norm):
            self.why_not, self._in_row = "", 0
            return None
        numbers = [v for v in values if isinstance(v, (int, float))]
        on_device = any(v is not None and not isinstance(v, (int, float)) for v in values)
        self.why_not = ON_DEVICE if on_device else ""
        if not numbers:
            return None
        if all(isfinite(v) for v in numbers):
            self._in_row = 0
            return None
        self._in_row += 1
        if not self.limit.take_if_allowed(beyond=self._in_row <= self._most_in_row):
            return None
        return "loss or gradient norm is not finite"


class ZeroNonfinite:
    """The order `{"max": 3, "per": 128}`, in steps.

    Attributes:
        why_not: why it cannot act, "" while it can.
    """

    def __init__(self, torch: Any, order: Mapping[str, Any]) -> None:
        self._torch = torch
        self._most, self._per = (
            int(order.get("max", MAX_SKIPS)),
            max(1, int(order.get("per", SKIP_WINDOW))),
        )
        self.limit = RateLimit(self._most, self._per)
        self.why_not = ""
        self._fired: Any = None  # on a device: the newest `per` steps in which it fired
        self._at = 0

    def step_ended(self) -> None:
        self.limit.step_ended()
        if self._fired is not None:
            self._at = (self._at + 1) % self._per
            self._fired[self._at] = False

    def zero_gradients_if_nonfinite(self, norm: Number, gradients: list[Any]) -> Number:
        """Set non-finite elements to zero, if `norm` is not finite and the limit allows it.

        Returns:
            1 when it fired, else 0; on a device as a tensor.
        """
        torch = self._torch
        if not isinstance(norm, torch.Tensor):
            if isfinite(norm) or not self.limit.take_if_allowed():
                return 0.0
            for gradient in gradients:
                gradient.masked_fill_(~torch.isfinite(gradient), 0.0)
            return 1.0
        if self._fired is None or self._fired.device != norm.device:
            self._fired = torch.zeros(self._per, dtype=torch.bool, device=norm.device)
        act = ~torch.isfinite(norm) & (self._fired.sum() < self._most)
        self._fired[self._at] |= act
        for gradient in gradients:
            here = act.to(gradient.device, non_blocking=True)
            gradient.masked_fill_(~torch.isfinite(gradient) & here, 0.0)
        return act.to(norm.dtype)


class NonfiniteGuards:
    """All orders of one process."""

    def __init__(
        self,
        context: ProbeContext,
        in_force: SafeguardState,
        gradient: GradientCollector,
        loss: LossCollector,
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._in_force, self._gradient, self._loss = in_force, gradient, loss
        orders = context.config.safeguards
        skip, zero = orders.get("skip_nonfinite"), orders.get("zero_nonfinite")
        self._skip = None if skip is None else SkipNonfinite(skip)
        self._zero = None if zero is None else ZeroNonfinite(context.torch, zero)
        self._replicas = Replicas(context.registry, context.position)
        self._scalars = context.scalars

    def repair_or_skip(self, update: Update) -> None:
        """Repair the final gradients of `update`, or skip the update."""
        if update.scaler is not None:
            return
        if self._zero is not None and self._zeroed(self._zero, update):
            return
        if self._skip is None:
            return
        norm, loss = update.gradient_norm, self._loss.total
        ranks = self._position.world_size
        if ranks > 1:
            loss = None  # of this rank alone
            if self._gradient.was_clipped_jointly(update.known):
                norm = self._joint_norm(update)
            elif not self._replicas.contain_all(update.known.ids):
                self._skip.why_not = APART.format(ranks)
                return
        reason = self._skip.explain_skip((loss, norm))
        if reason:
            self._in_force.acting = True
            update.skip = "safeguard"
            self._reporter.notice(
                "safeguard",
                f"skip_nonfinite skipped the update of step {self._position.step}: {reason}",
                {"order": "skip_nonfinite", "loss": str(loss), "gradient_norm": str(norm)},
            )

    def _joint_norm(self, update: Update) -> Optional[Number]:
        """Return NaN where the clip by the norm of all shards has left nothing else, else 0."""
        grads = (getattr(p.grad, "_local_tensor", p.grad) for p in update.params)
        gradient = next((grad for grad in grads if grad.numel()), None)
        if gradient is None:
            return 0.0
        element = self._scalars.value(gradient[(0,) * gradient.dim()])
        if not isinstance(element, float):
            return element
        return element if element != element and bool(gradient.isnan().all()) else 0.0

    def _zeroed(self, order: ZeroNonfinite, update: Update) -> bool:
        norm = update.gradient_norm
        if norm is None:
            order.why_not = "the gradient norm is not measured"
            return False
        order.why_not = ""
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in update.params]
        zeroed = order.zero_gradients_if_nonfinite(
            norm, [g._values() if g.is_sparse else g for g in grads]
        )
        zeroed_before = self._in_force.zeroed
        self._in_force.zeroed = zeroed if zeroed_before is None else zeroed_before + zeroed
        if not isinstance(zeroed, float) or not zeroed:
            return False
        self._reporter.notice(
            "safeguard",
            f"zero_nonfinite set the non-finite gradients of step {self._position.step} to zero",
            {"order": "zero_nonfinite", "gradient_norm": str(norm)},
        )
        return True

    @property
    def busy(self) -> bool:
        """Whether the end of a step counts for an order."""
        return self._zero is not None or (self._skip is not None and self._skip.limit.used)

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the counts."""
        self._in_force.zeroed = None
        if self._skip is not None:
            self._skip.limit.step_ended()
        if self._zero is not None:
            self._zero.step_ended()

    def cannot(self, reason: str) -> None:
        """Mark the orders as unable to act, for that reason; "" undoes it."""
        for order in (self._skip, self._zero):
            if order is not None:
                order.why_not = reason

    def unavailable(self) -> dict[str, str]:
        """Return why orders cannot act, by name."""
        named = {"skip_nonfinite": self._skip, "zero_nonfinite": self._zero}
        return {name: order.why_not for name, order in named.items() if order is not None}


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
        self._rows: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._records: deque[float] = deque([0.0], maxlen=AGES)
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

    def forget_rows_after(self, step: int) -> None:
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

    def explain_outlier(self, loss: float, norm: Optional[float], *, follows: bool = False) -> str:
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

    def forget_rows_after(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.loss.forget_rows_after(step)
        self.norm.forget_rows_after(step)


def _median(values: Sequence[float]) -> float:
    ascending = sorted(values)
    half = len(ascending) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2


def _around_parabola(rows: Sequence[float]) -> list[float]:
    """Return what a least-squares parabola leaves of evenly spaced rows."""
    line, curve, lines, curves = _axes(len(rows))
    mean = sum(rows) / len(rows)
    slope = sum(map(mul, line, rows)) / lines
    bend = sum(map(mul, curve, rows)) / curves
    return [row - mean - slope * t - bend * c for row, t, c in zip(rows, line, curve)]


@lru_cache(maxsize=2)
def _axes(count: int) -> tuple[list[float], list[float], float, float]:
    """Return two orthogonal axes, a line and a parabola, and the sums of their squares."""
    line = [index - (count - 1) / 2 for index in range(count)]
    lines = sum(map(mul, line, line))
    curve = [t * t - lines / count for t in line]
    return line, curve, lines, sum(map(mul, curve, curve))


if TYPE_CHECKING:
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import SafeguardState, Update

    Doubt = Callable[[int, float], str]

NAME = "skip_outliers"
MOST, PER = 32, 2000  # skips, steps: a bad source may last; project defaults
UNASKED = 2  # skips in a row for which nobody is asked
WITHIN = 1.1  # times the loss of before: the weights are good. As the runbooks' `check_weights`
LOSS_ON_DEVICE = "the loss lives on a device, and would have to be waited for"
NO_LOSS = "no loss of the job is seen"


class SkipOutliers:
    """The order `{"max": 32, "per": 2000, "spreads": 6, "rise": 0.15}`.

    Attributes:
        why_not: why it has stopped, or cannot act; "" while it can, or without an order.
    """

    def __init__(
        self, context: ProbeContext, in_force: SafeguardState, loss: LossCollector
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._in_force, self._loss = in_force, loss
        self._rule: Optional[OutlierRule] = None
        self.why_not = ""
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
        in_force.guards[NAME] = True

    def connect(self, doubt: Doubt) -> None:
        """Ask `doubt(before_step, within)` why the weights are not good, "" if they are."""
        self._doubt = doubt

    @property
    def busy(self) -> bool:
        """Whether the end of a step counts."""
        return self._rule is not None

    def skip_if_outlier(self, update: Update) -> None:
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
        reason = rule.explain_outlier(loss, finite_norm, follows=self._unasked > 0)
        if reason and self._decide_skip(step):
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
        return "" if type(loss) is float else LOSS_ON_DEVICE

    def _decide_skip(self, step: int) -> bool:
        """Return whether the update of an outlier is skipped."""
        if self.why_not:
            return False
        if not self._unasked:
            self._began = step
        if self._unasked >= UNASKED:
            doubt = self._doubt(self._began, WITHIN)
            if doubt:
                self._stop(f"no more update is skipped: {doubt}")
                return False
            self._unasked = 0
        if not self._limit.take_if_allowed():
            self._stop(self._spent)
            return False
        self._unasked += 1
        return True

    def _stop(self, reason: str) -> None:
        self._set_reason(reason)
        self._notice(f"makes updates as they come: {reason}", stopped=reason)

    def _in_band(self) -> None:
        """A usual batch: whatever there was is over."""
        self._unasked = 0
        if not self._limit.is_full:
            self._set_reason("")

    def on_rollback(self, step: int) -> None:
        """The weights are those behind `step` again."""
        if self._rule is not None:
            self._rule.forget_rows_after(step)
            self._judged, self._unasked = -1, 0

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the count."""
        if self._rule is not None:
            self._limit.step_ended()
            self._in_force.outlier = 0.0

    def cannot(self, reason: str) -> None:
        """Nothing can be judged, for that reason; "": it can again."""
        if self._rule is not None:
            self._set_reason(reason)

    def _set_reason(self, reason: str) -> None:
        if reason == self.why_not:
            return
        self.why_not, self._in_force.guards[NAME] = reason, not reason
        self._reporter.status_changed()

    def _notice(self, event: str, **data: Any) -> None:
        self._in_force.acting = True
        self._reporter.notice("safeguard", f"{NAME} {event}", {"order": NAME, **data})


class CommandedSkips:
    """Counts commanded skips; those of safeguards have a limit of their own."""

    def __init__(self, in_force: SafeguardState) -> None:
        self._in_force = in_force
        self._left = 0
        self._now = 0
        self._taken: deque[int] = deque()  # skipped steps among the newest SKIP_WINDOW

    def do_skip_step(self, args: dict[str, Any]) -> dict[str, Any]:
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

    def consume_skipped_step(self) -> str:
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
