"""The excess of a series over its own prediction, summed: evidence that it became worse.

For a sum with drift -k and long-run variance L per row, the chance of one excursion above h is
exp(-2 k h / L), whatever the noise is. So the limit h grows with the logarithm of the rows wanted
between two false alarms; and where noise is stranger than L says, with the greatest sum that was
over by itself, which needs no model but a past. The prediction is never above the recent past, so a
fall is no harm; and an excursion never enters its own reference.

Long-run variances: the greatest of one from the lag-1 correlation around a parabola, and of those
of sums of 16 and 64 rows by third differences. Neither takes the curve of a falling loss for noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import islice
from operator import mul
from typing import TypeAlias

from ..core.model.decisions import UNKNOWN
from ._baseline import HUGE, NORMAL, median_of_sorted
from ._watch import NEVER, Memory, explain_lacks

ExcessState: TypeAlias = int  # one of these
QUIET, SUSPECTED, ESTABLISHED, LASTED, LEARNING = range(5)
NEWEST = 32  # rows of the second median
REFIT = 8  # quiet rows between two fits
MEMORY = 256  # rows that the running means remember at most
LOW, BATCH = -6.0, 64  # spreads, rows: what is that low waits, as a batch that is repeated would be
SUSPECT = 1e3  # rows between two false suspicions
LEAST = 20  # independent rows that must have been seen
AGES, AGE = 16, 256  # records are kept for 16 ages of 256 rows
FLOOR, LEAST_SPREAD = 0.002, 1e-9  # share of the prediction, units of the metric
FAST, JUMP = 8.0, 0.25  # two rows in a row: spreads, share of the prediction
# What stays high has a median above this share of the allowance; of others it is seen after many
# rows how many of them are high: a generator's among its critic's are one in six. Our choice.
MOST, MANY, SHARE, HIGH = 0.75, 256, 0.2, 2.5
LASTING = 512  # rows after which an excess is the new level
ENDS = 16  # rows back in the allowance, at most, until it is over
FIRST = 8  # rows whose median a loss has fallen from
FELL, ONE_WAY = 4.0, 2.0  # errors; times the largest rise: a loss that is an objective; our choice
SLOW, BEFORE = 12, 64  # rows: a climb takes as many at least; compared with as many quiet ones
BETTER = 3.0  # twice the logarithm of how much likelier a step must be than a climb; our choice
CLIPPED = 16.0  # spreads; what a row teaches at most
KEPT = 3  # states that a rewind can restore, a window of rows apart


class Blocks:
    """The variance of sums of `size` rows, per row, with `errors` standard errors on top."""

    def __init__(self, size: int, errors: float) -> None:
        self.size, self.errors = size, errors
        self.filled, self.sum = 0, 0.0
        self.newest: tuple[float, ...] = ()
        self.weight = self.mean = 0.0

    def add(self, value: float, rate: float) -> None:
        """Add a row; `rate` is how fast rows are forgotten."""
        self.sum += value
        self.filled += 1
        if self.filled < self.size:
            return
        self.newest = (*self.newest[-3:], self.sum)
        self.filled, self.sum = 0, 0.0
        if len(self.newest) == 4:
            a, b, c, d = self.newest
            third = d - a + 3.0 * (b - c)  # of independent sums it has 20 times their variance
            self.weight = min(self.weight + 1.0, max(1.0, 2.0 / (rate * self.size)))
            self.mean += (third * third / (20.0 * self.size) - self.mean) / self.weight

    def variance(self) -> float:
        """Return the variance per row, 0 while there is none. Neighbours share their sums: 2.3."""
        if not self.weight:
            return 0.0
        return self.mean * (1.0 + self.errors * math.sqrt(2.3 / self.weight))

    def copy(self) -> Blocks:
        twin = Blocks(self.size, self.errors)
        vars(twin).update(vars(self))
        return twin


def _explained(rows: list[float], shape: list[float]) -> float:
    """Return how much of the squares of the rows their regression on a shape explains."""
    middle = sum(shape) / len(shape)
    shape = [x - middle for x in shape]
    along: float = max(0.0, sum(map(mul, rows, shape)))
    squares: float = sum(map(mul, shape, shape))
    return along * along / squares


class Excess:
    """The statistic without steps: `feed` rows, and read `level`, `spread`, `total` and `limit`.

    Attributes:
        ref: the newest quiet rows. waiting: the rows of the excursion under way. rows: how many.
        lost: their sum above `level`, the prediction. total: their evidence, at most `limit`.
        on: rows since the excess was established, 0 when it is not.
        is_step: the excess that was established came at once, and did not climb to it.
        has_reached: the evidence is enough; where most rows are usual ones, more are awaited.
        first: the first row of the run.
        drop, rise: the largest fall and the largest rise of the level until now, from the first
            rows on; of a climb that was over by itself its mean. A step is no wandering.
        error: of that level, one standard deviation.
    """

    def __init__(self, arl: float, margin: float, window: int) -> None:
        self.wanted, self.margin, self.window = math.log(arl), margin, window
        self.least = 3 * window // 8
        self.ref: list[float] = []
        self.ordered: list[float] = []
        self.low: list[float] = []
        self.blocks = (Blocks(16, 1.5), Blocks(64, 1.0))
        self.seen = self.fit_in = 0  # rows learned from; until the next fit
        self.quiet = 0  # rows in no excursion, those that were low included
        self.mean = self.upper = self.square = self.product = self.usual = 0.0
        self.sums, self.rises = [0.0] * AGES, [0.0] * AGES  # the greatest of each age
        self.level = self.spread = self.limit = math.nan
        self.allowed = self.most = self.suspect = self.per_independent = 0.0
        self.first, self.highest, self.lowest = math.nan, -math.inf, math.inf
        self.drop = self.rise = self.error = self.slope = 0.0
        self.axes: tuple[list[float], list[float], float, float] = ([], [], 1.0, 1.0)
        self.forget_excursion()

    def forget_excursion(self) -> None:
        """Forget the excursion under way, and what waits."""
        self.waiting: list[float] = []
        self.total = self.peak = self.lost = 0.0
        self.rows = self.on = 0
        self.jumped = False  # the newest row was far out
        self.is_step = self.has_reached = False

    def copy(self) -> Excess:
        twin = object.__new__(Excess)
        for name, value in vars(self).items():
            setattr(twin, name, value.copy() if isinstance(value, list) else value)
        twin.blocks = (self.blocks[0].copy(), self.blocks[1].copy())
        return twin

    @property
    def knows_descent(self) -> bool:
        """Whether enough rows were in no excursion to tell a fall from two levels by turns."""
        return self.quiet >= self.window // 2

    @property
    def has_descended(self) -> bool:
        """Whether it fell by more than noise, and by far more than it ever rose by itself."""
        return (
            self.knows_descent and self.drop > FELL * self.error and self.drop > ONE_WAY * self.rise
        )

    def keep_descent(self, before: Excess) -> None:
        """Take over what was seen of the same series before."""
        self.first, self.quiet = before.first, before.quiet
        self.highest, self.lowest = before.highest, before.lowest
        self.drop, self.rise, self.error = before.drop, before.rise, before.error

    # ── judging ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, x: float) -> ExcessState:
        """Take the next row."""
        if len(self.ref) < self.least:
            if not self.ref and math.isnan(self.first):
                self.first = x
            self._accept(x)
            if len(self.ref) == self.least:
                self.seen, self.quiet = self.least, max(self.quiet, self.least)
                self.highest = median_of_sorted(
                    sorted(self.ref[:FIRST])
                )  # most of a fall is at the start
                self._fit()
            return LEARNING
        u = (x - self.level) / self.spread
        if self.on:
            return self._follow(x, u)
        if u < LOW:
            self.low.append(x)
            self.quiet += 1
            if len(self.low) >= BATCH:
                self._take_in(self.low)
                self.low = []
            return QUIET
        total = self.total + (u if u < self.most else self.most) - self.allowed
        if total <= 0.0:
            self._learn_quiet(x)
            return QUIET
        self.total, self.peak = total, max(self.peak, total)
        self.rows += 1
        self.waiting.append(x)
        self.lost += x - self.level
        if self._is_established(x, u):
            self.on, self.total = 1, self.limit  # two rows that far out count as reaching it
            return ESTABLISHED
        if self.has_reached and self.rows < MANY:
            self.total = min(total, 2.0 * self.limit)  # so it ends soon after the high rows do
            return SUSPECTED
        enough = self._has_enough()
        if (enough and total >= 2.0 * self.limit) or self.rows > self.window // 2:
            self._take_in(self.waiting)  # too small or too few to matter, or too long for the start
            self.forget_excursion()
            return QUIET
        return SUSPECTED if total >= self.suspect else QUIET

    def _has_enough(self) -> bool:
        return self.seen + self.rows >= LEAST * self.per_independent

    def _is_established(self, x: float, u: float) -> bool:
        share = abs(self.level)
        far = u > FAST and x - self.level > JUMP * share and u > 2.0 * max(self.rises)
        twice, self.jumped = far and self.jumped, far
        matters = self.lost > self.margin * share * self.rows
        reached = self.total >= self.limit and matters and self._has_enough()
        if twice or (reached and not self.has_reached) or (self.has_reached and self._stays()):
            self.is_step = self._begins_at_once()
        self.has_reached |= reached
        return twice or (self.has_reached and matters and (self._stays() or self._is_often_high()))

    def _stays(self) -> bool:
        """Return whether most of the newest rows are high."""
        newest = sorted(self.waiting[-self.window // 2 :])
        return median_of_sorted(newest) - self.level > MOST * self.allowed * self.spread

    def _is_often_high(self) -> bool:
        """Return whether a good share of many rows is high."""
        if self.rows < MANY:
            return False
        lowest = sorted(self.waiting)[-int(SHARE * self.rows)]
        return lowest - self.level > HIGH * self.allowed * self.spread

    def _begins_at_once(self) -> bool:
        """Whether a step explains the excursion, and what was before it, better than a climb."""
        if self.rows == 2 and self.slope <= 0.0:  # else two rows may go on as those before
            return True
        rows = self.ref[-BEFORE:] + self.waiting
        count = len(rows)
        step = max(
            _explained(rows, [float(i >= start) for i in range(count)])
            for start in range(count - self.rows, count - 1)
        )
        climb = max(
            _explained(rows, [max(0.0, i - turn) for i in range(count)])
            for turn in range(0, count - SLOW, 2)
        )
        middle = sum(rows) / count
        left = sum((x - middle) ** 2 for x in rows) - step
        return (step - climb) * count > BETTER * left

    def _follow(self, x: float, u: float) -> ExcessState:
        """Follow what was established until it is over, or has lasted for so long that it stays."""
        self.rows += 1
        self.on += 1
        self.lost += x - self.level
        self.waiting.append(x)
        if len(self.waiting) > 2 * self.window:
            del self.waiting[: self.window]
        excess = min(u, self.most) - self.allowed
        self.total = min(
            self.limit, self.total + (excess if excess > 0.0 else min(excess, -self.limit / ENDS))
        )
        if self.total > 0.0 and self.on < LASTING:
            return ESTABLISHED
        lasted = self.total > 0.0
        if lasted:
            if self.is_step:
                self.lowest = math.inf  # what is harmed stays an objective
            self._take_in(self.waiting)
        else:
            self._note_sum(min(self.peak, 2.0 * self.limit))
            if not self.is_step:
                self.rise = max(self.rise, self.lost / self.rows)  # over by itself: it wanders
            self._fit()
        self.forget_excursion()
        return LASTED if lasted else QUIET

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def _learn_quiet(self, x: float) -> None:
        """Learn from a quiet row, and from what waited: that is over by itself."""
        if self.waiting:
            for entry in self.waiting:
                self._learn(entry)
            self._note_sum(self.peak)
            self.forget_excursion()
        self._learn(x)
        self.fit_in -= 1
        if self.fit_in <= 0:
            self._fit()

    def _accept(self, x: float) -> None:
        ref, ordered = self.ref, self.ordered
        if len(ref) >= self.window:
            del ordered[bisect_left(ordered, ref[0])]
            del ref[0]
        insort(ordered, x)
        ref.append(x)

    def _take_in(self, rows: list[float]) -> None:
        for x in rows[-self.window :]:
            self._accept(x)
        self._fit()

    def _learn(self, x: float) -> None:
        """Accept a row, and learn from its residual, which was out of sample."""
        self._accept(x)
        u = (x - self.level) / self.spread
        n = self.seen
        age = n // AGE % AGES
        rises = self.rises
        if n % AGE == 0:
            rises[age] = self.sums[age] = 0.0
        if u > rises[age]:
            rises[age] = u
        n = self.seen = n + 1
        self.quiet += 1
        if not -4.0 <= u <= 4.0:
            limit = min(max(4.0, self.most), CLIPPED)
            u = -limit if u < -limit else limit if u > limit else u
        rate = 1.0 / (MEMORY if n >= 3 * MEMORY else min(n, n / 3 + NEWEST, MEMORY))
        self.mean += rate * (u - self.mean)
        self.upper += rate * ((2.0 * u * u if u > 0.0 else 0.0) - self.upper)
        for blocks in self.blocks:
            blocks.add(u, rate)

    def _note_sum(self, peak: float) -> None:
        age = self.seen // AGE % AGES
        self.sums[age] = max(peak, self.sums[age])

    def _fit(self) -> None:
        """Fit level, spread, variances and limits to the reference."""
        self.fit_in = REFIT
        newest, middle = (
            median_of_sorted(sorted(self.ref[-NEWEST:])),
            median_of_sorted(self.ordered),
        )
        self.level = newest if newest < middle else middle
        n = self.seen
        self._fit_noise(REFIT / min(n / 3 + NEWEST, MEMORY) if self.usual else 1.0)
        sample_count = min(n, n / 3 + NEWEST, MEMORY)
        v = max(self.square, 1e-12)
        p = self.product / v
        p += 3.0 * (1.0 + max(p, 0.0)) / len(self.ref)  # the parabola's bias
        p = min(max(p + 2.0 * math.sqrt(max(1.0 - p * p, 0.0) / sample_count), 0.0), 0.98)
        v = max(v, self.upper)
        lrv = max(v * (1.0 + p) / (1.0 - p), *(blocks.variance() for blocks in self.blocks))
        self.per_independent = max(lrv / v, 1.0)
        # The error of the level, the lower of two medians: 1.57 L / 48, and more of dependent rows.
        error = 1.5 * math.sqrt(lrv * (1.0 + self.per_independent / 40.0) / 30.0)
        self.error = error * self.spread
        self.highest, self.lowest = max(self.level, self.highest), min(self.level, self.lowest)
        self.drop = max(self.drop, self.highest - self.level)
        self.rise = max(self.rise, self.level - self.lowest)
        fall = -self.slope * len(self.ref)
        if fall > FELL * self.spread * math.sqrt(12.0 * lrv / len(self.ref)):
            self.drop = max(self.drop, fall)
        self.allowed = 0.75 * math.pow(lrv, 0.25) + max(0.0, self.mean) + error
        self.limit = self._limit(lrv, self.wanted)
        self.suspect = self._limit(lrv, math.log(SUSPECT))
        self.most = self.allowed + self.limit / 3.0  # so it takes three rows, whatever their height

    def _limit(self, lrv: float, requested: float) -> float:
        """Return the limit for exp(`requested`) rows between two false alarms."""
        n, tau = min(self.seen, AGES * AGE), self.per_independent
        few = 1.0 + 8.0 * tau / n
        model = (
            requested * math.pow(lrv, 0.75) / 1.2 * few
        )  # 1.25 times what k of `allowed` asks for
        tail = (requested - math.log(tau)) / math.log(max(n / tau, 1.5))
        return max(model, max(self.sums) * max(2.0, tail))

    def _fit_noise(self, rate: float) -> None:
        """Fit the spread, and variance and lag-1 product in its units, around a parabola."""
        ref = self.ref
        n = len(ref)
        if n != len(self.axes[0]):
            line = [i - (n - 1) / 2 for i in range(n)]
            square = sum(map(mul, line, line))
            curve = [t * t - square / n for t in line]
            self.axes = (line, curve, square, sum(map(mul, curve, curve)))
        line, curve, lines, curves = self.axes
        level = sum(ref) / n
        slope = sum(map(mul, ref, line)) / lines
        bend = sum(map(mul, ref, curve)) / curves
        self.slope = slope
        off = [x - level - slope * t - bend * c for x, t, c in zip(ref, line, curve, strict=True)]
        mad = NORMAL * median_of_sorted(sorted(map(abs, off)))
        self.usual += (mad - self.usual) * rate
        spread = max(mad, self.usual, FLOOR * abs(self.level), LEAST_SPREAD)
        limit = min(max(4.0, self.most), CLIPPED) * spread
        off = [limit if e > limit else -limit if e < -limit else e for e in off]
        unit, self.spread = spread * spread * (n - 3), spread
        self.square += rate * (sum(map(mul, off, off)) / unit - self.square)
        self.product += rate * (sum(map(mul, off, islice(off, 1, None))) / unit - self.product)


class Series:
    """What a series of rows has taught: watches of one metric that learn the same share it.

    Attributes:
        key: what the statistic was made with; it and the rows decide all else.
        excess: the statistic now. rows: those since the oldest state that a rewind can restore.
        horizon: the step of the row before them.
        last: the newest step. verdict: of its row, None where that was absent or no number.
        lost, level: of the excursion, and the prediction, before that row.
    """

    def __init__(self, key: tuple[float, float, int]) -> None:
        self.key = key
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.excess = Excess(*self.key)
        self.states: list[Excess] = []
        self.rows: list[tuple[int, float]] = []
        self.horizon = self.last = NEVER
        self.verdict: ExcessState | None = None
        self.lost, self.level = 0.0, math.nan

    def feed_once(self, sample: float | None, step: int) -> ExcessState | None:
        """Feed a row, once, whoever brings it first; return its verdict."""
        if step == self.last:
            return self.verdict
        excess = self.excess
        self.last, self.lost, self.level = step, excess.lost, excess.level
        if sample is None or not abs(sample) < HUGE:
            self.verdict = None
            return None
        window = excess.window
        if len(self.rows) % window == 0:
            self.states.append(excess.copy())
            if len(self.states) > KEPT:
                self.horizon = self.rows[window - 1][0]
                del self.states[0], self.rows[:window]
        self.rows.append((step, sample))
        self.verdict = excess.feed(sample)
        return self.verdict

    def drop_after(self, step: int) -> None:
        """Go back to the last state of before, and take the rows between again."""
        window = self.excess.window
        while self.rows and self.rows[-1][0] > step:
            del self.rows[-1]
        self.last = min(self.last, step)
        if not self.rows:
            before, oldest, horizon = self.excess, self.states[:1], self.horizon
            self.reset()
            if step >= horizon:
                self.horizon = horizon  # a later rewind may go beyond it
                self.excess = oldest[0] if oldest else before
            else:  # no state of then is left
                self.excess.keep_descent(before)
            return
        index = (len(self.rows) - 1) // window
        del self.states[index + 1 :]
        self.excess = self.states[index].copy()
        for _, value in self.rows[index * window :]:
            self.excess.feed(value)


class ExcessWatch(Memory):
    """A watch that reads a series."""

    series: Series

    def __init__(self, arl: float, margin: float, window: int) -> None:
        self.series = Series((arl, margin, window))
        super().__init__()

    @property
    def excess(self) -> Excess:
        """The statistic."""
        return self.series.excess

    def reset(self) -> None:
        self.series.reset()
        super().reset()

    def forget_last(self) -> None:
        super().forget_last()
        self.excess.forget_excursion()

    def feed_statistic(self, sample: float | None, step: int) -> ExcessState | None:
        """Feed a sample to the statistic; None: it is absent, no number, or of a known step."""
        self.value, self.raw = sample, UNKNOWN
        if step <= self.last:
            return None
        self.last = step
        return self.series.feed_once(sample, step)

    def drop_after(self, step: int) -> None:
        self.series.drop_after(step)

    def needs_rows(self, metric: str) -> str:
        return explain_lacks(len(self.series.rows), self.excess.least + 1, f"samples of {metric}")
