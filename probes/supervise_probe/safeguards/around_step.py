"""All safeguards of one process: temporary changes of steps, without a rollback.

Each is an object whose `do_<verb>` executes one command at a step boundary; what stays in force is
applied here around every step. Without an order, a step is bit-identical. One that fails twice is
switched off by the guard, with a notice.
"""

from __future__ import annotations

import os
import re
from math import inf
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable

from ..context import Refused
from ..runtime import files
from ..runtime.guard import hidden_from_stacklevel
from .bad_steps import NAME, CommandedSkips, NonfiniteGuards, SkipOutliers
from .update_clip import GradientClip, UpdateClip

if TYPE_CHECKING:
    from ..collectors.gradient import GradientCollector
    from ..collectors.limits import LimitsCollector
    from ..collectors.loss import LossCollector
    from ..context import ProbeContext
    from ..torch_state.records import Optimizers, SafeguardState, Update
    from ..torch_state.registry import Registry


class LossScale:
    """Writes into the scalers of the job, in place: no device is waited for.

    Source: torch/amp/grad_scaler.py; `_growth_tracker` counts steps since the scale last changed.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def do_loss_scale(self, args: dict[str, Any]) -> dict[str, Any]:
        """Set the scale of every enabled scaler to `scale`, or None: to its initial one.

        The step boundary comes before the job's own `scaler.update()`: after an overflow, the next
        step has `backoff` times this scale.
        """
        scalers = [scaler for scaler in self._registry.scalers if scaler.is_enabled()]
        if not scalers:
            raise Refused("the job has no GradScaler that is enabled")
        scale = args.get("scale")
        if scale is not None and not 0.0 < float(scale) < inf:
            raise Refused(f"a loss scale must be finite and above 0, not {scale}")
        for scaler in scalers:
            value = float(scaler._init_scale if scale is None else scale)
            if scaler._scale is None:  # made at its first use
                scaler._init_scale = value
                continue
            scaler._scale.fill_(value)
            scaler._growth_tracker.fill_(0)
        return {"loss_scale": value, "backoff": float(scalers[-1].get_backoff_factor())}


LONGEST = 20  # steps; a trace grows by a few MB with each step of a large model
ENTRY_POINTS = ("_prepare_profiler", "_enable_profiler")  # every profiler of torch calls these


class Profile:
    """One trace at a time."""

    def __init__(self, context: ProbeContext, in_force: SafeguardState) -> None:
        self._context, self._in_force = context, in_force
        self._part = context.guard.part("profile", share=1.0)
        self._profiler: Any = None
        self._path = ""
        self._first = self._left = self._done = 0
        self._entry_points: list[tuple[str, Callable[..., Any]]] = []

    def do_profile(self, args: dict[str, Any]) -> dict[str, Any]:
        """Trace the next `steps` steps into the directory of `incident`, a file for each rank."""
        context, torch = self._context, self._context.torch
        steps = int(args.get("steps", 5))
        if not 1 <= steps <= LONGEST:
            raise Refused(f"profile of {steps} steps: 1 to {LONGEST}")
        if self._profiler is not None:
            raise Refused(f"a profile is being taken already: {self._path}")
        if torch.autograd._profiler_enabled():
            raise Refused("the job runs a profiler of its own")
        start = context.position.step
        self._path = _trace_path(
            context.config.marks, str(args["incident"]), start, context.position.rank
        )
        kinds = torch.profiler.ProfilerActivity
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        profiler = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU], record_shapes=True
        )
        profiler.start()
        self._profiler, self._first = profiler, start
        self._left, self._done = steps, 0
        self._in_force.acting = True
        context.guard.blind = True
        self._patch_entry_points()
        return {"path": self._path, "first_step": start, "steps": steps}

    @property
    def busy(self) -> bool:
        """Whether a trace is being taken."""
        return self._profiler is not None

    def step_ended(self) -> None:
        if self._profiler is not None:
            self._left -= 1
            self._done += 1
            if not self._left:
                self.end()

    def end(self, reason: str = "") -> None:
        """Stop the trace, if there is one, and write it; `why`: the reason for an early end."""
        if self._profiler is not None:
            began = monotonic_ns()
            self._context.guard.run(self._part, self._write, reason)
            self._context.position.held_ns += monotonic_ns() - began
            self._context.reporter.beat("step")

    def _write(self, reason: str) -> None:
        profiler, self._profiler = self._profiler, None
        self._context.guard.blind = False
        self._restore_entry_points()
        aside = f"{self._path}.{files.random_token()}"
        try:
            profiler.stop()
            profiler.export_chrome_trace(aside)
            os.chmod(aside, files.FILE)
            os.replace(aside, self._path)
            size = os.path.getsize(self._path)
        except Exception as error:
            self._context.reporter.notice("note", f"profile: no trace was written: {error}")
            return
        text = f"profile of {self._done} steps from step {self._first} on: {self._path}"
        self._context.reporter.notice(
            "note",
            f"{text} ({reason})" if reason else text,
            {"path": self._path, "bytes": size, "first": self._first, "steps": self._done},
        )

    # ── a profiler of the job's own has priority ──────────────────────────────────────────────

    def _patch_entry_points(self) -> None:
        module = self._context.torch.autograd.profiler
        for name in ENTRY_POINTS:
            original = getattr(module, name, None)
            if original is not None:
                self._entry_points.append((name, original))
                setattr(module, name, self._ending_ours(original))

    def _ending_ours(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @hidden_from_stacklevel
        def begin(*args: Any, **kwargs: Any) -> Any:
            self.end("the job started a profile of its own")
            return original(*args, **kwargs)

        return begin

    def _restore_entry_points(self) -> None:
        module = self._context.torch.autograd.profiler
        for name, original in self._entry_points:
            setattr(module, name, original)
        self._entry_points.clear()


def _trace_path(marks: str, incident: str, step: int, rank: int) -> str:
    """Return where the trace goes: into the incident's own directory, beside its evidence."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", incident).lstrip(".")
    home = os.path.join(os.path.dirname(marks), "incidents", name)
    files.make_directory(home)
    return os.path.join(home, f"profile-{step}-rank-{rank}.json")


class Safeguards:
    """The safeguards, and their calls around a step.

    Args:
        in_force: shared with the collectors that measure what the safeguards did.
    """

    def __init__(
        self,
        context: ProbeContext,
        in_force: SafeguardState,
        optimizers: Optimizers,
        gradient: GradientCollector,
        limits: LimitsCollector,
        loss: LossCollector,
    ) -> None:
        guard = self._guard = context.guard
        self.in_force = in_force
        self.orders = NonfiniteGuards(context, in_force, gradient, loss)
        self.outliers = SkipOutliers(context, in_force, loss)
        self.skip = CommandedSkips(in_force)
        self.clip = GradientClip(context, in_force, gradient, limits)
        self.update_clip = UpdateClip(context, in_force, gradient, limits, optimizers)
        self._scale = LossScale(context.registry)
        self._profile = Profile(context, in_force)
        self._steps = (
            *(self.orders, self.outliers, self.skip),
            *(self.clip, self.update_clip, self._profile),
        )
        # Ordered by a policy or a person, so their cost is not limited to a share of the step.
        self._orders_part = guard.part("safeguards", share=1.0)
        self._outliers_part = guard.part(NAME, share=1.0)
        self._clip_part = guard.part("clip", share=1.0)
        self._update_part = guard.part("update_clip", share=1.0)

    def doers(self) -> tuple[Any, ...]:
        """Return the objects that execute commands."""
        return self.skip, self.clip, self.update_clip, self._scale, self._profile

    def check_and_clip_gradients(self, update: Update) -> None:
        """Check and clip the gradients of `update`, which are final for the first time."""
        self._guard.run(self._orders_part, self.orders.repair_or_skip, update)
        if self.outliers.busy and not update.skip:
            self._guard.run(self._outliers_part, self.outliers.skip_if_outlier, update)
        if self.in_force.clip_bound is not None and not update.skip:
            self.limit(update)

    def limit(self, update: Update) -> None:
        """Clip the final gradients of `update`: once, or after each evaluation of a closure."""
        if self.in_force.clip_bound is not None:
            self._guard.run(self._clip_part, self.clip.limit, update)

    def before_update(self, update: Update) -> None:
        """Copy the weights of one optimizer, which is about to step."""
        if self.update_clip.rule is not None:
            self._guard.run(self._update_part, self.update_clip.copy_weights, update)

    def after_update(self, update: Update) -> None:
        """Limit the update of one optimizer, which has stepped or was skipped."""
        if self.update_clip.rule is not None:
            self._guard.run(self._update_part, self.update_clip.limit, update)

    def step_ended(self) -> None:
        """Count a step whose frame has been collected."""
        for safeguard in self._steps:
            safeguard.step_ended()
        self.in_force.acting = any(safeguard.busy for safeguard in self._steps)

    def on_rollback(self, step: int) -> None:
        """The weights are those behind `step` again."""
        self.outliers.on_rollback(step)

    def end(self) -> None:
        """The process ends."""
        self._profile.end("the job ended")

    def cannot(self, reason: str) -> None:
        """Mark all safeguards as unable to act, for that reason; "" undoes it."""
        self.orders.cannot(reason)
        self.outliers.cannot(reason)
        self.update_clip.cannot(reason)

    def unavailable(self) -> dict[str, str]:
        """Return why safeguards cannot act, by name."""
        others = {NAME: self.outliers.why_not, "update_clip": self.update_clip.why_not}
        return {**self.orders.unavailable(), **others}

    def describe(self) -> dict[str, Any]:
        """Return what is in force, for the status."""
        rule = self.update_clip.rule
        active: dict[str, Any] = {}
        if self.in_force.clip_bound is not None:
            active["clip"] = self.in_force.clip_bound
        if rule is not None:
            active["update_clip"] = {"window": rule.window, "sigma": rule.sigma}
        return active
