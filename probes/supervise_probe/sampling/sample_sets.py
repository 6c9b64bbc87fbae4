"""The sampled sets: which are due in the step under way, and what their samples cost."""

from __future__ import annotations

from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Mapping

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from .pace import Pace

# Steps between two samples by default: the cost of one is then below SHARE.
DEFAULTS = {"attention": 50, "activations": 50, "routing": 10, "weights": 500, "gradients": 50}
IN_FORWARD = frozenset(("attention", "activations", "routing"))
# Steps between two samples at first, of a set that has its default interval: 12 samples, which have
# a spread, and the next one lie in the first EARLY_STEPS.
EARLY = 7
EARLY_STEPS = 100
NONE: FrozenSet[str] = frozenset()


class Interval:
    """One set.

    Attributes:
        asked: steps between two samples as configured; 0 is never. every: as stretched.
        early: the same in the first EARLY_STEPS; 0: they are like all others.
        raised: steps between two while a command asks for more samples; 0: none does.
        cost_ns: of the newest sample, thread CPU time. spent_ns: of the one under way.
        samples: taken so far. off: why it is switched off, "" while it is on.
    """

    __slots__ = ("asked", "cost_ns", "early", "every", "off", "raised", "samples", "spent_ns")

    def __init__(self, asked: int, early: int = 0) -> None:
        self.asked = self.every = asked
        self.early = early
        self.cost_ns = self.spent_ns = self.samples = self.raised = 0
        self.off = ""


class SampleSets:
    """All of one process. `schedule.py` says when each is due.

    Attributes:
        by_name: all intervals by name.
        due: the sets that are sampled in the step under way.
        waiting: a set is due that is looked at in the forward, and no forward came yet.
        wanted: the input of the next forward is wanted as the probe batch.
        paces: the adaptive intervals of collectors, by name of the collector.
        dense_until: the first step in which these may be sparse again.
    """

    def __init__(self, guard: Guard, asked: Mapping[str, Any]) -> None:
        self._guard = guard
        self.by_name = {
            name: Interval(int(asked.get(name, n)), EARLY if name in IN_FORWARD - {*asked} else 0)
            for name, n in DEFAULTS.items()
        }
        self.due = NONE
        self.waiting = self.wanted = False
        self.paces: Dict[str, Pace] = {}
        self.dense_until = 0

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` for the set `name`; guarded, and its cost is the set's."""
        began = thread_time_ns()
        try:
            return self._guard.run(self._guard.part(name), function, *args)
        finally:
            self.by_name[name].spent_ns += thread_time_ns() - began

    def spent(self, name: str, cost_ns: int) -> None:
        """A sample of `name` cost that much thread CPU time somewhere else."""
        self.by_name[name].spent_ns += cost_ns

    def want(self) -> None:
        """Have the input of the next forward looked at, whatever is due."""
        self.waiting = self.wanted = True
