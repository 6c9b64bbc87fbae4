"""Actions on the update that the optimizer makes: bound its size, skip it, or rescale the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

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


@dataclass(frozen=True)
class SkipStep(Action):
    """Do not apply the next `count` optimizer steps; the job's loop and data go on as usual.

    Weights and optimizer state stay bit-identical over a skipped step. It is how a known bad batch
    is passed over. For non-finite gradients use the safeguard `skip_nonfinite`: a command
    from outside comes a step too late. No more than `most` updates are skipped so in any 128
    steps; the probe counts them and refuses the rest. To pass over a longer stretch of data, `most`
    has to be raised by hand.

    Example:
        - skip_step: {count: 1}

    Undo: none; what a skipped batch would have taught is lost.
    Source: torch.amp.GradScaler skips steps in the same way; PaLM, arXiv:2204.02311, section 5.1,
        passed over 200 to 500 batches after a spike. 3 in 128 steps is the most that we hold for
        safe unattended, as for the safeguard.
    """

    destructive: ClassVar[bool] = True
    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "skip_step"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    count: Steps = 1
    most: Steps = 3

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not 1 <= self.most <= 1000:
            wrong.append(("most", f"must be between 1 and 1000, not {self.most}"))
        if not 1 <= self.count <= self.most:
            wrong.append(("count", f"must be between 1 and most, {self.most}, not {self.count}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"count": self.count, "most": self.most})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("skip_step", args, key=key, deadline_s=self.deadline_s)
        if answer.get("will_skip") != args["count"]:
            raise ActionError(f"asked to skip {args['count']} steps, the probe answered {answer}")
        return answer


SCALE_TOLERANCE = 0.01
LARGEST_SCALE = 2.0**24  # scales above it overflow FP16 for any gradient that matters


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
        if self.set != "default" and not 0.0 < self.set <= LARGEST_SCALE:
            return [("set", f"must be above 0 and at most {LARGEST_SCALE:g}, not {self.set:g}")]
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
        if observed is None or least * (1.0 - SCALE_TOLERANCE) <= observed <= scale * (
            1.0 + SCALE_TOLERANCE
        ):
            return None
        return f"the loss scale is {observed:g}, not {scale:g}"
