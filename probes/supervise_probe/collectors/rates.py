"""Learning rates: what was really used, and what the job itself had set.

Groups are counted flat over the optimizers, in the order in which they first stepped. Only the
first GROUPS have a metric: a job with hundreds of groups must not fill the frame.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Dict, List

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Step, Update

RATES_METRICS = (
    MetricSpec(
        "learning_rate",
        "1",
        "Rate of the first parameter group as used in this step: after drill and scale.",
        'optimizer.param_groups[0]["lr"] during the step',
    ),
    MetricSpec(
        "learning_rate.<i>",
        "1",
        "The same for group i, flat over optimizers in order of first step; absent past 16 groups.",
        'optimizer.param_groups[i]["lr"] during the step',
    ),
    MetricSpec(
        "learning_rate_scheduled",
        "1",
        "Rate of the first group as the job set it.",
        'optimizer.param_groups[0]["lr"] before the step',
    ),
    MetricSpec(
        "learning_rate_expected",
        "1",
        "Rate that the job's torch scheduler last gave the first group; absent until 8 steps in a "
        "row, a change of the rate among them, have shown that it decides.",
        "torch.optim.lr_scheduler: get_last_lr",
    ),
    MetricSpec(
        "learning_rate_initial",
        "1",
        "Rate that the first group's schedule starts from, which a scheduler or the job's own loop "
        "keeps in the group: who raises both means it.",
        'optimizer.param_groups[0]["initial_lr"]',
    ),
    MetricSpec(
        "lr_scale",
        "1",
        "The probe's multiplier: `lr_scale`, `hold_rate` and re-warm after a rollback, without "
        "drills.",
        "this project",
    ),
    MetricSpec(
        "lr_rewarm",
        "1",
        "The part of `lr_scale` that is the re-warm after a rollback or a relaunch; absent without "
        "one.",
        "this project",
    ),
    MetricSpec(
        "lr_hold",
        "1",
        "The part of `lr_scale` that is `hold_rate`, in the first group; absent without one.",
        "this project",
    ),
)

GROUPS = 16
AGREED = 8  # steps that show which scheduler decides; a warm-up may dampen what it says
CLOSE = 1e-6  # relative: rounding
NAMES = ("learning_rate", *(f"learning_rate.{index}" for index in range(1, GROUPS)))


class RatesCollector(Collector):
    """Learning rates: what was really used, and what the job itself had set.

    Reads the rates of each optimizer while they are in force.
    """

    METRICS = RATES_METRICS

    def __init__(self, context: ProbeContext, rate: LearningRate) -> None:
        super().__init__(context)
        self._rate = rate
        self._values: Dict[str, Number] = {}
        self._schedulers = context.registry.schedulers
        self._searched = -1
        self._own: List[weakref.ref[Any]] = []  # schedulers of the first optimizer
        self._agreed, self._moved, self._last = 0, False, 0.0

    def before_update(self, update: Update) -> None:
        for index, group in enumerate(update.optimizer.param_groups, update.known.first_group):
            rate = group.get("lr")
            if rate is None or index >= GROUPS:
                continue
            self._values[NAMES[index]] = rate if type(rate) is float else self._read(rate)
            if index:
                continue
            initial = group.get("initial_lr")
            if type(initial) is float:
                self._values["learning_rate_initial"] = initial
            rate = update.scheduled
            if rate is not None:
                self._values["learning_rate_scheduled"] = (
                    rate if type(rate) is float else self._read(rate)
                )
                if type(rate) is float:
                    self._compare(update.optimizer, rate)

    def _compare(self, optimizer: Any, rate: float) -> None:
        """See what the scheduler of the first optimizer has made of `rate`."""
        if self._schedulers.changes != self._searched:
            self._searched = self._schedulers.changes
            served = (
                (scheduler, getattr(scheduler, "optimizer", None)) for scheduler in self._schedulers
            )
            self._own = [
                weakref.ref(scheduler)
                for scheduler, served in served
                if optimizer in (served, getattr(served, "optimizer", None))
            ]
        if not self._own:
            return
        scheduled = [
            float(rates[0])
            for reference in self._own
            if (rates := getattr(reference(), "_last_lr", None))
        ]
        agrees = any(abs(value - rate) <= CLOSE * abs(rate) for value in scheduled)
        if agrees:
            self._agreed += 1
            self._moved = self._moved or (self._agreed > 1 and rate != self._last)
        elif self._agreed < AGREED or not self._moved:
            self._agreed, self._moved = 0, False
        if scheduled and self._agreed >= AGREED and self._moved:
            self._values["learning_rate_expected"] = rate if agrees else scheduled[-1]
        self._last = rate

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        values.update(self._values)
        self._values.clear()
        hold = self._rate.hold
        values["lr_scale"] = self._rate.factor() * (1.0 if hold is None else hold.used)
        if hold is not None:
            values["lr_hold"] = hold.used
        if self._rate.warming.moves:
            values["lr_rewarm"] = self._rate.warming.now

    def _read(self, rate: Any) -> Number:
        return self.scalars.value(rate) if isinstance(rate, self.torch.Tensor) else float(rate)
