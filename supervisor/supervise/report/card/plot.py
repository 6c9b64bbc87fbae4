"""The series of an incident as figures, with its opening and every rollback marked.

x is the order of the frames, as steps repeat after a rollback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..figure import LOG, Figure, Line, Mark, Scale
from .metric_names import named
from .sentences import number
from .series import LOSSES, went_back


def figures(series: Mapping[str, Any] | None, limit: float | None = None) -> list[Figure]:
    """Return one figure per signal with a finite value, the loss first.

    Args:
        limit: below which the loss counts as recovered.
    """
    if series is None or len(series["steps"]) < 2:
        return []
    plots = (_figure(n, series, limit if n in LOSSES else None) for n in series["signals"])
    return [plot for plot in plots if plot is not None]


def _figure(name: str, series: Mapping[str, Any], limit: float | None) -> Figure | None:
    values = [_float(v) for v in series["signals"][name]]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    scale = Scale(low, high, low > 0.0 and high > LOG * low)
    count = len(values) - 1
    steps = series["steps"]
    extent = number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"
    return Figure(
        title=f"{named(name)}{', log scale' if scale.is_log else ''}",
        description=(
            f"{named(name)} over steps {steps[0]} to {steps[-1]}: from {number(low)} "
            f"to {number(high)}"
        ),
        extent=extent,
        first=steps[0],
        last=steps[-1],
        lines=list(_lines(values, series, scale, count)),
        name=name,
        marks=list(_marks(series, count, labels=name in LOSSES)),
        limits=[]
        if limit is None or not low <= limit <= high
        else [Mark("limit", scale.at(limit))],
        breaks=[
            _x(n, count) for n, v in enumerate(values) if v is not None and not math.isfinite(v)
        ],
        tall=name in LOSSES,
    )


def _x(index: int, count: int) -> float:
    return 100.0 * index / count


def _marks(series: Mapping[str, Any], count: int, *, labels: bool) -> Iterator[Mark]:
    """Yield the marks of the opening and of each way back."""
    index = min(max(series["opened_at"] - 1, 0), count)
    opened = f"opened, step {series['steps'][index]}"
    yield Mark("opened", _x(index, count), opened if labels else "")
    for n in went_back(series):
        label = f"⟲ goes on from step {series['steps'][n]}"
        yield Mark("back", _x(n, count), label if labels else "")


def _lines(
    values: Sequence[float | None], series: Mapping[str, Any], scale: Scale, count: int
) -> Iterator[Line]:
    """Yield a line per attempt, and one for what was undone of it.

    It is broken where a value is not finite; an absent one is bridged.
    """
    undone = _undone(series)
    points, current, was = list[str](), None, False
    for n, (value, attempt) in enumerate(zip(values, series["attempts"], strict=True)):
        broken = value is not None and not math.isfinite(value)
        if attempt != current or broken or undone[n] != was:
            yield from _line(points, left=was)
            points = points[-1:] if attempt == current and not broken else []
            current, was = attempt, undone[n]
        if value is not None and not broken:
            points.append(f"{_x(n, count):.2f},{scale.at(value):.2f}")
    yield from _line(points, left=was)


def _undone(series: Mapping[str, Any]) -> list[bool]:
    """Return of each point whether a later attempt made its step again."""
    undone, least = [], math.inf
    ends = {*went_back(series)}
    for n in range(len(series["steps"]) - 1, -1, -1):
        undone.append(series["steps"][n] >= least)
        if n in ends:
            least = min(least, series["steps"][n])
    return undone[::-1]


def _line(points: Sequence[str], *, left: bool) -> Iterator[Line]:
    """Yield a line, of one point too; `left`: it was undone."""
    if points:
        ends = points if len(points) > 1 else [points[0], points[0]]
        yield Line("line left" if left else "line", " ".join(ends))


def _float(value: Any) -> float | None:
    """Return a number of the document; "NaN" and the like are text there."""
    if isinstance(value, str):
        return {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}.get(value)
    return None if value is None else float(value)
