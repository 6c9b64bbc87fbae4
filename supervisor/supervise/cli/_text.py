"""Numbers, times and curves as people read them in a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import datetime

BARS = "▁▂▃▄▅▆▇█"
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def number(value: object) -> str:
    """Return a number with four digits, "-" for none; JSON has non-finite ones as text."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def span(seconds: float) -> str:
    """Return a time with its two largest units: `2 d 3 h`, `5 min 10 s`, `0.4 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    left, parts = round(seconds), list[str]()
    for size, unit in (*UNITS, (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))


def age(since: object, now: datetime) -> str:
    """Return how long ago an ISO-8601 time is: `3 h ago`; "-" where it is none."""
    seconds = seconds_since(since, now)
    if seconds is None:
        return "-"
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def seconds_since(since: object, now: datetime) -> float | None:
    """Return the seconds since an ISO-8601 time, None where it is none."""
    try:
        return (now - datetime.fromisoformat(str(since))).total_seconds()
    except (ValueError, TypeError):
        return None


def rate(per_s: float, noun: str) -> str:
    """Return `12.5 steps/s`, and of a slow one `8.3 s/step`."""
    if per_s < 1.0:
        return f"{1.0 / per_s:.3g} s/{noun}"
    return f"{count(per_s)} {noun}s/s"


def count(value: float) -> str:
    """Return `950`, `12.5k`, `3.41M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def spark(values: Sequence[float], width: int) -> str:
    """Return a curve as one line of bars; `x` is a value that is not finite.

    Where there are more values than columns, a column is the highest of its share.
    """
    columns = [_highest(part) for part in _parts(values, width)]
    finite = [value for value in columns if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((value - low) * scale)] if math.isfinite(value) else "x" for value in columns
    )


def _parts(values: Sequence[float], width: int) -> list[Sequence[float]]:
    if len(values) <= width:
        return [values[i : i + 1] for i in range(len(values))]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _highest(values: Sequence[float]) -> float:
    wrong = [value for value in values if not math.isfinite(value)]
    return wrong[0] if wrong else max(values)
