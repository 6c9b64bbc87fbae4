"""What is measured, one file per subject. Each lists its `METRICS` and has a `Collector`.

Adding a metric is adding a file: the package is walked, nothing is registered. A collector never
catches its own errors and never measures its own cost; the guard does both. It may keep nothing
that grows with the run.

Order of calls in a step: `after_backward` for each backward; for each optimizer `measure` (its
gradients are final), `before_update` (weights old, rates as used) and `after_update` (weights new);
then `collect` once, whose values may still be on a device; `finish` once they are not, which is a
step later on an accelerator. A closure computes the gradients inside the step: there `measure`
comes after `before_update`. From `measure` to `collect`, gradients are off.

A collector with `SAMPLED` is called in the steps in which that set is due (see `sampling.py`), but
for `finish` and `forget`; in the others it costs nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
from time import thread_time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Mapping, Tuple

if TYPE_CHECKING:
    from ..guard import Calls, Part
    from ..probe import Probe
    from ..scalars import Number
    from ..spec import MetricSpec
    from ..step import Step, Update

    Pair = Tuple[Part, Callable[..., Any]]

CALLS = (
    "after_backward", "forget", "measure", "before_update", "after_update", "collect", "finish",
)  # fmt: skip
SAMPLED_CALLS = ("after_backward", "measure", "before_update", "after_update", "collect")


class Collector:
    """One subject. A subclass overrides the calls it needs; the others cost nothing.

    Attributes:
        SHARE: what it may cost, as a share of the step time, before it is relaxed or switched off.
        FLOOR_US: what it may cost in any case.
        SAMPLED: the sampled set that it belongs to; "" is called in every step.
    """

    SHARE = 0.02
    FLOOR_US = 1000
    SAMPLED = ""

    def __init__(self, probe: Probe) -> None:
        self.torch = probe.torch
        self.scalars = probe.scalars

    def after_backward(self, loss: Number) -> None:
        """A backward ran from this unscaled loss."""

    def forget(self) -> None:
        """The job threw all gradients away before its first step: what was seen does not count."""

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


class Sampled:
    """The collectors of one sampled set: whether it is due is asked once a call for all of them."""

    def __init__(self, probe: Probe, name: str) -> None:
        self.calls: Dict[str, Calls] = {call: [] for call in SAMPLED_CALLS}
        self._probe = probe
        self._name = name

    def pairs(self) -> Iterator[Tuple[str, Pair]]:
        """Yield for each call the pair that stands for all of them."""
        part = self._probe.guard.part(self._name)
        for call, members in self.calls.items():
            if members:
                yield call, (part, self._stand_in(members))

    def _stand_in(self, members: Calls) -> Callable[..., None]:
        probe, name = self._probe, self._name

        def stand_in(*args: Any) -> None:
            if probe.sampling.due(name):
                began = thread_time_ns()
                probe.guard.run_all(members, *args)
                probe.sampling.spent(name, thread_time_ns() - began)

        return stand_in


def start(
    probe: Probe, modules: Iterable[Tuple[str, ModuleType]]
) -> Tuple[Dict[str, Collector], Dict[str, Calls]]:
    """Make a collector of each module.

    Returns:
        The collectors by name, and for each call the (part, method) pairs that do something in it.
    """
    collectors: Dict[str, Collector] = {}
    calls: Dict[str, Calls] = {call: [] for call in CALLS}
    sets: Dict[str, Sampled] = {}
    for name, module in modules:
        collector = collectors[name] = module.Collector(probe)
        part = probe.guard.part(name, share=collector.SHARE, floor_us=collector.FLOOR_US)
        part.relax = collector.relax
        asked = collector.SAMPLED
        sampled = sets.setdefault(asked, Sampled(probe, asked)).calls if asked else calls
        for call in CALLS:
            if getattr(type(collector), call) is not getattr(Collector, call):
                sampled.get(call, calls[call]).append((part, getattr(collector, call)))
    for each in sets.values():
        for call, pair in each.pairs():
            calls[call].append(pair)
    return collectors, calls


def modules() -> List[Tuple[str, ModuleType]]:
    """Return (name, module) of every collector, sorted by name."""
    found = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [(name, importlib.import_module(f"{__name__}.{name}")) for name in found]


def metrics() -> Tuple[MetricSpec, ...]:
    """Return every metric that the probe can measure."""
    return tuple(spec for _, module in modules() for spec in module.METRICS)
