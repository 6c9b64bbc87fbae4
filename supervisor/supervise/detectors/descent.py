"""Descent, comparable, averaged, stationary, negligible: whether a metric's past is its measure.

It has to have fallen in this run, its values must be of the same amount of data each, or means, and
what it compares the model with has to stay as it is. Where it has no noise its spread says
nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
from ._baseline import NORMAL, cut_lists_after, median_of_sorted, trim_window
from ._excess import ExcessWatch
from ._watch import AmountDetector, Memory, MetricDetector

ARL, MARGIN = 1e6, 0.02  # what an excursion is, as in `harm`
NOTHING = 1e-6  # what float32 leaves of a sum that cancels; no loss that is to fall begins there
# Amounts: a tenth more is alike; one row in eight may be odd, of 16 at least.
ALIKE, ODD, FIRST = math.log(1.1), 8, 16
FEWEST = 3  # rows that may be of three levels
# Of a move of the amount, in logarithms: how exactly a sum follows it; in deviations of the ratio.
EXACT, ROUGH, DEVIATIONS = 0.25, 0.5, 3.0
PROOF = 8  # rows behind a move: the metric has to go on following
# Without noise: second differences, as a share of the level. Batches that differ gave 0.03 and more
# in 17 small programs, one batch all the time at most 0.005, but while it oscillates.
SMOOTH, REMEMBERED = 0.005, 1024  # share; rows
CONVERGED = 0.125  # of the first rows' level; no language model comes that far; our choice
BEGIN = 8  # rows that the level of the begin is the median of


@dataclass(frozen=True)
class Descent(MetricDetector):
    """BREACH while the metric is an objective: in this run it has fallen beyond its own noise.

    Its level, the lower one of the medians of the newest `window` and of the newest 32 quiet rows,
    fell by more than four of its errors, and by twice what it ever climbed by itself. Rows of an
    excursion, as `harm` knows them, count for neither, and a step up is no climb: a run that was
    harmed stays an objective.

    UNKNOWN until half of `window` rows were quiet, and for absent and NaN samples; before, OK where
    it began at nothing, as a sum of terms that cancel does, and BREACH for the first half of
    `window` rows with `presumed`. `rewind` keeps what was before.

    Example:
        {kind: descent, metric: train_loss_raw}

    Blind to: falls within the noise, as of a fine-tuning that was done before it began, or of a run
        that was started again at the level where it stays.
    Source: losses of GANs and of reinforcement learning, which go up and down as the policy or the
        other network moves; the limits are those of `harm`, from 120 losses of 60 small GANs.
    """

    measures_descent: ClassVar[bool] = True

    metric: str
    window: int = 128  # rows
    presumed: bool = False  # the first rows are taken for those of an objective

    def start(self) -> DescentWatch:
        return DescentWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        if 32 <= self.window <= 1024:
            return []
        return [("window", f"must be 32 to 1024 rows, not {self.window}")]


class DescentWatch(ExcessWatch):
    """The level of the quiet rows, and how far it fell and rose."""

    def __init__(self, spec: Descent) -> None:
        self.spec = spec
        super().__init__(ARL, MARGIN, spec.window)

    def feed(self, sample: Any, step: int) -> int:
        if self.feed_statistic(sample, step) is None:
            return UNKNOWN
        if self.excess.knows_descent:
            self.raw = BREACH if self.excess.has_descended else OK
        elif abs(self.excess.first) <= NOTHING:
            self.raw = OK
        elif self.spec.presumed and len(self.series.rows) < self.spec.window // 2:
            self.raw = BREACH
        return self.raw

    def lacks(self, spacing: int) -> str:
        return self.needs_rows(self.spec.metric)

    def numbers(self) -> Reading:
        excess = self.excess
        return {
            "step": self.last,
            "value": None,
            "level": excess.level,
            "fallen": excess.drop,
            "risen": excess.rise,
            "error": excess.error,
            "samples": len(excess.ref),
        }


@dataclass(frozen=True)
class Comparable(AmountDetector):
    """BREACH while the values of a metric can be compared: they are of the same amount each.

    A loss that is summed over an episode, or over as many micro-batches as there are, goes up and
    down with their number. So it is OK, for `lasting` steps, where of the newest `window` rows one
    in eight had an `amount` unlike that of the row before and of the two commonest ones. Two levels
    are of the same kind: the last update of an epoch is of fewer micro-batches, two tasks come by
    turns. A tenth more or less is alike, and a few new levels are a ramp. Before 16 rows, and from
    the third on, that is so for the row alone.

    With `least` it is about the row alone, and OK where its amount is below that share of the
    median of `window` rows, as that of the last batch of an epoch.

    BREACH before 3 rows, and where no amount is known. UNKNOWN for absent and NaN samples of
    `metric`. `rewind` keeps what was before.

    Example:
        {kind: comparable, metric: train_loss_raw, amount: forwards_per_update}

    Blind to: one forward whose rows are an episode, and averages, which could be compared.
    Source: an actor and critic that learns to balance a pole: its loss rises a hundred times
        because it balances it for longer; the limits are our choice.
    """

    metric: str
    amount: str
    window: int = 64  # rows
    lasting: int = 1024  # steps
    least: float = 0.0  # share of the median amount; 0: any

    def start(self) -> ComparableWatch:
        return ComparableWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not FIRST <= self.window <= 1024:
            wrong.append(("window", f"must be {FIRST} to 1024 rows, not {self.window}"))
        if self.lasting < 1:
            wrong.append(("lasting", f"must be at least 1 step, not {self.lasting}"))
        if not 0.0 <= self.least < 1.0:
            wrong.append(("least", f"must be 0 to 1, not {self.least}"))
        return wrong


class ComparableWatch(Memory):
    """The newest amounts as `levels`, 10 % apart, whether each is unlike the one before, and the
    steps at which they were `odd`."""

    def __init__(self, spec: Comparable) -> None:
        self.spec = spec
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.levels: list[float] = []
        self.turns: list[float] = []
        self.odd: list[int] = []
        self.alike = 0  # newest rows in a row with one level

    def forget_last(self) -> None:
        super().forget_last()
        self.is_short = self.is_early = False

    def feed(self, sample: Any, step: int) -> int:
        self.value, amount = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last, self.is_short, self.is_early = step, False, False
        if amount is not None and 0.0 < amount < math.inf:
            self._count(round(math.log(amount) / ALIKE), step)
        if self.value is None or self.value - self.value != 0.0:
            return UNKNOWN
        is_odd = bool(self.odd) and step - self.odd[-1] < self.spec.lasting
        self.raw = OK if is_odd or self.is_short or self.is_early else BREACH
        return self.raw

    def _count(self, level: int, step: int) -> None:
        turned = bool(self.levels) and level != self.levels[-1]
        self.turns.append(turned)
        self.levels.append(level)
        self.steps.append(step)
        window = self.spec.window
        trim_window(window, self.steps, self.levels, self.turns)
        self.alike = 0 if turned else self.alike + 1
        if self.alike >= window:
            return
        if self.spec.least:
            newest = self.levels[-window:]
            least = math.log(self.spec.least) / ALIKE
            # Most rows are as large as any, and need no median.
            self.is_short = (
                level < max(newest) + least and level < median_of_sorted(sorted(newest)) + least
            )
            return
        turns = self.turns[-window:]
        if len(turns) < FEWEST or sum(turns) * ODD <= len(turns):
            return
        levels = self.levels[-window:]
        if len(set(levels)) <= 2:
            return
        common = {level for level, _ in Counter(levels).most_common(2)}
        strange = sum(turn and at not in common for at, turn in zip(levels, turns, strict=True))
        if strange * ODD <= len(turns):
            return
        self.is_early = len(turns) < FIRST
        if not self.is_early:
            self.odd.append(step)
            trim_window(window, self.odd)

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.levels, self.turns)
        cut_lists_after(step, self.odd)
        self.alike = 0

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "value": None,
            "odd_at": self.odd[-1] if self.odd else None,
            "samples": len(self.steps),
        }


@dataclass(frozen=True)
class Averaged(AmountDetector):
    """BREACH while a metric is a mean: it does not follow the amount that it is of.

    A loss that is summed over tokens doubles when the sequences do, and is no worse. So it is OK,
    for `lasting` steps, once the amount is a tenth above all of the older half of `window` rows,
    and the metric grew in proportion: the logarithm of their ratio moved by less than a quarter of
    the amount's, or by three of its deviations, and by half of it at most. That is taken back where
    the metric follows the amount no more in the 8 rows behind. A sum may be harmed, too: BREACH
    while the median of the newest 8 ratios is up by more than that quarter and three deviations.

    BREACH before `window` rows, and where no amount is known. UNKNOWN for absent and NaN samples of
    `metric`. `rewind` keeps what was before.

    Example:
        {kind: averaged, metric: train_loss_raw, amount: tokens_per_update}

    Blind to: sums over amounts that grow by less than a tenth in a window, or vary all the time.
    Source: a training with reduction="sum" whose sequences double in length; the limits are our
        choice.
    """

    measures_mean: ClassVar[bool] = True

    metric: str
    amount: str
    window: int = 64  # rows
    lasting: int = 1024  # steps

    def start(self) -> AveragedWatch:
        return AveragedWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 2 * FIRST <= self.window <= 1024:
            wrong.append(("window", f"must be {2 * FIRST} to 1024 rows, not {self.window}"))
        if self.lasting < 1:
            wrong.append(("lasting", f"must be at least 1 step, not {self.lasting}"))
        return wrong


class AveragedWatch(Memory):
    """Logarithms of `amounts` and of `ratios`, metric to amount; the steps of moves, and of their
    withdrawals; the ratios above which the metric is higher than a sum would be behind each move.
    """

    def __init__(self, spec: Averaged) -> None:
        self.spec = spec
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.amounts: list[float] = []
        self.ratios: list[float] = []
        self.moves: list[int] = []
        self.limits: list[float] = []
        self.withdrawals: list[int] = []

    @property
    def newest(self) -> int | None:
        """The step of the newest move that stands."""
        if not self.moves or (self.withdrawals and self.withdrawals[-1] > self.moves[-1]):
            return None
        return self.moves[-1]

    def feed(self, sample: Any, step: int) -> int:
        self.value, amount = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if self.value is None or self.value - self.value != 0.0:
            return UNKNOWN
        if self.value > 0.0 and amount is not None and 0.0 < amount < math.inf:
            self._count(math.log(amount), math.log(self.value), step)
        newest = self.newest
        lasts = newest is not None and step - newest < self.spec.lasting
        self.raw = OK if lasts and self._is_proportional() else BREACH
        return self.raw

    def _is_proportional(self) -> bool:
        """Return whether the newest rows are no higher than a sum over their amounts."""
        ratios = sorted(self.ratios[-PROOF:])  # none, far behind a rewind and without amounts
        return not ratios or median_of_sorted(ratios) < self.limits[-1]

    def _count(self, amount: float, value: float, step: int) -> None:
        self.steps.append(step)
        self.amounts.append(amount)
        self.ratios.append(value - amount)
        window = self.spec.window
        trim_window(window, self.steps, self.amounts, self.ratios)
        since = bisect_left(self.steps, self.moves[-1]) if self.moves else -PROOF
        if self.moves and len(self.steps) - since == PROOF:
            if self._highest_ratio(since, len(self.steps)) is None:
                self.withdrawals.append(step)
                trim_window(window, self.withdrawals)
            return
        is_free = len(self.steps) >= window and len(self.steps) - since > PROOF
        limit = self._highest_ratio(len(self.steps) - 1, len(self.steps)) if is_free else None
        if limit is not None:
            self.moves.append(step)
            self.limits.append(limit)
            trim_window(window, self.moves, self.limits)

    def _highest_ratio(self, start: int, end: int) -> float | None:
        """Return what the ratio may be where amount and metric are higher in proportion in these
        rows, None where they are not."""
        window = self.spec.window
        before = slice(max(0, end - window), max(1, end - window // 2))
        highest = max(self.amounts[before])
        move = median_of_sorted(sorted(self.amounts[start:end])) - highest
        if move < ALIKE:
            return None
        usual = median_of_sorted(sorted(self.ratios[before]))
        noise = median_of_sorted(sorted(abs(ratio - usual) for ratio in self.ratios[before]))
        exact, rough = move * EXACT, DEVIATIONS * NORMAL * noise
        limit = exact + min(move * (ROUGH - EXACT), rough)
        follows = all(abs(ratio - usual) < limit for ratio in self._middles(start, end))
        return usual + exact + rough if follows else None

    def _middles(self, start: int, end: int) -> list[float]:
        """Return the ratio of a row, or the medians of both halves of several."""
        middle = start + (end - start) // 2
        halves = [self.ratios[start:middle], self.ratios[middle:end]]
        return [median_of_sorted(sorted(half)) for half in halves if half]

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.amounts, self.ratios)
        cut_lists_after(step, self.moves, self.limits)
        cut_lists_after(step, self.withdrawals)

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "value": None,
            "odd_at": self.newest,
            "samples": len(self.steps),
        }


@dataclass(frozen=True)
class Stationary(AmountDetector):
    """BREACH while a metric compares the model with the same thing all the time.

    The loss of a network that learns what a copy of it expects, as in deep Q-learning, rises a
    thousand times when the copy is renewed, or when it first meets a reward, and is no worse. So it
    is OK from where `amount`, a count of networks that are copied from the trained one, is above 0.

    BREACH where no amount is known. UNKNOWN for absent and NaN samples of `metric`. `rewind` keeps
    what was before.

    Example:
        {kind: stationary, metric: train_loss_raw, amount: moving_targets}

    Blind to: targets that the trained network computes itself, as in self-play.
    Source: Mnih et al., 2015: targets of a network that is copied every 10000 updates.
    """

    metric: str
    amount: str

    def start(self) -> StationaryWatch:
        return StationaryWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        return []


class StationaryWatch(Memory):
    """The steps at which the amount went from 0 to more, or back, and whether it was more then."""

    def __init__(self, spec: Stationary) -> None:
        self.spec = spec
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.changes: list[int] = []
        self.moving: list[float] = []

    def feed(self, sample: Any, step: int) -> int:
        self.value, amount = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        if amount is not None and 0.0 <= amount < math.inf and (amount > 0.0) != self.is_moving:
            self.moving.append(amount > 0.0)
            self.changes.append(step)
            trim_window(FIRST, self.changes, self.moving)
        if self.value is None or self.value - self.value != 0.0:
            return UNKNOWN
        self.raw = OK if self.is_moving else BREACH
        return self.raw

    @property
    def is_moving(self) -> bool:
        """Whether the newest amount was above 0."""
        return bool(self.moving) and self.moving[-1] > 0.0

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.changes, self.moving)

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "value": None,
            "odd_at": self.changes[-1] if self.changes else None,
        }


@dataclass(frozen=True)
class Negligible(Detector):
    """BREACH while a metric that has no noise, and has nearly all of its fall behind it, is up by
    no more than `share` of that fall.

    A loss of one batch all the time has no spread that an excess could be compared with, and Adam
    oscillates on it: by several times what is left, by next to nothing of what was learned. So the
    level, the median of the newest `window` rows, must be an eighth of the first rows' at most, and
    at some point of the newest 1024 rows the median second difference of `window` rows must have
    been half a percent of it at most.

    OK before, and for absent, negative and NaN samples. `beside` is a metric of the rule that uses
    it, which can so be judged where there is no `metric`. `rewind` keeps what was before.

    Example:
        {kind: negligible, metric: train_loss_raw, beside: update_norm, share: 0.02}

    Blind to: faults of a run of one batch that cost less than `share` of what it has learned.
    Source: regressions, a sine and equations that are fitted in full batches; the limits are our
        choice.
    """

    reads: ClassVar[str] = "metrics"

    metric: str
    beside: str
    share: float = 0.02  # of the fall; our choice
    window: int = 64  # rows

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.beside)

    @property
    def subjects(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_all(self) -> bool:
        return False

    def start(self) -> NegligibleWatch:
        return NegligibleWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not 0.0 < self.share < 1.0:
            wrong.append(("share", f"must be between 0 and 1, not {self.share}"))
        if not FIRST <= self.window <= 1024:
            wrong.append(("window", f"must be {FIRST} to 1024 rows, not {self.window}"))
        return wrong


class NegligibleWatch(Memory):
    """The newest `values`, those of the `begin`, and the steps where they were `smooth`."""

    def __init__(self, spec: Negligible) -> None:
        self.spec = spec
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.steps: list[int] = []
        self.values: list[float] = []
        self.smooth: list[int] = []
        self.begin: list[float] = []
        self.begin_steps: list[int] = []

    def feed(self, sample: Any, step: int) -> int:
        self.value, _ = sample
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last, self.raw = step, OK
        value = self.value
        if value is None or not 0.0 <= value < math.inf:
            return OK
        if len(self.begin) < BEGIN:
            self.begin.append(value)
            self.begin_steps.append(step)
        elif value < self.highest and self._is_negligible(value):
            self.raw = BREACH
        self.values.append(value)
        self.steps.append(step)
        trim_window(self.spec.window, self.steps, self.values)
        return self.raw

    @property
    def highest(self) -> float:
        """The level of the first rows."""
        return median_of_sorted(sorted(self.begin)) if self.begin else math.nan

    def _is_negligible(self, value: float) -> bool:
        """Return whether a value is up by next to nothing, and note whether there is noise."""
        newest = self.values[-self.spec.window :]
        if len(newest) < self.spec.window:
            return False
        level = median_of_sorted(sorted(newest))
        if level > CONVERGED * self.highest:
            return False
        changes = [b - a for a, b in pairwise(newest)]
        bends = sorted(abs(b - a) for a, b in pairwise(changes))
        if median_of_sorted(bends) <= SMOOTH * level:
            self.smooth.append(self.steps[-1])
            trim_window(REMEMBERED, self.smooth)
        known = bool(self.smooth) and self.last - self.smooth[-1] <= REMEMBERED
        return known and value - level <= self.spec.share * (self.highest - level)

    def drop_after(self, step: int) -> None:
        cut_lists_after(step, self.steps, self.values)
        cut_lists_after(step, self.smooth)
        cut_lists_after(step, self.begin_steps, self.begin)

    def numbers(self) -> Reading:
        return {
            "step": self.last,
            "value": None,
            "level": median_of_sorted(sorted(self.values[-self.spec.window :]))
            if self.values
            else None,
            "smooth_at": self.smooth[-1] if self.smooth else None,
            "samples": len(self.steps),
        }
