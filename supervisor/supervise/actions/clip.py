"""Clip: a tighter bound on the gradient norm, for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Payload
from ..core.model.values import Steps
from ..errors import ActionError


class ClipArgs(Struct, frozen=True):
    """The bound that was asked for; None: a factor of the job's own."""

    max_norm: float | None = None
    lift: bool = False


class ClipOutcome(Struct, frozen=True):
    """The bound in force, None for none."""

    clip_bound: float | None


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
        choices = [self.max_norm is not None, self.factor is not None, self.lift]
        if sum(choices) != 1:
            return [("max_norm", "give one of max_norm, factor and lift")]
        wrong = []
        if self.max_norm is not None and not 0.0 < self.max_norm < math.inf:
            wrong.append(("max_norm", f"must be above 0, not {self.max_norm:g}"))
        if self.factor is not None and not 0.0 < self.factor <= 1.0:
            wrong.append(("factor", f"must be above 0 and at most 1, not {self.factor:g}"))
        if self.for_ < 0:
            wrong.append(("for", f"must not be negative, not {self.for_}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        return Payload({"max_norm": self.max_norm, "factor": self.factor, "steps": self.for_})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("clip", args, key=key, deadline_s=self.deadline_s)
        limit, order = answer.get("clip_bound", -1.0), args.parse(ClipArgs)
        requested = order.max_norm
        if order.lift:
            if limit is not None:
                raise ActionError(f"the clip was to be lifted, and the job has {limit}")
        elif not isinstance(limit, int | float) or not 0.0 < limit < math.inf:
            raise ActionError(f"the job reported no clip bound: {answer}")
        elif requested is not None and not math.isclose(limit, requested, rel_tol=1e-9):
            raise ActionError(f"asked for a clip to {requested:g}, the job clips to {limit:g}")
        return answer

    def effect(self, check: EffectCheck) -> str | None:
        observed, limit = check.frame.get("clip_bound"), check.result.parse(ClipOutcome).clip_bound
        if observed is None or (limit is not None and math.isclose(observed, limit, rel_tol=1e-6)):
            return None  # a frame without the column is not judged; the job's answer was
        return f"the gradient norm is clipped to {observed:.3g}, not {_clip_text(limit)}"

    def undo(self) -> Action | None:
        return None if self.lift else Clip(lift=True)


def _clip_text(limit: float | None) -> str:
    return "left alone" if limit is None else f"{limit:.3g}"
