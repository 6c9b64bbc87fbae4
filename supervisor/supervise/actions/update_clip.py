"""Update clip: shorten updates that are much larger than usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core.model.action import Action, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Steps
from ..errors import ActionError


@dataclass(frozen=True)
class UpdateClip(Action):
    """Cut updates to the mean plus `sigma` deviations of the last `window` update norms.

    A cut update keeps its direction, and counts as cut from then on. Nothing is cut until half of
    the window is known; the newest steps before the action count. It ends by itself after `for`
    steps; `for: 0` stays until `lift: true`. To have it from the first step on, and with several
    ranks, use the safeguard `update_clip`.

    It keeps a copy of all weights on their device, and moves as many bytes in a step as the
    optimizer does. Where the copy takes more than `max_gb`, it is refused.

    Example:
        - update_clip: {sigma: 2.0, for: 1000}

    Undo: update_clip with lift.
    Source: Marin's 32B run, Levanter's ClipUpdateNormConfig: window 128, 2 sigma. On healthy runs
        it cuts 1 to 4 % of the updates by a little. 1000 steps and 4 GB are project defaults.
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "clip"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    sigma: float = 2.0
    window: Steps = 128
    for_: Steps = 1000
    max_gb: float = 4.0
    lift: bool = False

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 <= self.sigma <= 100.0:
            wrong.append(("sigma", f"must be between 0 and 100, not {self.sigma:g}"))
        if not 2 <= self.window <= 10_000:
            wrong.append(("window", f"must be between 2 and 10000, not {self.window}"))
        if self.for_ < 0:
            wrong.append(("for", f"must not be negative, not {self.for_}"))
        if not 0.0 < self.max_gb <= 10_000.0:
            wrong.append(("max_gb", f"must be above 0 and at most 10000, not {self.max_gb:g}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        numbers = {"window": self.window, "sigma": self.sigma, "steps": self.for_}
        return Payload({**numbers, "max_gb": self.max_gb})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("update_clip", args, key=key, deadline_s=self.deadline_s)
        rule = {"window": args.get("window"), "sigma": args.get("sigma")}
        expected = None if args.get("lift") else rule
        if answer.get("update_clip", "missing") != expected:
            raise ActionError(
                f"asked for an update clip of {expected}, the probe answered {answer}"
            )
        return answer

    def undo(self) -> Action | None:
        return None if self.lift else UpdateClip(lift=True)
