"""The course of a metric as one line of text: bars, `!` for NaN or Inf, a mark for going back."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
BACK, BROKEN = "⟲", "!"
COLUMNS = 40


def spark(values: Sequence[float | None], attempts: Sequence[int], columns: int = COLUMNS) -> str:
    """Return one bar for every few values, the worst of them; "" without a value.

    A rollback or relaunch, where `attempts` grows, is `⟲`.

    Args:
        values: in the order of the frames; None is absent.
        attempts: of each value.
    """
    points = [(a, v) for a, v in zip(attempts, values, strict=True) if v is not None]
    finite = [v for _, v in points if math.isfinite(v)]
    if not points:
        return ""
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    each = max(1, math.ceil(len(points) / columns))
    line, cell, current = "", list[float](), points[0][0]
    for attempt, value in points:
        if attempt != current or len(cell) == each:
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
