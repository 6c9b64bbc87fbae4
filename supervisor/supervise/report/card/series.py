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
from typing import Any

from ...core.analysis.loss_band import median
from ...core.model.events import Frame

LOSSES = ("train_loss_raw", "train_loss")
SIGNALS = ("learning_rate", "update_norm", "grad_global_norm")  # beside the loss
MOST_SIGNALS = 8
MOST_RANKS = 64  # each holds up to 241 frames while an incident is open; project default
BEFORE, AFTER = 60, 180  # points; project defaults
EXCLUDED, LEAST = 5, 8  # of those before: the last ones may be part of it; fewer are no baseline
MOVED, SPREADS = 1.25, 5.0  # a signal moved: by a quarter, and by so many spreads
# Steps before the first breach in which a signal may have moved first: what is earlier may belong
# to another trouble. The learning rate as in `diagnosis`.
LOOK_BACK: Mapping[str, int] = {"learning_rate": 50}
NEAR = 5

Values = Mapping[str, float | None]
Point = tuple[int, int, Values]  # attempt, step, values


@dataclass(slots=True)
class Tape:
    """The frames of one rank around an incident.

    Attributes:
        rank: whose. before, after: points; `stride`: frames that one of `after` stands for.
    """

    rank: int
    before: list[Point] = field(default_factory=list)
    after: list[Point] = field(default_factory=list)
    stride: int = 1
    _cell: list[Point] = field(default_factory=list)

    def add(self, attempt: int, step: int, values: Values, *, opened: bool) -> None:
        """Take the next frame; `opened`: the incident was open by then."""
        point = (attempt, step, values)
        if not opened:
            self.before.append(point)
            del self.before[:-BEFORE]
            return
        self._cell.append(point)
        if len(self._cell) < self.stride and self._cell[0][0] == attempt:
            return
        self.after += _worst(self._cell)
        self._cell.clear()
        if len(self.after) > AFTER:
            self.after = [p for n in range(0, len(self.after), 2) for p in self._pair(n)]
            self.stride *= 2

    def _pair(self, n: int) -> Iterable[Point]:
        return _worst(self.after[n : n + 2])

    def has_loss(self) -> bool:
        """Return whether any point holds a loss."""
        points = (*self.before, *self.after, *self._cell)
        return any(values.get(name) is not None for _, _, values in points for name in LOSSES)

    def data(self, wanted: Iterable[str] = ()) -> dict[str, Any] | None:
        """Return the series as the document holds it, None without a frame.

        Args:
            wanted: further metrics, those that the rules read.
        """
        points = [*self.before, *self.after, *_worst(self._cell)]
        if not points:
            return None
        known = {name for _, _, values in points for name, v in values.items() if v is not None}
        names = [next((n for n in LOSSES if n in known), "")]
        names += [name for name in (*SIGNALS, *wanted) if name in known]
        names = list(dict.fromkeys(filter(None, names)))[:MOST_SIGNALS]
        return {
            "rank": self.rank,
            "steps": [step for _, step, _ in points],
            "attempts": [attempt for attempt, _, _ in points],
            "opened_at": len(self.before),
            "stride": self.stride,
            "window": [min(step for _, step, _ in points), max(step for _, step, _ in points)],
            "signals": {name: [values.get(name) for _, _, values in points] for name in names},
        }


class Tapes:
    """The frames of all ranks around an incident; `chosen` is the one that its document shows."""

    def __init__(self) -> None:
        self._tapes: dict[int, Tape] = {}

    def add(self, frame: Frame, names: Sequence[str], *, opened: bool) -> None:
        """Take the next frame of any of the first `MOST_RANKS` ranks; see `Tape.add`."""
        if frame.rank not in self._tapes and len(self._tapes) == MOST_RANKS:
            return
        tape = self._tapes.setdefault(frame.rank, Tape(frame.rank))
        values = dict(zip(names, frame.values, strict=False))
        tape.add(frame.attempt, frame.step, values, opened=opened)

    def chosen(self, rank: int | None) -> Tape | None:
        """Return the tape of that rank if it has a loss, else that of the first one with a loss."""
        order = sorted(self._tapes.values(), key=lambda tape: (tape.rank != rank, tape.rank))
        return next((tape for tape in order if tape.has_loss()), next(iter(order), None))


def _worst(points: Sequence[Point]) -> list[Point]:
    """Return the point with the highest loss of each attempt; a loss that is not finite is worst.

    Of points without a loss it is the last one.
    """
    found: dict[int, Point] = {}
    for point in points:
        held = found.get(point[0])
        if held is None or _height(point) >= _height(held):
            found[point[0]] = point
    return list(found.values())


def _height(point: Point) -> float:
    loss = next((v for name in LOSSES if (v := point[2].get(name)) is not None), -math.inf)
    return math.inf if math.isnan(loss) else loss


def loss_of(series: Mapping[str, Any] | None) -> str:
    """Return the name of the loss in a series, "" for none."""
    signals = (series or {}).get("signals", {})
    return next((name for name in LOSSES if name in signals), "")


def moves(series: Mapping[str, Any] | None, breach: int) -> list[dict[str, Any]]:
    """Return which signals left their level around the first breach, the first one first.

    Each with its `before` (median of those well before the breach), its `peak` (the farthest value
    in the attempt of the breach; the first that is not finite), `ratio` of both, and the steps of
    these. A signal without enough values before has no level.
    """
    if series is None:
        return []
    opened, attempts, steps = series["opened_at"], series["attempts"], series["steps"]
    at = attempts[max(0, opened - 1)]
    found = []
    for name, values in series["signals"].items():
        points = [
            (step, value)
            for attempt, step, value in zip(attempts, steps, values, strict=True)
            if attempt == at and value is not None
        ]
        early = [v for step, v in points if step < breach - EXCLUDED and math.isfinite(v)]
        if len(early) < LEAST:
            continue
        level = median(early)
        limit = SPREADS * 1.4826 * median([abs(v - level) for v in early])
        since = breach - LOOK_BACK.get(name, NEAR)
        around = [(step, v) for step, v in points if step >= since]
        away = [(step, v) for step, v in around if _is_away(v, level, limit)]
        if not away:
            continue
        broken = next(((s, v) for s, v in away if not math.isfinite(v)), None)
        peak = broken or max(away, key=lambda point: abs(point[1] - level))
        finite = math.isfinite(peak[1]) and level != 0.0
        found.append(
            {
                "metric": name,
                "before": level,
                "peak": peak[1],
                "peak_step": peak[0],
                "first_step": away[0][0],
                "ratio": peak[1] / level if finite else None,
            }
        )
    order = {name: n for n, name in enumerate(("learning_rate", "update_norm"))}
    return sorted(found, key=lambda one: (one["first_step"], order.get(one["metric"], 9)))


def _is_away(value: float, level: float, limit: float) -> bool:
    if not math.isfinite(value):
        return True
    far = abs(value - level) > limit
    if level <= 0.0 or value <= 0.0:
        return far and abs(value - level) > (MOVED - 1.0) * abs(level)
    return far and not 1.0 / MOVED < value / level < MOVED


def went_back(series: Mapping[str, Any] | None) -> list[int]:
    """Return the indices of the points before which another attempt began."""
    attempts = (series or {}).get("attempts", [])
    return [n + 1 for n, (a, b) in enumerate(pairwise(attempts)) if b != a]
