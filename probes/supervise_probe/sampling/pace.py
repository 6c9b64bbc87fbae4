"""Pace of a collector's costly values in short steps: every step, or every 4th, 8th, 16th.

What a collector costs and how long a step takes decide it. While anything looks unusual the value
is taken in every step again: the supervisor asked for denser samples, a command did, or the last
frame was far from the ones before it. The status reports the interval.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, List, Mapping

if TYPE_CHECKING:
    from ..runtime.reporter import Reporter

SPARSEST = 16  # steps; half of what the supervisor takes for a metric that went missing
LEAST = 4  # steps; a sample needs two passes where every step needs one, so 2 would save nothing
SAMPLES = 5  # whose median cost decides
ALARM_STEPS = 16  # for which an unusual frame makes samples dense
RATIO = 2.0  # of the update norm to its last sample; a learning rate that jumps shows in it
RATE_RATIO = 1.5  # of the learning rate to that of the step before
SPIKE = 3.0  # grad_spike_score
DEVIATIONS = 6.0  # of the loss from its mean, in mean absolute deviations
DECAY = 0.05  # of the mean loss and its deviation


class Pace:
    """The interval of one collector.

    Attributes:
        every: steps between two samples. due: whether the step under way is one of them.
        floor_ns: what the collector may cost per step in any case.

    Args:
        share: of the step time that the collector may cost. least: the shortest interval above 1.
    """

    __slots__ = ("_costs", "_least", "_reporter", "_share", "due", "every", "floor_ns")

    def __init__(
        self, reporter: Reporter, every: int, share: float, floor_ns: int, least: int = LEAST
    ) -> None:
        self._reporter = reporter
        self.every, self.due = every, every == 1
        self._share, self.floor_ns, self._least = share, floor_ns, least
        self._costs: List[int] = []

    def stretch(self) -> None:
        """Take samples half as often, or at the shortest interval above 1."""
        self._set(min(SPARSEST, max(self._least, 2 * self.every)))

    def weigh(self, cost_ns: int, step_ns: int) -> None:
        """A sample cost `cost_ns` of CPU time, in a step of `step_ns`: adjust the interval."""
        costs = self._costs
        costs.append(cost_ns)
        if len(costs) < SAMPLES:
            return
        cost = sorted(costs)[SAMPLES // 2]
        costs.clear()
        allowed = max(self._share * step_ns, self.floor_ns)
        if cost > allowed * self.every:
            self.stretch()
        elif self.every == self._least:
            if cost < allowed:
                self._set(1)
        elif 3 * cost < allowed * self.every:
            self._set(max(1, self.every // 2))

    def _set(self, every: int) -> None:
        if every != self.every:
            self.every = every
            self._costs.clear()
            self._reporter.status_changed()


class Unrest:
    """Whether a frame is far from the frames before it: a cheap look, no judgement."""

    __slots__ = ("_deviation", "_loss", "_rate", "_update")

    def __init__(self) -> None:
        self._loss = self._deviation = self._rate = self._update = 0.0

    def look(self, values: Mapping[str, float]) -> bool:
        """Take the values of one step; return whether any of them is unusual."""
        known = values.get
        unusual = known("nan_inf_events", 0.0) > 0.0 or known("grad_spike_score", 0.0) > SPIKE
        rate = known("learning_rate")
        if rate is not None:
            last, self._rate = self._rate, rate
            unusual = unusual or (last > 0.0 and not last / RATE_RATIO < rate < last * RATE_RATIO)
        update = known("update_norm")
        if update is not None:
            last, self._update = self._update, update
            unusual = unusual or (last > 0.0 and not last / RATIO < update < last * RATIO)
        loss = known("train_loss_raw")
        return self._far(loss) or unusual if loss is not None else unusual

    def _far(self, loss: float) -> bool:
        if not isfinite(loss):
            return True
        if not self._deviation:
            self._loss, self._deviation = loss, abs(loss) + 1e-9
            return False
        apart = loss - self._loss
        far = apart > DEVIATIONS * self._deviation
        self._loss += DECAY * apart
        self._deviation += DECAY * (abs(apart) - self._deviation)
        return far
