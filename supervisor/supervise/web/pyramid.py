"""The curves of a run: its frames in buckets, made of the journal on first sight.

A *stretch* is a sequence of frames of one rank with one attempt whose steps grow; buckets never
cross its end. The *ordinal*, the count of a rank's frames, is the only coordinate that never goes
back; step, time and tokens grow within a stretch. Of a wide window 4, 16, 64, ... buckets are
joined; of a narrow one the frames are read in the journal: a bucket has the byte where it begins.

The names of a rank's values may change their order, at a relaunch for instance. Columns are global
by name here, in the order of first sight, and a table of positions holds from its frame on.

The cache is a directory of its own, one file a rank, and `state`, which is replaced at once with
everything that is in memory: a killed build goes on from the last one, and gives the same. A cache
of another run, journal or version is thrown away.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from ..errors import MISSHAPEN, StoreError
from ..store import files
from ..store.journal import MAGIC, START, THINNED, Segment
from .buckets import (
    BASE,
    FAN,
    ORDINAL,
    PLANES,
    POSITION,
    STEP,
    TIME,
    TOKENS,
    Buckets,
    Floats,
    absent_values,
    join_buckets,
    reduce_frames,
)
from .journal_blocks import RECORD_HEAD, cut_window, decode_frames, frame_points, scan_block

FORMAT = 3
AXES = {"step": STEP, "time": TIME, "tokens": TOKENS}
MAX_COLUMNS = 2048  # metrics of a rank; a name beyond is not shown
MAX_RANKS = 64  # those beyond have no curves
BLOCK = 8 << 20  # bytes that are parsed at once
SAVE_BYTES = 32 << 20  # of the journal between two states of the cache
RAW_POINTS = 2  # a pixel: with fewer frames than that they are shown themselves
SLICE = 4096  # buckets that are joined at once
MAX_RAW_BYTES = 64 << 20  # read for it, of a journal with many ranks


class Stretch(Struct, eq=False):
    """Frames whose steps grow.

    Attributes:
        first, last: steps. ordinal, at_ns, event: of the first frame, `event` in the journal.
        begin, end: its closed buckets. length: number of frames.
    """

    attempt: int
    first: int
    last: int
    ordinal: int
    at_ns: int
    event: int
    begin: int
    end: int
    length: int = 0


@dataclass(frozen=True)
class Curves:
    """The values of a window.

    Attributes:
        bucket: frames that a point stands for; 1: the frames themselves.
        following: ordinal from which on points may still change, or come.
        stretches: each with f8[5][n] and f4[metrics][4][n].
    """

    bucket: int
    following: int
    stretches: Sequence[tuple[Stretch, Floats, Floats]]


class RankPyramid(Struct, eq=False):
    """The buckets of one rank.

    Attributes:
        length: number of frames. tokens: the newest count of them.
        columns: of the metrics. tables: from which frame on, columns of its values.
        rows: frames of the open bucket: x, values, which are not finite.
    """

    rank: int
    buckets: Buckets
    length: int = 0
    tokens: float = 0.0
    columns: dict[str, int] = field(default_factory=dict)
    tables: list[tuple[int, Floats]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    rows: tuple[Floats, Floats, Floats] | None = None

    def announce(self, names: Sequence[str]) -> None:
        """Take the names of the values that follow."""
        for name in names:
            if len(self.columns) < MAX_COLUMNS:
                self.columns.setdefault(name, len(self.columns))
        self.tables.append((self.length, self.table_of(names)))

    def table_of(self, names: Sequence[str]) -> Floats:
        """Return the columns of values with these names, -1 for none."""
        return np.array([self.columns.get(name, -1) for name in names], int)

    def table_at(self, ordinal: int) -> Floats:
        """Return the columns of the values of a frame."""
        index = bisect.bisect_right(self.tables, ordinal, key=lambda table: table[0])
        return self.tables[index - 1][1] if index else np.empty(0, int)

    def add_frames(self, head: Floats, values: Floats, broken: Floats) -> None:
        """Take frames: i8[n, 5], see `Span`, values and which are not finite: [n, metrics]."""
        cuts = np.flatnonzero((np.diff(head[:, 2]) != 0) | (np.diff(head[:, 1]) <= 0)) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(head)]):
            rows = head[begin:end]
            step, attempt = int(rows[0, 1]), int(rows[0, 2])
            stretch = self.stretches[-1] if self.stretches else None
            if stretch is None or stretch.attempt != attempt or step <= stretch.last:
                self._close()
                bucket, at_ns, event = self.buckets.length, int(rows[0, 0]), int(rows[0, 4])
                stretch = Stretch(attempt, step, step, self.length, at_ns, event, bucket, bucket)
                self.stretches.append(stretch)
            x = np.empty((PLANES, end - begin))
            x[ORDINAL] = self.length + np.arange(end - begin)
            x[STEP], x[TIME], x[POSITION] = rows[:, 1], rows[:, 0], rows[:, 3]
            x[TOKENS] = self.cumulative_tokens(values[begin:end], self.tokens)
            self.tokens = float(x[TOKENS, -1])
            stretch.length += end - begin
            stretch.last = int(rows[-1, 1])
            self.length += end - begin
            self._add(x, values[begin:end], broken[begin:end])

    def cumulative_tokens(self, values: Floats, tokens_before: float) -> Floats:
        """Return the tokens so far of frames; `tokens_before`: where one does not say so."""
        column = self.columns.get("tokens_seen", values.shape[1])
        if column >= values.shape[1]:
            return np.full(len(values), tokens_before)
        counts = values[:, column]
        newest = np.maximum.accumulate(np.where(np.isfinite(counts), np.arange(len(counts)), -1))
        return np.where(newest >= 0, counts[newest], tokens_before)

    def _add(self, x: Floats, values: Floats, broken: Floats) -> None:
        if self.rows is not None:
            old_x, old_values, old_broken = self.rows
            lacking = (0, 0), (0, values.shape[1] - old_values.shape[1])
            x = np.concatenate([old_x, x], 1)
            values = np.concatenate([np.pad(old_values, lacking, constant_values=np.nan), values])
            broken = np.concatenate([np.pad(old_broken, lacking), broken])
        full = x.shape[1] // BASE * BASE
        if full:
            frames = values[:full].reshape(-1, BASE, values.shape[1])
            marks = broken[:full].reshape(frames.shape)
            self._append(x[:, :full:BASE], reduce_frames(frames, marks))
        # Copies: a view would keep the whole block in memory.
        rest = x[:, full:].copy(), values[full:].copy(), broken[full:].copy()
        self.rows = rest if full < x.shape[1] else None

    def _append(self, x: Floats, values: Floats) -> None:
        self.buckets.append(x, values)
        self.stretches[-1].end = self.buckets.length

    def _close(self) -> None:
        """End the open bucket: the stretch is over."""
        if self.rows is not None:
            (x, values, broken), self.rows = self.rows, None
            self._append(x[:, :1], reduce_frames(values[None], broken[None]))

    def window(self, stretch: Stretch, axis: int, low: float, high: float) -> tuple[int, int]:
        """Return the buckets in a window, and one more on each side."""
        begin, end = stretch.begin, stretch.end
        first, last = np.searchsorted(self.buckets.plane(axis, begin, end), [low, high])
        return begin + max(int(first) - 1, 0), min(begin + int(last) + 1, end)

    def merged_buckets(
        self, stretch: Stretch, span: tuple[int, int], size: int, columns: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """Return buckets, and the open one behind them, of which each `size` are joined.

        They are counted from where the stretch begins: another window has the same.
        """
        begin = span[0] - (span[0] - stretch.begin) % size
        end = min(span[1] + (stretch.begin - span[1]) % size, stretch.end)
        is_open = stretch is self.stretches[-1] and end == stretch.end and self.rows is not None
        at_once = max(size, SLICE - SLICE % size)
        parts = [(np.empty((PLANES, 0)), absent_values(len(columns), 0))]
        for first in range(begin, end + is_open, at_once):
            last = min(first + at_once, end)
            x, values = self.buckets.read(columns, first, last)
            if is_open and self.rows is not None and first + at_once > end:
                rows_x, rows, broken = self.rows
                x = np.concatenate([x, rows_x[:, :1]], 1)
                open_bucket = frame_points(rows, broken, columns, joined=True)
                values = np.concatenate([values, open_bucket], 2)
            parts.append((x[:, ::size], join_buckets(values, size)))
        return (
            np.concatenate([x for x, _ in parts], 1),
            np.concatenate([values for _, values in parts], 2),
        )

    def start_of(self, bucket: int) -> tuple[int, int, float] | None:
        """Return ordinal, position and tokens of the first frame of a bucket.

        The one behind the closed ones is open; None where it has no frames yet.
        """
        if bucket < self.buckets.length:
            x, _ = self.buckets.read([], bucket, bucket + 1)
        elif bucket == self.buckets.length and self.rows is not None:
            x = self.rows[0]
        else:
            return None
        return int(x[ORDINAL, 0]), int(x[POSITION, 0]), float(x[TOKENS, 0])


class Cache(Struct, eq=False):
    """The file `state` of a cache.

    Attributes:
        boot: of the machine; what a power cut left is not trusted.
        folder: of the files of its buckets. identity: of the journal.
    """

    format: int
    boot: str
    folder: str
    run: str
    identity: str | None
    segment: int
    offset: int
    number: int
    is_in_thinned: bool
    read_bytes: int
    cut: bool
    ranks: dict[int, RankPyramid]


class Pyramid:
    """The curves of one run; `update` reads what is new. One thread at a time.

    Args:
        journal: directory of the segments.
        folder: of the cache; None, or one that another process uses: in memory.
        run: its id, of which a cache must be.
        save_bytes: of the journal between two states of the cache.

    Attributes:
        ranks: by number, in order of first sight.
        read_bytes: of the journal so far.
        damage: why nothing behind that is read, "" where nothing is wrong.
        cut: the journal lacks frames that are here or were.
    """

    def __init__(
        self,
        journal: Path,
        folder: Path | None = None,
        *,
        run: str = "",
        save_bytes: int = SAVE_BYTES,
    ) -> None:
        self._save_bytes = save_bytes
        self._journal, self._run = journal, run
        self._lock = -1
        self._begin(self._claim(folder))
        self._restore()

    def _begin(self, folder: Path | None) -> None:
        self.ranks: dict[int, RankPyramid] = {}
        self.read_bytes, self.damage, self.cut = 0, "", False
        self._segment, self._offset, self._number = 0, START.size, 0
        self._is_in_thinned = False  # the segment that is being read
        self._folder, self._saved_bytes = folder, 0

    def restart_without_cache(self) -> None:
        """Begin again, in memory: the cache cannot be used any more."""
        self._begin(None)

    def _claim(self, folder: Path | None) -> Path | None:
        if folder is None:
            return None
        try:
            files.make_directory(folder)
            self._lock = files.open_file(folder / "lock", os.O_WRONLY | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            return None
        return folder

    @property
    def is_cached(self) -> bool:
        """Whether it outlives this process."""
        return self._folder is not None

    def close(self) -> None:
        """Leave the cache to others."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def size_bytes(self) -> int:
        """Return the size of the journal, 0 for none."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self._journal.glob("*.jrn"))
        return 0

    @property
    def is_journal_there(self) -> bool:
        """Whether there is a journal to read."""
        return self._path(0).exists()

    def _path(self, segment: int) -> Path:
        return self._journal / f"{segment:05}.jrn"

    def update(self, limit: int = 1 << 62) -> int:
        """Read on, up to about `limit` bytes; return how many were read, 0 at the end."""
        count = 0
        while count < limit and not self.damage:
            # First: nothing is appended any more to a segment with one behind it.
            is_full = self._path(self._segment + 1).exists()
            block = self._block()
            if block is None:
                break
            try:
                used = self._take(block)
            except OSError:  # the cache cannot be written
                self.restart_without_cache()
                continue
            except MISSHAPEN:
                path = self._path(self._segment)
                self.damage = f"event {self._number} in {path} cannot be decoded"
                break
            self._offset += used
            self.read_bytes += used
            count += used
            if not used and not self._leave_segment(block, is_full=is_full):
                break
        if self.read_bytes - self._saved_bytes >= self._save_bytes:
            self.save()
        return count

    def _block(self) -> bytes | None:
        """Return bytes from where reading stopped; of a segment that was thinned since, all."""
        start = self._read(self._segment, 0, START.size)
        is_thinned = start.startswith(THINNED)
        if len(start) < START.size or not (is_thinned or start.startswith(MAGIC)):
            return None
        if is_thinned and not self._is_in_thinned:
            self.cut, self._is_in_thinned, self._offset = True, True, START.size
        return self._read(self._segment, self._offset, BLOCK)

    def _read(self, segment: int, offset: int, size: int) -> bytes:
        """Return bytes of a segment, none where it is not there or cannot be read."""
        with suppress(OSError):
            fd = files.open_file(self._path(segment))
            try:
                return os.pread(fd, size, offset)
            finally:
                os.close(fd)
        return b""

    def _leave_segment(self, left: bytes, *, is_full: bool) -> bool:
        """Go to the next segment if there is one; what is left of a full one is damage."""
        if left and (is_full or self._is_damaged(left)):
            path = self._path(self._segment)
            self.damage = f"event {self._number} in {path} (byte {self._offset}) is damaged"
        if left or not is_full:
            return False
        self._segment, self._offset, self._is_in_thinned = self._segment + 1, START.size, False
        return True

    def _is_damaged(self, left: bytes) -> bool:
        """Return whether a valid record follows what is none: then it is not being written."""
        if not left[: RECORD_HEAD.size].strip(b"\0"):
            return False  # room that the writer has reserved
        with suppress(OSError, StoreError), Segment(self._path(self._segment)) as segment:
            if segment.valid_record_after(self._offset, self._number):
                block = self._block() or b""  # again: it may have been written since
                return block.startswith(left) and not scan_block(block, 0, self._number).size
        return False

    def _take(self, block: bytes) -> int:
        """Take the records of a block; return how many bytes were whole records."""
        scan = scan_block(block, (self._segment << 40) + self._offset, self._number)
        for number, part in scan.parts:
            rank = self._rank(number)
            if rank is None:
                continue
            if isinstance(part, list):
                rank.announce(part)
            else:
                table = rank.table_at(rank.length)
                rank.add_frames(*decode_frames(part, block, table, len(rank.columns)))
        self._number = scan.number
        return scan.size

    def _rank(self, number: int) -> RankPyramid | None:
        if number not in self.ranks:
            if len(self.ranks) >= MAX_RANKS:
                return None
            folder = self._folder
            path = None if folder is None else str(folder / f"rank{number}")
            self.ranks[number] = RankPyramid(number, Buckets(path))
        return self.ranks[number]

    # ── queries ──

    def curves(
        self,
        number: int,
        metrics: Sequence[str],
        axis: str,
        low: float,
        high: float,
        pixels: int,
        *,
        shifts: Sequence[float] = (),
        following: int = 0,
    ) -> Curves:
        """Return the values of a window of an axis: step, time in ns, or tokens.

        Args:
            shifts: of each stretch, what is to be added to its axis.
            following: ordinal from which on they are wanted; the last of each stretch always is.

        Raises:
            KeyError: there is no such rank.
        """
        rank, plane = self.ranks[number], AXES[axis]
        columns = [rank.columns.get(name, 1 << 30) for name in metrics]
        moved = shifts or [0.0] * len(rank.stretches)
        windows = [(low - shift, high - shift) for shift in moved]
        pairs = list(zip(rank.stretches, windows, strict=True))
        spans = [rank.window(stretch, plane, *window) for stretch, window in pairs]
        frames = sum((end - begin) * BASE for begin, end in spans)
        if frames <= RAW_POINTS * pixels and (raw := self._raw(rank, spans, columns)) is not None:
            inside = [
                (stretch, *cut_window(x, values, plane, *window))
                for (stretch, window), (x, values) in zip(pairs, raw, strict=True)
            ]
            return Curves(1, rank.length, inside)
        size = 1
        while frames // BASE > size * pixels:
            size *= FAN
        stretches, following_ordinal = [], 0
        for stretch, (begin, end) in zip(rank.stretches, spans, strict=True):
            known = stretch.begin + max(0, following - stretch.ordinal) // BASE
            span = max(begin, min(known, end - 1)), end
            stretches.append((stretch, *rank.merged_buckets(stretch, span, size, columns)))
            whole = (stretch.end - stretch.begin) // size * size
            following_ordinal = stretch.ordinal + whole * BASE
        return Curves(BASE * size, following_ordinal, stretches)

    def _raw(
        self, rank: RankPyramid, spans: Sequence[tuple[int, int]], columns: Sequence[int]
    ) -> list[tuple[Floats, Floats]] | None:
        """Return the frames of some buckets, None where the journal lacks them."""
        parts = []
        for stretch, (begin, end) in zip(rank.stretches, spans, strict=True):
            is_open = stretch is rank.stretches[-1] and end == stretch.end
            start = rank.start_of(begin)
            if start is None or (begin == end and not is_open):
                parts.append((np.empty((PLANES, 0)), absent_values(len(columns), 0)))
                continue
            following = rank.start_of(end + is_open)
            if following is None:
                following = rank.length, (self._segment << 40) + self._offset, 0.0
            frames = self._frames(rank, stretch.event, start, following[:2])
            if frames is None:
                return None
            x, values, broken = frames
            parts.append((x, frame_points(values, broken, columns)))
        return parts

    def _frames(
        self, rank: RankPyramid, event: int, start: tuple[int, int, float], end: tuple[int, int]
    ) -> tuple[Floats, Floats, Floats] | None:
        """Return x, values and which are not finite of frames, read from the journal.

        Args:
            event: a number in the journal before them, or of the first.
            start: ordinal, position and tokens of the first. end: of the one behind the last.
        """
        ordinal, position, tokens = start
        table, budget = rank.table_at(ordinal), MAX_RAW_BYTES
        parts: list[tuple[Floats, Floats, Floats]] = []
        while position < end[1]:
            segment, offset = position >> 40, position & ((1 << 40) - 1)
            size = end[1] - position if segment == end[1] >> 40 else BLOCK
            block = self._read(segment, offset, min(size, BLOCK))
            if not self._read(segment, 0, len(MAGIC)).startswith(MAGIC):
                self.cut = True  # thinned since: its frames are not there any more
                return None
            scan = scan_block(block, position, event)
            for number, part in scan.parts if scan.size else ():
                if number == rank.rank and isinstance(part, list):
                    table = rank.table_of(part)
                elif number == rank.rank and not isinstance(part, list):
                    parts.append(decode_frames(part, block, table, len(rank.columns)))
            budget, event = budget - len(block), scan.number
            is_end = not scan.size and segment < end[1] >> 40
            if budget < 0 or not (scan.size or is_end):
                return None
            position = (segment + 1 << 40) + START.size if is_end else position + scan.size
        if sum(len(head) for head, _, _ in parts) != end[0] - ordinal:
            return None
        head, values, broken = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        x = np.zeros((PLANES, len(head)))
        x[ORDINAL] = ordinal + np.arange(len(head))
        x[STEP], x[TIME] = head[:, 1], head[:, 0]
        x[TOKENS] = rank.cumulative_tokens(values, tokens)
        return x, values, broken

    # ── the cache ──

    def save(self) -> None:
        """Write all that is in memory; a cache that cannot be written is none."""
        if self._folder is None:
            return
        cache = Cache(
            format=FORMAT,
            boot=_boot(),
            folder=str(self._folder),
            run=self._run,
            identity=self._identity(),
            segment=self._segment,
            offset=self._offset,
            number=self._number,
            is_in_thinned=self._is_in_thinned,
            read_bytes=self.read_bytes,
            cut=self.cut,
            ranks=self.ranks,
        )
        with suppress(OSError):
            raw = msgspec.msgpack.encode(cache, enc_hook=_from_array)
            files.replace_file(self._folder / "state", raw, durable=False)
            self._saved_bytes = self.read_bytes

    def _restore(self) -> None:
        if self._folder is None:
            return
        try:
            raw = files.read_file(self._folder / "state")
            cache = msgspec.msgpack.decode(raw, type=Cache, dec_hook=_to_array)
            if (cache.format, cache.boot, cache.run) != (FORMAT, _boot(), self._run):
                raise ValueError("it is of another run")
            whole = all(rank.buckets.is_whole() for rank in cache.ranks.values())
            if cache.folder != str(self._folder) or not whole:
                raise ValueError("the files of its buckets are not there")
            if self._identity() not in (None, cache.identity):
                raise ValueError("it is of another journal")
        except Exception:  # whatever a cache may hold: it is made again
            return
        self.ranks = cache.ranks
        self._segment, self._offset, self._number = cache.segment, cache.offset, cache.number
        self._is_in_thinned, self.cut = cache.is_in_thinned, cache.cut
        self.read_bytes = self._saved_bytes = cache.read_bytes

    def _identity(self) -> str | None:
        """Return the hash of where the journal begins, None without one."""
        start = self._read(0, 0, START.size + RECORD_HEAD.size)
        return hashlib.sha256(start[len(MAGIC) :]).hexdigest() if start else None


def _from_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _to_array(form: type, parts: Any) -> Floats:
    kind, shape, raw = parts
    return np.frombuffer(raw, kind).reshape(shape)


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
