"""Trends: the band that the loss had before an onset, changes, other data that come in, slow steps.

A falling loss that comes back to where it was has not come back: the band follows a Theil-Sen line
over ln(step). All lengths are frames. A loss jumps for other data as it does for damaged weights;
the statistics of what goes into the model do not depend on the weights. They are looked at every
few steps only, so that a level is compared with all that was seen before and not with a standard
deviation of a dozen values.

Source: Sen, 1968 (JASA 63:1379-1389); the median and its spread are those of `robust_z`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from .model import formats
from .model.verdicts import PARTS, SlowStep

PRE, EXCLUDED = 256, 10  # frames the trend is fitted to; left out just before the onset
# An exponential fall bends over ln(step): so the level of the newest half, and the flatter slope.
NEAR = PRE // 2
SHORT = 32  # frames whose level a short past has: the fall of its first steps is no noise
LEAST = 8  # frames for any band at all
BLOCK = 4  # frames per point of the fit: a quarter of the points, a sixteenth of the pairs
# A loss falls ever slower, also over ln(step): the whole slope, carried on for 350 frames, called
# 1 to 10 % of quiet places in healthy recordings a plateau; half of it, 0.1 %. The same for a slope
# from fewer than 256 frames (a warm-up is in it): up to 5 %. So there the level alone is taken.
TRUST = 0.5
STEP_MADS, STEP_SHARE = 6.0, 0.05  # one loss is in the band: no healthy nano loss was out of 6
RAISED, RAISED_SHARE = 16, 0.1  # losses in a row, and by how much, that are a raised level
BAND_MADS, BAND_SHARE = 4.0, 0.01  # a median of losses is; its scale is divided by sqrt(n / 4)


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def robust_spread(values: Sequence[float], middle: float) -> float:
    """Return 1.4826 x the median absolute deviation from `middle`."""
    return 1.4826 * median([abs(value - middle) for value in values])


@dataclass(frozen=True, slots=True)
class Band:
    """Where the loss was going before `onset`: `level` there, `slope` per unit of ln(step + 1).

    Attributes:
        spread: robust standard deviation of what the trend leaves.
        samples: losses it was fitted to; fewer than 256 give a level and no slope.
        limit: what a single loss at the onset must stay under.
    """

    onset: int
    level: float
    slope: float
    spread: float
    samples: int

    @property
    def limit(self) -> float:
        return self.limit_at(self.onset)

    def forecast(self, step: int) -> float:
        """Return the loss expected at `step`; after the onset, half of the slope is trusted.

        A loss above zero falls by shares of itself: on a straight line that of a small model, which
        has nearly learned its data by heart, would be expected below zero.
        """
        away = math.log(step + 1.0) - math.log(self.onset + 1.0)
        if away <= 0.0:
            return self.level + self.slope * away
        moved = TRUST * self.slope * away
        return self.level * math.exp(moved / self.level) if self.level > 0.0 else self.level + moved

    def limit_at(self, step: int) -> float:
        """Return what a single loss at `step` must stay under to be in the band."""
        return self.forecast(step) + max(STEP_MADS * self.spread, STEP_SHARE * abs(self.level))

    def width(self, frames: int) -> float:
        """Return the half width for the median of `frames` losses in a row."""
        noise = BAND_MADS * self.spread / math.sqrt(frames / 4.0)  # 4: they remember each other
        return max(noise, BAND_SHARE * abs(self.level))


def fit_loss_band(losses: Sequence[tuple[int, float]], onset: int) -> Band | None:
    """Fit the losses `(step, loss)` before `onset`; None with fewer than 8 of them.

    A slope upwards is taken for none: a loss that was rising is no trend to come back to. A loss
    that flattens is at its floor, where the fall of its first steps would have it lower.
    """
    points_before = [(step, loss) for step, loss in losses if step < onset]
    pre = [(step, loss) for step, loss in points_before if step < onset - EXCLUDED][-PRE:]
    if len(pre) < PRE:
        newest = [loss for _, loss in points_before[-SHORT:]]
        if len(newest) < LEAST:
            return None
        level = median(newest)
        return Band(onset, level, 0.0, robust_spread(newest, level), len(points_before[-PRE:]))
    down = min(0.0, max(theil_sen_slope(pre), theil_sen_slope(pre[-NEAR:])))
    log_onset = math.log(onset + 1.0)
    moved = [loss - down * (math.log(step + 1.0) - log_onset) for step, loss in pre]
    level = median(moved[-NEAR:])
    return Band(onset, level, down, robust_spread(moved, level), len(pre))


def loss_rise_step(losses: Sequence[tuple[int, float]], onset: int) -> int:
    """Return the step before which the losses `(step, loss)` before `onset` were not yet raised.

    What is noticed late has raised the newest of them already: they are no level to come back to.
    """
    points = [point for point in losses if point[0] < onset][-PRE:]
    first_index = len(points) % RAISED
    blocks = [points[i : i + RAISED] for i in range(first_index, len(points), RAISED)]
    if len(blocks) < LEAST:
        return onset
    levels = [median([loss for _, loss in block]) for block in blocks]
    lowest = levels.index(min(levels))
    noise = robust_spread([loss for _, loss in blocks[lowest]], levels[lowest])
    limit = levels[lowest] + max(STEP_MADS * noise, RAISED_SHARE * abs(levels[lowest]))
    calm = max(n for n, level in enumerate(levels) if level <= limit)
    return onset if calm == len(blocks) - 1 else blocks[calm + 1][0][0]


def theil_sen_slope(points: Sequence[tuple[int, float]], block: int = BLOCK) -> float:
    """Return the Theil-Sen slope over ln(step + 1), of the medians of blocks of points."""
    first_index = len(points) % block
    blocks = [points[i : i + block] for i in range(first_index, len(points), block)]
    log_steps = [
        math.fsum(math.log(step + 1.0) for step, _ in points_of_block) / block
        for points_of_block in blocks
    ]
    values = [median([loss for _, loss in points_of_block]) for points_of_block in blocks]
    pairs = (
        (i, j) for j in range(1, len(log_steps)) for i in range(j) if log_steps[j] > log_steps[i]
    )
    return median([(values[j] - values[i]) / (log_steps[j] - log_steps[i]) for i, j in pairs])


SHARE = "batch_top1_share"
TOKENS = ("batch_token_drift", "batch_token_entropy", "batch_unique_ratio", SHARE)
LEAST_LOOKS, LOOKS_BEFORE = 8, 64  # looks before the onset, at least and at most
NEWEST_LOOKS, LOOKS_SINCE = (
    2,
    8,
)  # the same behind it: a drift is told from what is usual, which follows it
SAMPLES = "batch_samples_differ"
EQUAL_STEPS, SELDOM = 3, 0.1  # as `data.constant`; share of steps before. Project defaults
BEYOND = 0.5  # times the whole range of before, outside of it; project default
ONE_TOKEN, SEVERAL = 0.99, 0.5  # shares of the commonest token, as `data.constant`
RECENT = 40  # losses whose course is asked for
FALLEN = 0.25  # of its excess at the onset; less may be noise. Project default


@dataclass(frozen=True, slots=True)
class InputChange:
    """What goes into the model is other than before.

    Attributes:
        text: which statistics, with their numbers before and since.
        degenerate: it was one token or sample, of which nothing is learned; `lasting`: it still is.
    """

    text: str
    degenerate: bool = False
    lasting: bool = False


def detect_input_change(
    series: Mapping[str, Sequence[tuple[int, float]]], onset: int
) -> InputChange | None:
    """Return how the inputs since `onset` differ from those before, None where they do not."""
    shares = series.get(SHARE, ())
    values_before = [value for step, value in shares if step < onset - EXCLUDED]
    since = [value for step, value in shares if step >= onset]
    ones = sum(value >= ONE_TOKEN for value in since)
    if values_before and median(values_before) < SEVERAL and ones >= NEWEST_LOOKS:
        text = f"the inputs were one token in {ones} of {len(since)} looks since step {onset}"
        return InputChange(text, True, since[-1] >= ONE_TOKEN)
    texts = [text for name in TOKENS if (text := _step(name, series.get(name, ()), onset))]
    if texts:
        return InputChange(", ".join(texts))
    return _repeated_sample(series.get(SAMPLES, ()), onset)


def _repeated_sample(points: Sequence[tuple[int, float]], onset: int) -> InputChange | None:
    equal_before = [value == 0.0 for step, value in points if step < onset - EXCLUDED]
    since = [value == 0.0 for step, value in points if step >= onset]
    longest = max((len(list(run)) for is_equal, run in groupby(since) if is_equal), default=0)
    is_known = len(equal_before) >= LEAST_LOOKS
    if not is_known or sum(equal_before) > SELDOM * len(equal_before) or longest < EQUAL_STEPS:
        return None
    text = f"the inputs were one sample in {sum(since)} of {len(since)} steps since step {onset}"
    return InputChange(text, True, since[-1])


def _step(name: str, points: Sequence[tuple[int, float]], onset: int) -> str:
    since = [value for step, value in points if step >= onset][:LOOKS_SINCE]
    usual = _usual_range(points, onset)
    if usual is None or len(since) < NEWEST_LOOKS or usual.contains_within(median(since), BEYOND):
        return ""
    shown = median(since[:NEWEST_LOOKS])  # the same number however many looks there are by now
    text = f"{formats.readable_metric(name)} {shown:.3g}"
    return f"{text} (before {usual.low:.3g} to {usual.high:.3g})"


class Range(NamedTuple):
    """The least, the greatest and the median of a few values."""

    low: float
    high: float
    middle: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(min(values), max(values), median(values))

    @property
    def width(self) -> float:
        return self.high - self.low

    def contains_within(self, value: float, share: float) -> bool:
        """Return whether a value is in it, or beyond it by `share` of its width at most."""
        far = share * self.width
        return self.low - far <= value <= self.high + far


def _usual_range(points: Sequence[tuple[int, float]], onset: int) -> Range | None:
    """Return where a statistic of the tokens was before an onset, None with too few looks."""
    looks = [value for step, value in points if step < onset - EXCLUDED][-LOOKS_BEFORE:]
    return Range.of(looks) if len(looks) >= LEAST_LOOKS else None


DRIFT = TOKENS[0]  # it shows a change, and gets used to it
DRIFTED = 1.5  # times the highest of before, where nothing else shows a change; project default
FEW_LOOKS = 4  # one of them may be far out
HALF = 0.5  # of the way from one range to another
NEXT_TO = 64  # steps before a change, of which the newest looks count; project default
ENDED = 4  # losses whose median is back; project default
RISE = 1.5  # times the rise of then, a loss that returns may be up; project default
LEARNED = 128  # steps in which the data of before are learned anew; the window of `harm`
UNSEEN_STEPS = 16  # until a look at the batches, where it is one step in as many


@dataclass(frozen=True, slots=True)
class DataLevel:
    """A stretch of other data, from which the run came back by itself.

    Attributes:
        step, end: its first step, and the first one behind it.
        usual, since: of each statistic that moved, where it was before and in it.
        loss_before, peak: the loss just before, and its highest one there.
        is_learned: the loss fell in it: of garbage nothing is learned, and what it did is harm.
    """

    step: int
    end: int
    usual: Mapping[str, Range]
    since: Mapping[str, Range]
    loss_before: float
    peak: float
    is_learned: bool

    def describe_recurrence(
        self,
        series: Mapping[str, Sequence[tuple[int, float]]],
        losses: Sequence[tuple[int, float]],
        onset: int,
    ) -> str | None:
        """Return what shows that these data, or those of before, came again at `onset`, or None.

        Until a look at the batches that is what the loss says, for a few steps.
        """
        after = [loss for step, loss in losses if step >= onset]
        highest = self.loss_before + RISE * (self.peak - self.loss_before)
        if onset < self.end or not after or max(after) > highest:
            return None
        newest = losses[-1][0]
        loss = f"loss {max(after):.3g}, then up to {self.peak:.3g}"
        for name, then, other in (
            (f"the data of steps {self.step} to {self.end - 1}", self.since, self.usual),
            (f"the data from before step {self.step}", self.usual, self.since),
        ):
            places = _places(series, then, other)
            looks = [(step, place) for step, place in places if step >= onset]
            before = [p for s, p in places if onset - EXCLUDED - NEXT_TO <= s < onset - EXCLUDED]
            if not before or median(before[-LEAST_LOOKS:]) >= HALF:
                continue  # they were there just before: the loss rose for another reason
            if not looks and newest - onset < UNSEEN_STEPS:
                return f"{name}: not seen yet; {loss}"
            far = 1.0 + HALF + max(map(_noise, then.values(), other.values()))
            if looks and _is_there([place for _, place in looks], far):
                last = max((step for step, place in looks if place > HALF), default=onset)
                if newest - last <= LEARNED:
                    return f"{name}: {_describe_looks(series, then, onset)}; {loss}"
        return None


NEAR_TURN = 0.25  # of the rise of a turn, within which a loss is where it was; project default


@dataclass(frozen=True, slots=True)
class TaskAlternation:
    """A stretch of another task, of which no tokens are known; the run came back by itself.

    Attributes:
        step: its first one. loss_before, peak: the loss just before, and its highest one there.
    """

    step: int
    loss_before: float
    peak: float

    def describe_recurrence(self, losses: Sequence[tuple[int, float]], onset: int) -> str:
        """Return what shows that the tasks took turns again at `onset`, "" where it may be more.

        A loss that rose from about where it was then, about as far, and has not stayed up for long;
        without a rise a rule tells of something else. It may see that a few steps late.
        """
        after = [loss for step, loss in losses if step >= onset - UNSEEN_STEPS]
        before = [loss for step, loss in losses if step < onset - UNSEEN_STEPS][-ENDED:]
        rise = self.peak - self.loss_before
        if onset <= self.step or not after or len(before) < ENDED:
            return ""
        level = median(before)
        is_alike = level + HALF * rise < max(after) <= level + RISE * rise
        if not is_alike or abs(level - self.loss_before) > NEAR_TURN * rise:
            return ""
        if losses[-1][0] - onset > LEARNED and median(after[-ENDED:]) > level + NEAR_TURN * rise:
            return ""
        return (
            f"another task, as from step {self.step}: loss {max(after):.3g}, then {self.peak:.3g}"
        )


def _places(
    series: Mapping[str, Sequence[tuple[int, float]]],
    then: Mapping[str, Range],
    other: Mapping[str, Range],
) -> list[tuple[int, float]]:
    """Return where each look was between two ranges: 0 as the other one, 1 as then.

    The mean of the statistics: each alone may have ranges that overlap. What drifts shows a change
    to either: 1 where it is beyond what is usual.
    """
    if DRIFT in then:
        limit = DRIFTED * min(then[DRIFT].high, other[DRIFT].high)
        return [(step, float(value > limit)) for step, value in series.get(DRIFT, ())]
    sums: dict[int, list[float]] = {}
    for name, reach in then.items():
        away = other[name].middle
        for step, value in series.get(name, ()):
            sums.setdefault(step, []).append((value - away) / (reach.middle - away))
    return [(s, sum(parts) / len(parts)) for s, parts in sorted(sums.items())]


def _noise(then: Range, other: Range) -> float:
    """Return half the width of a range, in distances between two."""
    return 0.5 * max(then.width, other.width) / abs(then.middle - other.middle)


def _is_there(places: Sequence[float], far: float) -> bool:
    """Return whether several looks running were as then; a few may still be far out."""
    if len(places) < FEW_LOOKS:
        return HALF / 2.0 < median(places) <= far
    windows = (places[i : i + FEW_LOOKS] for i in range(len(places) - FEW_LOOKS + 1))
    return any(HALF < median(window) <= far for window in windows)


def _describe_looks(
    series: Mapping[str, Sequence[tuple[int, float]]], then: Mapping[str, Range], onset: int
) -> str:
    """Return the statistics of the first looks since an onset, and where they were then."""
    texts = []
    for name, reach in then.items():
        looks = [value for step, value in series.get(name, ()) if step >= onset][:LOOKS_SINCE]
        text = f"{formats.readable_metric(name)} {median(looks):.3g}"
        texts.append(f"{text}, then {reach.low:.3g} to {reach.high:.3g}")
    return ", ".join(texts)


def fit_data_level(
    series: Mapping[str, Sequence[tuple[int, float]]],
    losses: Sequence[tuple[int, float]],
    onset: int,
) -> DataLevel | None:
    """Return the stretch of other data that began at `onset`, once it is over; None for none.

    One in which the inputs were one token is none: nothing of it may come again.
    """
    losses_before = [loss for step, loss in losses if step < onset][-LEAST:]
    after = [(step, loss) for step, loss in losses if step >= onset]
    if len(losses_before) < LEAST or len(after) <= ENDED:
        return None
    before = median(losses_before)
    peak = max(loss for _, loss in after[:LOOKS_SINCE])
    limit = before + (peak - before) / 2.0
    windows = (after[i : i + ENDED] for i in range(1, len(after) - ENDED + 1))
    back = (w for w in windows if median([loss for _, loss in w]) < limit)
    end = next((step for step, loss in next(back, ()) if loss < limit), None)
    if end is None or peak <= before:
        return None
    last = max(onset + 1, end - ENDED)  # a loss that is not back yet may be of the data of before
    series = {name: [p for p in points if p[0] < last] for name, points in series.items()}
    change = detect_input_change(series, onset)
    if change is None or change.degenerate:
        return None
    usual, since = dict[str, Range](), dict[str, Range]()
    for share, names in ((BEYOND, TOKENS[1:]), (0.0, TOKENS[1:]), (BEYOND, (DRIFT,))):
        for name in names if not since else ():  # those that moved far say most
            points = series.get(name, ())
            looks = [value for step, value in points if step >= onset][:LOOKS_SINCE]
            reach = _usual_range(points, onset)
            if reach is None or not looks or reach.contains_within(median(looks), share):
                continue
            if name != DRIFT or max(looks) > DRIFTED * reach.high:
                usual[name], since[name] = reach, Range.of(looks)
    there = [loss for step, loss in after if step < last]
    start, newest = median(there[:ENDED]), median(there[-ENDED:])
    is_learned = start - newest >= FALLEN * (start - before)
    return DataLevel(onset, end, usual, since, before, peak, is_learned) if since else None


@dataclass(frozen=True, slots=True)
class LossCourse:
    """Where the losses since a step have gone, in the noise that they had before it.

    Attributes:
        first, older, newer: median of the first ones since the onset, and of the halves since.
        change: of the halves, negative where they fall; 0 where it is within the noise.
        jump: how far the newest two are above those before them; 0 where one loss may be.
        fallen: a good part of the excess at the onset is gone, with nobody's help.
    """

    first: float
    older: float
    newer: float
    change: float
    jump: float
    fallen: bool


def fit_loss_course(
    losses: Sequence[tuple[int, float]], band: Band, onset: int, since: int
) -> LossCourse | None:
    """Return the course of the losses from step `since` on, None with fewer than 4 of them."""
    losses_after = [loss for step, loss in losses if step >= onset]
    recent = [loss for step, loss in losses if step >= since][-RECENT:]
    half = len(recent) // 2
    if half < 2:
        return None
    first_index, older, newer = (
        median(losses_after[:3]),
        median(recent[:half]),
        median(recent[half:]),
    )
    own_spread = robust_spread(recent[:-2], median(recent[:-2]))  # other data may be noisier
    moved = newer - older
    noise = max(band.width(half), BAND_MADS * own_spread / math.sqrt(half))
    jump = min(recent[-2:]) - median(recent[:-2])
    excess = first_index - band.forecast(onset)
    return LossCourse(
        first_index,
        older,
        newer,
        moved if abs(moved) > noise else 0.0,
        jump if jump > max(band.limit - band.level, STEP_MADS * own_spread) else 0.0,
        first_index - newer > max(noise, FALLEN * excess),
    )


STEP_TIME = "step_time"
NEWEST, BEFORE = 20, 256  # steps whose median is the new time of a step, and the old one
SLOWER = 1.25  # the limit of the pack `throughput`
MOST_OF_IT = 0.5  # of what a step takes longer; below it several parts are slower
BRIEF_S = 3.0  # of slow steps that are not worth a word, and a look at the host; project default
WAITS = 20.0  # percent of the time, where it is not known how much longer steps take

Series = Callable[[str], list[tuple[int, float]]]


def is_cpu_contention(slow: SlowStep | None, wait: float) -> bool:
    """Return whether steps are slow as they wait for CPUs that others have.

    Args:
        slow: how slow they are, None where that is not known. wait: percent of the time.
    """
    if slow is None:
        return wait >= WAITS
    return wait >= 100.0 * MOST_OF_IT * (1.0 - slow.before_s / slow.now_s)


def find_slow_step(series: Series, breach: int) -> SlowStep | None:
    """Return since when the newest steps take longer than those before `breach`, None if not.

    Args:
        series: `(step, value)` of a metric, oldest first.
    """
    points = series(STEP_TIME)
    early = [value for step, value in points if step < breach][-BEFORE:]
    late = [value for _, value in points[-NEWEST:]]
    if min(len(early), len(late)) < LEAST:
        return None
    time_before, now = median(early), median(late)
    if time_before <= 0.0 or now < SLOWER * time_before:
        return None
    limit, since = (time_before * now) ** 0.5, points[-1][0]
    fast, is_slow = 0, False
    for step, value in reversed(points):  # the newest may be fast again
        is_slow |= value > limit
        fast = 0 if value > limit or not is_slow else fast + 1
        if fast > 1:
            break
        since = step if value > limit else since
    early = [value for step, value in points if step < since][-BEFORE:]
    time_before = median(early) if len(early) >= LEAST else time_before
    if now < SLOWER * time_before:  # they vary, or grew all the while: there is no such step
        return None
    part, part_now = "", 0.0
    grown = MOST_OF_IT * (now - time_before)
    for name in PARTS:
        values = series(name)
        old = [value for step, value in values if step < since][-BEFORE:]
        new = [value for step, value in values if step >= since][-NEWEST:]
        if not new:
            continue
        excess = median(new) - (median(old) if old else 0.0)
        if excess > grown:
            part, part_now, grown = name, median(new), excess
    return SlowStep(since, time_before, now, part, part_now)


LATE, FEWEST = 32, 4  # steps just before a change, and values in them that are enough of them
FEW, MANY = 16, 64  # samples that a course is fitted to: as many as lie on one line
STRAIGHT = 2.0  # standard errors: a slope is one, and the newest quarter is off its line
FLOOR = 0.005  # of the level: no series is taken to be quieter
EXTREME = 3.0  # the third largest excess is so many spreads at most: heavy tails are noise too
REACH, DELAY = 50, 10  # steps before a breach, and behind it, where what belongs to it may begin
# A row counts against its past from so many spreads on, and no more than so many: alone, before
# the breach, it proves nothing; behind it, where a rule has seen something, one row may do.
ALLOWED, CAP_BEFORE, CAP_SINCE, PROOF = 2.5, 3.0, 12.0, 6.0
LEAP, STEEP = CAP_SINCE + ALLOWED, 4.0  # spreads; times as far off as the row before
DOUBT = 2.0  # other beginnings that explain the rows nearly as well are as likely
JUMP, AS_BEFORE = 1.5, 2.0  # a rate jumps: times the one before it, and times its last change
HIGHEST = 1.1  # times the highest rate of the run: what is below was in its schedule before


@dataclass(frozen=True, slots=True)
class Course:
    """Where a healthy series was going.

    Attributes:
        step: of its newest sample; level: its value there. slope: per step. spread: of the rest.
        is_log: slope and spread are of the logarithm.
    """

    step: int
    level: float
    slope: float
    spread: float
    is_log: bool

    def forecast(self, step: int) -> float:
        """Return the value expected at a step: a fall is ever slower, so half of it is trusted."""
        away = step - self.step
        moved = self.slope * (TRUST * away if away > 0 else away)
        return self.level * math.exp(moved) if self.is_log else self.level + moved

    def height(self, step: int, value: float) -> float:
        """Return how many spreads a value is above the forecast; what is not finite is above."""
        expected = self.forecast(step)
        if not math.isfinite(value):
            return math.inf
        if self.is_log:
            return math.log(max(value / expected, 1e-30)) / self.spread
        return (value - expected) / self.spread


@dataclass(frozen=True, slots=True)
class Change:
    """A series left its course.

    Attributes:
        step: the first one off it. earliest, latest: it may have been any of these.
        before: the healthy value just before it. is_up: it rose, or is not finite.
    """

    step: int
    earliest: int
    latest: int
    before: float
    is_up: bool


def fit_course(points: Sequence[tuple[int, float]]) -> Course | None:
    """Return the course of the newest `(step, value)`, None with fewer than 8 of them.

    A bent series has the line of its end: the newest quarter must lie on it.
    """
    course, size = None, MANY
    while size >= FEW:
        recent = points[-size:]
        if len(recent) < LEAST:
            return None
        course, excess = _line(recent)
        quarter = excess[-max(4, len(recent) // 4) :]
        if abs(median(quarter)) <= STRAIGHT * 1.25 * course.spread / math.sqrt(len(quarter)):
            break
        size //= 2
    return course


def _line(points: Sequence[tuple[int, float]]) -> tuple[Course, list[float]]:
    """Return the line through points, and what it leaves of each."""
    is_log = all(value > 0.0 for _, value in points)
    steps = [step for step, _ in points]
    values = [math.log(value) if is_log else value for _, value in points]
    half, end = len(points) // 2, steps[-1]
    pairs = ((i, i + half) for i in range(len(points) - half))
    rise = median([(values[j] - values[i]) / (steps[j] - steps[i]) for i, j in pairs])
    excess: list[float] = []
    for slope_per_step in (rise, 0.0):
        flat = [value - slope_per_step * (s - end) for s, value in zip(steps, values, strict=True)]
        level = median(flat)
        excess = [value - level for value in flat]
        noise = max(robust_spread(excess, 0.0), 1e-9)
        error = noise * math.sqrt(16.0 / len(points)) / max(1, end - steps[0])
        if abs(slope_per_step) >= STRAIGHT * error:
            break
    extreme = sorted(map(abs, excess))[-min(3, len(excess))] / EXTREME
    least = FLOOR if is_log else max(FLOOR * abs(level), 1e-9)
    course = Course(
        end,
        math.exp(level) if is_log else level,
        slope_per_step,
        max(noise, extreme, least),
        is_log,
    )
    return course, excess


def healthy_value(points: Sequence[tuple[int, float]], otherwise: float) -> float:
    """Return the median of the newest finite values, `otherwise` where there are none.

    Of a metric that is measured in few steps, only those of the last ones.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)][-LEAST:]
    late = [value for step, value in finite if step > finite[-1][0] - LATE]
    values = late if len(late) >= FEWEST else [value for _, value in finite]
    return median(values) if values else otherwise


def find_change(points: Sequence[tuple[int, float]], breach: int) -> Change | None:
    """Return where a series left its course near the first breach of a rule, None where it did not.

    A change-point: the beginning from which on the rows, together, speak most against the course
    of before. One hard row some steps earlier is none of it.

    Args:
        points: `(step, value)` of one attempt, oldest first; a value may be NaN.
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    healthy = [p for p in finite if p[0] < breach - EXCLUDED]
    healthy = healthy if len(healthy) >= LEAST else [p for p in finite if p[0] < breach]
    course = fit_course(healthy)
    change = None if course is None else _find_change(points, course, breach)
    while change is not None:  # once more without what grew just before
        healthy = [p for p in finite if p[0] < change.earliest - EXCLUDED]
        course = fit_course(healthy)
        earlier = None if course is None else _find_change(points, course, breach)
        if earlier is None or earlier.step >= change.step or earlier.is_up != change.is_up:
            break
        change = earlier
    return change


def _find_change(points: Sequence[tuple[int, float]], course: Course, breach: int) -> Change | None:
    rows = [p for p in points if breach - REACH <= p[0] <= breach + DELAY]
    begin = next((n for n, (step, _) in enumerate(rows) if step >= breach), len(rows) - 1)
    if begin < 0:
        return None
    rises = [course.height(step, value) for step, value in rows]
    falls = [-rise for rise in rises]
    # What becomes NaN or Inf begins with a leap, if with anything: no drift before it does that.
    ways = (rises,) if math.inf in rises else (falls, rises)
    leaps = [_Leap.of(heights, begin, is_up=heights is rises) for heights in ways]
    leaps = [leap for leap in leaps if leap.proof >= PROOF]
    if not leaps:
        return None
    leap = min(leaps, key=lambda leap: leap.first)  # of two that begin together, the fall
    likely = leap.likely_rows()
    earliest = rows[likely[0]][0]
    previous = [(step, value) for step, value in points if step < earliest]
    return Change(
        step=rows[leap.first][0],
        earliest=previous[-1][0] + 1 if previous else earliest,
        latest=rows[likely[-1]][0],
        before=healthy_value(previous, course.level),
        is_up=leap.is_up,
    )


@dataclass(frozen=True, slots=True)
class _Leap:
    """What the rows say of a change in one direction.

    Attributes:
        is_up: the direction. first: index of the row at which it begins.
        evidence: see `_evidence`. best: index of the row with the most of it.
    """

    is_up: bool
    first: int
    evidence: list[float]
    best: int

    @classmethod
    def of(cls, heights: Sequence[float], breach: int, *, is_up: bool) -> _Leap:
        evidence = _evidence(heights, breach)
        best = evidence.index(max(evidence))
        return cls(is_up, _begin(heights, best), evidence, best)

    @property
    def proof(self) -> float:
        return self.evidence[self.best]

    def likely_rows(self) -> list[int]:
        """Return the rows at which it may have begun."""
        start = self.first if self.first > self.best else 0
        enough = self.evidence[self.first] - DOUBT
        return [n for n, total in enumerate(self.evidence) if n >= start and total >= enough]


def _begin(heights: Sequence[float], first: int) -> int:
    """Return where a change began for which `first` has most evidence: with its first leap, if any.

    Rows that are a little off some steps before it are noise; a ramp leads up to it. A norm that
    leapt is 0 in the updates that are skipped for it, which is no fall.
    """
    begin = next((n for n in range(first, len(heights)) if heights[n] >= LEAP), first)
    while begin > first and heights[begin - 1] >= max(ALLOWED, heights[begin] / STEEP):
        begin -= 1
    return begin


def _evidence(heights: Sequence[float], breach: int) -> list[float]:
    """Return for each row what the rows from it on say together against the course of before.

    Args:
        heights: of the rows, in spreads. breach: index of the row that a rule has seen.
    """
    sums = [0.0] * len(heights)
    best = -math.inf  # of the sums from a row on that reach the breach
    for n in range(len(heights) - 1, -1, -1):
        cap = CAP_SINCE if n >= breach or heights[n] == math.inf else CAP_BEFORE
        row = min(cap, max(-ALLOWED, heights[n] - ALLOWED))
        best = row + (max(0.0, best) if n >= breach else best)
        sums[n] = max(0.0, best)
    return sums


def find_jump(
    rates: Sequence[tuple[int, float]], breach: int, highest: float = 0.0
) -> Change | None:
    """Return the jump of a learning rate near a first breach that its schedule does not explain.

    A warm-up grows by ever smaller shares, a decay falls, and a restart goes back to a rate that
    the run had before.

    Args:
        rates: `(step, value)` of one attempt, oldest first. highest: rate of the run before them.
    """
    points = [(step, rate) for step, rate in rates if math.isfinite(rate)]
    for n in range(2, len(points)):
        (_, earlier), (_, before), (step, rate) = points[n - 2 : n + 1]
        highest = max(highest, earlier, before)
        if not breach - REACH <= step <= breach + DELAY or min(earlier, before) <= 0.0:
            continue
        is_jump = rate >= JUMP * before and rate > HIGHEST * highest
        if is_jump and math.log(rate / before) > AS_BEFORE * abs(math.log(before / earlier)):
            return Change(step, step, step, before, is_up=True)
    return None
