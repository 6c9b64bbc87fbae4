"""A checkpoint in the job's own format, at any step, on command.

The layout is learned from a checkpoint that the job saved (`layout.py`), as is the place in its
loop where it can be saved (`save_site.py`): the file is written when the job next reaches it, in
the loop iteration of the step after which it was ordered. It is written beside the job's own, under
another name. A library that runs the loop writes it itself.

Under DDP rank 0 alone writes, as the job does. Sharded state is refused: no rank has all of it.
"""

from __future__ import annotations

import os
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional

from ..context import Refused
from ..runtime import files
from ..runtime.call_stack import CannotRestore, job_frames
from ..runtime.guard import describe
from . import save_site
from .layout import Layout, Learner, Sources, containers
from .save_site import Name, VariableScope

if TYPE_CHECKING:
    from ..collectors.framework import FrameworkCollector
    from ..context import ProbeContext
    from .resume import SaveReports

NOTHING = "the job has not saved a checkpoint yet, from which its layout could be learned"
PARTIAL = "no file that the job saves holds both its weights and its optimizer's state"
SHARDED = "the job's state is sharded, and no rank has a whole checkpoint"
NOT_REACHED = "the loop ended or went on without reaching the place where the job saves"
OF_SEVERAL_RANKS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.optim",
)


class Saved(NamedTuple):
    """What was learned from the newest checkpoint of the job."""

    layout: Layout
    stack: save_site.Stack
    path: str


class OnDemand:
    """The command `checkpoint`, and what it must know before.

    Args:
        library: whose loop trains, if one does.
        finite: whether the newest frame held finite values only.
    """

    def __init__(
        self,
        context: ProbeContext,
        library: FrameworkCollector,
        reports: SaveReports,
        finite: Callable[[], bool],
    ) -> None:
        self._context, self._torch, self._guard = context, context.torch, context.guard
        self._position, self._registry = context.position, context.registry
        self._library, self._finite = library, finite
        self._reports = reports
        self._part = context.guard.part("checkpoint", share=1.0)
        self._saved: Optional[Saved] = None
        self._why = NOTHING
        self._waiting = False

    def learn_from(self, content: Any, path: str) -> None:
        """Learn the layout of what the job saved by `torch.save`."""
        self._guard.run(self._part, self._learn, content, path)

    def _learn(self, content: Any, path: str) -> None:
        self._why = PARTIAL if self._why == NOTHING else self._why
        if not isinstance(content, dict):
            return
        if self._is_sharded():
            self._why = SHARDED
            return
        frames = job_frames(self._torch)
        variables = VariableScope(frames, set(map(id, containers(content))))
        steps = self._position.step
        layout = Learner(self._torch, self._registry, variables, steps).learn(content)
        if layout.kinds >= {"module", "optimizer"}:
            is_first = self._saved is None
            self._saved = Saved(layout, save_site.code_stack(frames), path)
            if is_first:
                self._context.reporter.status_changed()

    def _is_sharded(self) -> bool:
        """Whether a state dict needs other ranks, or holds a part of the state only."""
        registry = self._registry
        owners = [*registry.modules, *registry.optimizers]
        if any(type(owner).__module__.startswith(OF_SEVERAL_RANKS) for owner in owners):
            return True
        groups = (group for optimizer in registry.optimizers for group in optimizer.param_groups)
        return any(hasattr(p, "_local_tensor") for group in groups for p in group["params"])

    def describe(self) -> str:
        """Return whether one can be ordered, as far as that is known without its place."""
        reason = "" if self._part.on else f"this part of the probe is off: {self._part.reason}"
        if not (reason or self._saved or self._library.trainer):
            reason = self._why
        return f"unavailable: {reason}" if reason else "ready"

    def do_checkpoint(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Order one: `{"path": str or None}` -> `{"path", "step", "how"}`.

        The notice `checkpoint-saved` follows when the file is written, or `checkpoint-refused` with
        the reason; either comes before the next step ends. `step` counts the steps that are in it.
        """
        library, position = self._library, self._position
        if not self._part.on:
            raise Refused(f"this part of the probe is off: {self._part.reason}")
        if not self._finite():
            raise Refused("the newest step was not finite")
        path = os.path.abspath(args["path"]) if args.get("path") else ""
        if path and os.path.exists(path):
            raise Refused(f"{path} exists already")
        if library.trainer:
            return self._by_library(path)
        if position.rank:
            if self._saved is not None:
                raise Refused("each rank of the job saves a file of its own")
            return {"path": None, "step": position.step, "how": "rank 0 writes it"}
        if self._saved is None:
            raise Refused(self._why)
        return self._order(self._saved, path)

    def _by_library(self, path: str) -> Dict[str, Any]:
        library = self._library
        if self._position.world_size > 1:
            raise Refused(
                f"{library.trainer} saves on all ranks at once, which needs step-fenced commands"
            )
        if path and library.names_saves:
            raise Refused(f"{library.trainer} names its checkpoints itself; leave the path out")
        library.order_save(path)
        step = self._position.step
        return {"path": path or None, "step": step, "how": library.trainer}

    def _order(self, save: Saved, path: str) -> Dict[str, Any]:
        if self._waiting:
            raise Refused("another checkpoint is about to be written")
        guard, position, step = self._guard, self._position, self._position.step
        frames = self._frames()
        frame, site = save_site.find_save_site(save.stack, frames)
        stem = os.path.splitext(save.path)[0]
        path = path or f"{stem}.supervise-{step}.pt"
        self._build(save, site)  # refuses at once what has no source
        save_site.call_at(
            frame,
            site,
            arrived=lambda: guard.run(self._part, self._arrived, save, site, path, frame),
            on_exit=lambda: guard.run(self._part, self._end, NOT_REACHED),
            over=lambda: position.step != step,
        )
        self._waiting = True
        return {"path": path, "step": step, "how": "on-demand"}

    def _frames(self) -> Any:
        try:
            return job_frames(self._torch)
        except CannotRestore as problem:
            raise Refused(str(problem)) from problem

    def _build(
        self, save: Saved, site: save_site.SaveSite, traced: Optional[FrameType] = None
    ) -> Any:
        """Return what the job would save at this place."""
        scope = site.scope

        def stale(name: Name, container: bool) -> bool:
            return name.scope == scope and site.assigns((name.variable, *name.way), container)

        variables = VariableScope(self._frames(), set(), traced)
        with self._torch.no_grad():
            return save.layout.build(Sources(variables, stale, self._position.step))

    def _arrived(self, save: Saved, site: save_site.SaveSite, path: str, frame: FrameType) -> None:
        began = monotonic_ns()
        self._reports.begins()
        try:
            with files.replacing(path, shared=True, sync=True) as file:
                self._torch.save(self._build(save, site, frame), file)
        except Exception as problem:
            self._end(str(problem) if isinstance(problem, Refused) else describe(problem))
        else:
            self._end("")
            seconds = (monotonic_ns() - began) / 1e9
            self._reports.report({}, path, seconds, "on-demand", path)
        finally:
            self._reports.ends()
            self._position.held_ns += monotonic_ns() - began

    def _end(self, why_not: str) -> None:
        self._waiting = False
        if why_not:
            self._context.reporter.notice(
                "checkpoint-refused", f"no checkpoint was written: {why_not}"
            )
