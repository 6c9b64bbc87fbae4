"""A rolling window of accepted samples that stays sorted, keeps out the spike it judges, and can go
back.

A spike that entered the window would raise its own threshold. So a flagged sample stays out; but
not for ever: when `freeze` of the newest two windows of samples were flagged, the newest `freeze`
samples, flagged or not, become the window. For a step to a new level these are the flagged ones;
when only the spread has grown they are a mixture, and counting flagged ones in a row would wait for
ever, as a window that takes the quiet samples only never learns how loud it is.

Going back: twice the window is kept, so that `rewind` over at most `size` accepted samples gives
exactly the window of that time; further back it is shorter. A baseline that was replaced is kept
for as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

KEPT = 2  # windows that can be gone back over
SLACK = 2  # windows more, before the oldest samples are dropped, all of them at once


class Freeze:
    """Which samples were flagged of late, and the newest samples since the first of them.

    `flags` has one bit per sample, newest lowest; 0 means that there is nothing to remember, and
    samples that are not flagged need not be told.
    """

    __slots__ = ("flags", "most", "newest", "span")

    def __init__(self, span: int, most: int) -> None:
        self.span = span
        self.most = most
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.flags = 0
        self.newest: list[tuple[int, float]] = []

    def take(self, step: int, value: float, flagged: bool) -> bool:
        """Remember a sample. True when `most` of the newest `span` were flagged."""
        self.flags = (self.flags << 1 | flagged) & ((1 << self.span) - 1)
        if not self.flags:
            self.newest = []
            return False
        self.newest.append((step, value))
        if len(self.newest) > 2 * self.most:
            del self.newest[: self.most]
        return self.flags.bit_count() >= self.most

    def drain(self) -> list[tuple[int, float]]:
        """Return the newest `most` samples, and forget everything."""
        drained = self.newest[-self.most :]
        self.clear()
        return drained

    def copy(self) -> Freeze:
        """Return an independent copy."""
        twin = Freeze(self.span, self.most)
        twin.flags, twin.newest = self.flags, self.newest.copy()
        return twin


class Baseline:
    """The newest `size` accepted samples."""

    __slots__ = ("_freeze", "_ordered", "_shelf", "_size", "_steps", "_values")

    def __init__(self, size: int, freeze: int) -> None:
        self._size = size
        self._freeze = Freeze(2 * size, freeze)
        self._shelf: list[tuple[int, list[float], list[int]]] = []
        self._begin()

    def _begin(self) -> None:
        self._ordered: list[float] | None = []  # None: not sorted yet
        self._values: list[float] = []
        self._steps: list[int] = []

    @property
    def ordered(self) -> list[float]:
        """The values, ascending."""
        if self._ordered is None:
            self._ordered = sorted(self._values[-self._size :])
        return self._ordered

    def accept(self, step: int, value: float) -> None:
        """Take a sample in; the oldest one leaves."""
        ordered, values = self._ordered, self._values
        if ordered is not None:
            if len(values) >= self._size:
                del ordered[bisect_left(ordered, values[-self._size])]
            insort(ordered, value)
        values.append(value)
        self._steps.append(step)
        if len(values) >= (KEPT + SLACK) * self._size:
            self._drop()
        if self._freeze.flags:
            self._freeze.take(step, value, False)

    def _drop(self) -> None:
        """Let go of what is older than can be gone back to."""
        del self._values[: -KEPT * self._size], self._steps[: -KEPT * self._size]

    def flag(self, step: int, value: float) -> bool:
        """Keep a sample out. True when as many are out now as may be: `refit` is due."""
        return self._freeze.take(step, value, True)

    def refit(self) -> None:
        """Make the newest samples, flagged or not, the window."""
        newest = self._freeze.drain()
        self._shelf.append((newest[-1][0], self._values, self._steps))
        del self._shelf[: -(self._size // self._freeze.most + 1)]
        self._begin()
        for step, value in newest:
            self.accept(step, value)

    def refitted(self, metric: str, level: float, before: dict[str, Any]) -> dict[str, Any]:
        """Return the note of a `refit`. `level`: of the new window; `before`: the old numbers."""
        count = len(self.ordered)
        return {
            "kind": "rebaseline",
            "reason": f"{metric}: {count} samples were flagged; "
            f"the level of the newest {count}, {level:.6g}, is the baseline now",
            "metric": metric,
            "median": level,
            "samples": count,
            "steps": list(self.steps() or ()),
            "before": before,
        }

    def steps(self) -> tuple[int, int] | None:
        """Return the first and last step in the window, None when it is empty."""
        window = self._steps[-self._size :]
        return (window[0], window[-1]) if window else None

    def rewind(self, step: int) -> None:
        """Forget what came after `step`, and which samples were flagged."""
        self._freeze.clear()
        while self._shelf and self._shelf[-1][0] > step:
            _, values, steps = self._shelf.pop()
            self._values, self._steps = values.copy(), steps.copy()  # a copy of us may share them
        self._drop()
        while self._steps and self._steps[-1] > step:
            del self._values[-1], self._steps[-1]
        self._ordered = None

    def copy(self) -> Baseline:
        """Return an independent copy."""
        twin = Baseline.__new__(Baseline)
        twin._size = self._size
        twin._freeze, twin._shelf = self._freeze.copy(), self._shelf.copy()
        twin._values, twin._steps = self._values.copy(), self._steps.copy()
        twin._ordered = None if self._ordered is None else self._ordered.copy()
        return twin


def median(ordered: list[float]) -> float:
    """Return the median of ascending values: the mean of the middle two when their number is even.

    Halved before they are added, so that two huge values cannot overflow.
    """
    half = len(ordered) >> 1
    if len(ordered) & 1:
        return ordered[half]
    return 0.5 * ordered[half - 1] + 0.5 * ordered[half]
