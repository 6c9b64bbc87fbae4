"""The sampled sets: which are due in the step under way, and what their samples cost."""

from __future__ import annotations

from functools import partial
from math import isfinite
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping

if TYPE_CHECKING:
    from ..runtime.guard import Guard

SHARE = 0.01  # of the time of a step, for the whole probe; project default
RARE = 0.25  # of that is for what can be rare, whatever each step costs anyway
# Parts of what is left for it: of the update, of the look at an optimizer's moments, of the
# statistics of tokens, and of all sampled sets; and what each may cost per step in any case, in ns.
UPDATES, MOMENTS, TOKENS, SETS = 0.4, 0.1, 0.1, 0.4
FLOOR_NS = 10_000
SLACK = 0.75  # of what all sets may cost: none takes twice as many samples beyond it
LEAST = 4  # steps; a sample needs two passes where every step needs one, so 2 would save nothing
SPARSEST = 16  # steps; half of what the supervisor takes for a metric that went missing
# Steps between two samples by default: the cost of one is then below its part of SHARE.
DEFAULTS = {
    "checksums": 50,  # first: two ranks must take them at the same step
    "attention": 50,
    "activations": 50,
    "routing": 10,
    "routers": 50,
    "weights": 500,
    "gradients": 50,
}
IN_FORWARD = frozenset(("attention", "activations", "routing"))
AT_ONCE = IN_FORWARD | {"routers"}  # dense at first: rules compare them with their own past
# Steps between two samples at first, of a set that has its default interval: 12 samples, which have
# a spread, and the next one lie in the first EARLY_STEPS.
EARLY = 7
EARLY_STEPS = 100
NONE: frozenset[str] = frozenset()


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

    def __init__(self, steps: int, early: int = 0) -> None:
        self.asked = self.every = steps
        self.early = early
        self.cost_ns = self.spent_ns = self.samples = self.raised = 0
        self.off = ""


class Budget:
    """What may be measured in some steps only, may cost so much a step on average."""

    def __init__(self, guard: Guard, share: float) -> None:
        """`share`: of the time of a step, for the whole probe."""
        self._guard, self.share = guard, share

    def allowed_ns(self, part: float, floor_ns: float, step_ns: int) -> float:
        """Return what is allowed to one that gets `part` of it, in a step of so many ns."""
        whole = self.share * step_ns
        return max(part * max(whole - self._guard.fixed_ns, RARE * whole), floor_ns)


class SampleSets:
    """All of one process. `schedule.py` says when each is due.

    Attributes:
        by_name: all intervals by name.
        due: the sets that are sampled in the step under way.
        waiting: a set is due that is looked at in the forward, and no forward came yet.
        wanted: the input of the next forward is wanted as the probe batch.
        budget: what they may cost. paces: the adaptive intervals of collectors, by their names.
        dense_until: the first step in which these may be sparse again.
        total_ns: what all samples cost so far.
    """

    def __init__(
        self, guard: Guard, settings: Mapping[str, Any], status_changed: Callable[[], None]
    ) -> None:
        self._guard, self._status_changed = guard, status_changed
        self.budget = Budget(guard, float(settings.get("share", SHARE)))
        self.by_name = {
            name: Interval(
                int(settings.get(name, n)), EARLY if name in AT_ONCE - {*settings} else 0
            )
            for name, n in DEFAULTS.items()
        }
        self.due = NONE
        self.waiting = self.wanted = False
        self.paces: dict[str, Pace] = {}
        self.dense_until = self.total_ns = 0

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

    def affordable_interval(self, interval: Interval, step_ns: int) -> int:
        """Return the steps between two samples of a set, twice as many, half as many or as now.

        What sets may cost is divided evenly among those whose cost is known; what one of them does
        not need is the others'.

        Args:
            step_ns: duration of a step.
        """
        costs = [each.cost_ns / each.every for each in self._paying()]
        allowed = self.budget.allowed_ns(SETS / len(costs), FLOOR_NS, step_ns)
        whole, spent = len(costs) * allowed, sum(costs)
        cost = interval.cost_ns / interval.every
        if cost > allowed and spent > whole:
            return 2 * interval.every
        fits = 4 * cost < allowed or spent + cost < SLACK * whole
        return interval.every // 2 if interval.every > interval.asked and fits else interval.every

    def densest_interval(self, interval: Interval, step_ns: int) -> int:
        """Return the steps between two samples of a set where all may cost the whole share.

        It is a doubling of what was asked, so that ranks sample the same steps.
        """
        every, cost = interval.asked, interval.cost_ns * len(self._paying())
        while every < interval.every and cost > self.allowed_ns(every, every * step_ns):
            every *= 2
        return every

    def allowed_ns(self, steps: int, elapsed_ns: int) -> float:
        """Return what the samples of so many steps may cost where nothing else comes first."""
        return max(self.budget.share * elapsed_ns, len(self._paying()) * FLOOR_NS * steps)

    def _paying(self) -> list[Interval]:
        """Return the sets whose cost is known."""
        return [each for each in self.by_name.values() if each.samples > 1 and not each.off]

    def pace(
        self,
        name: str,
        every: int,
        part: float,
        floor_ns: int,
        least: int = LEAST,
        most: int = SPARSEST,
    ) -> Pace:
        """Return the interval of a collector, which gets `part` of the budget."""
        allowed = partial(self.budget.allowed_ns, part, floor_ns)
        self.paces[name] = Pace(self._status_changed, every, allowed, least, most)
        return self.paces[name]

    def thinned(self) -> dict[str, int]:
        """Return what is measured less often than it should be for its cost, and how often."""
        thinned = {name: pace.every for name, pace in self.paces.items() if pace.every > 1}
        sets = self.by_name.items()
        return thinned | {n: i.every for n, i in sets if i.every > i.asked and not i.off}

    def want(self) -> None:
        """Have the input of the next forward looked at, whatever is due."""
        self.waiting = self.wanted = True


SAMPLES = 5  # whose median cost decides
ALARM_STEPS = 16  # for which an unusual frame makes samples dense
RATIO = 2.0  # of the update norm to its last sample; a learning rate that jumps shows in it
RATE_RATIO = 1.5  # of the learning rate to that of the step before
SPIKE = 3.0  # grad_spike_score
DEVIATIONS = 6.0  # of the loss from its mean, in mean absolute deviations
DECAY = 0.05  # of the mean loss and its deviation


class Pace:
    """The interval of one collector.

    Attributes:
        every: steps between two samples. due: whether the step under way is one of them.
        allowed: returns what it may cost per step, in one of so many ns.

    Args:
        changed: called when the interval is another. least: the shortest above 1. most: the
            longest.
    """

    __slots__ = ("_changed", "_costs", "_least", "_most", "allowed", "due", "every")

    def __init__(
        self,
        changed: Callable[[], None],
        every: int,
        allowed: Callable[[int], float],
        least: int = LEAST,
        most: int = SPARSEST,
    ) -> None:
        self._changed, self.allowed = changed, allowed
        self.every, self.due, self._least, self._most = every, every == 1, least, most
        self._costs: list[int] = []

    def stretch(self) -> None:
        """Take samples half as often, or at the shortest interval above 1."""
        self._set(min(self._most, max(self._least, 2 * self.every)))

    def adjust_interval(self, cost_ns: int, step_ns: int) -> None:
        """A sample cost `cost_ns` of CPU time, in a step of `step_ns`: adjust the interval."""
        costs = self._costs
        costs.append(cost_ns)
        if len(costs) < SAMPLES:
            return
        cost = sorted(costs)[SAMPLES // 2]
        costs.clear()
        allowed = self.allowed(step_ns)
        if cost > allowed * self.every:
            self.stretch()
        elif self.every == self._least:
            if 2 * cost < allowed:  # in each step it costs more than this, around it
                self._set(1)
        elif 3 * cost < allowed * self.every:
            self._set(max(1, self.every // 2))

    def _set(self, every: int) -> None:
        if every != self.every:
            self.every = every
            self._costs.clear()
            self._changed()


class Unrest:
    """Whether a frame is far from the frames before it: a cheap look, no judgement."""

    __slots__ = ("_deviation", "_loss", "_rate", "_update")

    def __init__(self) -> None:
        self._loss = self._deviation = self._rate = self._update = 0.0

    def add_and_is_unusual(self, values: Mapping[str, float]) -> bool:
        """Take the values of one step; return whether any of them is unusual."""
        value_of = values.get
        unusual = value_of("nan_inf_events", 0.0) > 0.0 or value_of("grad_spike_score", 0.0) > SPIKE
        rate = value_of("learning_rate")
        if rate is not None:
            previous, self._rate = self._rate, rate
            unusual = unusual or (
                previous > 0.0 and not previous / RATE_RATIO < rate < previous * RATE_RATIO
            )
        update = value_of("update_norm")
        if update is not None:
            previous, self._update = self._update, update
            unusual = unusual or (
                previous > 0.0 and not previous / RATIO < update < previous * RATIO
            )
        loss = value_of("train_loss_raw")
        return self._far(loss) or unusual if loss is not None else unusual

    def _far(self, loss: float) -> bool:
        if not isfinite(loss):
            return True
        if not self._deviation:
            self._loss, self._deviation = loss, abs(loss) + 1e-9
            return False
        apart = loss - self._loss
        far = apart > DEVIATIONS * self._deviation
        self._loss += DECAY * apart
        self._deviation += DECAY * (abs(apart) - self._deviation)
        return far
