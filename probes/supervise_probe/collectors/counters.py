"""Counts of applied and of skipped steps, with the reason.

The law to check: attempted steps = steps_seen + skipped_updates. A step of several optimizers is
skipped when the update of any of them was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Mapping

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update

COUNTERS_METRICS = (
    MetricSpec("steps_seen", "steps", "Steps whose update was applied, so far.", "this project"),
    MetricSpec(
        "update_skipped",
        "1",
        "1 when an update of this step was not applied: overflow under a GradScaler, standing "
        "order or command; else 0.",
        "torch.amp.GradScaler: found_inf",
    ),
    MetricSpec("skipped_updates", "steps", "Sum of update_skipped so far.", "this project"),
)


class CountersCollector(Collector):
    """Counts of applied and of skipped steps, with the reason.

    Counts in `finish`: under a fused optimizer the device alone knows of an overflow.
    """

    METRICS = COUNTERS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._skipped: Number = 0.0
        self._applied_so_far = 0.0
        self._skipped_so_far = 0.0

    def after_update(self, update: Update) -> None:
        if update.skip:
            self._skipped = self._skipped + 1.0
        elif update.found_inf is not None:
            self._skipped = self._skipped + update.found_inf

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        skipped, self._skipped = self._skipped, 0.0
        values["update_skipped"] = skipped

    def finish(self, values: Dict[str, float]) -> None:
        skipped = 1.0 if values.get("update_skipped", 0.0) > 0.0 else 0.0
        self._skipped_so_far += skipped
        self._applied_so_far += 1.0 - skipped
        values["update_skipped"] = skipped
        values["skipped_updates"] = self._skipped_so_far
        values["steps_seen"] = self._applied_so_far

    def state(self) -> Dict[str, float]:
        return {"steps_seen": self._applied_so_far, "skipped_updates": self._skipped_so_far}

    def rewind(self, state: Mapping[str, float]) -> None:
        self._applied_so_far = state.get("steps_seen", self._applied_so_far)
        self._skipped_so_far = state.get("skipped_updates", self._skipped_so_far)
