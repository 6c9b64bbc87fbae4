"""Curves of recorded runs, for `supervise reference`: level and spread at knots.

The level at a knot is a Theil-Sen line through blocks of the samples between its two neighbours,
per run, and the mean over runs. The spread is taken from what is left of each run around the curve,
smoothed as the detector will smooth it: the scatter within a run (from its median and its 95th
percentile, which also sees where straight lines miss a bend; the median over runs) and the largest
distance of a run from the common curve, added as squares.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from ..detectors._curve import Curve
from ..detectors._theil_sen import line, mean
from ..errors import InputError, UsageError
from ..store.run_directory import is_run

DIGITS = 5  # significant ones that are printed
KNOTS = 40  # about as many, where the user says nothing
BLOCKS = 16  # of the samples between two knots
REACH = 4  # times `smooth`: at least so many samples on either side say what the spread is
PARTS = 32  # of the time that is aligned on, as in the detector


@dataclass(frozen=True, slots=True)
class Series:
    """A metric of one run: the finite samples, ascending by step, each step once."""

    name: str
    steps: list[int]
    values: list[float]


def read(path: Path, metric: str) -> list[Series]:
    """Return the runs of a run directory or file that have the metric.

    Raises:
        UsageError: no run in it has the metric. InputError: it cannot be read.
    """
    if is_run(path):
        return [_own(path, metric)]
    from ..recordings.find import readers, sources
    from ..recordings.table import recordings

    found, known = [], dict[str, None]()
    for source in sources([path]):
        for each in recordings(readers()[source.reader].read(source.path)):
            known.update(dict.fromkeys(each.names))
            if metric in each.names:
                column = each.names.index(metric)
                rows = [(s, a, v[column]) for s, rank, a, v in each.rows if rank == 0]
                found.append(_series(f"{source.name} {each.run}".strip(), rows))
    if not found:
        raise _unknown(path, metric, list(known))
    return found


def _own(path: Path, metric: str) -> Series:
    """Read rank 0 of a run directory."""
    from ..store import history
    from ..store.run_directory import RunDir

    run = RunDir.open(path)
    known = history.metric_ids(run)
    if metric not in known:
        raise _unknown(path, metric, known)
    return _series(
        run.id, [(s, a, v.get(metric)) for rank, a, s, _, v in history.frames(run) if rank == 0]
    )


def _series(name: str, rows: Sequence[tuple[int, int, float | None]]) -> Series:
    """Keep the life that counted: a rollback takes back the steps from its own first one on."""
    kept: dict[int, float] = {}
    attempt = 0
    for step, own, value in rows:
        if own != attempt:
            attempt = own
            kept = {s: v for s, v in kept.items() if s < step}
        if value is not None and math.isfinite(value):
            kept[step] = value
    steps = sorted(kept)
    return Series(name, steps, [kept[step] for step in steps])


def _unknown(path: Path, metric: str, known: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(metric, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"{path}: no metric {metric!r}", hint=f"{meant}it has: {', '.join(known)}")


def grid(runs: Sequence[Series], every: int | None) -> list[int]:
    """Return the steps of the knots, closer together where a curve is steep: at the beginning.

    Raises:
        InputError: there are too few samples for a curve.
    """
    steps = [step for run in runs for step in (run.steps[0], run.steps[-1]) if run.steps]
    if any(len(run.steps) < 2 * BLOCKS for run in runs) or not steps:
        few = min(runs, key=lambda run: len(run.steps))
        raise InputError(
            f"{few.name}: {len(few.steps)} samples are too few for a curve",
            hint=f"give runs with {2 * BLOCKS} or more",
        )
    first, last = min(steps), max(steps)
    spacing = every or _round((last - first) / KNOTS)
    early = [first + spacing // 8, first + spacing // 4, first + spacing // 2]
    regular = range(first + spacing, last - spacing // 2, spacing)
    return sorted({first, *early, *regular, last})


def _round(spacing: float) -> int:
    """Return 1, 2 or 5 times a power of ten, no less than `spacing`."""
    power = int(10 ** max(0, math.floor(math.log10(max(spacing, 1.0)))))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= spacing)


def levels(runs: Sequence[Series], at: Sequence[int]) -> list[tuple[float, float]]:
    """Return (step, level) of every knot that has samples around it."""
    found = []
    for i, knot in enumerate(at):
        left, right = at[max(0, i - 1)], at[min(len(at) - 1, i + 1)]
        own = [
            level
            for run in runs
            if (level := _level(*_between(run, left, right), knot)) is not None
        ]
        if own:
            found.append((float(knot), fmean(own)))
    return found


def _level(steps: list[int], values: list[float], knot: int) -> float | None:
    if len(steps) < 4:
        return median(values) if values else None
    size = max(1, len(steps) // BLOCKS)
    cuts = range(0, len(steps) - size + 1, size)
    slope, intercept = line(
        [fmean(steps[c : c + size]) for c in cuts], [mean(values[c : c + size]) for c in cuts]
    )
    return intercept + slope * knot


def _between(run: Series, left: float, right: float) -> tuple[list[int], list[float]]:
    low, high = bisect_left(run.steps, left), bisect_right(run.steps, right)
    return run.steps[low:high], run.values[low:high]


def spreads(
    runs: Sequence[Series], curve: list[tuple[float, float]], smooth: int
) -> list[tuple[float, float, float]]:
    """Return (step, level, spread) of every knot."""
    form = Curve(tuple((step, level, 0.0) for step, level in curve))
    rests = [_rest(run, form, smooth) for run in runs]
    found = []
    for i, (knot, level) in enumerate(curve):
        left, right = curve[max(0, i - 1)][0], curve[min(len(curve) - 1, i + 1)][0]
        within, apart = [], []
        for rest in rests:
            held = _around(rest, left, right, knot, REACH * smooth)
            if len(held) > 1:
                middle = median(held)
                apart.append(abs(middle))
                within.append(_scatter([abs(value - middle) for value in held]))
        if within:
            found.append((knot, level, math.hypot(median(within), max(apart))))
    return found


def _scatter(distances: list[float]) -> float:
    """Return the larger of what the median and the 95th percentile say, as if it were normal."""
    ordered = sorted(distances)
    tail = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return max(1.4826 * median(ordered), tail / 1.96)


def _rest(run: Series, curve: Curve, smooth: int) -> Series:
    """Return what is left of a run around a curve, smoothed."""
    steps, away = [], []
    for step, value in zip(run.steps, run.values, strict=True):
        at = curve.at(step)
        if at is not None:
            steps.append(step)
            away.append(value - at[0])
    means = [fmean(away[i - smooth : i]) for i in range(smooth, len(away) + 1)]
    return Series(run.name, steps[smooth - 1 :], means)


def _around(rest: Series, left: float, right: float, knot: float, reach: int) -> list[float]:
    """Return the samples between two steps, and at least `reach` on either side of the knot."""
    middle = bisect_left(rest.steps, knot)
    low = min(bisect_left(rest.steps, left), max(0, middle - reach))
    high = max(bisect_right(rest.steps, right), middle + reach)
    return rest.values[low:high]


def band(
    runs: Sequence[Series], at: Sequence[int], smooth: int, log: bool
) -> list[tuple[float, ...]]:
    """Return the knots of `band`: step, level, spread."""
    if log:
        runs = [_logs(run) for run in runs]
    knots = spreads(runs, levels(runs, at), smooth)
    return [
        (step, rounded(math.exp(level) if log else level), rounded(spread))
        for step, level, spread in knots
    ]


def _logs(run: Series) -> Series:
    pairs = [(s, math.log(v)) for s, v in zip(run.steps, run.values, strict=True) if v > 0.0]
    if len(pairs) < len(run.steps) / 2:
        raise InputError(f"{run.name}: most samples are not positive", hint="leave out --log")
    return Series(run.name, [s for s, _ in pairs], [v for _, v in pairs])


def collapse(
    runs: Sequence[Series],
    at: Sequence[int],
    smooth: int,
    total: int,
    align: tuple[float, float],
) -> list[tuple[float, ...]]:
    """Return the knots of `collapse`: fraction of training, normalised loss, spread."""
    last = [run.values[-max(1, min(smooth, len(run.values) // 20)) :] for run in runs]
    scaled = [_scaled(run, fmean(values)) for run, values in zip(runs, last, strict=True)]
    curve = levels(scaled, at)
    form = Curve(tuple((step, level, 0.0) for step, level in curve))
    aligned = [_scaled(run, _scale(run, form, total, align)) for run in scaled]
    return [
        (rounded((step + 1) / total), rounded(level), rounded(spread))
        for step, level, spread in spreads(aligned, curve, smooth)
    ]


def _scaled(run: Series, scale: float) -> Series:
    if not scale > 0.0:
        raise InputError(f"{run.name}: a loss that ends at {scale:g} cannot be normalised")
    return Series(run.name, run.steps, [value / scale for value in run.values])


def _scale(run: Series, curve: Curve, total: int, align: tuple[float, float]) -> float:
    """Return the scale that the detector would find for this run."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for step, value in zip(run.steps, run.values, strict=True):
        share = ((step + 1) / total - align[0]) / (align[1] - align[0])
        level = curve.at(step)
        if 0.0 <= share <= 1.0 and level is not None:
            parts[min(PARTS - 1, int(PARTS * share))].append(value / level[0])
    means = [fmean(part) for part in parts if part]
    if not means:
        raise InputError(
            f"{run.name}: no samples in {align[0]:g} to {align[1]:g} of {total} steps",
            hint="say how long the training is with --total-steps",
        )
    return median(means)


def rounded(value: float) -> float:
    """Return the number that is printed."""
    return float(f"{value:.{DIGITS}g}")
