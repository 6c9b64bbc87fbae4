"""Where the time of a step went, as the host sees it.

On an accelerator, forward and backward times are the times until the work was queued. A part that
a job does not have (no DataLoader, a model that is never called as a whole) has no metric, and its
time counts as other time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from ..spec import MetricSpec
from . import Collector as Base

if TYPE_CHECKING:
    from ..probe import Probe
    from ..scalars import Number
    from ..step import Step, Update

METRICS = (
    MetricSpec(
        "step_time",
        "s",
        "Wall time from the last step's end to this one's, without holds; absent in the first.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec("input_time", "s", "Time inside next() of a DataLoader.", "CLOCK_MONOTONIC"),
    MetricSpec(
        "forward_time", "s", "Time inside the outermost module, gradients on.", "CLOCK_MONOTONIC"
    ),
    MetricSpec("backward_time", "s", "Time inside torch.autograd.backward.", "CLOCK_MONOTONIC"),
    MetricSpec(
        "optimizer_time",
        "s",
        "Time inside optimizer.step, without the forward and backward of a closure.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec("other_time", "s", "step_time less the parts above.", "CLOCK_MONOTONIC"),
)

PARTS = ("input", "forward", "backward", "optimizer")


class Times:
    """Running sums in ns; the hooks add to them. `seen` holds the parts that the job has."""

    __slots__ = ("backward", "forward", "input", "optimizer", "seen")

    def __init__(self) -> None:
        self.input = self.forward = self.backward = self.optimizer = 0
        self.seen: Dict[str, bool] = dict.fromkeys(PARTS, False)

    def add(self, part: str, elapsed_ns: int) -> None:
        """`elapsed_ns` passed in `part`."""
        self.seen[part] = True
        setattr(self, part, getattr(self, part) + elapsed_ns)

    def inside(self) -> int:
        """Return what was counted so far in the parts that can run inside an optimizer's step."""
        return self.input + self.forward + self.backward


class Collector(Base):
    """Splits the step. What ran after its last optimizer belongs to the next one."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._times = probe.times
        self._step: Dict[str, int] = dict.fromkeys(PARTS, 0)

    def after_update(self, update: Update) -> None:
        for part in PARTS:
            self._step[part] += getattr(self._times, part)
            setattr(self._times, part, 0)

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        known = 0
        for part in PARTS:
            elapsed, self._step[part] = self._step[part], 0
            if self._times.seen[part] and step.elapsed_ns is not None:
                known += elapsed
                values[f"{part}_time"] = elapsed / 1e9
        if step.elapsed_ns is not None:
            values["step_time"] = step.elapsed_ns / 1e9
            values["other_time"] = max(0, step.elapsed_ns - known) / 1e9
