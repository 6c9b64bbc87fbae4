"""Where the time of a step went, as the host sees it.

On an accelerator, forward and backward times are the times until the work was queued. A part that
a job does not have (no DataLoader, a model that is never called as a whole) has no metric, and its
time counts as other time.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Dict, Optional, Tuple

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
        "forward_time",
        "s",
        "Time inside the outermost module, gradients on, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "backward_time",
        "s",
        "Time inside torch.autograd.backward, without collectives.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "optimizer_time",
        "s",
        "Time inside optimizer.step, without collectives, and forward and backward of a closure.",
        "CLOCK_MONOTONIC",
    ),
    MetricSpec(
        "comm_time",
        "s",
        "Time inside collectives that the training thread calls, and waiting for them; without the "
        "reduction of DistributedDataParallel, which is part of backward_time; absent before the "
        "first.",
        "CLOCK_MONOTONIC around torch.distributed's functions and Work.wait",
    ),
    MetricSpec("other_time", "s", "step_time less the parts above.", "CLOCK_MONOTONIC"),
)

PARTS = ("input", "forward", "backward", "optimizer", "comm")
NAMES = tuple(f"{part}_time" for part in PARTS)


class Times:
    """Running sums in ns; the hooks add to them. `seen` holds the parts that steps had so far.

    Attributes:
        input, forward, backward, optimizer, comm: since the last optimizer's step ended.
    """

    __slots__ = ("backward", "comm", "forward", "input", "optimizer", "seen")

    def __init__(self) -> None:
        self.input = self.forward = self.backward = self.optimizer = self.comm = 0
        self.seen: Dict[str, bool] = dict.fromkeys(PARTS, False)

    def waited(self, elapsed_ns: int, part: str) -> None:
        """`elapsed_ns` passed in a collective, inside `part`, which has not ended ("": in none)."""
        self.comm += elapsed_ns
        if part:
            setattr(self, part, getattr(self, part) - elapsed_ns)

    def inside(self) -> int:
        """Return what was counted so far in the parts that can run inside an optimizer's step."""
        return self.input + self.forward + self.backward + self.comm

    def take(self) -> Tuple[int, int, int, int, int]:
        """Return the sums in the order of PARTS, and start anew."""
        taken = self.input, self.forward, self.backward, self.optimizer, self.comm
        self.input = self.forward = self.backward = self.optimizer = self.comm = 0
        seen = self.seen
        for part, elapsed in zip(PARTS, taken):
            if elapsed:
                seen[part] = True
        return taken


class Collector(Base):
    """Splits the step. What ran after its last optimizer belongs to the next one."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._times = probe.times
        self._step: Optional[Tuple[int, ...]] = None

    def after_update(self, update: Update) -> None:
        taken: Tuple[int, ...] = self._times.take()
        if self._step is not None:  # a second optimizer in the same step
            taken = tuple(map(add, self._step, taken))
        self._step = taken

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        elapsed, self._step = self._step, None
        if step.elapsed_ns is None or elapsed is None:
            return
        seen, known = self._times.seen, 0
        for part, name, spent in zip(PARTS, NAMES, elapsed):
            if seen[part]:
                known += spent
                values[name] = spent / 1e9
        values["step_time"] = step.elapsed_ns / 1e9
        values["other_time"] = max(0, step.elapsed_ns - known) / 1e9
