"""The journal of a run: every event, numbered from 0, in the order in which it was judged.

    segment = `SUPVJRN1` | u64 number of its first record | records         little-endian
    record  = u32 payload length | u32 crc | u32 number | u8 kind | payload

Segments are `00000.jrn`, `00001.jrn`, ...; the crc covers all that follows it. One append is one
`os.write`, so that a killed supervisor loses nothing that it has judged; only a power cut can lose
records since the last `sync`. A bad record with no good one after it is a torn tail: reading stops
there, and the next writer cuts it off. A bad record before a good one is damage, and an error.

Knows the events' fields only through pack.py.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..core.values import Event
from ..errors import StoreError
from . import files
from .pack import KINDS, TYPES, pack, unpack

SEGMENT_BYTES = 64 << 20
MAGIC = b"SUPVJRN1"

_START = struct.Struct("<8sQ")
_HEAD = struct.Struct("<IIIB")
_SUMMED = struct.Struct("<IB")  # the part of the head under the crc
_PREFIX = struct.Struct("<II")


class Journal:
    """The writer; get one from `open`. One writer at a time: the audit log's lock sees to that."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._fd = -1
        self._segment = -1
        self._size = 0  # bytes of good records in the segment
        self._number = 0
        self._opened: tuple[Path, os.stat_result] | None = None
        self._broken = False  # half a record may stand at the end

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """Open or create the journal in `directory`; a torn tail is cut off.

        Raises:
            StoreError: it is damaged before its tail, or cannot be written.
        """
        journal = cls(directory, segment_bytes)
        try:
            files.make_directory(directory)
            paths = _segments(directory)
            if paths:
                journal._continue(paths[-1])
            else:
                journal._begin_segment()
        except OSError as error:
            journal.close()
            raise StoreError(f"cannot write {directory}: {error.strerror}") from error
        return journal

    def __len__(self) -> int:
        """Number of events appended so far, earlier writers included."""
        return self._number

    def append(self, event: Event) -> int:
        """Write one event and return its number.

        Raises:
            StoreError: it was not written; judge it if you must, but do nothing destructive.
        """
        kind, payload = pack(event)
        body = _SUMMED.pack(self._number & 0xFFFFFFFF, kind) + payload
        record = _PREFIX.pack(len(payload), zlib.crc32(body)) + body
        try:
            if self._size >= self._segment_bytes:
                self._begin_segment()
            self._write(record)
        except OSError as error:
            raise StoreError(f"cannot write {self._directory}: {error.strerror}") from error
        self._number += 1
        return self._number - 1

    def sync(self) -> None:
        """Put all events on the disk. Raises StoreError."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreError(f"cannot sync {self._directory}: {error.strerror}") from error

    def gone(self) -> str | None:
        """Say that the file is not there any more, None while it is. Any thread; may hang."""
        return None if self._opened is None else files.gone(*self._opened)

    def close(self) -> None:
        """Let go of the file; nothing is buffered."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, record: bytes) -> None:
        if self._broken:
            os.ftruncate(self._fd, self._size)
            self._broken = False
        try:
            if os.write(self._fd, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._broken = True
            raise
        self._size += len(record)

    def _begin_segment(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)  # `sync` will not reach it any more
        path = self._directory / f"{self._segment + 1:05}.jrn"
        files.replace(path, _START.pack(MAGIC, self._number), durable=True)
        fd = files.open_file(path, os.O_WRONLY | os.O_APPEND)
        self.close()
        self._fd, self._size, self._broken = fd, _START.size, False
        self._opened = path, os.fstat(fd)
        self._segment += 1

    def _continue(self, path: Path) -> None:
        data = files.read(path)
        first = _first_number(data, path)
        self._number, self._size = first, _START.size
        for number, _, _, end in _records(data, first, path, newest=True):
            self._number, self._size = number + 1, end
        self._segment = int(path.stem)
        self._fd = files.open_file(path, os.O_WRONLY | os.O_APPEND)
        self._opened = path, os.fstat(self._fd)
        os.ftruncate(self._fd, self._size)


def read(directory: Path, *, only: Collection[type[Any]] = ()) -> Iterator[tuple[int, Event]]:
    """Yield `(number, event)` in order; stop at a torn tail.

    Args:
        only: classes of events to yield; empty for all. The others are checked but not unpacked.

    Raises:
        StoreError: no journal, a segment is missing, or damage before the tail.
    """
    paths = _segments(directory)
    if not paths:
        raise StoreError(f"{directory} holds no journal")
    kinds = {KINDS[cls] for cls in only or KINDS}
    expected = 0
    for index, path in enumerate(paths):
        try:
            data = files.read(path)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        first = _first_number(data, path)
        if first != expected or int(path.stem) != index:
            raise StoreError(f"{path} begins with event {first}, but event {expected} comes next")
        for number, kind, payload, _ in _records(data, first, path, newest=path is paths[-1]):
            expected = number + 1
            if kind in kinds:
                yield number, _event(kind, payload, number, path)


def _segments(directory: Path) -> list[Path]:
    return sorted(p for p in directory.glob("*.jrn") if p.stem.isdigit())


def _event(kind: int, payload: bytes, number: int, path: Path) -> Event:
    try:
        return unpack(kind, payload)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        text = f"event {number} in {path} cannot be understood: {error}"
        raise StoreError(text, hint="it was written by another version") from error


def _first_number(data: bytes, path: Path) -> int:
    if len(data) < _START.size or data[: len(MAGIC)] != MAGIC:
        raise StoreError(f"{path} is not a journal segment")
    return int(_START.unpack_from(data)[1])


def _records(
    data: bytes, number: int, path: Path, *, newest: bool
) -> Iterator[tuple[int, int, bytes, int]]:
    """Yield `(number, kind, payload, end offset)` of a segment whose first record is `number`."""
    offset = _START.size
    while offset < len(data):
        found = _record_at(data, offset)
        if found is None or found[0] != number & 0xFFFFFFFF:
            if newest and not _good_record_after(data, offset, number):
                return
            raise StoreError(
                f"event {number} in {path} (byte {offset}) is damaged",
                hint="the events before it are good; restore the file from a copy",
            )
        _, kind, payload, offset = found
        yield number, kind, payload, offset
        number += 1


def _record_at(data: bytes, offset: int) -> tuple[int, int, bytes, int] | None:
    start = offset + _HEAD.size
    if start > len(data):
        return None
    length, crc, number, kind = _HEAD.unpack_from(data, offset)
    end = start + length
    if end > len(data) or kind not in TYPES or zlib.crc32(data[offset + 8 : end]) != crc:
        return None
    return number, kind, data[start:end], end


def _good_record_after(data: bytes, offset: int, number: int) -> bool:
    """Tell damage from a torn tail: is there any good, later record after the bad one?"""
    end = len(data.rstrip(b"\0"))
    for start in range(offset + 1, end - _HEAD.size + 1):
        found = _record_at(data, start)
        if found is not None and found[0] >= number & 0xFFFFFFFF:
            return True
    return False
