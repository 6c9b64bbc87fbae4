"""The curves of a run for the page: built in the background, kept up to date, sent as bytes.

    u32 n | n bytes of JSON, padded so that 4 + n is a multiple of 8 | per stretch:
    f64[4][k] ordinal, step, seconds, tokens | f32[metrics][4][k] min, max, mean, count

Little-endian; the browser makes typed arrays of it without copies. Seconds count from when the run
was created, by the clocks of all its boots.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from ..core.model.formats import SLOW_AT
from ..store import files
from ..store.run_directory import cache_directory
from ..store.run_records import WallClock
from .buckets import MEAN, STEP, Floats
from .pyramid import Pyramid, RankPyramid, Stretch
from .run_view import RunView, Undone

MAX_METRICS, MAX_PIXELS, PIXELS = 64, 4000, 800
BUILD_BYTES = 8 << 20  # between two looks at the progress
SMALL_S = 0.15  # a small run needs no progress bar
CACHE_BYTES = 2 << 30  # of all runs; the oldest go first
CUT = "frames were removed from the journal"
CACHE_ALONE = "the journal was removed: the curves are from the page's cache"
NO_CACHE = "the curves are kept in memory: their cache cannot be written, or another page has it"
CLOSE_S = 3.0  # for what reads the journal or the cache at the end
TURN_S = 5.0  # a build that takes longer waits for a disk, or is no reason to wait
OWN_TIME = ("input_time", "forward_time", "optimizer_time", "other_time")  # of a rank by itself
STRAGGLER = ("straggler_ratio", "straggler_rank", "straggler_part")
SLOW = 1.33  # times what a step were with the median rank: the limit of the pack `ranks`
NEWEST, LATE = 4, 512  # buckets: of the time of a rank; in which a rank may have become slow
_building = threading.Lock()  # one at a time: the machine trains


class BuildingError(Exception):
    """The curves are not there yet. `progress`: 0 to 1."""

    def __init__(self, progress: float) -> None:
        super().__init__(f"{progress:.0%}")
        self.progress = progress


class QueryError(Exception):
    """A query that cannot be answered."""


class Query(
    Struct,
    frozen=True,
    rename={"metrics": "m", "axis": "x", "low": "lo", "high": "hi", "pixels": "px"}.get,
):
    """Which part of which curves; the names of the fields in a URL are shorter.

    Attributes:
        rank: None for the leading one. following: only from this ordinal on.
    """

    metrics: Annotated[list[str], Meta(min_length=1, max_length=MAX_METRICS)]
    axis: Literal["step", "time", "tokens"] = "step"
    low: float = -math.inf
    high: float = math.inf
    pixels: Annotated[int, Meta(ge=1, le=MAX_PIXELS)] = PIXELS
    rank: int | None = None
    following: Annotated[int, Meta(ge=0, le=1 << 53)] = field(default=0, name="from")

    @classmethod
    def parse(cls, pairs: Sequence[tuple[str, str]]) -> Query:
        """Return the query of a URL. Raises QueryError."""
        metrics = list(dict.fromkeys(value for name, value in pairs if name == "m" and value))
        given = {name: value for name, value in pairs if name != "m" and value}
        try:
            query = msgspec.convert({**given, "m": metrics}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise QueryError(f"m names 1 to {MAX_METRICS} metrics, m=ID each; {error}") from None
        if math.isnan(query.low) or math.isnan(query.high):
            raise QueryError("lo and hi are numbers")
        return query


class RunCurves:
    """The curves of one run. Thread-safe.

    Args:
        folder: of the cache; None: in memory.
    """

    def __init__(self, view: RunView, folder: Path | None) -> None:
        self._view, self._folder = view, folder
        self._lock = threading.Lock()
        self._pyramid = Pyramid(view.run.journal_path, folder, run=view.run.id)
        self._progress = 0.0
        self._builder: threading.Thread | None = None
        self._starting = threading.Lock()  # one thread builds
        self._offsets: tuple[int, Callable[[Stretch], float]] = (-1, lambda stretch: 0.0)
        self._is_ended = threading.Event()

    def close(self) -> None:
        """Leave the cache to others; a build ends."""
        self._is_ended.set()
        if not self._lock.acquire(timeout=CLOSE_S):
            return  # who has it waits for a disk
        try:
            self._pyramid.save()
            self._pyramid.close()
        finally:
            self._lock.release()

    def progress(self) -> float:
        """Return 1.0 when all can be shown; a build begins, and small runs are ready at once."""
        with self._starting:
            is_building = self._builder is not None and self._builder.is_alive()
            if self._progress < 1.0 and not is_building:
                builder = threading.Thread(target=self._build, daemon=True, name="curves")
                with suppress(RuntimeError):  # there may be no more threads: at the next look
                    builder.start()
                    self._builder = builder
                    builder.join(SMALL_S)
        return self._progress

    def _build(self) -> None:
        has_turn = _building.acquire(timeout=TURN_S)
        try:
            while self._progress < 1.0 and not self._is_ended.is_set():
                self._build_on()
        finally:
            if has_turn:
                _building.release()
        if self._folder is not None:
            trim_cache(self._folder.parent)

    def _build_on(self) -> None:
        with self._lock:
            if self._is_ended.is_set():
                return
            count = self._pyramid.update(BUILD_BYTES)
            if not count:
                self._pyramid.save()
            share = self._pyramid.read_bytes / max(self._pyramid.size_bytes(), 1)
            self._progress = min(share, 0.999) if count else 1.0

    def update(self) -> None:
        """Read what is new of a run that is built."""
        if self.progress() >= 1.0:
            with self._lock:
                if not self._is_ended.is_set():
                    self._pyramid.update()

    def facts(self) -> dict[str, Any]:
        """Return how far the curves are, which there are, and the attempts of the leading rank."""
        with self._lock:
            try:
                return self._facts()
            except OSError:
                self._leave_cache()
                return self._facts()

    def _facts(self) -> dict[str, Any]:
        ranks, newest = self._pyramid.ranks, self._view.newest
        lead = min(ranks, default=None)
        stretches = [] if lead is None else ranks[lead].stretches
        content: dict[str, Any] = {
            "building": self._progress,
            "cache": self._cache_note(),
            "lead": lead,
            "frames": {str(number): rank.length for number, rank in ranks.items()},
            "attempts": [] if lead is None else self._attempts(ranks[lead]),
            "own_s": {str(n): _own_time(r) for n, r in ranks.items()} if len(ranks) > 1 else {},
            "slow": None if lead is None else _slow_rank(ranks[lead]),
        }
        known = (0, -1) if newest is None else (newest.attempt, newest.step)
        if stretches and (reached := (stretches[-1].attempt, stretches[-1].last)) > known:
            content |= {"attempt": reached[0], "step": reached[1]}
        return content

    def _leave_cache(self) -> None:
        """Build again, in memory: somebody has removed the cache, or a part of it."""
        self._pyramid.restart_without_cache()
        self._progress = 0.0

    def metrics(self) -> tuple[str, ...]:
        """Return the ids of all metrics of the ranks that are built."""
        with self._lock:
            ranks = self._pyramid.ranks.values()
            return tuple(dict.fromkeys(name for rank in ranks for name in rank.columns))

    def _cache_note(self) -> str | None:
        """Return what is to be said about journal and cache."""
        pyramid = self._pyramid
        if pyramid.damage:
            return f"{pyramid.damage}: the curves end there"
        if not pyramid.is_journal_there:
            return CACHE_ALONE if pyramid.ranks else None
        if pyramid.cut:
            return CUT
        return None if pyramid.is_cached else NO_CACHE

    def _attempts(self, rank: RankPyramid) -> list[dict[str, Any]]:
        offset = self._clock(rank)
        ends = [*(stretch.at_ns for stretch in rank.stretches[1:]), 0]
        return [
            {
                "attempt": stretch.attempt,
                "first": stretch.first,
                "last": stretch.last,
                "t": round(stretch.at_ns / 1e9 + offset(stretch), 3),
                "end_t": round(end / 1e9 + offset(stretch), 3) if end else None,
            }
            for stretch, end in zip(rank.stretches, ends, strict=False)  # none before a first step
        ]

    def series(self, query: Query) -> bytes:
        """Return the curves of a window. Raises BuildingError, QueryError."""
        self.update()
        if (progress := self.progress()) < 1.0:
            raise BuildingError(progress)
        with self._lock:
            ranks = self._pyramid.ranks
            number = query.rank if query.rank is not None else min(ranks, default=0)
            header: dict[str, Any] = {"metrics": query.metrics, "rank": number, "stretches": []}
            if not ranks:
                return _encode({**header, "tokens": False, "bucket": 1, "next": 0}, [])
            rank = ranks.get(number)
            if rank is None:
                raise QueryError(f"there are no curves of rank {number}")
            offset = self._clock(rank)
            shifts = [1e9 * offset(stretch) for stretch in rank.stretches]
            low, high = query.low, query.high
            is_time = query.axis == "time"
            if is_time:
                low, high = low * 1e9, high * 1e9
            try:
                curves = self._pyramid.curves(
                    number,
                    query.metrics,
                    query.axis,
                    low,
                    high,
                    query.pixels,
                    shifts=shifts if is_time else (),
                    following=query.following,
                )
            except OSError:
                self._leave_cache()
                raise BuildingError(0.0) from None
            header |= {
                "bucket": curves.bucket,
                "next": curves.following,
                "tokens": "tokens_seen" in rank.columns,
            }
            repeated = _repeated(rank.stretches)
            arrays: list[Floats] = []
            for (stretch, x, values), again, shift in zip(
                curves.stretches, repeated, shifts, strict=True
            ):
                last, end = stretch.last, stretch.ordinal + stretch.length
                if x.size and x[0, -1] + curves.bucket < end:  # the window ends before it
                    last = int(x[1, -1]) + curves.bucket - 1
                span = x[0] >= query.following
                x, values = x[:4, span], values[:, :, span]
                x[2] = (x[2] + shift) / 1e9
                undone = _undone_of(stretch, again, self._view.undone)
                header["stretches"].append(
                    {"attempt": stretch.attempt, "n": x.shape[1], "last": last, "undone": undone}
                )
                arrays += [x.astype("<f8"), values.astype("<f4")]
        return _encode(header, arrays)

    def _clock(self, rank: RankPyramid) -> Callable[[Stretch], float]:
        """Return what is to be added to the clock of a stretch, for seconds since the start."""
        # A machine that boots in between starts the job again: another attempt.
        attempt = self._view.records[-1].attempt if self._view.records else -1
        if self._offsets[0] != attempt or attempt < 0:
            self._offsets = attempt, _offsets(self._view, rank.stretches)
        return self._offsets[1]


def _newest(rank: RankPyramid, names: Sequence[str], buckets: int) -> tuple[Floats, Floats]:
    """Return the steps of the newest buckets of a rank, and the means of some metrics in them."""
    if not rank.stretches:
        return np.empty(0), np.empty((len(names), 0))
    stretch = rank.stretches[-1]
    span = max(stretch.begin, stretch.end - buckets), stretch.end
    x, values = rank.merged_buckets(
        stretch, span, 1, [rank.columns.get(name, 1 << 30) for name in names]
    )
    return x[STEP], values[:, MEAN]


def _own_time(rank: RankPyramid) -> float | None:
    """Return the seconds that a rank spends by itself in one of its newest steps."""
    _, means = _newest(rank, OWN_TIME, NEWEST)
    known = np.isfinite(means)
    total = float((np.where(known, means, 0.0).sum(1) / np.maximum(known.sum(1), 1)).sum())
    return total or None


def _slow_rank(rank: RankPyramid) -> dict[str, Any] | None:
    """Return which rank the others wait for now, since which step, and what it is slow at.

    Empty: they wait for none. None: it is not known.
    """
    steps, (ratio, number, part) = _newest(rank, STRAGGLER, LATE)
    known = np.flatnonzero(np.isfinite(ratio))
    if not known.size:
        return None
    last = known[-1]
    if ratio[last] < SLOW or number[last] % 1:
        return {}
    others = known[(ratio[known] < SLOW) | (number[known] != number[last])]
    begin = known[known > (others[-1] if others.size else -1)][0]
    return {
        "rank": int(number[last]),
        "since": int(steps[begin]),
        "part": SLOW_AT[round(float(part[last]))],
    }


def _offsets(view: RunView, stretches: Sequence[Stretch]) -> Callable[[Stretch], float]:
    clock = WallClock(view.run.audit_path)
    first_s = stretches[0].at_ns / 1e9 if stretches else 0.0

    def offset(stretch: Stretch) -> float:
        wall = clock.time_of(stretch.event, stretch.at_ns)
        if wall is None:  # no record says when: since the first frame
            return -first_s
        return wall.timestamp() - view.t0 - stretch.at_ns / 1e9

    return offset


def _repeated(stretches: Sequence[Stretch]) -> list[list[int] | None]:
    """Return of each stretch which of its steps, first and last, a later one made again."""
    spans: list[list[int] | None] = []
    least = 1 << 62
    for stretch in reversed(stretches):
        first = max(least, stretch.first)
        spans.append([first, stretch.last] if first <= stretch.last else None)
        least = min(least, stretch.first)
    return spans[::-1]


def _undone_of(
    stretch: Stretch, repeated: list[int] | None, rollbacks: Sequence[Undone]
) -> list[list[int]]:
    """Return the steps of a stretch that do not count, as pairs in order."""
    spans = [] if repeated is None else [repeated]
    spans += [
        [max(span.first, stretch.first), min(span.last, stretch.last)]
        for span in rollbacks
        if span.attempt == stretch.attempt
    ]
    merged: list[list[int]] = []
    for first, last in sorted(span for span in spans if span[0] <= span[1]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return merged


def _encode(header: Mapping[str, Any], arrays: Sequence[Floats]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])


def cache_folder(run_id: str, chosen: Path | None) -> Path | None:
    """Return the directory of the curves of a run, None where there can be none."""
    if chosen is not None:
        return chosen / "pyramids" / run_id
    with suppress(OSError):
        return cache_directory(os.environ, run_id)
    return None


def trim_cache(home: Path, limit: int = CACHE_BYTES) -> None:
    """Remove curves that nobody uses, the oldest first, down to a limit; they can be made again."""
    with suppress(OSError):
        sizes = []
        for folder in (path for path in home.iterdir() if (path / "state").exists()):
            statuses = [path.stat() for path in folder.rglob("*") if path.is_file()]
            newest = max((status.st_mtime for status in statuses), default=0.0)
            sizes.append((newest, sum(status.st_size for status in statuses), folder))
        total = sum(size for _, size, _ in sizes)
        for _, size, folder in sorted(sizes)[:-1]:
            if total <= limit:
                return
            if not files.is_locked(folder / "lock"):
                files.remove_tree(folder)
                total -= size
