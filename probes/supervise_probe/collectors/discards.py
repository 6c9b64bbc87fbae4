"""Values that were not finite and that the job discarded: such a step has no frame.

So does a job that looks at its loss, or at what `clip_grad_norm_` returns, and goes on to the next
batch. Seen are the losses that went into backward, those of `cross_entropy` and `nll_loss` that did
not, and norms that a clip told. Norms that a job computes by hand are not. A grad scaler looks for
its scale in its first steps: gradients that are not finite, of a finite loss, are no news there.

A job that throws away everything makes no step, and so no frame: that is said in a notice. Nothing
is read from a device for it: there the notice comes once the count has arrived.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterable, List, Optional, Tuple

from ..spec import MetricSpec
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number, Pending
    from ..torch_state.grad_scaler import GradScalerState
    from ..torch_state.records import Step
    from .gradient import GradientCollector
    from .loss import LossCollector

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
        self._counted: Deque[Tuple[int, float]] = deque()  # by step, of the newest STEPS

    def gradients(self) -> None:
        """Those of this step so far are thrown away."""
        loss = self._loss.total
        norms = [clip.norm for clip in self._gradient.clips]
        if self._scaling.unscaled and self._position.step < SEARCH:
            norms = []
        self._count(norms if loss is None else [loss, *norms])

    def losses(self, values: Iterable[Number]) -> None:
        """These had no backward: each is of a step of its own."""
        for value in values:
            self._count([value])

    def goes_on(self) -> None:
        """Forwards come, and no backward: the job lives."""
        self._reporter.beat("step")

    def _count(self, values: List[Any]) -> None:
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

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        values[NEW], self._new = self._new, 0.0
        self._since_ns, self._reported, self._asked = step.at_ns, False, None

    def finish(self, values: Dict[str, float]) -> None:
        new, counted = values.pop(NEW, None), self._counted
        if new is None:  # a step from before the first, whose values came late
            return
        self._steps += 1
        if new:
            counted.append((self._steps, new))
        while counted and counted[0][0] <= self._steps - STEPS:
            counted.popleft()
        values["nonfinite_discards"] = sum(count for _, count in counted)
