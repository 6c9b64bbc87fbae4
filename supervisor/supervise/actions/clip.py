"""Clip: a tighter bound on the gradient norm, for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.values import Steps
from ..errors import ActionError


@dataclass(frozen=True)
class Clip(Action):
    """Limit the gradient norm to `max_norm`, or to `factor` times the job's own limit.

    The norm is that of all parameters of an optimizer, after the job's own clip; the whole gradient
    is scaled, its direction stays. `factor` is taken of the limit that the job last clipped to,
    else of the median norm of the newest 128 steps; once, so that what is in force is an absolute
    number. It ends by itself after `for` steps; `for: 0` stays until `lift: true`.

    Example:
        - clip: {factor: 0.3, for: 500}

    Undo: clip with lift.
    Source: torch.nn.utils.clip_grad_norm_, which it repeats. OPT-175B lowered its clip from 1.0 to
        0.3 against divergences (arXiv:2205.01068, section 2.5); hence 0.3. 500 steps outlast every
        verification here: project default.
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "clip"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    max_norm: float | None = None
    factor: float | None = None
    for_: Steps = 500
    lift: bool = False

    def check(self) -> list[tuple[str, str]]:
        said = [self.max_norm is not None, self.factor is not None, self.lift]
        if sum(said) != 1:
            return [("max_norm", "give one of max_norm, factor and lift")]
        wrong = []
        if self.max_norm is not None and not 0.0 < self.max_norm < math.inf:
            wrong.append(("max_norm", f"must be above 0, not {self.max_norm:g}"))
        if self.factor is not None and not 0.0 < self.factor <= 1.0:
            wrong.append(("factor", f"must be above 0 and at most 1, not {self.factor:g}"))
        if self.for_ < 0:
            wrong.append(("for", f"must not be negative, not {self.for_}"))
        return wrong

    def plan(self, context: PlanContext) -> dict[str, Any]:
        if self.lift:
            return {"lift": True}
        return {"max_norm": self.max_norm, "factor": self.factor, "steps": self.for_}

    def perform(self, job: Job, args: Mapping[str, Any], *, key: str) -> dict[str, Any]:
        seen = job.command("clip", args, key=key, deadline_s=self.deadline_s)
        bound, asked = seen.get("clip_bound", -1.0), args.get("max_norm")
        if args.get("lift"):
            if bound is not None:
                raise ActionError(f"the clip was to be lifted, and the job has {bound}")
        elif not isinstance(bound, int | float) or not 0.0 < bound < math.inf:
            raise ActionError(f"the job reported no clip bound: {seen}")
        elif asked is not None and not math.isclose(bound, asked, rel_tol=1e-9):
            raise ActionError(f"asked for a clip to {asked:g}, the job clips to {bound:g}")
        return seen

    def effect(self, check: EffectCheck) -> str | None:
        shown, bound = check.frame.get("clip_bound"), check.result["clip_bound"]
        if shown is None or (bound is not None and math.isclose(shown, bound, rel_tol=1e-6)):
            return None  # a frame without the column is not judged; the job's answer was
        return f"the gradient norm is clipped to {shown:.3g}, not {_told(bound)}"

    def undo(self) -> Action | None:
        return None if self.lift else Clip(lift=True)


def _told(bound: float | None) -> str:
    return "left alone" if bound is None else f"{bound:.3g}"
