"""Measurements, by subject. Each is a subclass of `Collector` that lists its `METRICS`.

Adding a metric is adding a class: the package is walked, nothing is registered, and the name of a
collector is that of its class (`LossScaleCollector`: `loss_scale`). One that needs more
than the context, or that others call, is made in `wiring.py`. A collector never catches its
own errors and never measures its own cost; the guard does both. It may keep nothing that grows with
the run.

Order of calls in a step: `after_backward` for each backward; for each optimizer `measure` (its
gradients are final), `before_update` (weights old, rates as used) and `after_update` (weights new);
then `collect` once, whose values may still be on a device; `add_derived_values` once they are not,
which is a step later on an accelerator. A closure computes the gradients inside the step: there
`measure` comes after `before_update`. From `measure` to `collect`, gradients are off.

A collector with `SAMPLED` is called in the steps in which that set is due (see
`sampling/schedule.py`), but for `add_derived_values` and `forget`; in the others it costs nothing.
Nor does one that is `ASLEEP` before it wakes: even a call that finds nothing to do costs 2 us
behind a forward, where caches are cold.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping, NamedTuple

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.guard import Calls, Guard, Part
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..torch_state.records import Step, Update

    Pair = tuple[Part, Callable[..., Any]]

CALLS = (
    "after_backward",
    "forget",
    "measure",
    "before_update",
    "after_update",
    "collect",
    "add_derived_values",
)
# What counts on over a relaunch, and the collectors that count it.
COUNTERS = ("steps_seen", "skipped_updates", "tokens_seen", "tokens_applied")
COUNTING = ("counters", "tokens", "derived")
SAMPLED_CALLS = ("after_backward", "measure", "before_update", "after_update", "collect")


class Collector:
    """One subject. A subclass overrides the calls it needs; the others cost nothing.

    Attributes:
        SHARE: what it may cost, as a share of the step time, before it is relaxed or switched off.
        FLOOR_US: what it may cost in any case.
        SAMPLED: the sampled set that it belongs to; "" is called in every step.
        ASLEEP: it is called only from its own `wake` on.
        METRICS: what it measures.
    """

    METRICS: ClassVar[tuple[MetricSpec, ...]] = ()
    SHARE = 0.02
    FLOOR_US = 1000
    SAMPLED = ""
    ASLEEP = False

    def __init__(self, context: ProbeContext) -> None:
        self.torch = context.torch
        self.scalars = context.scalars
        self.asleep = self.ASLEEP
        self._wake: Callable[[], None] = lambda: None  # it may wake while the plan is made

    def wake(self) -> None:
        """There is something to do: be called from now on."""
        if self.asleep:
            self.asleep = False
            self._wake()

    def after_backward(self, loss: Number) -> None:
        """A backward ran from this unscaled loss."""

    def forget(self) -> None:
        """The job threw all gradients of the step away: what was seen of it does not count."""

    def measure(self, update: Update) -> None:
        """The gradients of one optimizer are final."""

    def before_update(self, update: Update) -> None:
        """One optimizer is about to step: its weights are the old ones, its rates as used."""

    def after_update(self, update: Update) -> None:
        """One optimizer has stepped, or was kept from it (`update.skip`)."""

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        """Add this step's values, and forget what belonged to it."""

    def add_derived_values(self, values: dict[str, float]) -> None:
        """Add values that follow from others; all are on the host now, in order of steps."""

    def relax(self) -> bool:
        """Too dear: go on in a cheaper way and return True, or be switched off."""
        return False

    def state(self) -> dict[str, float]:
        """Return what a rollback must put back."""
        return {}

    def rewind(self, state: Mapping[str, float]) -> None:
        """Put back what `state` returned at an earlier step."""


class Plan:
    """Which (part, method) pairs each call has.

    Attributes:
        usual: by call, in a step without samples. now: in the step under way.
    """

    def __init__(self, guard: Guard, sets: SampleSets) -> None:
        self.usual: dict[str, Calls] = {call: [] for call in CALLS}
        self.now = self.usual
        self._guard = guard
        self._samples = sets
        self._members: dict[str, dict[str, Calls]] = {}  # by set and call
        self._sets: dict[str, dict[str, Pair]] = {}  # each for all members
        self._derivers: dict[str, Calls] = {}  # of sets that were never sampled

    def add(self, name: str, collector: Collector) -> None:
        """Take in a collector."""
        sampled_set = collector.SAMPLED
        part = self._guard.part(name, share=collector.SHARE, floor_us=collector.FLOOR_US)
        part.relax = collector.relax
        pairs: dict[str, Pair] = {
            call: (part, getattr(collector, call))
            for call in CALLS
            if getattr(type(collector), call) is not getattr(Collector, call)
        }
        if sampled_set and "add_derived_values" in pairs:
            self._derivers.setdefault(sampled_set, []).append(pairs.pop("add_derived_values"))
        for call in SAMPLED_CALLS if sampled_set else ():
            if call in pairs:
                members = self._members.setdefault(sampled_set, {}).setdefault(call, [])
                members.append(pairs.pop(call))
                self._sets.setdefault(sampled_set, {})[call] = self._sampled(sampled_set, members)
        if collector.asleep:
            collector._wake = lambda: self._call(pairs)
        else:
            self._call(pairs)

    def _call(self, pairs: Mapping[str, Pair]) -> None:
        for call, pair in pairs.items():
            self.usual[call].append(pair)
            if self.now is not self.usual:
                self.now[call].append(pair)

    def run(self, call: str, *args: Any) -> None:
        """Make one call of the step under way. To be called inside a `guard.run`."""
        self._guard.run_all(self.now[call], *args)

    def begin_step(self, due: frozenset[str]) -> None:
        """Begin a step in which the sets `due` are sampled."""
        for name in [name for name in self._derivers if name in due]:
            self.usual["add_derived_values"] += self._derivers.pop(name)
        sets = [name for name in self._sets if name in due]
        if not sets:
            self.now = self.usual
            return
        self.now = {
            call: pairs + [self._sets[name][call] for name in sets if call in self._sets[name]]
            for call, pairs in self.usual.items()
        }

    def _sampled(self, name: str, members: Calls) -> Pair:
        """Return one pair for all members of a set: its cost is the set's."""
        guard, sets = self._guard, self._samples

        def sample(*args: Any) -> None:
            began = thread_time_ns()
            guard.run_all(members, *args)
            sets.spent(name, thread_time_ns() - began)

        return guard.part(name), sample


class Collectors:
    """All of one process.

    Attributes:
        by_name: each by the name of its file. plan: of their calls.
    """

    def __init__(self, context: ProbeContext, plan: Plan, ready: Mapping[str, Collector]) -> None:
        """Make those that are not `made` already."""
        self.plan = plan
        self.by_name: dict[str, Collector] = {}
        for name, kind in collector_classes().items():
            collector = ready.get(name) or kind(context)
            self.by_name[name] = collector
            plan.add(name, collector)

    def names_of_set(self, name: str) -> list[str]:
        """Return the names of those that are called when this set is sampled."""
        return [member for member, collector in self.by_name.items() if name == collector.SAMPLED]

    def counters(self) -> dict[str, float]:
        """Return `COUNTERS`."""
        state: dict[str, float] = {}
        for name in COUNTING:
            state.update(self.by_name[name].state())
        return {name: state[name] for name in COUNTERS}

    def count_on(self, counters: Mapping[str, float]) -> None:
        """Count on from these `COUNTERS`; the other collectors have no part in it."""
        for name in COUNTING:
            self.by_name[name].rewind(counters)

    def save_state(self) -> dict[str, float]:
        """Return what goes back with a rollback."""
        state: dict[str, float] = {}
        for collector in self.by_name.values():
            state.update(collector.state())
        return state

    def rewind(self, state: Mapping[str, float]) -> None:
        """Put back what `state` returned at an earlier step."""
        for collector in self.by_name.values():
            collector.rewind(state)


@functools.lru_cache(maxsize=None)  # a forked child must not read the disk again
def collector_classes() -> dict[str, type[Collector]]:
    """Return every collector by its name, sorted by it."""
    kinds: dict[str, type[Collector]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Collector) and kind is not Collector:
                name = kind.__name__[: -len("Collector")]
                kinds[re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()] = kind
    return dict(sorted(kinds.items()))


def metric_specs() -> tuple[MetricSpec, ...]:
    """Return every metric that the probe can measure."""
    return tuple(spec for kind in collector_classes().values() for spec in kind.METRICS)


class MetricSpec(NamedTuple):
    """One metric, as its collector promises it.

    Attributes:
        id: the name in policies, frames and exports, such as `grad_global_norm`.
        unit: unit of the float64 in the frame, such as `s` or `tokens/s`; "1" for a pure number.
        meaning: one sentence: what exactly is measured, and when it is absent.
        source: where the definition comes from: a formula, a paper, a torch function.
        cost: what one sample costs the job, such as `one pass over the gradients`; "" for nothing
            that can be measured.
        every: steps between two samples as the probe takes them by default; 1 is each step. In
            the others the metric is absent.
        sparsest: the most steps between two samples of a metric that is taken less often where
            steps are short; 0: it never is.
    """

    id: str
    unit: str
    meaning: str
    source: str
    cost: str = ""
    every: int = 1
    sparsest: int = 0


_FACE = {
    "Inputs": "batch",
    "Manifest": "quarantine",
    "QuarantineCollector": "quarantine",
    "SourceMix": "token_statistics",
    "TokensCollector": "progress",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers beside its own when it is asked for (PEP 562)."""
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
