"""Nonfinite: NaN or infinity in a metric.

The only detector for which NaN is data; for all others it is UNKNOWN. It has no memory, so a
repeated step id cannot hide a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector
from ._watch import Memory


@dataclass(frozen=True)
class Nonfinite(Detector):
    """BREACH when any of `metrics` is NaN or infinite, on from the first step, without a baseline.

    Absent metrics are left out; UNKNOWN when all of them are absent.

    Example:
        {kind: nonfinite, metrics: [train_loss_raw, grad_global_norm]}

    Blind to: values that are wrong but finite, and whatever the probe does not see: one bad weight
        shows up only when it reaches the loss or a gradient.
    Source: torch.amp.GradScaler's found_inf and Megatron-LM's check for NaN in the loss, which
        are on by default as well.
    """

    reads: ClassVar[str] = "metrics"

    metrics: tuple[str, ...] = ("train_loss_raw", "grad_global_norm")  # both pass the host anyway

    @property
    def needs_all(self) -> bool:
        return False

    def start(self) -> NonfiniteWatch:
        return NonfiniteWatch(self)

    def check(self) -> list[tuple[str, str]]:
        return [] if self.metrics else [("metrics", "names no metric")]


class NonfiniteWatch(Memory):
    """Keeps the last sample for its numbers only."""

    def __init__(self, spec: Nonfinite) -> None:
        self.spec = spec
        super().__init__()

    def forget_last(self) -> None:
        super().forget_last()
        self.sample: Sequence[float | None] = ()

    def feed(self, sample: Any, step: int) -> int:
        self.last = step
        self.sample = sample
        try:
            if sample and isfinite(sum(sample)):  # then all of them are
                self.raw = OK
                return OK
        except TypeError:  # one of them is absent
            pass
        code = UNKNOWN
        for value in sample:
            if value is not None:
                if value - value != 0.0:  # NaN and both infinities
                    self.raw = BREACH
                    return BREACH
                code = OK
        self.raw = code
        return code

    def numbers(self) -> dict[str, Any]:
        values = dict(zip(self.spec.metrics, self.sample, strict=False))
        bad = [name for name, value in values.items() if value is not None and value - value != 0.0]
        return {"step": self.last, "values": values, "nonfinite": bad}
