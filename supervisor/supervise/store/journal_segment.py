"""One file of the journal: its records, and what is wrong with them. See `journal`."""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import StoreError
from . import files
from .event_codec import TYPES

SEGMENT_BYTES = 64 << 20
MAX_RESERVE = 16 << 20  # bytes that a segment has beyond its end; project default
MAX_PAYLOAD = 4 << 20  # bytes; the largest event is a reload: a policy has at most 256 kB
MAGIC, THINNED = b"SUPVJRN1", b"SUPVJRNT"
START = struct.Struct("<8sQ")

_HEAD = struct.Struct("<IIIB")
_SUMMED = struct.Struct("<IB")  # the part of the head under the crc
_PREFIX = struct.Struct("<II")
_MAX_NUMBER = 1 << 53
_SEARCHED = SEGMENT_BYTES + MAX_RESERVE + _HEAD.size + MAX_PAYLOAD  # bytes; never longer
_TRIED_BYTES = 256 << 20  # limit of checksummed bytes in the search for a valid record
_TRIAL_BYTES = 1 << 10  # overhead of one trial, in bytes
# A head may be wherever the length is small enough and the kind is known.
_MAYBE = re.compile(
    rb"(?s)(?=..[\x00-%c]\x00.{8}[%s])" % (MAX_PAYLOAD >> 16, re.escape(bytes(sorted(TYPES))))
)
_COPY = "the events before it are intact; restore the file from a copy"


def record(number: int, kind: int, payload: bytes) -> bytes:
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
                raise StoreError(
                    f"{path} is not a journal segment: it starts with {start[:8]!r}",
                    hint="restore the file from a copy",
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
        at = 0
        while at < end and (block := os.pread(self._fd, min(self.BLOCK, end - at), at)):
            yield block
            at += len(block)

    def records(self, *, newest: bool) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield `(number, kind, payload, end offset)` of each valid record.

        Raises:
            StoreError: a bad one before a valid one, or at the end of any but the `newest`.
        """
        number, offset = self.first, START.size
        while offset < self.size:
            found = self._record_at(offset)
            if self.is_thinned and found is not None:
                number += (found[0] - number) & 0xFFFFFFFF
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
