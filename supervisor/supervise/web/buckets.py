"""Buckets of a curve in a file: minimum, maximum, mean and count of each metric.

    bucket  = up to BASE frames of one rank within one stretch
    planes  = f8[5]: ordinal of its first frame, step, time in ns, tokens, position in the journal
              f4[4] of each metric: minimum, maximum, mean, count of finite values
    chunk   = ROWS buckets: f8[5][ROWS], then f4[metrics][4][ROWS]; as wide as the metrics then

A count below 0 says that some values were not finite: -n - 0.5 for n finite ones. A full chunk is
appended to the file of its rank and read through a map; the open one is in memory. f4 will do for
curves; x is f8, because tokens pass 2**24.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ..store import files

BASE, FAN, ROWS = 16, 4, 256
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


def join_buckets(values: Floats, size: int) -> Floats:
    """Return the values of buckets that join `size` others each, the last one what is left."""
    metrics, _, buckets = values.shape
    values = np.concatenate([values, absent_values(metrics, -buckets % size)], 2)
    values = values.reshape(metrics, 4, -1, size)
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


class Buckets(Struct, eq=False):
    """The closed buckets of one rank.

    Attributes:
        path: of its file; None: in memory, where nothing can be written.
        length: number of buckets.
        chunks: offset in the file and metrics of each full chunk.
        memory: the full chunks without a file.
        x, values: of the open chunk.
    """

    path: str | None = None
    length: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    memory: list[tuple[Floats, Floats]] = field(default_factory=list)
    x: Floats = field(default_factory=lambda: np.empty((PLANES, 0)))
    values: Floats = field(default_factory=lambda: absent_values(0, 0))

    def append(self, x: Floats, values: Floats) -> None:
        """Add buckets. Raises OSError: the file cannot be written."""
        width = max(len(self.values), len(values))
        self.length += x.shape[1]
        x = np.concatenate([self.x, x], 1)
        values = np.concatenate([widen_values(v, width) for v in (self.values, values)], 2)
        full = x.shape[1] // ROWS * ROWS
        for begin in range(0, full, ROWS):
            span = slice(begin, begin + ROWS)
            self._end_chunk(x[:, span].copy(), values[:, :, span].copy())
        # Copies: a view would keep the whole block in memory.
        self.x, self.values = x[:, full:].copy(), values[:, :, full:].copy()

    def _end_chunk(self, x: Floats, values: Floats) -> None:
        if self.path is None:
            self.memory.append((x, values))
            return
        offset = sum(_size(metrics) for _, metrics in self.chunks)
        raw = x.tobytes() + values.tobytes()
        fd = files.open_file(Path(self.path), os.O_WRONLY | os.O_CREAT)
        try:
            if os.fstat(fd).st_size < offset:
                raise OSError("the chunks before it were removed")
            os.ftruncate(fd, offset)
            if os.pwrite(fd, raw, offset) < len(raw):
                raise OSError("the disk is full")
        finally:
            os.close(fd)
        self.chunks.append((offset, len(values)))

    def is_whole(self) -> bool:
        """Return whether the file holds all chunks. Raises OSError."""
        size = sum(_size(metrics) for _, metrics in self.chunks)
        return not size or (self.path is not None and Path(self.path).stat().st_size >= size)

    def read(self, columns: Sequence[int], begin: int, end: int) -> tuple[Floats, Floats]:
        """Return the buckets `begin` to `end`: all planes of x, values of some metrics."""
        chosen = absent_values(len(columns), end - begin)
        planes = np.empty((PLANES, end - begin))
        for x, values, span, first in self._parts(begin, end):
            target = slice(first - begin, first - begin + span.stop - span.start)
            planes[:, target] = x[:, span]
            for row, column in enumerate(columns):
                if column < len(values):
                    chosen[row, :, target] = values[column, :, span]
        return planes, chosen

    def plane(self, plane: int, begin: int, end: int) -> Floats:
        """Return one plane of x of the buckets `begin` to `end`."""
        planes, _ = self.read([], begin, end)
        chosen: Floats = planes[plane]
        return chosen

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Floats, Floats, slice, int]]:
        """Yield x and values of each chunk, which of its buckets are meant, and the first.

        Raises OSError: the file is not there, or lacks chunks.
        """
        numbers = range(begin // ROWS, (end - 1) // ROWS + 1) if end > begin else range(0)
        with ExitStack() as stack:
            file = None
            if self.path is not None and numbers.start < len(self.chunks):
                fd = files.open_file(Path(self.path))
                stack.callback(os.close, fd)
                if not self.is_whole():
                    raise OSError("chunks of it were removed")
                file = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            for number in numbers:
                first = max(begin - number * ROWS, 0)
                span = slice(first, min(end - number * ROWS, ROWS))
                yield *self._chunk(number, file), span, number * ROWS + first

    def _chunk(self, number: int, file: mmap.mmap | None) -> tuple[Floats, Floats]:
        if file is not None and number < len(self.chunks):
            offset, metrics = self.chunks[number]
            x = np.frombuffer(file, "f8", PLANES * ROWS, offset)
            values = np.frombuffer(file, "f4", metrics * 4 * ROWS, offset + PLANES * ROWS * 8)
            return x.reshape(PLANES, ROWS), values.reshape(metrics, 4, ROWS)
        if number < len(self.memory):
            return self.memory[number]
        return self.x, self.values


def _size(metrics: int) -> int:
    return ROWS * (PLANES * 8 + metrics * 4 * 4)
