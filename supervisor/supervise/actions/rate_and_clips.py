"""Actions on the next updates: learning rate, clips, skipped steps, scale of the loss.

Three factors of the rate are multiplied: the one that `lr_scale` set, the re-warm after a rollback
or a relaunch, and what `hold_rate` leaves. Each is judged without the others, which the frame
shows: `lr_scale` is the product of all, `lr_rewarm` and `lr_hold` are two of them, absent without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from msgspec import Struct

from ..core.model.action import Action, EffectCheck, Job, PlanContext
from ..core.model.payload import Json, Outcome, Payload, RateArgs, Rewarm
from ..core.model.values import Steps
from ..errors import ActionError

RAMP_STEPS = 5  # how far a ramp may have come in the first frame that shows it
RATE_TOLERANCE = 0.01  # share that the rate of a frame may be off

Metrics = Mapping[str, float | None]


def rewarm_due(context: PlanContext, start: float, steps: int) -> dict[str, float] | None:
    """Return the re-warm behind going back, None where the rate is not to blame."""
    due = steps and not context.rate_cleared
    return {"start": start, "steps": steps} if due else None


def explain_scale_mismatch(frame: Metrics, scale: float, rewarm_steps: int) -> str | None:
    """Return None when the rate used is `scale` of what the re-warm leaves, else a sentence.

    With `rewarm_steps` it may be a few steps up its ramp already. A job without a rate is not
    judged.
    """
    return _shows(frame, scale, rewarm_steps, _rewarm(frame))


def explain_rewarm_mismatch(
    frame: Metrics, rewarm: Rewarm | None, limit: float | None = None
) -> str | None:
    """Return None when the rate used is at the beginning of `rewarm`, else a sentence.

    Without one, and in a job without a rate, there is nothing to be judged. `limit`: the ramp leads
    to this rate where the job asks for more, as after a rollback that did not take the loop back.
    """
    if rewarm is None:
        return None
    other_scale = (frame.get("lr_scale") or 1.0) / _rewarm(frame) / _hold(frame)
    return _shows(frame, rewarm.start, rewarm.steps, other_scale, limit)


def explain_hold_mismatch(frame: Metrics, limit: float) -> str | None:
    """Return None when the rate used is at most `limit`, or back at what the job asks for."""
    used, scale = frame.get("learning_rate"), frame.get("lr_scale") or 1.0
    if used is None or used <= limit * scale / _hold(frame) * (1.0 + RATE_TOLERANCE):
        return None
    own_rate = (frame.get("learning_rate_scheduled") or 0.0) * scale
    if frame.get("lr_hold") == 1.0 and used <= own_rate * (1.0 + RATE_TOLERANCE):
        return None
    return f"the learning rate is {used:.3g}, not at most {limit:.3g}"


def _rewarm(frame: Metrics) -> float:
    return frame.get("lr_rewarm") or 1.0


def _hold(frame: Metrics) -> float:
    return frame.get("lr_hold") or 1.0


def _shows(
    frame: Metrics, scale: float, steps: int, other_scale: float, limit: float | None = None
) -> str | None:
    used, scheduled_rate = frame.get("learning_rate"), frame.get("learning_rate_scheduled")
    if used is None or not scheduled_rate:
        return None
    scheduled_rate *= _hold(frame)
    least, highest = (
        (scheduled_rate, scheduled_rate) if limit is None else (min(scheduled_rate, limit), limit)
    )
    highest *= scale + (1.0 - scale) * min(1.0, RAMP_STEPS / steps if steps else 0.0)
    if (
        scale * least * (1.0 - RATE_TOLERANCE)
        <= used / other_scale
        <= highest * (1.0 + RATE_TOLERANCE)
    ):
        return None
    besides = "" if other_scale == 1.0 else f" times {other_scale:.3g}"
    return (
        f"the learning rate is {used / scheduled_rate:.3g} of the job's own, not {scale:g}{besides}"
    )


@dataclass(frozen=True)
class LrScale(Action):
    """Multiply the learning rate that the job asks for by `set`, for every parameter group.

    The multiplier is absolute: asking twice for 0.5 gives 0.5, not 0.25. It is put on before each
    optimizer step and taken off after it, so that it composes with any scheduler and with loops
    that write the rate themselves. With `rewarm` it rises back to 1.0 linearly over so many steps;
    with 0 it stays. A re-warm under way goes on beside it, and both are multiplied. A rollback and
    a relaunch leave it in force.

    Example:
        - lr_scale: {set: 0.5, rewarm: 200}

    Undo: lr_scale to 1.0.
    Source: LambdaLR overwrites an edited rate at its next step, StepLR carries the edit on for
        ever; hence a multiplier on, and off, each step. OPT-175B lowered its rate by hand after
        divergences (arXiv:2205.01068, section 2.5).
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "lr_scale"
    deadline_s: ClassVar[float] = 120.0  # the next boundary may lie behind an evaluation

    set: float
    rewarm: Steps = 0

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.set <= 1.0:
            wrong.append(("set", f"must be above 0 and at most 1, not {self.set:g}"))
        if self.rewarm < 0:
            wrong.append(("rewarm", f"must not be negative, not {self.rewarm}"))
        return wrong

    def plan(self, context: PlanContext) -> Payload:
        return Payload({"value": self.set, "rewarm_steps": self.rewarm})

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("lr_scale", args, key=key, deadline_s=self.deadline_s)
        scale, requested = answer.get("lr_scale"), args.parse(RateArgs).value
        if not isinstance(scale, int | float) or not math.isclose(scale, requested, rel_tol=1e-9):
            raise ActionError(
                f"asked for a learning rate scale of {requested:g}, the job has {scale}"
            )
        return answer

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        order = check.args.parse(RateArgs)
        return explain_scale_mismatch(check.frame, order.value, order.rewarm_steps)

    def undo(self) -> Action | None:
        return None if self.set == 1.0 else LrScale(set=1.0)


@dataclass(frozen=True)
class HoldRate(Action):
    """Let no parameter group have more than `within` times its last healthy learning rate.

    That is the rate before the first breach, and what it became since without a jump to more than
    1.5 times. It is constant: how far the schedule has moved on below the jump is not known. It
    binds only while the job asks for more, and composes with any scheduler, as `lr_scale`, which is
    put on after it. It is over when the job has asked for no more in `release` steps in a row (0:
    never), a rate counting as back that falls to what a linear warm-up may have come to meanwhile;
    or by `supervise lr RUN 1.0`. A rollback and a relaunch leave it in force. It is the one command
    that does not wait for the next boundary: it works in the update that is about to be made.

    With `tested` it is the remedy for a rate that was tested as the cause of the trouble, and left
    out where it was not. The level is then the rate that 128 steps of before had at least, with
    good weights; where the trouble came back behind a rollback at the same rate, half of that. The
    groups keep their proportions. A schedule that decays passes under it, and ends it so.

    Refused where the host knows no rate of before: in the first step, and where they are tensors on
    a device. A group that is thawed, so had none, is left alone. With a captured step nothing that
    the host sets is used.

    Example:
        - hold_rate: {within: 1.0, release: 64}

    Undo: hold_rate with lift; what is tried next does not take it back.
    Source: our runs of 13 programs (benchmarks/proving/live.md): one step behind a rate times
        thirty it loses a half to a ninth of what it loses three steps behind it. What the update
        at the jump did stays: hence the rollback in the runbook. 64: as the rate guard's steps
        until a rate is the usual one; project default.
    """

    changes_training: ClassVar[bool] = True
    budget: ClassVar[str | None] = "lr_scale"
    deadline_s: ClassVar[float] = 120.0  # the next update may lie behind an evaluation

    within: float = 1.0
    release: Steps = 64
    tested: bool = False
    lift: bool = False

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.within < math.inf:
            wrong.append(("within", f"must be above 0, not {self.within:g}"))
        if self.release < 0:
            wrong.append(("release", f"must not be negative, not {self.release}"))
        return wrong

    def is_due(self, context: PlanContext) -> bool:
        return not self.tested or (
            context.rate_limit is not None and "fence" not in context.unavailable
        )

    @property
    def budget_class(self) -> str | None:
        return None if self.tested else self.budget  # it is a part of what goes back, which counts

    @property
    def is_dispensable(self) -> bool:
        return self.tested

    def plan(self, context: PlanContext) -> Payload:
        if self.lift:
            return Payload({"lift": True})
        args = Payload({"before_step": context.breach_step, "release": self.release})
        if not self.tested:
            return args.extended(within=self.within)
        return args.extended(limit=context.rate_limit, harmful=context.rate)

    def perform(self, job: Job, args: Payload, *, key: str) -> Mapping[str, Json]:
        answer = job.command("hold_rate", args, key=key, deadline_s=self.deadline_s)
        groups = answer.get("groups")
        if not isinstance(groups, int) or (groups > 0) is (args.get("lift") is True):
            raise ActionError(f"the rate of {groups} parameter groups is held")
        return answer

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        lifted = check.args.parse(RateArgs).lift
        limit = None if lifted else check.result.read(Outcome).rate_limit
        return None if limit is None else explain_hold_mismatch(check.frame, limit)

    def undo(self) -> Action | None:
        return None if self.lift else HoldRate(lift=True)


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

    def find_errors(self) -> list[tuple[str, str]]:
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

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
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

    def find_errors(self) -> list[tuple[str, str]]:
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

    def find_errors(self) -> list[tuple[str, str]]:
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

    def find_errors(self) -> list[tuple[str, str]]:
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

    def explain_missing_effect(self, check: EffectCheck) -> str | None:
        observed, outcome = check.frame.get("loss_scale"), check.result.parse(ScaleOutcome)
        scale = outcome.loss_scale
        least = scale * outcome.backoff  # the step before it may have overflowed
        if observed is None or least * (1.0 - SCALE_TOLERANCE) <= observed <= scale * (
            1.0 + SCALE_TOLERANCE
        ):
            return None
        return f"the loss scale is {observed:g}, not {scale:g}"
