"""The learning rate: scaled or held just before the optimizer uses it, put back right after.

So it composes with every scheduler, and with loops that write `group["lr"]` each step: the job's
own schedule never sees the scale. Knows no policy and no drill.

A hold keeps rates at their last healthy level: no group has more, whatever the job asks for. The
level is constant: of a schedule that moved on below a jump nobody knows how far. It binds only
while the job asks for more. Groups are counted flat over the optimizers, as in the metrics.

What was asked for stays until somebody takes it back, a hold until the job asks for no more: over a
rollback, which leaves them alone, and over a relaunch, for which they are written down.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Mapping, Optional

from ..runtime import files
from .records import TRAIL_LENGTH

if TYPE_CHECKING:
    from ..runtime.scalars import Scalars
    from .records import OptimizerInfo, Trail

# Of a healthy rate: more is a jump, and not a schedule's slope (0 of 298 006 rows of recorded
# schedules were over 1.5 times their largest rate so far).
JUMP = 1.5
FAR = 2.5  # of the rate in the step before; `over` of update_scale.lr_guard_far
LATE = 16  # steps that a jump may be confirmed behind its own step; project default


def record_rates(trail: Trail, step: int, rates: list[Optional[float]]) -> None:
    """Take down the rates of a step, if they are others than before."""
    if trail and trail[-1][1] == rates:
        return
    while trail and trail[-1][0] >= step:  # the run went back
        trail.pop()
    trail.append((step, rates))


def is_far(trail: Trail, rates: list[Optional[float]]) -> bool:
    """Whether the first group is about to have a rate far above that of the step before."""
    newest = trail[-1][1][:1] if trail else []
    return bool(newest and rates and newest[0] and rates[0] and rates[0] > FAR * newest[0])


def healthy_rate(trail: Trail, group: int, before_step: int) -> Optional[float]:
    """Return the rate of a group before the step `before`, and what it became without a jump.

    None where it is not known, or was 0: a group that is thawed has no level.
    """
    level: Optional[float] = None
    top = 0.0
    for step, rates in trail:
        rate = rates[group] if group < len(rates) else None
        if rate is None:
            continue
        if level is None and step >= before_step and len(trail) < TRAIL_LENGTH:
            break
        if level is not None and step >= before_step - LATE and rate > JUMP * max(level, top):
            break
        level, top = rate, max(top, rate)
    return level or None


def requested_rates(trail: Trail, at_step: int) -> list[Optional[float]]:
    """Return the rates that were asked for in the step `at`, the oldest known ones before that."""
    newest: list[Optional[float]] = []
    for step, rates in trail:
        if step > at_step and newest:
            break
        newest = rates
    return newest


class RateHold:
    """The levels of one order.

    Attributes:
        levels: by number of the group. since: the step that they are from before.
        release: steps without more than its level in any group, after which it is over; 0: never.
        used: of the first group, the share of its own rate that it has.
    """

    __slots__ = ("_back", "_last", "_over", "_quiet", "levels", "release", "since", "used")

    def __init__(
        self, levels: dict[int, float], since: int, release: int, newest: dict[int, float]
    ) -> None:
        """Begin; `last`: what the job has asked for last, by number of the group."""
        self.levels, self.since, self.release, self._last = levels, since, release, newest
        self._back, self._over, self._quiet, self.used = False, False, 0, 1.0

    def limit_if_exceeded(self, number: int, rate: float, step: int) -> Optional[float]:
        """Return what a group may have where it asks for more, None where it does not.

        A rate that falls from its jump to what a warm-up may have come to meanwhile is healthy, and
        so is what it becomes from there without another jump.
        """
        level, newest = self.levels.get(number), self._last.get(number, 0.0)
        self._last[number] = rate
        if level is None or rate <= level:
            return None
        # Linear in the steps: a warm-up from 0 at the first step.
        if rate <= JUMP * level * max(1.0, (step + 1) / max(1, self.since)):
            self._back = self._back or newest > JUMP * rate
            if self._back:
                self.levels[number] = rate
                self.since = step + 1
                return None
        self._over = True
        return level

    def advance_and_check_end(self) -> bool:
        """A step ended; return whether the hold has."""
        self._quiet = 0 if self._over else self._quiet + 1
        self._over = False
        return 0 < self.release <= self._quiet


HELD = "learning-rate.json"  # among the marks: what the next launch begins with
HOLD = "rate-hold.json"
Levels = dict[int, float]  # by the id of a parameter group


class Warmup:
    """A factor that starts at `value` and goes linearly to 1 over `steps`; 0 steps: it stays.

    Attributes:
        now: the factor of the step under way. moves: whether that of the next one may differ.
    """

    __slots__ = ("_done", "_steps", "_value", "moves", "now")

    def __init__(self, value: float = 1.0, steps: int = 0, steps_done: int = 0) -> None:
        """Begin; with `done` where it is after so many steps."""
        self._value, self._steps, self._done = value, steps, steps_done
        self._look()

    @property
    def progress(self) -> float:
        """How far the ramp is in the step under way, from 0 to 1; 1 where there is none."""
        return self._done / self._steps if self.moves else 1.0

    def advance(self) -> None:
        if self.moves:
            self._done += 1
            self._look()

    def _look(self) -> None:
        self.moves = self._done < self._steps
        share = self._done / self._steps if self._steps else 0.0
        self.now = self._value + (1.0 - self._value) * share if share < 1.0 else 1.0


# Of a search: its first rate at most, the factor of a step at least, how even that is, steps that
# show it, and its last rate at most. fastai and Lightning go from 1e-7 and 1e-8 over eight decades
# in 100 steps; a schedule that grows by mistake begins where training does. Project defaults.
TINY, GROWTH, EVEN, SHOWN, HIGHEST = 1e-5, 1.04, 0.02, 32, 1e3
# Of its last rate, within so many steps: the search is over, and its weights are thrown away. It
# has come further than an even warm-up of four decades does.
FALLEN, RECENT, RISEN = 0.5, 8, 3e4


class RateSearch:
    """A search for the highest rate of a training, as Smith's range test, arXiv:1506.01186.

    The rate is tiny and multiplied by the same factor in each step until the loss breaks. Then the
    training begins, with the weights from before.

    Attributes:
        on: it is under way. over: the rate has just fallen from it.
    """

    __slots__ = ("_factor", "_first", "_rate", "_since", "_steps", "_top", "on", "over")

    def __init__(self) -> None:
        self._rate = self._factor = 0.0  # of the step before; the natural logarithm of the growth
        self._first = self._top = 0.0  # rates of the newest search
        self._since = self._steps = 0  # steps since that; steps that grew evenly
        self.on = self.over = False

    def follow(self, rate: Optional[float]) -> None:
        """The job asks for this rate in the step that is about to be made."""
        previous, self._rate = self._rate, rate or 0.0
        self._since += 1
        if self.on:
            self._top, self._since = previous, 0
        has_fallen = self._rate < FALLEN * self._top and self._top > RISEN * self._first
        self.over = self._since <= RECENT and has_fallen
        if not self._rate > previous > 0.0:
            self._steps, self.on = 0, False
            return
        grown = math.log(self._rate / previous)
        if self._steps and abs(grown - self._factor) > EVEN * self._factor:
            self._steps = 0
        if not self._steps:
            self._factor = grown
            if previous > TINY or grown < math.log(GROWTH):
                self.on = False
                return
            self._first = previous
        self._steps += 1
        self.on = self._steps >= SHOWN and self._rate <= HIGHEST


class LearningRate:
    """The probe's hand on the learning rates of all optimizers.

    Attributes:
        held: what `lr_scale` asked for.
        warming: the re-warm ramp after a rollback or a relaunch; both factors are multiplied.
        hold: the limits of `hold_rate`, None without; they are applied before both.
        jumps: whether the optimizer that is about to step has a rate far above the one before.
        search: for the highest rate, by the first group of all.

    While it re-warms after a rollback that let the loop go on, each rate is limited: the loop may
    stand where the rate is what did the harm.
    """

    def __init__(
        self,
        torch: Any,
        scalars: Scalars,
        marks: str,
        first_step: Optional[int] = None,
        rewarm: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Begin; a later launch with what the one before held, and its re-warm.

        Args:
            marks: directory of what outlives a launch. first_step: of a later launch, else None.
            rewarm: `{"start", "steps"}`.
        """
        self._torch, self._scalars = torch, scalars
        self._path, self._hold_path = os.path.join(marks, HELD), os.path.join(marks, HOLD)
        self.held = Warmup()
        self.hold: Optional[RateHold] = None
        if first_step is not None:
            self.held, self.hold = _stored(self._path, first_step), _kept_hold(self._hold_path)
        self._rewarm = rewarm
        self.warming, self.jumps, self.search = Warmup(), False, RateSearch()
        self._limits: Levels = {}
        self.restart_rewarm()
        self._changed: list[tuple[dict[str, Any], Any, Any, float]] = []

    def restart_rewarm(self) -> None:
        """Begin the re-warm of this launch with the step under way, if there is one."""
        rewarm = self._rewarm
        if rewarm:
            self.warming = Warmup(float(rewarm["start"]), int(rewarm["steps"]))

    def start_scale(self, factor: float, steps: int, start: int) -> None:
        """Multiply by `factor` from the step `first` on, back at 1 after `steps`; 0: it stays.

        Raises:
            OSError: it is so, but a later launch will not know.
        """
        self.held = Warmup(factor, steps)
        if factor == 1.0:
            _forget(self._path)
            return
        document = {"value": factor, "steps": steps, "first": start}
        files.replace_file(self._path, json.dumps(document).encode())

    def record_requested_rates(
        self, info: OptimizerInfo, optimizer: Any, step: int, drill: float, leads: bool
    ) -> None:
        """Remember what the job asks for in this step, where the host knows it.

        leads: its first group is the first of all.
        """
        rates: list[Optional[float]] = []
        for group in optimizer.param_groups:  # a comprehension is one more call in each step
            rate = group.get("lr")
            rates.append(rate if type(rate) is float else self._on_host(rate))
        if drill != 1.0:
            rates = [None if rate is None else rate * drill for rate in rates]
        if leads:
            self.search.follow(rates[0])
        self.jumps = False
        if not info.rates or info.rates[-1][1] != rates:
            self.jumps = is_far(info.rates, rates)
            record_rates(info.rates, step, rates)

    def hold_at_healthy_level(
        self, optimizers: list[OptimizerInfo], before_step: int, factor: float, release: int
    ) -> dict[int, float]:
        """Hold each group at `factor` times its last healthy level; return the limits.

        Args:
            before_step: the step of the first breach. release: see `RateHold`.
        """
        levels: dict[int, float] = {}
        newest: dict[int, float] = {}
        for info in optimizers:
            for group in range(info.groups):
                level = healthy_rate(info.rates, group, before_step)
                if level is not None:
                    number = info.first_group + group
                    levels[number] = factor * level
                    newest[number] = info.rates[-1][1][group] or 0.0
        if levels:
            self.hold = RateHold(levels, before_step, release, newest)
        return levels

    def hold_at_limit(
        self, optimizers: list[OptimizerInfo], step: int, limit: float, release: int
    ) -> dict[int, float]:
        """Hold the first group at `limit`, the others in proportion, as they were in the step `at`.

        Returns the limits; none where the first one's rate was not known.
        """
        rates: dict[int, float] = {}
        newest: dict[int, float] = {}
        for info in optimizers:
            for group, rate in enumerate(requested_rates(info.rates, step)):
                if rate:
                    rates[info.first_group + group] = rate
                    newest[info.first_group + group] = info.rates[-1][1][group] or 0.0
        if 0 not in rates:
            return {}
        levels = {number: limit * rate / rates[0] for number, rate in rates.items()}
        self.hold = RateHold(levels, step, release, newest)
        return levels

    def save_hold(self) -> None:
        """Write down what is held, for a later launch. Raises OSError."""
        if self.hold is not None:
            hold = self.hold
            document = {"levels": hold.levels, "since": hold.since, "release": hold.release}
            files.replace_file(self._hold_path, json.dumps(document).encode())

    def clear_hold(self) -> None:
        """Hold no rate any more."""
        self.hold = None
        _forget(self._hold_path)

    def begin_training(self) -> None:
        """Another model trains from now on: no ramp and no search of the one before is its own."""
        self.warming, self.search = Warmup(), RateSearch()

    def factor(self) -> float:
        """Return the multiplier of the step under way, drills and `hold` excluded."""
        return self.held.now * self.warming.now

    def levels(self, optimizers: list[Any]) -> Levels:
        """Return the rate that the job has set for each group, where the host knows it."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [(id(group), group.get("lr")) for group in groups]
        return {number: float(rate) for number, rate in rates if isinstance(rate, (int, float))}

    def start_rewarm(self, start: float, steps: int, levels: Levels) -> Optional[float]:
        """Begin a re-warm from `start`; until its end no group has more than `JUMP` its level.

        Returns the limit of the first group.
        """
        self.warming = Warmup(start, steps)
        self._limits = {number: JUMP * level for number, level in levels.items()}
        return next(iter(self._limits.values()), None)

    def apply(self, optimizer: Any, drill: float, start: int, step: int) -> None:
        """Multiply the rate of every group until `restore_job_rates`, by `drill` as if by the job
        itself.

        Args:
            start: number of its first group.
        """
        ours, hold = self.factor(), self.hold
        limits = self._limits if self.warming.moves else {}
        scaled: list[tuple[dict[str, Any], float]] = []
        groups = optimizer.param_groups
        for number, group in enumerate(groups, start):
            rate = group.get("lr")
            factor, limit = drill * ours, limits.get(id(group))
            job_rate = self._on_host(rate) if hold is not None or limit is not None else None
            if job_rate is not None:
                requested_rate = job_rate * drill
                cap = None if hold is None else hold.limit_if_exceeded(number, requested_rate, step)
                if hold is not None and start == 0 and self._is_shared(rate, groups[0], group):
                    used = 1.0 if cap is None else cap / job_rate
                    hold.used = min(used, hold.used) if number else used
                limit = min(
                    (ceiling for ceiling in (limit, cap) if ceiling is not None),
                    default=requested_rate,
                )
                if requested_rate > limit:
                    factor = limit * ours / job_rate
            if rate is not None:
                scaled.append((group, factor))
        self._set(scaled)

    def _is_shared(self, rate: Any, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether two groups are the same or have the same tensor as their rate."""
        return one is other or (one.get("lr") is rate and isinstance(rate, self._torch.Tensor))

    def _set(self, scaled: list[tuple[dict[str, Any], float]]) -> None:
        """Multiply the rates of groups by their factors.

        Groups may share one tensor, which is multiplied once: by the smallest factor, since no
        group may have more than its limit.
        """
        tensors: dict[int, tuple[Any, Any, float]] = {}  # by id: itself, its value, the factor
        for group, factor in scaled:
            rate = group["lr"]
            if isinstance(rate, self._torch.Tensor):
                job_rate, smallest = tensors.get(id(rate), (rate, rate.clone(), factor))[1:]
                tensors[id(rate)] = rate, job_rate, min(factor, smallest)
            else:
                used = rate * factor
                self._changed.append((group, rate, used, factor))
                group["lr"] = used
        for group, _ in scaled:
            if id(group["lr"]) in tensors:
                rate, job_rate, factor = tensors[id(group["lr"])]
                self._changed.append((group, job_rate, rate, factor))
        with self._torch.no_grad():
            for rate, _, factor in tensors.values():
                rate.mul_(factor)  # in place: a compiled or captured step holds this tensor

    def reschedule(self, optimizer: Any, factor: float) -> None:
        """Multiply every rate until `restore_job_rates`, as if the job's schedule had."""
        self._set(
            [(group, factor) for group in optimizer.param_groups if group.get("lr") is not None]
        )

    @property
    def is_scaled(self) -> bool:
        """Whether a rate is scaled now."""
        return bool(self._changed)

    def restore_job_rates(self) -> None:
        """Put back what the job had set, bit for bit."""
        while self._changed:
            group, job_rate, used, factor = self._changed.pop()
            if group.get("lr") is not used:  # the optimizer chose a new rate during its step
                group["lr"] = group["lr"] / factor
            elif isinstance(used, self._torch.Tensor):
                with self._torch.no_grad():
                    used.copy_(job_rate)
            else:
                group["lr"] = job_rate

    def advance_and_check_hold_end(self) -> bool:
        """A step ended; return whether the job's own rate is let go."""
        if self.warming.moves:
            self.warming.advance()
        if self.held.moves:
            self.held.advance()
            if not self.held.moves:
                with suppress(OSError):  # then a later launch goes through the ramp once more
                    _forget(self._path)
        ends = self.hold is not None and self.hold.advance_and_check_end()
        if ends:
            with suppress(OSError):  # then a later launch lets it go once more
                self.clear_hold()
        return ends

    def _on_host(self, rate: Any) -> Optional[float]:
        """Return a rate as a number, None where that would wait for a device, or there is none."""
        if isinstance(rate, self._torch.Tensor):
            return float(rate) if self._scalars.can_read_now(rate) and rate.numel() == 1 else None
        return float(rate) if isinstance(rate, (int, float)) else None


def _forget(path: str) -> None:
    with suppress(FileNotFoundError):
        os.remove(path)


def _stored(path: str, step: int) -> Warmup:
    """Return what an earlier launch held, as it was at `step`; before that, as it began."""
    try:
        document = json.loads(files.read_file(path))
        steps = int(document["steps"])
        return Warmup(
            float(document["value"]), steps, min(max(0, step - int(document["first"])), steps)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return Warmup()


def _kept_hold(path: str) -> Optional[RateHold]:
    """Return the limits that an earlier launch held its rates at, None without."""
    try:
        document = json.loads(files.read_file(path))
        levels = {int(number): float(level) for number, level in document["levels"].items()}
        return RateHold(levels, int(document["since"]), int(document["release"]), {})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
