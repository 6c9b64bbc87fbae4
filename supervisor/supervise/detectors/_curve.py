"""A reference curve in a policy: knots, with straight lines between them.

A knot is `[x, level, spread]`. The knots are part of the policy, so its digest covers them and a
run can be replayed without the files that they came from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise

Knots = tuple[tuple[float, float, float], ...]

BACK = 256  # samples that `rewind` can drop at least, beyond the window itself
MOST = 512  # knots; a policy stays readable


class Curve:
    """Immutable: copies of a watch share it."""

    __slots__ = ("_lines", "_xs")

    def __init__(self, knots: Knots) -> None:
        self._xs = [knot[0] for knot in knots]
        # From each knot on: where, level, spread, and how much these change per x.
        self._lines = [
            (
                x,
                level,
                spread,
                (ahead[1] - level) / (ahead[0] - x),
                (ahead[2] - spread) / (ahead[0] - x),
            )
            for (x, level, spread), ahead in pairwise(knots)
        ]

    def at(self, x: float) -> tuple[float, float] | None:
        """Return level and spread at `x`, None outside of the knots."""
        xs = self._xs
        if not xs[0] <= x <= xs[-1]:
            return None
        begin, level, spread, slope, widening = self._lines[bisect_right(xs, x, 1, len(xs) - 1) - 1]
        ahead = x - begin
        return level + slope * ahead, spread + widening * ahead


def check_knots(
    knots: Knots, description: str, *, positive: bool, upper: float = math.inf
) -> list[tuple[str, str]]:
    """Return what is wrong with knots.

    Args:
        description: name of the first number of a knot. positive: levels must be above zero.
        upper: the largest first number there may be.
    """
    if not 2 <= len(knots) <= MOST:
        return [
            ("knots", f"must be 2 to {MOST} of [{description}, level, spread], not {len(knots)}")
        ]
    for i, (x, level, spread) in enumerate(knots):
        here = f"knot {i + 1}"
        if not all(math.isfinite(number) for number in (x, level, spread)):
            return [("knots", f"{here}: must be finite numbers, not {[x, level, spread]}")]
        if not 0.0 <= x <= upper:
            limit_text = "" if upper == math.inf else f" and at most {upper:g}"
            return [("knots", f"{here}: {description} must be at least 0{limit_text}, not {x:g}")]
        if i and x <= knots[i - 1][0]:
            return [
                ("knots", f"{here}: {description} {x:g} does not come after {knots[i - 1][0]:g}")
            ]
        if spread < 0.0:
            return [("knots", f"{here}: the spread must be zero or more, not {spread:g}")]
        if positive and level <= 0.0:
            return [("knots", f"{here}: the level must be above zero, not {level:g}")]
    return []


def cut(step: int, steps: list[int], *columns: list[float]) -> None:
    """Drop the entries after `step` from parallel lists."""
    count = bisect_left(steps, step + 1)
    del steps[count:]
    for column in columns:
        del column[count:]


def trim(window: int, steps: list[int], *columns: list[float]) -> None:
    """Drop what neither the window needs, nor a rewind over 256 samples or one window."""
    keep = window + max(window, BACK)
    if len(steps) > 2 * keep:
        del steps[:-keep]
        for column in columns:
            del column[:-keep]
