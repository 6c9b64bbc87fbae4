"""A few signals around the beginning of an incident, in a bounded number of points.

All frames of one rank from just before it opened, then those since: where they become too many,
every second one goes, and of two neighbours the worse one stays. The same frames give the same
points, live and read back from the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..core.model.events import Frame
from ..core.trends import median
from .incident_report import Move, Series

LOSSES = ("train_loss_raw", "train_loss")
SIGNALS = ("learning_rate", "update_norm", "grad_global_norm")  # beside the loss
MAX_SIGNALS = 8
MAX_RANKS = 64  # each holds up to 241 frames while an incident is open; project default
BEFORE, AFTER = 60, 180  # points; project defaults
EXCLUDED, LEAST = 5, 8  # of those before: the last ones may be part of it; fewer are no baseline
MOVED, SPREADS = 1.25, 5.0  # a signal moved: by a quarter, and by so many spreads
# Steps before the first breach in which a signal may have moved first: what is earlier may belong
# to another trouble. The learning rate as in `diagnosis`.
LOOK_BACK: Mapping[str, int] = {"learning_rate": 50}
NEAR = 5

BARS = "▁▂▃▄▅▆▇█"
BACK, BROKEN = "⟲", "!"
COLUMNS = 40

Values = Mapping[str, float | None]
Point = tuple[int, int, Values]  # attempt, step, values


@dataclass(slots=True)
class Tape:
    """The frames of one rank around an incident.

    Attributes:
        before, after: points; `stride`: frames that one of `after` stands for.
    """

    rank: int
    points_before: list[Point] = field(default_factory=list)
    points_since: list[Point] = field(default_factory=list)
    stride: int = 1
    _cell: list[Point] = field(default_factory=list)

    def add(self, attempt: int, step: int, values: Values, *, opened: bool) -> None:
        """Add the next frame; `opened`: the incident was open by then."""
        point = (attempt, step, values)
        if not opened:
            self.points_before.append(point)
            del self.points_before[:-BEFORE]
            return
        self._cell.append(point)
        if len(self._cell) < self.stride and self._cell[0][0] == attempt:
            return
        self.points_since += _worst(self._cell)
        self._cell.clear()
        if len(self.points_since) > AFTER:
            pairs = (self.points_since[n : n + 2] for n in range(0, len(self.points_since), 2))
            self.points_since = [point for pair in pairs for point in _worst(pair)]
            self.stride *= 2

    def has_loss(self) -> bool:
        """Return whether any point holds a loss."""
        points = (*self.points_before, *self.points_since, *self._cell)
        return any(values.get(name) is not None for _, _, values in points for name in LOSSES)

    def series(self, metrics: Iterable[str] = ()) -> Series | None:
        """Return the series of the report, None without a frame.

        Args:
            metrics: further ones, those that the rules read.
        """
        points = [*self.points_before, *self.points_since, *_worst(self._cell)]
        if not points:
            return None
        present = {name for _, _, values in points for name, v in values.items() if v is not None}
        names = [next((n for n in LOSSES if n in present), "")]
        names += [name for name in (*SIGNALS, *metrics) if name in present]
        names = list(dict.fromkeys(filter(None, names)))[:MAX_SIGNALS]
        steps = [step for _, step, _ in points]
        return Series(
            rank=self.rank,
            steps=steps,
            attempts=[attempt for attempt, _, _ in points],
            opened_at=len(self.points_before),
            stride=self.stride,
            window=[min(steps), max(steps)],
            signals={name: [values.get(name) for _, _, values in points] for name in names},
        )


class Tapes:
    """The frames of all ranks around an incident; `select` returns the one of its report."""

    def __init__(self) -> None:
        self._tapes: dict[int, Tape] = {}

    def add(self, frame: Frame, names: Sequence[str], *, opened: bool) -> None:
        """Add the next frame of any of the first `MAX_RANKS` ranks; see `Tape.add`."""
        if frame.rank not in self._tapes and len(self._tapes) == MAX_RANKS:
            return
        tape = self._tapes.setdefault(frame.rank, Tape(frame.rank))
        values = dict(zip(names, frame.values, strict=False))
        tape.add(frame.attempt, frame.step, values, opened=opened)

    def select(self, rank: int | None) -> Tape | None:
        """Return the tape of that rank if it has a loss, else that of the first one with a loss."""
        order = sorted(self._tapes.values(), key=lambda tape: (tape.rank != rank, tape.rank))
        return next((tape for tape in order if tape.has_loss()), next(iter(order), None))


def _worst(points: Sequence[Point]) -> list[Point]:
    """Return the point with the highest loss of each attempt; a loss that is not finite is worst.

    Of points without a loss it is the newest one.
    """
    worst: dict[int, Point] = {}
    for point in points:
        previous = worst.get(point[0])
        if previous is None or _height(point) >= _height(previous):
            worst[point[0]] = point
    return list(worst.values())


def _height(point: Point) -> float:
    loss = next((v for name in LOSSES if (v := point[2].get(name)) is not None), -math.inf)
    return math.inf if math.isnan(loss) else loss


def loss_of(series: Series | None) -> str:
    """Return the name of the loss in a series, "" for none."""
    return next((name for name in LOSSES if series and name in series.signals), "")


def moves(series: Series | None, breach: int) -> list[Move]:
    """Return which signals left their level around the first breach, in order.

    The peak is the farthest value in the attempt of the breach, or the first that is not finite. A
    signal without enough values before has no level.
    """
    if series is None:
        return []
    attempt = series.attempts[max(0, series.opened_at - 1)]
    rows = []
    for name, values in series.signals.items():
        points = [
            (step, value)
            for of_point, step, value in zip(series.attempts, series.steps, values, strict=True)
            if of_point == attempt and value is not None
        ]
        early = [v for step, v in points if step < breach - EXCLUDED and math.isfinite(v)]
        if len(early) < LEAST:
            continue
        level = median(early)
        limit = SPREADS * 1.4826 * median([abs(v - level) for v in early])
        since = breach - LOOK_BACK.get(name, NEAR)
        away = [(step, v) for step, v in points if step >= since and _is_away(v, level, limit)]
        if not away:
            continue
        broken = next(((s, v) for s, v in away if not math.isfinite(v)), None)
        peak_step, peak = broken or max(away, key=lambda point: abs(point[1] - level))
        rows.append(
            Move(
                metric=name,
                level=level,
                peak=peak,
                peak_step=peak_step,
                first_step=away[0][0],
                ratio=peak / level if math.isfinite(peak) and level != 0.0 else None,
            )
        )
    order = {name: n for n, name in enumerate(("learning_rate", "update_norm"))}
    return sorted(rows, key=lambda move: (move.first_step, order.get(move.metric, 9)))


def _is_away(value: float, level: float, limit: float) -> bool:
    if not math.isfinite(value):
        return True
    far = abs(value - level) > limit
    if level <= 0.0 or value <= 0.0:
        return far and abs(value - level) > (MOVED - 1.0) * abs(level)
    return far and not 1.0 / MOVED < value / level < MOVED


def restarts(series: Series) -> list[int]:
    """Return the indices of the points before which another attempt began."""
    return [n + 1 for n, (a, b) in enumerate(pairwise(series.attempts)) if b != a]


def spark(values: Sequence[float | None], attempts: Sequence[int], columns: int = COLUMNS) -> str:
    """Return one bar for every few values, the worst of them; "" without a value.

    `!` is NaN or Inf; a rollback or relaunch, where `attempts` grows, is `⟲`.

    Args:
        values: in the order of the frames; None is absent.
        attempts: of each value.
    """
    points = [(a, v) for a, v in zip(attempts, values, strict=True) if v is not None]
    finite = [v for _, v in points if math.isfinite(v)]
    if not points:
        return ""
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    width = max(1, math.ceil(len(points) / columns))
    line, cell, current = "", list[float](), points[0][0]
    for attempt, value in points:
        if attempt != current or len(cell) == width:
            line += _bar(cell, low, high) if cell else ""
            line += BACK if attempt != current else ""
            cell, current = [], attempt
        cell.append(value)
    return line + (_bar(cell, low, high) if cell else "")


def _bar(values: Sequence[float], low: float, high: float) -> str:
    if not all(map(math.isfinite, values)):
        return BROKEN
    if high - low <= 1e-3 * max(abs(high), abs(low)):  # flat: noise is no course
        return BARS[1]
    return BARS[round((max(values) - low) / (high - low) * (len(BARS) - 1))]
