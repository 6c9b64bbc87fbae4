"""Loss scale: let the job's GradScaler start again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from msgspec import Struct

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..errors import ActionError

TOLERANCE = 0.01
LARGEST = 2.0**24  # scales above it overflow FP16 for any gradient that matters


class ScaleOutcome(Struct, frozen=True):
    """The scale that was set, and by what an overflow multiplies it."""

    loss_scale: float
    backoff: float = 1.0


@dataclass(frozen=True)
class LossScale(Action):
    """Set the loss scale of the job's GradScaler, or put it back to the one it began with.

    The scaler goes on from there by its own rules: halved at an overflow, doubled after 2000 steps
    without one. It is for a scale that fell so low that small gradients vanish, or that starts a
    storm of skipped steps by being far too high. A job without a GradScaler (BF16, FP32) refuses.

    Example:
        - loss_scale: {set: 1024}

    Undo: none; the scaler finds its scale by itself.
    Source: torch.amp.GradScaler: 65536 to begin with, growth 2, backoff 0.5, interval 2000 steps.
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "loss_scale"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    set: float | Literal["default"] = "default"

    def check(self) -> list[tuple[str, str]]:
        if self.set != "default" and not 0.0 < self.set <= LARGEST:
            return [("set", f"must be above 0 and at most {LARGEST:g}, not {self.set:g}")]
        return []

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"scale": None if self.set == "default" else self.set})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("loss_scale", args, key=key, deadline_s=self.deadline_s)
        scale, requested = answer.get("loss_scale"), args["scale"]
        if not isinstance(scale, int | float) or (requested is not None and scale != requested):
            raise ActionError(
                f"asked for a loss scale of {requested or 'old'}, the job has {scale}"
            )
        return answer

    def effect(self, check: EffectCheck) -> str | None:
        observed, outcome = check.frame.get("loss_scale"), check.result.parse(ScaleOutcome)
        scale = outcome.loss_scale
        least = scale * outcome.backoff  # the step before it may have overflowed
        if observed is None or least * (1.0 - TOLERANCE) <= observed <= scale * (1.0 + TOLERANCE):
            return None
        return f"the loss scale is {observed:g}, not {scale:g}"
