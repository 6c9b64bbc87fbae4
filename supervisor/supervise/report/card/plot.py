"""The series as inline SVG, with the incident and every rollback marked.

The lines stretch with the page; what must stay readable on a phone, labels and marks, is HTML at
positions in percent. x is the order of the frames, as steps repeat after a rollback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .metric_names import named
from .sentences import number
from .series import LOSSES, went_back

LOG = 20.0  # a series that spans more than so many times its least value has a log scale
ROOM = 0.06  # of the height, above and below


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to percent from the top."""

    low: float
    high: float
    is_log: bool

    def at(self, value: float) -> float:
        """Return where a value is; outside of the range at its edge."""
        low, high, here = (self._of(v) for v in (self.low, self.high, value))
        share = 0.5 if high == low else min(1.0, max(0.0, (here - low) / (high - low)))
        return 100.0 * (1.0 - ROOM - share * (1.0 - 2.0 * ROOM))

    def _of(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.is_log else value


def plots(series: Mapping[str, Any] | None, limit: float | None = None) -> Iterator[str]:
    """Yield one figure per signal, the loss first.

    Args:
        limit: below which the loss counts as recovered.
    """
    if series is None or len(series["steps"]) < 2:
        return
    for name in series["signals"]:
        yield _figure(name, series, limit if name in LOSSES else None)


def _figure(name: str, series: Mapping[str, Any], limit: float | None) -> str:
    values = [_float(v) for v in series["signals"][name]]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = Scale(low, high, low > 0.0 and high > LOG * low)
    count = len(values) - 1
    marks = list(_marks(series, count))
    lines = "".join(_lines(values, series, scale, count))
    where = "" if limit is None or not low <= limit <= high else _limit(scale, limit)
    broken = "".join(
        f'<i class="nan" style="left:{_x(n, count):.2f}%">✕</i>'
        for n, v in enumerate(values)
        if v is not None and not math.isfinite(v)
    )
    verticals = "".join(
        f'<line class="{kind}" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="100"/>' for kind, x, _ in marks
    )
    labels = "".join(map(_label, marks)) if name in LOSSES else ""
    steps = series["steps"]
    title = escape(f"{named(name)}{', log scale' if scale.is_log else ''}")
    described = escape(
        f"{named(name)} over steps {steps[0]} to {steps[-1]}: from {number(low)} to {number(high)}"
    )
    extent = number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"
    tall = " tall" if name in LOSSES else ""
    return (
        f'<figure class="plot{tall}"><figcaption>{title} <small>{escape(name)}</small>'
        f'<span class="range">{extent}</span></figcaption>'
        f'<div class="frame"><svg role="img" aria-label="{described}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none">{where}{verticals}{lines}</svg>{broken}</div>'
        f'<div class="labels">{labels}</div>'
        f'<div class="axis"><span>step {steps[0]}</span><span>step {steps[-1]}</span></div>'
        "</figure>"
    )


def _label(mark: tuple[str, float, str]) -> str:
    kind, x, text = mark
    side = " end" if x > 45.0 else ""
    return f'<span class="{kind}{side}" style="left:{x:.2f}%">{escape(text)}</span>'


def _x(index: int, count: int) -> float:
    return 100.0 * index / count


def _marks(series: Mapping[str, Any], count: int) -> Iterator[tuple[str, float, str]]:
    """Yield `(class, x, label)` of the opening and of each way back."""
    at = min(max(series["opened_at"] - 1, 0), count)
    yield "opened", _x(at, count), f"opened, step {series['steps'][at]}"
    for n in went_back(series):
        yield "back", _x(n, count), f"⟲ goes on from step {series['steps'][n]}"


def _lines(
    values: Sequence[float | None], series: Mapping[str, Any], scale: Scale, count: int
) -> Iterator[str]:
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
    found, least = [], math.inf
    ends = {*went_back(series)}
    for n in range(len(series["steps"]) - 1, -1, -1):
        found.append(series["steps"][n] >= least)
        if n in ends:
            least = min(least, series["steps"][n])
    return found[::-1]


def _line(points: Sequence[str], *, left: bool) -> Iterator[str]:
    """Yield a line; `left`: it was undone."""
    if points:
        ends = points if len(points) > 1 else [points[0], points[0]]
        yield f'<polyline class="line{" left" if left else ""}" points="{" ".join(ends)}"/>'


def _limit(scale: Scale, limit: float) -> str:
    at = scale.at(limit)
    return f'<line class="limit" x1="0" x2="100" y1="{at:.2f}" y2="{at:.2f}"/>'


def _float(value: Any) -> float | None:
    """Return a number of the document; "NaN" and the like are text there."""
    if isinstance(value, str):
        return {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}.get(value)
    return None if value is None else float(value)
