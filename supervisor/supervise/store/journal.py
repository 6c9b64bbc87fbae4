"""The journal of a run: every event, numbered from 0, in the order of processing.

    segment = `SUPVJRN1` | u64 number of its first record | records         little-endian
    record  = u32 payload length | u32 crc | u32 number | u8 kind | payload

Segments are `00000.jrn`, `00001.jrn`, ...; the crc covers all that follows it. One append is one
`os.write`, so that a killed supervisor loses no processed event; only a power cut can lose records
since the last `sync`. A bad record without a valid one after it is a truncated tail: reading stops
there, and the next writer removes it. A bad record before a valid one is damage, and an error.

Reading needs memory for one record and time proportional to the bytes on disk, whatever the files
contain: holes are skipped, and the search for a valid record after a bad one is bounded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..core.model.events import Event
from ..errors import StoreError
from . import files
from .event_codec import KINDS, TYPES, pack, unpack

SEGMENT_BYTES = 64 << 20
MAX_PAYLOAD = 4 << 20  # bytes; the largest event is a reload: a policy has at most 256 kB
MAGIC = b"SUPVJRN1"
RETENTION = "retention.json"  # of the run directory: what `supervise gc` has removed

_START = struct.Struct("<8sQ")
_HEAD = struct.Struct("<IIIB")
_SUMMED = struct.Struct("<IB")  # the part of the head under the crc
_PREFIX = struct.Struct("<II")
_NAME = re.compile(r"[0-9]{5,9}\.jrn")
_MAX_NUMBER = 1 << 53
_SEARCHED = SEGMENT_BYTES + _HEAD.size + MAX_PAYLOAD  # bytes; a segment is never longer
_TRIED_BYTES = 256 << 20  # limit of checksummed bytes in the search for a valid record
_TRIAL_BYTES = 1 << 10  # overhead of one trial, in bytes
# A head may be wherever the length is small enough and the kind is known.
_MAYBE = re.compile(
    rb"(?s)(?=..[\x00-%c]\x00.{8}[%s])" % (MAX_PAYLOAD >> 16, re.escape(bytes(sorted(TYPES))))
)
_COPY = "the events before it are intact; restore the file from a copy"


class Journal:
    """The writer; get one from `open`. One writer at a time, by the audit log's lock."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._fd = -1
        self._segment = -1
        self._size = 0  # bytes of good records in the segment
        self._number = 0
        self._opened: tuple[Path, os.stat_result] | None = None
        self._partial = False  # the end may be half a record
        self._total = 0  # bytes of all segments
        self._sum = hashlib.sha256()  # over them, in their order

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
        """`events`, `bytes` and `sha256` of the concatenated segments, for the audit log."""
        return {"events": self._number, "bytes": self._total, "sha256": self._sum.hexdigest()}

    def append(self, event: Event) -> int:
        """Write one event and return its number.

        Raises:
            StoreError: it was not written; then do nothing destructive.
        """
        try:
            kind, payload = pack(event)
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            name = type(event).__name__
            raise StoreError(f"event {self._number} ({name}) cannot be encoded: {error}") from error
        if len(payload) > MAX_PAYLOAD:
            name = type(event).__name__
            raise StoreError(f"event {self._number} ({name}) is too large: {len(payload)} bytes")
        body = _SUMMED.pack(self._number & 0xFFFFFFFF, kind) + payload
        record = _PREFIX.pack(len(payload), zlib.crc32(body)) + body
        try:
            if self._size >= self._segment_bytes:
                self._start_segment()
            self._write(record)
        except OSError as error:
            raise StoreError(f"cannot write {self._directory}: {error.strerror}") from error
        self._number += 1
        return self._number - 1

    def sync(self) -> None:
        """Sync all events to disk. Raises StoreError."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreError(f"cannot sync {self._directory}: {error.strerror}") from error

    def missing(self) -> str | None:
        """Return a sentence if the file was removed, else None. Thread-safe; may hang."""
        return None if self._opened is None else files.missing(*self._opened)

    def close(self) -> None:
        """Close the file; nothing is buffered."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, record: bytes) -> None:
        if self._partial:
            os.ftruncate(self._fd, self._size)
            self._partial = False
        try:
            if os.write(self._fd, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._partial = True
            raise
        self._size += len(record)
        self._count(record)

    def _count(self, raw: bytes) -> None:
        self._total += len(raw)
        self._sum.update(raw)

    def _start_segment(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)  # later calls of `sync` do not reach it
        path = self._directory / f"{self._segment + 1:05}.jrn"
        start = _START.pack(MAGIC, self._number)
        files.replace(path, start, durable=True)
        fd = files.open_file(path, os.O_WRONLY | os.O_APPEND)
        self.close()
        self._fd, self._size, self._partial = fd, _START.size, False
        self._opened = path, os.fstat(fd)
        self._segment += 1
        self._count(start)

    def _continue(self, paths: list[Path]) -> None:
        for path in paths:
            newest = path is paths[-1]
            with _Segment(path) as segment:
                self._number, self._size = segment.first, _START.size
                if newest:
                    for number, _, _, end in segment.records(newest=True):
                        self._number, self._size = number + 1, end
                for block in segment.blocks(self._size if newest else segment.size):
                    self._count(block)
        self._segment = int(paths[-1].stem)
        self._fd = files.open_file(paths[-1], os.O_WRONLY | os.O_APPEND)
        self._opened = paths[-1], os.fstat(self._fd)
        os.ftruncate(self._fd, self._size)


def read(directory: Path, *, only: Collection[type[Any]] = ()) -> Iterator[tuple[int, Event]]:
    """Yield `(number, event)` in order; stop at a truncated tail.

    Args:
        only: classes of events to yield; empty for all. Others are checked but not unpacked.

    Raises:
        StoreError: no journal, a segment is missing, or damage before the tail.
    """
    kinds = {KINDS[cls] for cls in only or KINDS}
    for number, kind, payload, path in _records(directory):
        if kind in kinds:
            yield number, _event(kind, payload, number, path)


def count(directory: Path) -> int:
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
    expected = 0
    for index, path in enumerate(paths):
        try:
            with _Segment(path) as segment:
                if segment.first != expected or int(path.stem) != index:
                    first = segment.first
                    raise StoreError(
                        f"{path} starts with event {first}, not with event {expected}",
                        hint="a segment is missing: restore it from a copy of the run directory",
                    )
                for number, kind, payload, _ in segment.records(newest=path is paths[-1]):
                    expected = number + 1
                    yield number, kind, payload, path
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error


def heads(directory: Path, sizes: Collection[int]) -> dict[int, str]:
    """Return the SHA-256 over the first `size` bytes of all segments, for each of `sizes`.

    Sizes beyond the end are left out.

    Raises:
        StoreError: a segment cannot be read.
    """
    found: dict[int, str] = {}
    digest, total = hashlib.sha256(), 0
    wanted = sorted(size for size in sizes if size >= 0)
    for path in _segments(directory):
        try:
            with _Segment(path) as segment:
                for block in segment.blocks(segment.size):
                    while wanted and wanted[0] <= total + len(block):
                        part = digest.copy()
                        part.update(block[: wanted[0] - total])
                        found[wanted.pop(0)] = part.hexdigest()
                    if not wanted:
                        return found
                    digest.update(block)
                    total += len(block)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
    return found


def _segments(directory: Path) -> list[Path]:
    try:
        found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror}") from error
    return sorted(found, key=lambda path: int(path.stem))


def _event(kind: int, payload: bytes, number: int, path: Path) -> Event:
    try:
        return unpack(kind, payload)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        text = f"event {number} in {path} cannot be decoded: {error}"
        raise StoreError(text, hint="it was written by another version, or changed") from error


class _Segment:
    """One segment file, read block by block. Raises OSError as files do."""

    BLOCK = 1 << 20

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = files.open_file(path)
        try:
            self.size = os.fstat(self._fd).st_size
            start = os.pread(self._fd, _START.size, 0)
            if len(start) < _START.size or not start.startswith(MAGIC):
                raise StoreError(
                    f"{path} is not a journal segment: it starts with {start[:8]!r}",
                    hint="restore the file from a copy",
                )
            self.first = int(_START.unpack(start)[1])
            if self.first > _MAX_NUMBER:
                raise StoreError(
                    f"{path} is damaged (byte 8): it starts with event {self.first}",
                    hint="restore the file from a copy",
                )
        except BaseException:
            os.close(self._fd)
            raise
        self._block, self._at = b"", 0

    def __enter__(self) -> _Segment:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._fd)

    def blocks(self, end: int) -> Iterator[bytes]:
        """Yield the bytes up to `end`."""
        at = 0
        while at < end and (block := os.pread(self._fd, min(self.BLOCK, end - at), at)):
            yield block
            at += len(block)

    def records(self, *, newest: bool) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield `(number, kind, payload, end offset)` of each valid record.

        Raises:
            StoreError: a bad one before a valid one, or at the end of any but the `newest`.
        """
        number, offset = self.first, _START.size
        while offset < self.size:
            found = self._record_at(offset)
            if found is None or found[0] != number & 0xFFFFFFFF:
                if newest and not self._valid_record_after(offset, number):
                    return
                raise StoreError(
                    f"event {number} in {self._path} (byte {offset}) is damaged", hint=_COPY
                )
            _, kind, payload, offset = found
            yield number, kind, payload, offset
            number += 1

    def _bytes(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes at `at`; sequential reads are buffered."""
        begin = at - self._at
        if begin < 0 or begin + size > len(self._block):
            self._block, self._at = os.pread(self._fd, max(size, self.BLOCK), at), at
            begin = 0
        return self._block[begin : begin + size]

    def _record_at(self, offset: int) -> tuple[int, int, bytes, int] | None:
        head = self._bytes(offset, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, crc, number, kind = _HEAD.unpack(head)
        end = offset + _HEAD.size + length
        if length > MAX_PAYLOAD or end > self.size or kind not in TYPES:
            return None
        body = self._bytes(offset + 8, _SUMMED.size + length)
        if zlib.crc32(body) != crc:
            return None
        return number, kind, body[_SUMMED.size :], end

    def _valid_record_after(self, offset: int, number: int) -> bool:
        """Whether a valid later record follows: then it is damage, not a truncated tail."""
        end = min(self.size, _SEARCHED)
        left, at = _TRIED_BYTES, offset
        while (at := self._data_at(at)) < end:
            block = os.pread(self._fd, min(self.BLOCK, end - at) + _HEAD.size, at)
            for match in _MAYBE.finditer(block) if block.strip(b"\0") else ():
                length, crc, found, _ = _HEAD.unpack_from(block, match.start())
                begin = at + match.start()
                later = (found - number) & 0xFFFFFFFF
                if later > begin // _HEAD.size or begin + _HEAD.size + length > self.size:
                    continue  # more records than fit before it, or half a record
                left -= length + _TRIAL_BYTES
                if left < 0:
                    return True  # a truncated tail never looks so much like records
                body = os.pread(self._fd, _SUMMED.size + length, begin + 8)
                if zlib.crc32(body) == crc:
                    return True
            at += self.BLOCK
        return False

    def _data_at(self, at: int) -> int:
        """Return the start of the next bytes outside a hole; the size if there are none."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else at
