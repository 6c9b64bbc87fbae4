"""The journal of a run: every event, numbered from 0, in the order of processing.

    segment = `SUPVJRN1` | u64 number of its first record | records         little-endian
    record  = u32 payload length | u32 crc | u32 number | u8 kind | payload

Segments are `00000.jrn`, `00001.jrn`, ...; the crc covers all that follows it. `append` writes at
once, `add` with the next `flush`: many events, one write. A killed supervisor loses no written
event; only a power cut can lose records since the last `sync`. A bad record without a valid one
after it is a truncated tail: reading stops there, and the next writer removes it. A bad record
before a valid one is damage, and an error. An empty segment behind such a tail is part of it.

The newest segment has a reserve of space beyond its end, which nobody else can take: once the disk
is full, writing goes on into it, in the same segment.

A journal over its limit is *thinned*, piece by piece (a piece is a segment that is full): frames,
ticks and gaps are removed from it, all else keeps its number. Such a piece begins with `SUPVJRNT`.
What is left can be read, and not folded: the state of the engine behind it is unknown.

A payload is one event, exactly: what is unpacked equals what was packed. A Frame is binary: only
present values are stored, 8 bytes each, so that floats are exact and NaN stays NaN. Other events
are JSON objects of their fields with bare NaN and Infinity.

Reading needs memory for one record and time proportional to the bytes on disk, whatever the files
contain: holes are skipped, and the search for a valid record after a bad one is bounded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, pairwise, repeat
from operator import is_not
from pathlib import Path
from typing import Any

import msgspec

from ..core.model.events import (
    Adopted,
    Announced,
    Beat,
    Event,
    Exited,
    Finished,
    Frame,
    Gap,
    LateFrame,
    Launched,
    Notice,
    OperatorCommand,
    PolicyChanges,
    Reloaded,
    Tick,
)
from ..errors import FULL, StoreError
from . import files
from .files import is_shallow

FRAME = 1
KINDS: dict[type[Any], int] = {  # on disk: never renumber
    Frame: FRAME,
    Launched: 2,
    Announced: 3,
    Gap: 4,
    Tick: 5,
    Notice: 6,
    Finished: 7,
    OperatorCommand: 8,
    Exited: 9,
    Reloaded: 10,
    Adopted: 11,
    LateFrame: 12,
}
TYPES: dict[int, type[Any]] = {kind: cls for cls, kind in KINDS.items()}

_FRAME_HEAD = struct.Struct("<qqIIH")  # at_ns, step, rank, attempt, number of values
_MAX = 1 << 63


def pack_event(event: Event) -> tuple[int, bytes]:
    """Return the kind number and the payload of `event`."""
    if isinstance(event, Frame):
        return FRAME, _pack_frame(event)
    fields: dict[str, object] = {name: getattr(event, name) for name in event.__slots__}
    if isinstance(event, Tick):
        fields["beats"] = [(beat.rank, beat.seen_ns, beat.phase) for beat in event.beats]
    text = json.dumps(fields, separators=(",", ":"), default=_builtins)
    return KINDS[type(event)], text.encode()


def _builtins(value: Mapping[str, object] | PolicyChanges) -> object:
    return dict(value) if isinstance(value, Mapping) else msgspec.to_builtins(value)


def unpack_event(kind: int, payload: bytes) -> Event:
    """Return the event.

    Raises:
        ValueError, KeyError, TypeError, struct.error, RecursionError: it is invalid.
    """
    if kind == FRAME:
        return _unpack_frame(payload)
    cls, fields = TYPES[kind], json.loads(payload)
    if not isinstance(fields, dict) or not is_shallow(fields):
        raise ValueError("it is not an object, or nested too deep")
    if not fields.keys() <= set(cls.__slots__):
        raise ValueError(f"{sorted(fields.keys() - set(cls.__slots__))} are no fields of it")
    if cls is Tick:
        names = Beat.__slots__
        fields["beats"] = [dict(zip(names, row, strict=True)) for row in fields["beats"]]
    event: Event = msgspec.convert(fields, cls, dec_hook=lambda form, value: form(value))
    rows = fields["beats"] if isinstance(event, Tick) else [fields]
    for number in (value for row in (fields, *rows) for value in row.values()):
        if type(number) is int and not -_MAX <= number < _MAX:
            raise ValueError(f"{number} has more than 64 bits")
    if isinstance(event, Announced | LateFrame):
        for name in event.names if isinstance(event, Announced) else event.values:
            name.encode()  # JSON may contain half of a surrogate pair, a table may not
    return event


def _pack_frame(frame: Frame) -> bytes:
    values = frame.values
    count = len(values)
    size = (count + 7) // 8
    if None in values:
        present = bytes(map(is_not, values, repeat(None)))
        bits = _bitmap(present)
        values = tuple(compress(values, present))
    else:
        bits = ((1 << count) - 1).to_bytes(size, "little")
    head = _FRAME_HEAD.pack(frame.at_ns, frame.step, frame.rank, frame.attempt, count)
    return head + bits + struct.pack(f"<{len(values)}d", *values)


@lru_cache(maxsize=256)  # what is absent comes in a few patterns
def _bitmap(present: bytes) -> bytes:
    bits = sum(1 << index for index, flag in enumerate(present) if flag)
    return bits.to_bytes((len(present) + 7) // 8, "little")


def _unpack_frame(payload: bytes) -> Frame:
    at_ns, step, rank, attempt, count = _FRAME_HEAD.unpack_from(payload)
    start = _FRAME_HEAD.size + (count + 7) // 8
    bits = int.from_bytes(payload[_FRAME_HEAD.size : start], "little")
    present = struct.unpack(f"<{(len(payload) - start) // 8}d", payload[start:])
    if bits == (1 << count) - 1 and len(present) == count:
        return Frame(at_ns, rank, attempt, step, present)
    if bits >> count or bits.bit_count() != len(present):
        raise ValueError(f"{len(present)} of {count} values are present, unlike its bitmap")
    rest = iter(present)
    values = tuple([next(rest) if bits >> index & 1 else None for index in range(count)])
    return Frame(at_ns, rank, attempt, step, values)


SEGMENT_BYTES = 64 << 20
MAX_RESERVE = 16 << 20  # bytes that a segment has beyond its end; project default
MAX_PAYLOAD = 4 << 20  # bytes; the largest event is a reload: a policy has at most 256 kB
MAGIC, THINNED = b"SUPVJRN1", b"SUPVJRNT"
START = struct.Struct("<8sQ")

_RECORD_HEAD = struct.Struct("<IIIB")
_SUMMED = struct.Struct("<IB")  # the part of the head under the crc
_PREFIX = struct.Struct("<II")
_MAX_NUMBER = 1 << 53
_SEARCHED = SEGMENT_BYTES + MAX_RESERVE + _RECORD_HEAD.size + MAX_PAYLOAD  # bytes; never longer
_TRIED_BYTES = 256 << 20  # limit of checksummed bytes in the search for a valid record
_TRIAL_BYTES = 1 << 10  # overhead of one trial, in bytes
# A head may be wherever the length is small enough and the kind is known.
_MAYBE = re.compile(
    rb"(?s)(?=..[\x00-%c]\x00.{8}[%s])" % (MAX_PAYLOAD >> 16, re.escape(bytes(sorted(TYPES))))
)
_COPY = "the events before it are intact; restore the file from a copy"


def encode_record(number: int, kind: int, payload: bytes) -> bytes:
    """Return an event as it is on disk."""
    body = _SUMMED.pack(number & 0xFFFFFFFF, kind) + payload
    return _PREFIX.pack(len(payload), zlib.crc32(body)) + body


class Segment:
    """One segment file, read block by block. Raises OSError as files do."""

    BLOCK = 1 << 20

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = files.open_file(path)
        try:
            self.size = os.fstat(self._fd).st_size
            start = os.pread(self._fd, START.size, 0)
            self.is_thinned = start.startswith(THINNED)
            if len(start) < START.size or not (self.is_thinned or start.startswith(MAGIC)):
                other = start.startswith(MAGIC[:-1])
                raise StoreError(
                    f"{path} is not a journal segment: it starts with {start[:8]!r}"
                    f"{f', this version reads {MAGIC!r}' if other else ''}",
                    hint="use the version of supervise that wrote it"
                    if other
                    else "restore the file from a copy",
                )
            self.first = int(START.unpack(start)[1])
            if self.first > _MAX_NUMBER:
                raise StoreError(
                    f"{path} is damaged (byte 8): it starts with event {self.first}",
                    hint="restore the file from a copy",
                )
        except BaseException:
            os.close(self._fd)
            raise
        self._block, self._at = b"", 0

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._fd)

    def blocks(self, end: int) -> Iterator[bytes]:
        """Yield the bytes up to `end`."""
        offset = 0
        while offset < end and (block := os.pread(self._fd, min(self.BLOCK, end - offset), offset)):
            yield block
            offset += len(block)

    def records(self, *, newest: bool) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield `(number, kind, payload, end offset)` of each valid record.

        Raises:
            StoreError: a bad one before a valid one, or at the end of any but the `newest`.
        """
        number, offset = self.first, START.size
        while offset < self.size:
            record = self._record_at(offset)
            if self.is_thinned and record is not None:
                number += (record[0] - number) & 0xFFFFFFFF
            if record is None or record[0] != number & 0xFFFFFFFF:
                if newest and not self.valid_record_after(offset, number):
                    return
                raise StoreError(
                    f"event {number} in {self._path} (byte {offset}) is damaged", hint=_COPY
                )
            _, kind, payload, offset = record
            yield number, kind, payload, offset
            number += 1

    def skim(self, kinds: Collection[int], frames: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield `(number, kind, payload)` of records of some kinds, up to what is no record.

        Of frames only the newest; all that is left out is passed by its length, unchecked.
        """
        newest, others = deque[int](maxlen=frames), list[int]()
        offset, unpack, kind = START.size, _RECORD_HEAD.unpack_from, FRAME
        while kind in TYPES and (block := os.pread(self._fd, self.BLOCK, offset)):
            at, end = 0, len(block) - _RECORD_HEAD.size
            while at <= end:
                length, _, _, kind = unpack(block, at)
                if kind not in TYPES or length > MAX_PAYLOAD:
                    break
                if kind in kinds:
                    (newest if kind == FRAME else others).append(offset + at)
                at += _RECORD_HEAD.size + length
            if not at:
                break
            offset += at
        for offset in sorted([*others, *newest]):
            if (record := self._record_at(offset)) is None:
                return
            yield record[0], record[1], record[2]

    def _bytes(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes at `at`; sequential reads are buffered."""
        begin = offset - self._at
        if begin < 0 or begin + size > len(self._block):
            self._block, self._at = os.pread(self._fd, max(size, self.BLOCK), offset), offset
            begin = 0
        return self._block[begin : begin + size]

    def _record_at(self, offset: int) -> tuple[int, int, bytes, int] | None:
        head = self._bytes(offset, _RECORD_HEAD.size)
        if len(head) < _RECORD_HEAD.size:
            return None
        length, crc, number, kind = _RECORD_HEAD.unpack(head)
        end = offset + _RECORD_HEAD.size + length
        if length > MAX_PAYLOAD or end > self.size or kind not in TYPES:
            return None
        body = self._bytes(offset + 8, _SUMMED.size + length)
        if zlib.crc32(body) != crc:
            return None
        return number, kind, body[_SUMMED.size :], end

    def valid_record_after(self, offset: int, number: int) -> bool:
        """Whether a valid later record follows: then it is damage, not a truncated tail."""
        end = min(self.size, _SEARCHED)
        budget, position = _TRIED_BYTES, offset
        while (position := self._data_at(position)) < end:
            block = os.pread(
                self._fd, min(self.BLOCK, end - position) + _RECORD_HEAD.size, position
            )
            for match in _MAYBE.finditer(block) if block.strip(b"\0") else ():
                length, crc, record_number, _ = _RECORD_HEAD.unpack_from(block, match.start())
                begin = position + match.start()
                later = (record_number - number) & 0xFFFFFFFF
                if (
                    later > begin // _RECORD_HEAD.size
                    or begin + _RECORD_HEAD.size + length > self.size
                ):
                    continue  # more records than fit before it, or half a record
                budget -= length + _TRIAL_BYTES
                if budget < 0:
                    return True  # a truncated tail never looks so much like records
                body = os.pread(self._fd, _SUMMED.size + length, begin + 8)
                if zlib.crc32(body) == crc:
                    return True
            position += self.BLOCK
        return False

    def _data_at(self, offset: int) -> int:
        """Return the start of the next bytes outside a hole; the size if there are none."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else offset


LAST_FRAMES = 4096
BATCH_BYTES = 1 << 20  # written at once at most
PIECES = 8  # of a journal with a limit: what is thinned at once is a part of it; project default
RETENTION = "retention.json"  # of the run directory: what `supervise gc` has removed

_NAME = re.compile(r"[0-9]{5,9}\.jrn")
_BULK = frozenset(KINDS[cls] for cls in (Frame, Tick, Gap))


@dataclass(slots=True)
class Piece:
    """A full segment.

    Attributes:
        first, end: number of its first event, and of the first behind it.
        cited: a decision about an incident refers to one of its events.
    """

    path: Path
    first: int
    end: int
    size_bytes: int
    sha256: str
    is_thinned: bool = False
    cited: bool = False


@dataclass(frozen=True, slots=True)
class Thinning:
    """What is left of a piece, not on disk yet."""

    piece: Piece
    content: bytes

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the audit log says of it."""
        piece = self.piece
        return {
            "piece": piece.path.name,
            "events": [piece.first, piece.end - 1],
            "cited": piece.cited,
            "bytes_before": piece.size_bytes,
            "sha256_before": piece.sha256,
            "bytes": len(self.content),
            "sha256": hashlib.sha256(self.content).hexdigest(),
        }


class Journal:
    """The writer; get one from `open`. One writer at a time, by the audit log's lock."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._fd = -1
        self._segment = -1
        self._size = 0  # bytes of good records in the segment
        self._number = 0  # of written events
        self._batch: list[bytes] = []  # the records behind them
        self._batch_bytes = 0
        self._reserved = 0  # offset in the segment up to which the disk has room
        self._is_full = False  # it had none beyond that
        self._opened: tuple[Path, os.stat_result] | None = None
        self._partial = False  # the end may be half a record
        self._total = 0  # bytes of all segments, as written
        self._sum = hashlib.sha256()  # over them, in their order
        self._pieces: list[Piece] = []
        self._first, self._cited = 0, False  # of the newest segment
        self._segment_sum = hashlib.sha256()

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Open or create the journal in `directory`; a truncated tail is removed.

        Raises:
            StoreError: it is damaged before its tail, or cannot be written.
        """
        journal = cls(directory, segment_bytes)
        try:
            files.make_directory(directory)
            paths = _segments(directory)
            if paths:
                journal._continue(paths)
            else:
                journal._start_segment()
        except OSError as error:
            journal.close()
            raise StoreError(f"cannot write {directory}: {error.strerror}") from error
        return journal

    def __len__(self) -> int:
        """Number of events so far, those of earlier writers included."""
        return self._number

    @property
    def head(self) -> dict[str, Any]:
        """`events`, `bytes` and `sha256` of the concatenated segments, for the audit log.

        Of a thinned journal `events` and `pieces`, each with its name, bytes and sha256.
        """
        if any(piece.is_thinned for piece in self._pieces):
            name, digest = f"{self._segment:05}.jrn", self._segment_sum.hexdigest()
            pieces = [(piece.path.name, piece.size_bytes, piece.sha256) for piece in self._pieces]
            return {"events": self._number, "pieces": [*pieces, (name, self._size, digest)]}
        return {"events": self._number, "bytes": self._total, "sha256": self._sum.hexdigest()}

    def append(self, event: Event) -> int:
        """Write one event and return its number.

        Raises:
            StoreError: it was not written; then do nothing destructive.
        """
        number = self.add(event)
        self.flush()
        return number

    def add(self, event: Event) -> int:
        """Take one event, to be written by `flush`, and return its number.

        Raises:
            StoreError: it was not taken, or those before it were not written.
        """
        number = self._number + len(self._batch)
        try:
            kind, payload = pack_event(event)
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            name = type(event).__name__
            raise StoreError(f"event {number} ({name}) cannot be encoded: {error}") from error
        if len(payload) > MAX_PAYLOAD:
            name = type(event).__name__
            raise StoreError(f"event {number} ({name}) is too large: {len(payload)} bytes")
        if self._batch_bytes and self._size + self._batch_bytes >= self._segment_bytes:
            self.flush()
        self._batch.append(encode_record(number, kind, payload))
        self._batch_bytes += len(self._batch[-1])
        if self._batch_bytes >= BATCH_BYTES:
            self.flush()
        return number

    @property
    def unwritten(self) -> int:
        """Number of events that wait for `flush`."""
        return len(self._batch)

    def flush(self) -> None:
        """Write the events that wait.

        Raises:
            StoreError: not all of them were written; the others are forgotten.
        """
        if not self._batch:
            return
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        try:
            if self._size >= self._segment_bytes and not self._is_full:
                self._continue_elsewhere()
            self._write(batch)
        except OSError as error:
            raise StoreError(f"cannot write {self._directory}: {error.strerror}") from error

    def reserve(self, size_bytes: int) -> None:
        """Make sure of so many bytes for what comes. Raises OSError."""
        if self._size + size_bytes > self._reserved or self._is_full:
            try:
                files.allocate_bytes(self._fd, self._size, size_bytes)
            except OSError as error:
                self._is_full = error.errno in FULL
                raise
            self._reserved, self._is_full = self._size + size_bytes, False

    @property
    def reserve_bytes(self) -> int:
        """Bytes that can be written though the disk is full."""
        return max(0, self._reserved - self._size)

    def sync(self) -> None:
        """Sync all events to disk. Raises StoreError."""
        try:
            files.sync_file(self._fd)
        except OSError as error:
            raise StoreError(f"cannot sync {self._directory}: {error.strerror}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum(piece.size_bytes for piece in self._pieces) + self._size

    def limit(self, max_bytes: float) -> None:
        """Begin new segments so often that one is a part of the limit."""
        self._segment_bytes = int(min(SEGMENT_BYTES, max_bytes / PIECES))

    def cite_event(self, number: int) -> None:
        """An incident refers to this event: its piece is thinned after all others."""
        if number >= self._first:
            self._cited = True
        for piece in self._pieces:
            piece.cited |= piece.first <= number < piece.end

    def plan_next_thinning(self) -> Thinning | None:
        """Return the next piece to thin: the oldest that is not cited, else the oldest.

        Raises:
            StoreError: it cannot be read.
        """
        pieces = [piece for piece in self._pieces if not piece.is_thinned]
        if not pieces:
            return None
        piece = min(pieces, key=lambda candidate: (candidate.cited, candidate.first))
        content = bytearray(START.pack(THINNED, piece.first))
        try:
            with Segment(piece.path) as segment:
                for number, kind, payload, _ in segment.records(newest=False):
                    if kind not in _BULK:
                        content += encode_record(number, kind, payload)
        except OSError as error:
            raise StoreError(f"cannot read {piece.path}: {error.strerror}") from error
        return Thinning(piece, bytes(content))

    def replace_piece(self, plan: Thinning) -> None:
        """Put what is left of a piece in its place. Raises StoreError."""
        piece, facts = plan.piece, plan.facts
        try:
            files.replace_file(piece.path, plan.content, durable=True)
        except OSError as error:
            raise StoreError(f"cannot write {piece.path}: {error.strerror}") from error
        piece.size_bytes, piece.sha256 = facts["bytes"], facts["sha256"]
        piece.is_thinned = True

    def missing(self) -> str | None:
        """Return a sentence if the file was removed, else None. Thread-safe; may hang."""
        return None if self._opened is None else files.explain_missing(*self._opened)

    def close(self) -> None:
        """Close the file, without its reserve. Raises OSError."""
        if self._fd >= 0:
            if self._reserved:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            os.close(self._fd)
            self._fd = -1

    def _write(self, batch: Sequence[bytes]) -> None:
        """Write records; after an error those that are complete count."""
        if self._partial:
            os.ftruncate(self._fd, self._size)
            self._partial = False
        unwritten, error = files.write_all(self._fd, b"".join(batch))
        if error is not None:
            self._partial, complete = True, 0
            while len(batch[complete]) <= unwritten:
                unwritten -= len(batch[complete])
                complete += 1
            self._take(batch[:complete])
            raise error
        self._take(batch)

    def _take(self, batch: Sequence[bytes]) -> None:
        raw = b"".join(batch)
        self._size += len(raw)
        self._number += len(batch)
        self._count(raw)

    def _count(self, raw: bytes) -> None:
        self._total += len(raw)
        self._sum.update(raw)
        self._segment_sum.update(raw)

    def _continue_elsewhere(self) -> None:
        """Start a new segment, or stay in this one while the disk is full and it has a reserve."""
        try:
            self._start_segment()
        except OSError as error:
            if error.errno not in FULL or not self.reserve_bytes:
                raise
            self._is_full = True

    def _start_segment(self) -> None:
        path = self._directory / f"{self._segment + 1:05}.jrn"
        start = START.pack(MAGIC, self._number)
        if self._fd >= 0:
            # Before the new one is: a power cut must not leave that behind a gap. Later calls of
            # `sync` do not reach this one.
            files.sync_file(self._fd)
        # The first one is made durable with the rest of a new run directory.
        files.replace_file(path, start, durable=self._fd >= 0)
        fd = files.open_file(path, os.O_WRONLY | os.O_APPEND)
        if self._fd >= 0:
            self._end_piece(is_thinned=False, cited=self._cited)
        self.close()
        self._fd, self._size, self._partial, self._reserved = fd, START.size, False, 0
        self._opened = path, os.fstat(fd)
        self._segment += 1
        self._first, self._cited = self._number, False
        self._count(start)

    def _end_piece(self, *, is_thinned: bool, cited: bool) -> None:
        path = self._directory / f"{self._segment:05}.jrn"
        digest, self._segment_sum = self._segment_sum.hexdigest(), hashlib.sha256()
        piece = Piece(path, self._first, self._number, self._size, digest, is_thinned, cited)
        self._pieces.append(piece)

    def _continue(self, paths: list[Path]) -> None:
        is_thinned = False
        if _ends_in_gap(paths):
            paths.pop().unlink()
        for path in paths:
            newest = path is paths[-1]
            with Segment(path) as segment:
                if self._segment >= 0:
                    self._number = segment.first
                    # Nobody knows any more which of its events an incident refers to.
                    self._end_piece(is_thinned=is_thinned, cited=True)
                self._segment, is_thinned = int(path.stem), segment.is_thinned
                self._first = self._number = segment.first
                self._size = START.size if newest else segment.size
                if newest:
                    for number, _, _, end in segment.records(newest=True):
                        self._number, self._size = number + 1, end
                for block in segment.blocks(self._size if newest else segment.size):
                    self._count(block)
        self._cited = True
        self._fd = files.open_file(paths[-1], os.O_WRONLY | os.O_APPEND)
        self._opened = paths[-1], os.fstat(self._fd)
        os.ftruncate(self._fd, self._size)


def read_journal(
    directory: Path, *, only: Collection[type[Any]] = ()
) -> Iterator[tuple[int, Event]]:
    """Yield `(number, event)` in order; stop at a truncated tail.

    Args:
        only: classes of events to yield, as far as they are left; empty for all. Others are checked
            but not unpacked.

    Raises:
        StoreError: no journal, a segment is missing, or damage before the tail; without `only`
            also where the journal was thinned.
    """
    cut = () if only else first_events_of_thinned(directory)
    for first, end in cut[:1]:
        raise StoreError(
            f"{directory} lacks the frames of events {first} to {end - 1}: they were removed to "
            "keep it in the limit of the policy (journal.max_gb)",
            hint="`supervise export` and `supervise why` have what is left",
        )
    kinds = {KINDS[cls] for cls in only or KINDS}
    for number, kind, payload, path in _records(directory):
        if kind in kinds:
            yield number, _event(kind, payload, number, path)


def read_segments_back(directory: Path, only: Collection[type[Any]]) -> Iterator[list[Event]]:
    """Yield the events of some classes in each segment, the newest segment first.

    For what is asked of the end of a journal that may have millions of frames, of which LAST_FRAMES
    of the newest segment are decoded. Behind damage there is nothing.

    Raises:
        StoreError: a segment cannot be read.
    """
    kinds = {KINDS[cls] for cls in only}
    frames = LAST_FRAMES
    for path in reversed(_segments(directory)):
        try:
            with Segment(path) as segment:
                rows, frames = segment.skim(kinds, frames), 0
                yield [_event(kind, payload, number, path) for number, kind, payload in rows]
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error


def first_events_of_thinned(directory: Path) -> list[tuple[int, int]]:
    """Return the first event of each thinned piece, and of the segment behind it.

    Raises:
        StoreError: a segment cannot be read.
    """
    starts: list[tuple[int, bool]] = []
    for path in _segments(directory):
        try:
            with Segment(path) as segment:
                starts.append((segment.first, segment.is_thinned))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return [(first, end) for (first, is_thin), (end, _) in pairwise(starts) if is_thin]


def read_until(directory: Path, end: int) -> Iterator[tuple[int, Event]]:
    """Yield the events before event `end`. Raises StoreError as `read`."""
    for number, kind, payload, path in _records(directory):
        if number >= end:
            return
        yield number, _event(kind, payload, number, path)


def count_events(directory: Path) -> int:
    """Return the number of valid events without unpacking; raises StoreError as `read`."""
    events = 0
    for number, _, _, _ in _records(directory):
        events = number + 1
    return events


def _records(directory: Path) -> Iterator[tuple[int, int, bytes, Path]]:
    """Yield number, kind, payload and segment of each valid record of the journal."""
    paths = _segments(directory)
    if not paths:
        marker = directory.with_name(RETENTION)
        hint = f"`supervise gc` removed it, see {marker}" if marker.exists() else None
        raise StoreError(f"{directory} has no journal", hint=hint)
    expected, is_thinned = 0, False
    if _ends_in_gap(paths):
        del paths[-1]
    for index, path in enumerate(paths):
        try:
            with Segment(path) as segment:
                if is_thinned and segment.first > expected:
                    expected = segment.first
                is_thinned = segment.is_thinned
                if segment.first != expected or int(path.stem) != index:
                    first_number = segment.first
                    raise StoreError(
                        f"{path} starts with event {first_number}, not with event {expected}",
                        hint="a segment is missing: restore it from a copy of the run directory",
                    )
                for number, kind, payload, _ in segment.records(newest=path is paths[-1]):
                    expected = number + 1
                    yield number, kind, payload, path
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error


def hash_prefixes(directory: Path, sizes: Collection[int]) -> dict[int, str]:
    """Return the SHA-256 over the first `size` bytes of all segments, for each of `sizes`.

    Sizes beyond the end are left out.

    Raises:
        StoreError: a segment cannot be read.
    """
    digests: dict[int, str] = {}
    digest, total = hashlib.sha256(), 0
    ordered_sizes = sorted(size for size in sizes if size >= 0)
    for path in _segments(directory):
        try:
            with Segment(path) as segment:
                for block in segment.blocks(segment.size):
                    while ordered_sizes and ordered_sizes[0] <= total + len(block):
                        part = digest.copy()
                        part.update(block[: ordered_sizes[0] - total])
                        digests[ordered_sizes.pop(0)] = part.hexdigest()
                    if not ordered_sizes:
                        return digests
                    digest.update(block)
                    total += len(block)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return digests


def _segments(directory: Path) -> list[Path]:
    try:
        paths = [p for p in directory.iterdir() if _NAME.fullmatch(p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error
    return sorted(paths, key=lambda path: int(path.stem))


def _ends_in_gap(paths: Sequence[Path]) -> bool:
    """Return whether a power cut took the end of the last segment but one: the newest is empty.

    Then that end is a truncated tail, as where no newer segment was begun.
    """
    if len(paths) < 2 or int(paths[-1].stem) != len(paths) - 1:
        return False
    with Segment(paths[-1]) as newest, Segment(paths[-2]) as segment:
        if newest.size > START.size or segment.is_thinned:
            return False
        end = segment.first
        for number, _, _, _ in segment.records(newest=True):
            end = number + 1
        return end < newest.first


def _event(kind: int, payload: bytes, number: int, path: Path) -> Event:
    try:
        return unpack_event(kind, payload)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        text = f"event {number} in {path} cannot be decoded: {error}"
        raise StoreError(text, hint="it was written by another version, or changed") from error
