"""What is measured, one file per subject. Each lists its `METRICS` and has a `Collector`.

Adding a metric is adding a file: the package is walked, nothing is registered. A collector never
catches its own errors and never measures its own cost; the guard does both. It may keep nothing
that grows with the run.

Order of calls in a step: `after_backward` for each backward; for each optimizer `measure` (its
gradients are final), `before_update` (weights old, rates as used) and `after_update` (weights new);
then `collect` once, whose values may still be on a device; `finish` once they are not, which is a
step later on an accelerator. A closure computes the gradients inside the step: there `measure`
comes after `before_update`. From `measure` to `collect`, gradients are off.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING, Dict, Iterable, List, Mapping, Tuple

if TYPE_CHECKING:
    from ..guard import Calls
    from ..probe import Probe
    from ..scalars import Number
    from ..spec import MetricSpec
    from ..step import Step, Update

CALLS = ("after_backward", "measure", "before_update", "after_update", "collect", "finish")


class Collector:
    """One subject. A subclass overrides the calls it needs; the others cost nothing.

    Attributes:
        SHARE: what it may cost, as a share of the step time, before it is relaxed or switched off.
        FLOOR_US: what it may cost in any case.
    """

    SHARE = 0.02
    FLOOR_US = 1000

    def __init__(self, probe: Probe) -> None:
        self.torch = probe.torch
        self.scalars = probe.scalars

    def after_backward(self, loss: Number) -> None:
        """A backward ran from this unscaled loss."""

    def measure(self, update: Update) -> None:
        """The gradients of one optimizer are final."""

    def before_update(self, update: Update) -> None:
        """One optimizer is about to step: its weights are the old ones, its rates as used."""

    def after_update(self, update: Update) -> None:
        """One optimizer has stepped, or was kept from it (`update.skip`)."""

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        """Add this step's values, and forget what belonged to it."""

    def finish(self, values: Dict[str, float]) -> None:
        """Add values that follow from others; all are on the host now, in order of steps."""

    def relax(self) -> bool:
        """Too dear: go on in a cheaper way and return True, or be switched off."""
        return False

    def state(self) -> Dict[str, float]:
        """Return what a rollback must put back."""
        return {}

    def rewind(self, state: Mapping[str, float]) -> None:
        """Put back what `state` returned at an earlier step."""


def start(
    probe: Probe, modules: Iterable[Tuple[str, ModuleType]]
) -> Tuple[Dict[str, Collector], Dict[str, Calls]]:
    """Make a collector of each module.

    Returns:
        The collectors by name, and for each call the (part, method) pairs that do something in it.
    """
    collectors: Dict[str, Collector] = {}
    calls: Dict[str, Calls] = {call: [] for call in CALLS}
    for name, module in modules:
        collector = collectors[name] = module.Collector(probe)
        part = probe.guard.part(name, share=collector.SHARE, floor_us=collector.FLOOR_US)
        part.relax = collector.relax
        for call in CALLS:
            if getattr(type(collector), call) is not getattr(Collector, call):
                calls[call].append((part, getattr(collector, call)))
    return collectors, calls


def modules() -> List[Tuple[str, ModuleType]]:
    """Return (name, module) of every collector, sorted by name."""
    found = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [(name, importlib.import_module(f"{__name__}.{name}")) for name in found]


def metrics() -> Tuple[MetricSpec, ...]:
    """Return every metric that the probe can measure."""
    return tuple(spec for _, module in modules() for spec in module.METRICS)
