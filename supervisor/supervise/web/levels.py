"""Buckets of a curve in files: minimum, maximum, mean and count of each metric, level by level.

    bucket  = up to BASE frames of one rank within one stretch; of level L+1: FAN buckets of level L
    planes  = f8[5]: ordinal of its first frame, step, time in ns, tokens, position in the journal
              f4[4] of each metric: minimum, maximum, mean, count of finite values
    chunk   = ROWS buckets: f8[5][ROWS], then f4[metrics][4][ROWS]; as wide as the metrics then

A count below 0 says that some values were not finite: -n - 0.5 for n finite ones. A full chunk is
appended to the file of its level and read through a map; the open one is in memory. f4 will do for
curves; x is f8, because tokens pass 2**24.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store import files

BASE, FAN, LEVELS, ROWS = 16, 4, 8, 256
PLANES = 5
ORDINAL, STEP, TIME, TOKENS, POSITION = range(PLANES)
MIN, MAX, MEAN, COUNT = range(4)
LARGEST = float(np.finfo("f4").max)
Floats = NDArray[Any]


def absent_values(metrics: int, buckets: int) -> Floats:
    """Return the values of buckets without any."""
    values = np.full((metrics, 4, buckets), np.nan, "f4")
    values[:, COUNT] = 0
    return values


def widen_values(values: Floats, metrics: int) -> Floats:
    """Return buckets with absent values of the metrics that they lack."""
    if len(values) >= metrics:
        return values
    return np.concatenate([values, absent_values(metrics - len(values), values.shape[2])])


def reduce_frames(frames: Floats, broken: Floats) -> Floats:
    """Return the values of buckets.

    Args:
        frames: f8[buckets, frames, metrics], NaN where absent or not finite.
        broken: which of them are not finite.
    """
    count = np.isfinite(frames).sum(1)
    values = np.empty((frames.shape[2], 4, frames.shape[0]), "f4")
    with np.errstate(all="ignore"):
        values[:, MIN] = np.fmin.reduce(frames, 1).clip(-LARGEST, LARGEST).T
        values[:, MAX] = np.fmax.reduce(frames, 1).clip(-LARGEST, LARGEST).T
        mean = np.nansum(frames, 1) / count
        if np.isinf(mean).any():  # the sum of numbers near the largest one
            mean = np.nansum(frames / np.maximum(count, 1)[:, None, :], 1)
            mean = np.where(count > 0, mean, np.nan)
        values[:, MEAN] = mean.clip(-LARGEST, LARGEST).T
    values[:, COUNT] = np.where(broken.any(1), -count - 0.5, count).T
    return values


def join_buckets(values: Floats) -> Floats:
    """Return the values of buckets that join others: f4[metrics, 4, buckets, joined]."""
    count = np.floor(np.abs(values[:, COUNT])).astype("f8")
    total = count.sum(-1)
    joined = np.empty(values.shape[:3], "f4")
    joined[:, MIN] = np.fmin.reduce(values[:, MIN], -1)
    joined[:, MAX] = np.fmax.reduce(values[:, MAX], -1)
    with np.errstate(all="ignore"):
        weights = count / total[..., None]
        mean = np.nansum(values[:, MEAN].astype("f8") * weights, -1)
        joined[:, MEAN] = np.where(total > 0, mean, np.nan)
    joined[:, COUNT] = np.where((values[:, COUNT] < 0).any(-1), -total - 0.5, total)
    return joined


class Level:
    """The buckets of one level of one rank.

    Args:
        path: of its file; None: in memory, where nothing can be written.

    Attributes:
        length: number of buckets.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._chunks: list[tuple[int, int]] = []  # offset in the file, metrics
        self._memory: list[tuple[Floats, Floats]] = []  # the same without a file
        self._x = np.empty((PLANES, ROWS))
        self._values = absent_values(0, ROWS)
        self._fill = 0
        self.length = 0

    def widen(self, metrics: int) -> None:
        """Make room for more metrics."""
        self._values = widen_values(self._values, metrics)

    def append(self, x: Floats, values: Floats) -> None:
        """Add buckets. Raises OSError: the file cannot be written."""
        begin, count = 0, x.shape[1]
        while begin < count:
            size = min(count - begin, ROWS - self._fill)
            target = slice(self._fill, self._fill + size)
            self._x[:, target] = x[:, begin : begin + size]
            self._values[: len(values), :, target] = values[:, :, begin : begin + size]
            self._fill += size
            begin += size
            self.length += size
            if self._fill == ROWS:
                self._end_chunk()

    def _end_chunk(self) -> None:
        if self._path is None:
            self._memory.append((self._x.copy(), self._values.copy()))
        else:
            offset = sum(_size(metrics) for _, metrics in self._chunks)
            fd = files.open_file(self._path, os.O_WRONLY | os.O_CREAT)
            try:
                raw = self._x.tobytes() + self._values.tobytes()
                os.ftruncate(fd, offset)
                if os.pwrite(fd, raw, offset) < len(raw):
                    raise OSError("the disk is full")
            finally:
                os.close(fd)
            self._chunks.append((offset, len(self._values)))
        self._fill = 0
        self._values = absent_values(len(self._values), ROWS)

    def _chunk(self, number: int) -> tuple[Floats, Floats]:
        if number == len(self._chunks) + len(self._memory):
            return self._x, self._values
        if self._path is None:
            return self._memory[number]
        offset, metrics = self._chunks[number]
        if self._map is None or len(self._map) < offset + _size(metrics):
            fd = files.open_file(self._path)
            try:
                self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        x = np.frombuffer(self._map, "f8", PLANES * ROWS, offset)
        values = np.frombuffer(self._map, "f4", metrics * 4 * ROWS, offset + PLANES * ROWS * 8)
        return x.reshape(PLANES, ROWS), values.reshape(metrics, 4, ROWS)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Floats, Floats, slice, int]]:
        for number in range(begin // ROWS, (end - 1) // ROWS + 1) if end > begin else ():
            x, values = self._chunk(number)
            first = max(begin - number * ROWS, 0)
            yield x, values, slice(first, min(end - number * ROWS, ROWS)), number * ROWS + first

    def x(self, planes: Sequence[int] | slice, begin: int, end: int) -> Floats:
        """Return some planes of the buckets `begin` to `end`."""
        parts = [x[planes, span] for x, _, span, _ in self._parts(begin, end)]
        return np.concatenate(parts, 1) if parts else self._x[planes, :0]

    def values(self, columns: Sequence[int], begin: int, end: int) -> Floats:
        """Return the values of some metrics: f4[metrics, 4, buckets]."""
        chosen = absent_values(len(columns), end - begin)
        for _, values, span, first in self._parts(begin, end):
            target = slice(first - begin, first - begin + span.stop - span.start)
            for row, column in enumerate(columns):
                if column < len(values):
                    chosen[row, :, target] = values[column, :, span]
        return chosen

    def state(self) -> tuple[dict[str, Any], list[Floats]]:
        """Return what `restore` needs besides the file."""
        facts = {"chunks": self._chunks, "length": self.length, "fill": self._fill}
        return facts, [self._x[:, : self._fill], self._values[:, :, : self._fill]]

    def restore(self, facts: dict[str, Any], arrays: Sequence[Floats]) -> None:
        """Go on where another one was. Raises OSError, ValueError: the file is not of it."""
        self._chunks = [(int(offset), int(metrics)) for offset, metrics in facts["chunks"]]
        size = sum(_size(metrics) for _, metrics in self._chunks)
        if size and (self._path is None or self._path.stat().st_size < size):
            raise ValueError("the file of a level is too short")
        self.length, self._fill = int(facts["length"]), int(facts["fill"])
        self._x[:, : self._fill] = arrays[0]
        self._values = absent_values(len(arrays[1]), ROWS)
        self._values[:, :, : self._fill] = arrays[1]


def _size(metrics: int) -> int:
    return ROWS * (PLANES * 8 + metrics * 4 * 4)
