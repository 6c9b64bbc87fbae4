"""Hears of every save of the job, and finds those that are checkpoints.

The supervisor learns of what holds the model's weights. Most calls of `torch.save` do not: they
write a scheduler, a cache, one tensor of a shard.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple

from ..checkpoints.save_reports import Reported, name_of

if TYPE_CHECKING:
    from ..checkpoints.save_reports import SaveReports
    from ..collectors.framework import Collector as FrameworkCollector
    from ..context import ProbeContext
    from ..control.fault_injector import FaultInjector
    from ..torch_state.records import Optimizers

ENOUGH = 0.5  # of the trained parameters' elements make a checkpoint; project default
LOOKS = 100_000  # objects that are looked at before a file is none
DEPTH = 6  # of dicts in dicts
OPTIMIZER = {"state", "param_groups"}  # the keys of an optimizer's state


class SaveListener:
    """Hears of every save. One for each process: a forked child gets another.

    Attributes:
        reports: sets the phase during a save, and reports those that are checkpoints.
    """

    def __init__(
        self,
        context: ProbeContext,
        optimizers: Optimizers,
        drills: FaultInjector,
        reports: SaveReports,
        library: FrameworkCollector,
    ) -> None:
        self._torch, self._registry = context.torch, context.registry
        self._guard, self._reporter = context.guard, context.reporter
        self._optimizers, self._drills, self.reports = optimizers, drills, reports
        self._library = library
        self._reported: Dict[str, Reported] = {}  # by the way of saving
        self._learn: Callable[[Any, str], None] = lambda thing, path: None

    def connect(self, learn: Callable[[Any, str], None]) -> None:
        """The process is a rank: `learn` is given what `torch.save` saved, and the path."""
        self._learn = learn

    @property
    def active(self) -> bool:
        """Whether this process reports."""
        return self._reporter.writer is not None

    def saved(self, seconds: float, thing: Any, place: Any, how: str) -> None:
        """The job has saved `thing` at `place`."""
        path = name_of(place)
        if path and how == "torch.save":
            self._learn(thing, path)
        if path and self._holds_the_model(thing):
            self.reports.report(self._reported.setdefault(how, {}), path, seconds, how, place)
            self._drills.saved(path)

    def saved_by_library(
        self, seconds: float, what: Callable[[], Tuple[str, Optional[int]]]
    ) -> None:
        """A library has saved its own checkpoint.

        Args:
            what: returns its path, "" where another rank reports it, and the library's step, None
                where it counts none.
        """
        self._library.saved(seconds)
        path, step = what()
        if path:
            path = os.path.abspath(path)
            step = self.reports.step if step is None else step
            report = {
                "path": path,
                "step": step,
                **self.reports.facts(seconds, "its library"),
            }
            self._reporter.notice("checkpoint-saved", f"step {step} was saved in {path}", report)

    def _holds_the_model(self, saved: Any) -> bool:
        """Whether tensors shaped as the trained parameters make up half of their elements.

        An optimizer's state is shaped alike, and is left out. Nothing is read or copied.
        """
        torch = self._torch
        shapes, elements = self._trained()
        flat = all(len(shape) < 2 for shape in shapes)  # sharded as one vector: any shape may come
        found, looks = 0, 0
        todo: List[Tuple[Any, int]] = [(saved, 0)]
        while todo and elements and looks < LOOKS:
            thing, depth = todo.pop()
            looks += 1
            kind = type(thing)
            if issubclass(kind, torch.Tensor):
                if thing.is_floating_point() and (flat or tuple(thing.shape) in shapes):
                    found += thing.numel()
            elif issubclass(kind, torch.nn.Module):
                found += sum(p.numel() for p in thing.parameters())
            elif (
                issubclass(kind, dict) and depth < DEPTH and not set(dict.keys(thing)) >= OPTIMIZER
            ):
                todo += [(value, depth + 1) for value in dict.values(thing)]
            if found >= ENOUGH * elements:
                return True
        return False

    def _trained(self) -> Tuple[Set[Tuple[int, ...]], int]:
        """Return the shapes of the trained parameters, and how many elements they have."""
        parameters = {id(p): p for p in self._optimizers.parameters()}
        if not parameters:
            modules = self._registry.modules
            parameters = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        shapes = set()
        for parameter in parameters.values():
            shapes.add(tuple(parameter.shape))
            local = getattr(parameter, "_local_tensor", None)
            if local is not None:
                shapes.add(tuple(local.shape))
        return shapes, sum(p.numel() for p in parameters.values())
