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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..store import files
from ..store.run_directory import cache_directory
from ..store.run_records import WallClock
from .levels import Floats
from .pyramid import AXES, MAX_RANKS, Pyramid, RankPyramid, Stretch
from .run_view import RunView, Undone

MAX_METRICS, MAX_PIXELS, PIXELS = 64, 4000, 800
BUILD_BYTES = 8 << 20  # between two looks at the progress
SMALL_S = 0.15  # a small run needs no progress bar
CACHE_BYTES = 2 << 30  # of all runs; the oldest go first
CACHE_ENDED = "the journal was removed, or frames of it: from the page's cache"
NO_CACHE = "the curves are kept in memory: their cache cannot be written, or another page has it"
TURN_S = 5.0  # what takes longer waits for a disk
_building = threading.Lock()  # one at a time: the machine trains


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other run is read, unless that one hangs."""
    global _building
    while not (turn := _building).acquire(timeout=TURN_S):
        if turn is _building:  # else another has taken its place: there is one in turn again
            turn = threading.Lock()
            turn.acquire()
            _building = turn
            break
    try:
        yield
    finally:
        turn.release()


class BuildingError(Exception):
    """The curves are not there yet. `progress`: 0 to 1."""

    def __init__(self, progress: float) -> None:
        super().__init__(f"{progress:.0%}")
        self.progress = progress


class QueryError(Exception):
    """A query that cannot be answered."""


@dataclass(frozen=True)
class Query:
    """Which part of which curves.

    Attributes:
        rank: None for the leading one. following: only from this ordinal on.
    """

    metrics: Sequence[str]
    axis: str = "step"
    low: float = -math.inf
    high: float = math.inf
    pixels: int = PIXELS
    rank: int | None = None
    following: int = 0

    @classmethod
    def parse(cls, pairs: Sequence[tuple[str, str]]) -> Query:
        """Return the query of a URL. Raises QueryError."""
        metrics = list(dict.fromkeys(value for name, value in pairs if name == "m" and value))
        given = {name: value for name, value in pairs if name != "m" and value}
        if not metrics or len(metrics) > MAX_METRICS:
            raise QueryError(f"m: name 1 to {MAX_METRICS} metrics, m=ID each")
        axis = given.get("x", "step")
        if axis not in AXES:
            raise QueryError(f"x: one of {', '.join(AXES)}")
        try:
            low, high = float(given.get("lo", "-inf")), float(given.get("hi", "inf"))
            pixels, following = int(given.get("px", PIXELS)), int(given.get("from", 0))
            rank = int(given["rank"]) if "rank" in given else None
        except ValueError as error:
            raise QueryError(f"lo, hi, px, rank and from are numbers: {error}") from None
        if math.isnan(low) or math.isnan(high) or abs(following) > 1 << 53:
            raise QueryError("lo, hi and from are numbers")
        if not 1 <= pixels <= MAX_PIXELS:
            raise QueryError(f"px: 1 to {MAX_PIXELS}")
        return cls(metrics, axis, low, high, pixels, rank, following)


class RunCurves:
    """The curves of one run. Thread-safe.

    Args:
        folder: of the cache; None: in memory.
    """

    def __init__(self, view: RunView, folder: Path | None) -> None:
        self._view, self._folder = view, folder
        self._journal = view.run.journal_path
        self._lock = threading.Lock()
        self._pyramids = [Pyramid(self._journal, folder, run=view.run.id)]
        self._progress = [0.0]
        self._is_building = False
        self._offsets: tuple[int, Callable[[Stretch], float]] = (-1, lambda stretch: 0.0)
        self._is_ended = threading.Event()

    def close(self) -> None:
        """Leave the cache to others; a build ends."""
        self._is_ended.set()
        with self._lock:
            for pyramid in self._pyramids:
                pyramid.save()
                pyramid.close()

    def progress(self) -> float:
        """Return 1.0 when all can be shown; a build begins, and small runs are ready at once."""
        if self._progress[-1] < 1.0 and not self._is_building:
            self._is_building = True
            thread = threading.Thread(target=self._build, daemon=True, name="curves")
            thread.start()
            thread.join(SMALL_S)
        return min(self._progress)

    def _build(self) -> None:
        try:
            while min(self._progress) < 1.0:
                with _turn(), self._lock:  # the one of a chosen rank may be another the next time
                    number = next(n for n, done in enumerate(self._progress) if done < 1.0)
                    pyramid = self._pyramids[number]
                    if self._is_ended.is_set():
                        break
                    count = pyramid.update(BUILD_BYTES)
                    if not count:
                        pyramid.save()
                    share = pyramid.read_bytes / max(pyramid.size_bytes(), 1)
                    self._progress[number] = min(share, 0.999) if count else 1.0
            if self._folder is not None:
                trim_cache(self._folder.parent)
        finally:
            self._is_building = False

    def update(self) -> None:
        """Read what is new of a run that is built."""
        if self.progress() >= 1.0:
            with self._lock:
                for pyramid in () if self._is_ended.is_set() else self._pyramids:
                    pyramid.update()

    def rank_numbers(self) -> list[int]:
        """Return the ranks that are built."""
        with self._lock:
            return sorted({number for pyramid in self._pyramids for number in pyramid.ranks})

    def _rank(self, number: int) -> tuple[Pyramid, RankPyramid]:
        """Return a rank; of a job with many it may have to be built. Raises QueryError."""
        for pyramid in self._pyramids:
            if number in pyramid.ranks:
                return pyramid, pyramid.ranks[number]
        if len(self._pyramids[0].ranks) < MAX_RANKS or not self._is_rank(number):
            raise QueryError(f"the run has no rank {number}")
        if self._is_ended.is_set():
            raise BuildingError(0.0)
        for other in self._pyramids[1:]:
            other.save()
            other.close()
        folder = None if self._folder is None else self._folder / f"rank-{number}"
        self._pyramids[1:] = [Pyramid(self._journal, folder, run=self._view.run.id, rank=number)]
        self._progress[1:] = [0.0]
        raise BuildingError(0.0)

    def _is_rank(self, number: int) -> bool:
        newest = self._view.newest
        return newest is not None and 0 <= number < max(newest.world_size, len(newest.ranks))

    def lead(self) -> int | None:
        """Return the rank whose curves are shown first, None before there is one."""
        return min(self.rank_numbers(), default=None)

    def metrics(self) -> list[str]:
        """Return the ids of all metrics of the ranks that are built."""
        with self._lock:
            ranks = [r for pyramid in self._pyramids for r in pyramid.ranks.values()]
            return list(dict.fromkeys(name for rank in ranks for name in rank.columns))

    def cache_note(self) -> str | None:
        """Return what is to be said about the cache."""
        pyramid = self._pyramids[0]
        if pyramid.damage:
            return f"{pyramid.damage}: the curves end there"
        if pyramid.cut or not pyramid.is_journal_there:
            return CACHE_ENDED if pyramid.ranks else None
        return None if pyramid.is_cached else NO_CACHE

    def head(self) -> dict[str, Any]:
        """Return how far the curves are."""
        with self._lock:
            ranks = self._pyramids[0].ranks
            rank = ranks[min(ranks)] if ranks else None
            stretch = rank.stretches[-1] if rank is not None and rank.stretches else None
            newest = self._view.newest
            t = None if newest is None else _seconds(newest.updated_wall, self._view.t0)
            return {
                "frames": {str(number): built.length for number, built in ranks.items()},
                "step": -1 if stretch is None else stretch.last,
                "attempt": 0 if stretch is None else stretch.attempt,
                "t": t,
                "building": min(self._progress),
            }

    def version(self) -> tuple[object, ...]:
        """Return what changes when anything but the curves themselves does."""
        with self._lock:
            ranks = [r for pyramid in self._pyramids for r in pyramid.ranks.values()]
            sizes = [(len(rank.stretches), len(rank.columns)) for rank in ranks]
            return (*sizes, self._progress[0], self._pyramids[0].cut, self._pyramids[0].damage)

    def attempts(self) -> list[dict[str, Any]]:
        """Return the stretches of the leading rank."""
        with self._lock:
            ranks = self._pyramids[0].ranks
            if not ranks:
                return []
            rank = ranks[min(ranks)]
            offset = self._clock(rank)
            ends = [stretch.at_ns for stretch in rank.stretches[1:]]
            return [
                {
                    "attempt": stretch.attempt,
                    "first": stretch.first,
                    "last": stretch.last,
                    "t": round(stretch.at_ns / 1e9 + offset(stretch), 3),
                    "end_t": round(end / 1e9 + offset(stretch), 3) if end else None,
                }
                for stretch, end in zip(rank.stretches, [*ends, 0], strict=True)
            ]

    def repeated(self) -> list[Undone]:
        """Return the steps of the leading rank that a later attempt made again."""
        with self._lock:
            ranks = self._pyramids[0].ranks
            stretches = ranks[min(ranks)].stretches if ranks else []
            return [span for span in _repeated(stretches) if span is not None]

    def tag(self, query: Query) -> str:
        """Return what changes with the answer to a query."""
        with self._lock:
            lengths = [r.length for p in self._pyramids for r in p.ranks.values()]
        text = f"{len(self._view.records)} {sum(lengths)} {query}"
        return f'"{zlib.crc32(text.encode()):x}"'

    def series(self, query: Query) -> bytes:
        """Return the curves of a window. Raises BuildingError, QueryError."""
        self.update()
        if (progress := self.progress()) < 1.0:
            raise BuildingError(progress)
        with self._lock:
            ranks = self._pyramids[0].ranks
            number = query.rank if query.rank is not None else min(ranks, default=0)
            if not ranks:
                return _encode({**_header(query, number), "bucket": 1, "frames": 0, "next": 0}, [])
            pyramid, rank = self._rank(number)
            offset = self._clock(rank)
            shifts = [1e9 * offset(stretch) for stretch in rank.stretches]
            low, high = query.low, query.high
            is_time = query.axis == "time"
            if is_time:
                low, high = low * 1e9, high * 1e9
            curves = pyramid.curves(
                number,
                query.metrics,
                query.axis,
                low,
                high,
                query.pixels,
                shifts=shifts if is_time else (),
            )
            header = {
                **_header(query, number),
                "bucket": curves.bucket,
                "frames": rank.length,
                "next": curves.following,
                "tokens": "tokens_seen" in rank.columns,
            }
            rollbacks = self._view.undone()
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
                undone = _undone_of(stretch, again, rollbacks)
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


def _offsets(view: RunView, stretches: Sequence[Stretch]) -> Callable[[Stretch], float]:
    clock = WallClock(view.run.audit_path)
    first_s = stretches[0].at_ns / 1e9 if stretches else 0.0

    def offset(stretch: Stretch) -> float:
        wall = clock.time_of(stretch.event, stretch.at_ns)
        if wall is None:  # no record says when: since the first frame
            return -first_s
        return wall.timestamp() - view.t0 - stretch.at_ns / 1e9

    return offset


def _repeated(stretches: Sequence[Stretch]) -> list[Undone | None]:
    """Return of each stretch which of its steps a later one made again."""
    spans: list[Undone | None] = []
    least = 1 << 62
    for stretch in reversed(stretches):
        first = max(least, stretch.first)
        spans.append(
            Undone(attempt=stretch.attempt, first=first, last=stretch.last, by="relaunch")
            if first <= stretch.last
            else None
        )
        least = min(least, stretch.first)
    return spans[::-1]


def _undone_of(
    stretch: Stretch, repeated: Undone | None, rollbacks: Sequence[Undone]
) -> list[list[int]]:
    """Return the steps of a stretch that do not count, as pairs in order."""
    spans = [[repeated.first, repeated.last]] if repeated is not None else []
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


def _header(query: Query, rank: int) -> dict[str, Any]:
    return {
        "metrics": list(query.metrics),
        "x": query.axis,
        "rank": rank,
        "stretches": [],
        "tokens": False,
    }


def _encode(header: Mapping[str, Any], arrays: Sequence[Floats]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])


def _seconds(wall: str, t0: float) -> float | None:
    with suppress(ValueError):
        return round(datetime.fromisoformat(wall).astimezone(UTC).timestamp() - t0, 3)
    return None


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
