"""The loss of a step, the loss scale, and values that the job discarded."""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Iterable, Optional

from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number, Pending
    from ..torch_state.records import Step, Update
    from ..torch_state.registry import GradScalerState
    from .gradient import GradientCollector

LOSS_METRICS = (
    MetricSpec(
        "train_loss_raw",
        "loss",
        "Sum of the unscaled scalars passed to backward since the last step, in their units; their "
        "mean in a pipeline schedule that averages; absent without one.",
        "torch.autograd.backward; for a closure that is evaluated again, the first evaluation",
    ),
)


class LossCollector(Collector):
    """The loss of a step: what the job put into backward, all of it.

    Adds up losses; on a device the sum stays there.
    """

    METRICS = LOSS_METRICS

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self.total: Optional[Number] = None
        self._averaged: Number = 0.0  # the part of it that is final

    def after_backward(self, loss: Number) -> None:
        self.total = loss if self.total is None else self.total + loss

    def averaged(self, parts: int) -> None:
        """The gradients of the newest `parts` losses were divided by their number."""
        if self.total is not None:
            self.total = self._averaged = self._averaged + (self.total - self._averaged) / parts

    def forget(self) -> None:
        self.total, self._averaged = None, 0.0

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        total = self.total
        self.forget()
        if total is not None:
            values["train_loss_raw"] = total


LOSS_SCALE_METRICS = (
    MetricSpec(
        "loss_scale",
        "1",
        "Scale in force in this step, before the scaler's own update of it.",
        "torch.amp.GradScaler",
    ),
)


class LossScaleCollector(Collector):
    """The loss scale of the job's GradScaler; absent in a job that has none (BF16, FP32).

    Takes the scale that the step was made under.
    """

    METRICS = LOSS_SCALE_METRICS

    ASLEEP = True

    def __init__(self, context: ProbeContext, scaling: GradScalerState) -> None:
        super().__init__(context)
        scaling.appeared = self.wake
        self._scale: Optional[Number] = None

    def before_update(self, update: Update) -> None:
        if update.scaler is not None:
            self._scale = update.scale

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        scale, self._scale = self._scale, None
        if scale is not None:
            values["loss_scale"] = scale


DISCARDS_METRICS = (
    MetricSpec(
        "nonfinite_discards",
        "1",
        "Losses and gradients that were not finite and that the job threw away by itself, in the "
        "last 128 steps; absent before the first.",
        "this project",
    ),
)

STEPS = 128  # as many as a safeguard's skips are counted in
SEARCH = 64  # steps in which a grad scaler may look for its scale
ROW = 32  # without a step between them that are reported: twice what a scaler's search takes
NEW = "_nonfinite_discards"  # since the last step, on its way to the host; never published


class DiscardsCollector(Collector):
    """Values that were not finite and that the job discarded: such a step has no frame.

    Counts; asleep in a job that throws nothing away.
    """

    METRICS = DISCARDS_METRICS

    ASLEEP = True

    def __init__(
        self,
        context: ProbeContext,
        scaling: GradScalerState,
        gradient: GradientCollector,
        loss: LossCollector,
    ) -> None:
        super().__init__(context)
        self._reporter, self._position = context.reporter, context.position
        self._scaling, self._gradient, self._loss = scaling, gradient, loss
        self._new: Number = 0.0
        self._since_ns = 0  # the last step, or the first that was thrown away
        self._reported = False
        self._asked: Optional[Pending] = None
        self._steps = 0
        self._counted: deque[tuple[int, float]] = deque()  # by step, of the newest STEPS

    def add_discarded_gradients(self) -> None:
        """Those of this step so far are thrown away."""
        loss = self._loss.total
        norms = [clip.norm for clip in self._gradient.clips]
        if self._scaling.unscaled and self._position.step < SEARCH:
            norms = []
        self._count(norms if loss is None else [loss, *norms])

    def add_discarded_losses(self, values: Iterable[Number]) -> None:
        """These had no backward: each is of a step of its own."""
        for value in values:
            self._count([value])

    def record_forward_only(self) -> None:
        """Forwards come, and no backward: the job lives."""
        self._reporter.beat("step")

    def _count(self, values: list[Any]) -> None:
        bad: Any = False
        for value in values:
            if not self.scalars.on_host(value) and value.is_meta:  # shapes were tried out
                continue
            nonfinite = value - value != 0.0  # NaN and both infinities
            if bad is False or nonfinite is True:
                bad = nonfinite
            elif bad is not True and nonfinite is not False:
                bad = bad | nonfinite.to(bad.device, non_blocking=True)
        if bad is False:
            return
        if self.asleep:
            self.wake()
        if not self._since_ns:
            self._since_ns = monotonic_ns()
        self._new = self._new + (1.0 if bad is True else bad.float())
        if not self._reported:
            self._report()

    def _report(self) -> None:
        """Say that no step comes, once."""
        count = self._new
        if not self.scalars.on_host(count):
            if self._asked is None:
                self._asked = self.scalars.pack({"count": count})
            if self._asked is None or not self._asked.ready():
                return
            count, self._asked = self._asked.read().get("count", 0.0), None
        if count < ROW:
            return
        self._reported = True
        seconds = (monotonic_ns() - self._since_ns) / 1e9
        self._reporter.notice(
            "discards",
            f"no optimizer step for {seconds:.0f} s: the newest {count:.0f} losses or gradients "
            "were not finite, and the job discarded them",
            {"count": count, "seconds": round(seconds, 1)},
        )

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        values[NEW], self._new = self._new, 0.0
        self._since_ns, self._reported, self._asked = step.at_ns, False, None

    def add_derived_values(self, values: dict[str, float]) -> None:
        new, counted = values.pop(NEW, None), self._counted
        if new is None:  # a step from before the first, whose values came late
            return
        self._steps += 1
        if new:
            counted.append((self._steps, new))
        while counted and counted[0][0] <= self._steps - STEPS:
            counted.popleft()
        values["nonfinite_discards"] = sum(count for _, count in counted)
