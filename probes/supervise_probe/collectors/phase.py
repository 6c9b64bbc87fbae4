"""Learning rates, and the phase of a run in their schedule."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Optimizers, Step, Update
    from .progress import FrameworkCollector


class Ends(NamedTuple):
    """Where warm-up, stable part and whole schedule end; None where unknown."""

    warm: Optional[float] = None
    stable: Optional[float] = None
    total: Optional[float] = None


def find_scheduler(schedulers: list[Any], optimizer: Any) -> Any:
    """Return the scheduler whose lengths are known, the outermost one of this optimizer, or None.

    Args:
        schedulers: in order of their making; one made of others comes after them.
    """
    for scheduler in reversed(schedulers):
        served = getattr(scheduler, "optimizer", None)
        served = served if served is optimizer else getattr(served, "optimizer", served)
        if served is optimizer and part_lengths(scheduler) is not None:
            return scheduler
    return None


def part_lengths(scheduler: Any) -> Optional[Ends]:
    """Return the lengths of a scheduler's parts, in its own steps; None where it has none."""
    read = _KINDS.get(type(scheduler).__name__)
    return None if read is None else read(scheduler)


def _of_lambda(scheduler: Any) -> Optional[Ends]:
    keywords = getattr(scheduler.lr_lambdas[0], "keywords", None)
    if not keywords or "num_warmup_steps" not in keywords:
        return None
    warm = keywords["num_warmup_steps"]
    total, stable = keywords.get("num_training_steps"), None
    if "num_decay_steps" in keywords:
        stable = warm + keywords["num_stable_steps"]
        total = stable + keywords["num_decay_steps"]
    return Ends(warm, stable, total)


def _of_sequence(scheduler: Any) -> Ends:
    milestones = list(scheduler._milestones)
    length = part_lengths(scheduler._schedulers[-1])
    total = None if length is None or length.total is None else milestones[-1] + length.total
    return Ends(milestones[0], milestones[1] if len(milestones) > 1 else None, total)


def _of_one_cycle(scheduler: Any) -> Ends:
    return Ends(scheduler._schedule_phases[0]["end_step"], None, scheduler.total_steps - 1)


def _of_linear(scheduler: Any) -> Ends:
    if scheduler.start_factor < scheduler.end_factor:
        return Ends(warm=scheduler.total_iters)
    return Ends(total=scheduler.total_iters)


_KINDS: dict[str, Callable[[Any], Optional[Ends]]] = {
    "LambdaLR": _of_lambda,
    "SequentialLR": _of_sequence,
    "OneCycleLR": _of_one_cycle,
    "LinearLR": _of_linear,
    "CosineAnnealingLR": lambda scheduler: Ends(total=scheduler.T_max),
    "PolynomialLR": lambda scheduler: Ends(total=scheduler.total_iters),
}

PHASE_METRICS = (
    MetricSpec(
        "lr_phase",
        "1",
        "Warm-up 0, stable 1, decay 2, re-warm after a rollback 3, plus the part of it that is "
        "over where its length is known; a search for the highest rate 4; absent until the rate "
        "changes, for 16 steps at most.",
        "learning_rate_scheduled so far; lengths: torch schedulers, Trainer, Lightning",
    ),
)

WARMUP, STABLE, DECAY, REWARM, SEARCH = 0.0, 1.0, 2.0, 3.0, 4.0
NOT_YET, UNDECIDED = -2.0, -1.0
SAME = 1e-9  # relative change that is none
FLAT = 16.0  # equal rates that end a warm-up, or show that there is none
RISES = 2.0  # rises in a row that begin one
NEARLY = 0.999  # of a phase: the next whole number is another phase
# On their way to `add_derived_values`; never published.
POSITION, RAMP, SEARCHES = "_lr_position", "_lr_ramp", "_lr_search"


def _nothing() -> None:
    """Stands for a reference to no scheduler."""


class PhaseCollector(Collector):
    """Phase of a run in its learning-rate schedule, inferred from the rates so far.

    Keeps six numbers: the phase and where it began, the rate, its level, two counts.
    """

    METRICS = PHASE_METRICS

    def __init__(
        self,
        context: ProbeContext,
        optimizers: Optimizers,
        rate: LearningRate,
        library: FrameworkCollector,
    ) -> None:
        super().__init__(context)
        self._optimizers, self._learning_rate, self._library = optimizers, rate, library
        self._phase, self._rate, self._level = NOT_YET, 0.0, 0.0
        self._flat = self._rises = self._begun = 0.0
        self._schedulers = context.registry.schedulers
        self._scheduler: Callable[[], Any] = _nothing
        self._ends: Any = Ends()
        self._searched = (-1, 0)  # with so many schedulers, for this optimizer

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        if (self._schedulers.changes, self._optimizers.leader()) != self._searched:
            self._search()
        scheduler = self._scheduler() if self._scheduler is not _nothing else None
        if scheduler is not None:
            values[POSITION] = scheduler.last_epoch
        elif self._library.total_steps is not None:
            self._ends = Ends(total=self._library.total_steps)
            values[POSITION] = step.number + self._library.steps_before
        warming = self._learning_rate.warming
        if warming.moves:
            values[RAMP] = warming.progress
        if self._learning_rate.search.on:
            values[SEARCHES] = 1.0

    def add_derived_values(self, values: dict[str, float]) -> None:
        position = values.pop(POSITION, 0.0)
        ramp, searches = values.pop(RAMP, None), values.pop(SEARCHES, None)
        rate = values.get("learning_rate_scheduled")
        if rate == self._rate and self._phase >= STABLE:
            self._rises = 0.0
        elif rate is not None:
            previous = self._phase
            self._follow(rate)
            if self._phase != previous:
                self._begun = position
        if searches is not None:
            values["lr_phase"] = SEARCH
        elif ramp is not None:
            values["lr_phase"] = REWARM + min(NEARLY, ramp)
        elif self._phase >= 0.0:
            values["lr_phase"] = self._phase + (self._part(position) if position else 0.0)

    def _follow(self, rate: float) -> None:
        """One more step was made with this rate."""
        previous, self._rate = self._rate, rate
        margin = SAME * abs(previous)
        rises, falls = rate > previous + margin, rate < previous - margin
        if self._phase == NOT_YET:
            self._phase, self._level = UNDECIDED, rate
            return
        self._rises = self._rises + 1.0 if rises else 0.0
        self._flat = 0.0 if rises or falls else self._flat + 1.0
        if self._phase == UNDECIDED:
            if rises or falls or self._flat >= FLAT:
                self._phase = WARMUP if rises else DECAY if falls else STABLE
            self._level = rate
            return
        if self._phase == DECAY:
            if self._rises >= RISES:
                self._phase = WARMUP
        elif rate < self._level * (1.0 - SAME):  # a cosine begins too flat to show in one step
            self._phase = DECAY
        elif self._phase == WARMUP and self._flat >= FLAT:
            self._phase = STABLE
        self._level = max(self._level, rate) if self._phase != DECAY else rate

    def _search(self) -> None:
        """Look for the scheduler that knows its lengths. A step is over: optimizers are known."""
        self._searched = self._schedulers.changes, self._optimizers.leader()
        optimizers = self._optimizers.living()
        schedule = find_scheduler(list(self._schedulers), optimizers[0]) if optimizers else None
        self._scheduler = _nothing if schedule is None else weakref.ref(schedule)
        self._ends = Ends() if schedule is None else part_lengths(schedule)

    def _part(self, position: float) -> float:
        start, end = self._bounds()
        if end is None or not start < position:
            return 0.0
        return (position - start) / (end - start) if position < end else NEARLY

    def _bounds(self) -> tuple[float, Optional[float]]:
        warm, stable, total = self._ends
        if self._phase == DECAY:
            return self._begun if stable is None else stable, total
        if self._phase == WARMUP:
            return 0.0, warm
        return self._begun if warm is None else warm, total if stable is None else stable

    def state(self) -> dict[str, float]:
        numbers = (self._phase, self._rate, self._level, self._flat, self._rises, self._begun)
        return {f"lr_phase.{index}": number for index, number in enumerate(numbers)}

    def rewind(self, state: Mapping[str, float]) -> None:
        if "lr_phase.5" in state:
            self._phase, self._rate, self._level, self._flat, self._rises, self._begun = (
                state[f"lr_phase.{index}"] for index in range(6)
            )


RATES_METRICS = (
    MetricSpec(
        "learning_rate",
        "1",
        "Rate of the first parameter group as used in this step: after drill and scale.",
        'optimizer.param_groups[0]["lr"] during the step',
    ),
    MetricSpec(
        "learning_rate.<i>",
        "1",
        "The same for group i, flat over optimizers in order of first step; absent past 16 groups.",
        'optimizer.param_groups[i]["lr"] during the step',
    ),
    MetricSpec(
        "learning_rate_scheduled",
        "1",
        "Rate of the first group as the job set it.",
        'optimizer.param_groups[0]["lr"] before the step',
    ),
    MetricSpec(
        "learning_rate_expected",
        "1",
        "Rate that the job's torch scheduler last gave the first group; absent until 8 steps in a "
        "row, a change of the rate among them, have shown that it decides.",
        "torch.optim.lr_scheduler: get_last_lr",
    ),
    MetricSpec(
        "learning_rate_initial",
        "1",
        "Rate that the first group's schedule starts from, which a scheduler or the job's own loop "
        "keeps in the group, or with which another optimizer begins: who raises both means it.",
        'optimizer.param_groups[0]["initial_lr"]; of a later optimizer without it, its "lr"',
    ),
    MetricSpec(
        "lr_scale",
        "1",
        "The probe's multiplier: `lr_scale`, `hold_rate` and re-warm after a rollback, without "
        "drills.",
        "this project",
    ),
    MetricSpec(
        "lr_rewarm",
        "1",
        "The part of `lr_scale` that is the re-warm after a rollback or a relaunch; absent without "
        "one.",
        "this project",
    ),
    MetricSpec(
        "lr_hold",
        "1",
        "The part of `lr_scale` that is `hold_rate`, in the first group; absent without one.",
        "this project",
    ),
)

GROUPS = 16
AGREED = 8  # steps that show which scheduler decides; a warm-up may dampen what it says
CLOSE = 1e-6  # relative: rounding
NUMBER = (float, int)  # LBFGS begins with the integer 1
NAMES = ("learning_rate", *(f"learning_rate.{index}" for index in range(1, GROUPS)))


class RatesCollector(Collector):
    """Learning rates: what was really used, and what the job itself had set.

    Reads the rates of each optimizer while they are in force.
    """

    METRICS = RATES_METRICS

    def __init__(self, context: ProbeContext, rate: LearningRate) -> None:
        super().__init__(context)
        self._rate = rate
        self._values: dict[str, Number] = {}
        self._schedulers = context.registry.schedulers
        self._searched = -1
        self._first: Optional[weakref.ref[Any]] = None  # the optimizer of the first group
        self._own: list[weakref.ref[Any]] = []  # its schedulers
        self._agreed, self._moved, self._last = 0, False, 0.0

    def before_update(self, update: Update) -> None:
        for index, group in enumerate(update.optimizer.param_groups, update.known.first_group):
            rate = group.get("lr")
            if rate is None or index >= GROUPS:
                continue
            self._values[NAMES[index]] = rate if type(rate) is float else self._read(rate)
            if index:
                continue
            initial = group.get("initial_lr")
            if self._first is None or self._first() is not update.optimizer:
                if self._first is not None and not isinstance(initial, NUMBER):
                    initial = rate  # who makes another optimizer says which rate it has
                self._first = weakref.ref(update.optimizer)
            if isinstance(initial, NUMBER):
                self._values["learning_rate_initial"] = float(initial)
            rate = update.scheduled
            if rate is not None:
                self._values["learning_rate_scheduled"] = (
                    rate if type(rate) is float else self._read(rate)
                )
                if isinstance(rate, NUMBER):
                    self._compare(update.optimizer, float(rate))

    def _compare(self, optimizer: Any, rate: float) -> None:
        """See what the scheduler of the first optimizer has made of `rate`."""
        if self._schedulers.changes != self._searched:
            self._searched = self._schedulers.changes
            served = (
                (scheduler, getattr(scheduler, "optimizer", None)) for scheduler in self._schedulers
            )
            self._own = [
                weakref.ref(scheduler)
                for scheduler, served in served
                if optimizer in (served, getattr(served, "optimizer", None))
            ]
        if not self._own:
            return
        scheduled = [
            float(rates[0])
            for reference in self._own
            if (rates := getattr(reference(), "_last_lr", None))
        ]
        agrees = any(abs(value - rate) <= CLOSE * abs(rate) for value in scheduled)
        if agrees:
            self._agreed += 1
            self._moved = self._moved or (self._agreed > 1 and rate != self._last)
        elif self._agreed < AGREED or not self._moved:
            self._agreed, self._moved = 0, False
        if scheduled and self._agreed >= AGREED and self._moved:
            self._values["learning_rate_expected"] = rate if agrees else scheduled[-1]
        self._last = rate

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        values.update(self._values)
        self._values.clear()
        hold = self._rate.hold
        values["lr_scale"] = self._rate.factor() * (1.0 if hold is None else hold.used)
        if hold is not None:
            values["lr_hold"] = hold.used
        if self._rate.warming.moves:
            values["lr_rewarm"] = self._rate.warming.now

    def _read(self, rate: Any) -> Number:
        return self.scalars.value(rate) if isinstance(rate, self.torch.Tensor) else float(rate)
