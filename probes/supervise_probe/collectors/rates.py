"""Learning rates: what was really used, and what the job itself had set.

Groups are counted flat over the optimizers, in the order in which they first stepped. Only the
first GROUPS have a metric: a job with hundreds of groups must not fill the frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Step, Update

METRICS = (
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
        "lr_scale",
        "1",
        "The probe's multiplier: `lr_scale` and re-warm after a rollback, without drills.",
        "this project",
    ),
    MetricSpec(
        "lr_rewarm",
        "1",
        "The part of `lr_scale` that is the re-warm after a rollback or a relaunch; absent without "
        "one.",
        "this project",
    ),
)

GROUPS = 16
NAMES = ("learning_rate", *(f"learning_rate.{index}" for index in range(1, GROUPS)))


class Collector(Base):
    """Reads the rates of each optimizer while they are in force."""

    def __init__(self, context: ProbeContext, rate: LearningRate) -> None:
        super().__init__(context)
        self._rate = rate
        self._values: Dict[str, Number] = {}

    def before_update(self, update: Update) -> None:
        for index, group in enumerate(update.optimizer.param_groups, update.known.first_group):
            rate = group.get("lr")
            if rate is None or index >= GROUPS:
                continue
            self._values[NAMES[index]] = rate if type(rate) is float else self._read(rate)
            if index == 0 and update.scheduled is not None:
                rate = update.scheduled
                self._values["learning_rate_scheduled"] = (
                    rate if type(rate) is float else self._read(rate)
                )

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        values.update(self._values)
        self._values.clear()
        values["lr_scale"] = self._rate.factor()
        if self._rate.warming.moves:
            values["lr_rewarm"] = self._rate.warming.now

    def _read(self, rate: Any) -> Number:
        return self.scalars.value(rate) if isinstance(rate, self.torch.Tensor) else float(rate)
