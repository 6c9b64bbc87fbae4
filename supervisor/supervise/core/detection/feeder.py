"""Who has to see a frame, and who can be told of it later.

In most frames nothing happens: every value lies where its detector would call it usual. A watch
that can say beforehand which values these are (`QuietWatch`) is left alone while they are; it gets
its samples in one piece, before anybody looks at it, and is then exactly what it would be had it
been fed frame by frame. One comparison for each bound, in C, stands for a call of every watch. A
watch that a value wakes, and one that has nothing to say, are fed frame by frame.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import inf, isfinite
from operator import attrgetter, itemgetter, lt
from typing import Any

from ..model.decisions import OK
from ..model.interfaces import Clockwork, Detector, Watch

STRETCH = 30  # frames; a window of 128 can hardly tell what will be usual for longer

Values = tuple[float | None, ...]
Sampler = Callable[[Values], Any]
NEWEST = attrgetter("last")  # step of a watch


class QuietWatch(Watch):
    """A watch of one metric that knows beforehand what it will find usual.

    Attributes:
        last: newest step taken.
    """

    __slots__ = ()
    last: int

    @abstractmethod
    def band(self, count: int) -> tuple[float, float] | None:
        """Return (low, high), asked only while the reading and `raw` are OK.

        Each of the next `count` samples, at rising steps after `last`, would be answered with OK,
        and `raw` OK, and without a note, if all of them lie strictly between. None when that cannot
        be said.
        """

    @abstractmethod
    def catch_up(self, samples: Sequence[float], steps: Sequence[int]) -> None:
        """Take samples that all lay in the band: the same as `feed` with one after the other."""


class Idle(Watch):
    """A watch of several inputs that keeps nothing but the newest sample while all is well."""

    __slots__ = ()
    last: int

    @abstractmethod
    def idle(self) -> bool:
        """Return whether samples of finite values and OK codes, at rising steps, would be answered
        with OK and without a note, and feeding the last of them is the same as feeding all.

        Asked only while the reading and `raw` are OK.
        """


class SampleRouter:
    """The samples of one rank's watches, each from its columns.

    Private lists: `_loud` and `_loud_others` are fed in each frame; `_calm` and `_idle` have not
    seen the frames in `_rows` yet.
    """

    def __init__(
        self,
        detectors: Sequence[tuple[str, Detector]],
        watches: Sequence[Watch],
        names: Sequence[str],
    ) -> None:
        column = {name: i for i, name in enumerate(names)}
        place = {name: i for i, (name, _) in enumerate(detectors)}
        self.clocks: list[tuple[int, Clockwork]] = []
        self._singles: list[tuple[int, Watch, int, bool]] = []  # the last: can it be calm
        self._others: list[tuple[int, Watch, Sampler, list[int], list[int]]] = []
        for i, (_, detector) in enumerate(detectors):
            watch = watches[i]
            columns = [column.get(metric, -1) for metric in detector.metrics]
            known = [c for c in columns if c >= 0]
            inputs = [place[name] for name in detector.detectors]
            if isinstance(watch, Clockwork):
                self.clocks.append((i, watch))
            elif detector.reads == "metric":
                if known:
                    self._singles.append((i, watch, columns[0], isinstance(watch, QuietWatch)))
            elif known or inputs:
                sample = _sampler(detector.reads, columns, [watches[j] for j in inputs])
                self._others.append((i, watch, sample, known, inputs))
        self._newest = -1  # step that every watch left alone has seen, or will hear of
        self._rows: list[Values] = []
        self._steps: list[int] = []
        self._aimed: tuple[list[int], set[int]] = [], set()
        self._rest()

    def _rest(self) -> None:
        """Feed everybody, until the next frame asks who can be left alone."""
        self._calm: list[tuple[int, QuietWatch, int, float, float]] = []
        self._idle: list[tuple[int, Idle, Sampler, list[int], list[int]]] = []
        self._loud = [(i, watch.feed, column) for i, watch, column, _ in self._singles]
        self._loud_others = [(i, watch.feed, sample) for i, watch, sample, _, _ in self._others]
        self._left = 0

    def feed(self, values: Values, step: int, codes: Sequence[int]) -> list[tuple[int, int]]:
        """Take a frame; return the place and the code of every watch whose code is not `codes`."""
        if not self._left:
            self._begin(codes)
        self._left -= 1
        if self._calm or self._idle:
            if step <= self._newest:
                self.settle()
            else:
                try:
                    seen = self._pick(values)
                    usual = (
                        isfinite(sum(seen))
                        and all(map(lt, seen, self._highs))
                        and all(map(lt, self._lows, seen))
                    )
                except TypeError:  # a value is absent
                    usual = False
                if not usual:
                    self._wake(values)
                self._rows.append(values)
                self._steps.append(step)
                self._newest = step
        moved = []
        for i, feed, column in self._loud:
            code = feed(values[column], step)
            if code != codes[i]:
                moved.append((i, code))
        for i, feed, sample in self._loud_others:
            code = feed(sample(values), step)
            if code != codes[i]:
                moved.append((i, code))
        return moved

    def settle(self) -> None:
        """Bring every watch up to date."""
        if self._calm or self._idle:
            self._catch_up()
            self._rest()

    def _catch_up(self) -> None:
        if self._rows:
            columns = list(zip(*self._rows, strict=False))
            for _, calm, column, _, _ in self._calm:
                calm.catch_up(columns[column], self._steps)
            for _, idle, sample, _, _ in self._idle:
                idle.feed(sample(self._rows[-1]), self._steps[-1])
            self._rows, self._steps = [], []

    # ── who can be left alone ─────────────────────────────────────────────────────────────────────

    def _begin(self, codes: Sequence[int]) -> None:
        """Bring every watch up to date and ask each how it is."""
        self._catch_up()
        self._left = STRETCH
        self._calm, self._idle, self._loud, self._loud_others = [], [], [], []
        both: list[tuple[int, QuietWatch, int, float, float]] = []  # bounded on both sides
        upper: list[tuple[int, QuietWatch, int, float, float]] = []  # from above only
        for i, watch, column, can in self._singles:
            band = None
            if can and codes[i] == OK == watch.raw:
                band = watch.band(STRETCH)  # type: ignore[attr-defined]
            if band is None:
                self._loud.append((i, watch.feed, column))
            elif band[0] == -inf:
                upper.append((i, watch, column, *band))
            else:
                both.append((i, watch, column, *band))
        self._calm = both + upper
        calm_places = {entry[0] for entry in self._calm}
        for i, watch, sample, columns, inputs in self._others:
            well = isinstance(watch, Idle) and codes[i] == OK == watch.raw and watch.idle()
            if well and calm_places.issuperset(inputs):
                self._idle.append((i, watch, sample, columns, inputs))  # type: ignore[arg-type]
                calm_places.add(i)
            else:
                self._loud_others.append((i, watch.feed, sample))
        self._lows = [entry[3] for entry in both]
        self._highs = [entry[4] for entry in self._calm]
        alone = [entry[1] for entry in self._calm] + [entry[1] for entry in self._idle]
        self._newest = max(map(NEWEST, alone), default=-1)
        self._aim()

    def _aim(self) -> None:
        """Pick the values of the calm watches, in their order, then those that need be finite."""
        calm = [column for _, _, column, _, _ in self._calm]
        idle = {c for _, _, _, used, _ in self._idle for c in used}
        if (calm, idle) == self._aimed:  # as it nearly always is
            return
        self._aimed = calm, idle
        columns = calm + sorted(idle.difference(calm))
        if columns:
            self._pick = itemgetter(*columns, columns[-1])  # twice, as one alone is no tuple

    def _wake(self, values: Values) -> None:
        """Bring the watches up to date that this frame concerns, and feed them from now on.

        With any of them wakes every coupling that comes after.
        """
        rows, woken = self._rows, False
        for at in reversed(range(len(self._calm))):
            i, watch, column, low, high = self._calm[at]
            value = values[column]
            if value is not None and low < value < high:
                continue
            woken = True
            if rows:
                watch.catch_up([row[column] for row in rows], self._steps)  # type: ignore[misc]
            self._loud.append((i, watch.feed, column))
            del self._calm[at], self._highs[at], self._lows[at : at + 1]
        idle, self._idle = self._idle, []
        for lying in idle:
            i, several, sample, columns, inputs = lying
            if not (woken and inputs) and all(_finite(values[c]) for c in columns):
                self._idle.append(lying)
                continue
            woken = True
            if rows:
                several.feed(sample(rows[-1]), self._steps[-1])
            self._loud_others.append((i, several.feed, sample))
        self._loud.sort(key=itemgetter(0))
        self._loud_others.sort(key=itemgetter(0))
        self._aim()


def _finite(value: float | None) -> bool:
    return value is not None and isfinite(value)


def _sampler(reads: str, columns: Sequence[int], inputs: Sequence[Watch]) -> Sampler:
    """Return what takes a sample from the values of a frame; -1 is no column."""
    if reads == "metrics":
        if len(columns) > 1 and min(columns) >= 0:
            return itemgetter(*columns)
        return lambda values: [values[c] if c >= 0 else None for c in columns]
    if reads == "detectors":
        return lambda values: [watch.raw for watch in inputs]
    column, other = columns[0], inputs[0]
    return lambda values: (values[column] if column >= 0 else None, other.raw)
