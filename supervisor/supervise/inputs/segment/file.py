"""One segment file: opened with care, read and written by offset, its damage named.

It reads with `pread` and never maps the file: one that somebody cuts short under us is then a short
read, where a mapping would be SIGBUS and the end of the supervisor.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from supervise_probe import wire

from ...errors import SegmentError
from ...store import files
from . import limits

_COUNTERS_SIZE = wire.END_AT  # the fixed header and all counters, in one read
FAULTY_HINT = "the probe is broken, or somebody else writes there: this rank is not watched"
_VERSION_HINT = "the job runs the probe of another release; start both from the same installation"


class SegmentFile:
    """An open segment whose header is whole; every method raises SegmentError once it is not.

    Attributes:
        header: the fixed header, as the probe wrote it at its start.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            SegmentError: it cannot be opened, or is short, foreign, damaged or of another version.
        """
        self.path = path
        self._size = _COUNTERS_SIZE
        self._writing = threading.Lock()  # a pause is renewed by a thread of its own
        try:
            self._fd = files.open_file(path, os.O_RDWR)
        except OSError as error:
            raise self.fault(f"cannot be opened: {error.strerror}") from error
        try:
            self._fixed = os.pread(self._fd, wire.FIXED_SIZE, 0)
            self.header = self._unpack_header()
            self._size = self.header.file_size
            self._check_size()
            if (odd := limits.header(self.header)) is not None:
                raise self.fault(odd, FAULTY_HINT)
        except BaseException:
            self.close()
            raise

    def counters(self) -> bytes:
        """Return the fixed header and all counters; the offsets are those of `wire`."""
        self._check_size()
        counters = self.read(0, _COUNTERS_SIZE)
        if not counters.startswith(self._fixed):
            raise self.fault("had its header overwritten")
        return counters

    def read(self, at: int, size: int) -> bytes:
        """Return exactly `size` bytes at offset `at`."""
        try:
            raw = os.pread(self._fd, size, at)
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        if len(raw) < size:
            raise self.fault(f"is short: {len(raw)} of {size} bytes at offset {at}")
        return raw

    def write(self, at: int, raw: bytes) -> None:
        """Write `raw` at offset `at`; never makes the file longer."""
        with self._writing:  # or it would go to what has the number of a closed file by then
            self._check_size()
            try:
                os.pwrite(self._fd, raw, at)
            except OSError as error:
                raise self.fault(f"cannot be written: {error.strerror}") from error

    def write_checked(self, at: int, *counters: int) -> None:
        """Write checked words, one after the other."""
        pairs = (wire.CHECKED.pack(word, word ^ wire.ALL_ONES) for word in counters)
        self.write(at, b"".join(pairs))

    def document(self, at: int, size: int) -> tuple[int, Any]:
        """Return `(generation, JSON value)` of the names or status area; 0 while there is none.

        The newer of its two halves counts, or the other while that is half-written or damaged.
        """
        halves = [wire.unpack_letter(self.read(at + half * size, size)) for half in (0, 1)]
        whole = [(seq, raw) for seq, raw in filter(None, halves) if raw is not None]
        generation, raw = max(whole, default=(0, b""))
        return generation, parse(raw)

    def close(self) -> None:
        """Let go of the file; safe to repeat."""
        with self._writing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def fault(self, what: str, hint: str | None = None) -> SegmentError:
        """Return the error that says `what` about this segment."""
        return SegmentError(f"segment {self.path.name} {what}", hint=hint)

    def _check_size(self) -> None:
        try:
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        if size < self._size:
            raise self.fault(f"was cut short: {size} of {self._size} bytes are left")

    def _unpack_header(self) -> wire.Header:
        try:
            return wire.unpack_header(self._fixed)
        except wire.VersionError as error:
            raise self.fault(str(error), _VERSION_HINT) from error
        except wire.WireError as error:
            raise self.fault(str(error)) from error


def parse(raw: bytes) -> Any:
    """Return the JSON value in `raw`, None if there is none."""
    try:
        return wire.from_json(raw)
    except wire.WireError:
        return None


def read_u64(counters: bytes, at: int) -> int:
    """Return the number at offset `at` of `SegmentFile.counters()`."""
    return int.from_bytes(counters[at : at + 8], "little")
