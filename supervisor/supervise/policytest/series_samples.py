"""The notation of series: `2.4x300 5.0-0.1x20 0.1*1.5x10 _x5 nan` -> samples, frame by frame.

`2.4x300` is 2.4 for 300 frames, `5.0-0.1x20` starts at 5.0 and falls by 0.1 each frame,
`0.1*1.5x10` grows by half each frame, `_` is absent; `nan` and `inf` are literal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..catalog.scenarios import PIECE

Columns = Mapping[str, Sequence[float | None]]


def samples(text: str) -> list[float | None]:
    """Return the samples of a series; None is absent.

    Raises:
        ValueError: a piece cannot be parsed; the loader rejects such text before.
    """
    found: list[float | None] = []
    for piece in text.split():
        match = PIECE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r}: invalid piece of a series")
        literal, start, how, change, times = match.groups()
        count = int(times or 1)
        if literal == "_":
            found += [None] * count
        elif literal is not None:
            found += [float(literal)] * count
        elif how == "*":
            found += [_geometric(float(start), float(change), i) for i in range(count)]
        else:
            slope = float(change or 0.0) * (-1.0 if how == "-" else 1.0)
            found += [float(start) + i * slope for i in range(count)]
    return found


def _geometric(start: float, factor: float, times: int) -> float:
    try:
        return float(start * factor**times)
    except OverflowError:
        return start * float("inf")


class MetricSeries:
    """The series of a scenario: the first set, then one after each rollback.

    Attributes:
        names: ids of the metrics, in the order in which they are announced.
    """

    def __init__(
        self, series: Mapping[str, str], sequels: Sequence[Mapping[str, str]] = ()
    ) -> None:
        self._first: Columns = {name: samples(text) for name, text in series.items()}
        self._sequels: list[Columns] = [
            {name: samples(text) for name, text in sequel.items()} for sequel in sequels
        ]
        self.names = tuple(dict.fromkeys([*self._first, *(n for s in self._sequels for n in s)]))
        self._now: Columns = self._first
        self._at = 0

    @property
    def over(self) -> bool:
        """Whether all samples were used."""
        return all(self._at >= len(column) for column in self._now.values())

    def take(self, step: int) -> list[float | None]:
        """Return the next sample of every metric.

        After a rollback, a metric without a sequel repeats its value of this `step`.
        """
        at, self._at = self._at, self._at + 1
        found = []
        for name in self.names:
            column = self._now.get(name)
            if column is None:
                column, index = self._first.get(name, ()), step
            else:
                index = at
            found.append(column[index] if 0 <= index < len(column) else None)
        return found

    def rolled_back(self, times: int) -> None:
        """Switch to the series after the `times`-th rollback, if there is one."""
        if self._sequels:
            self._now, self._at = self._sequels[min(times, len(self._sequels)) - 1], 0
