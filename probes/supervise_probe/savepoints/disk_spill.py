"""One savepoint's copies in a file, while their memory serves another savepoint.

Rule 1: the file has no name: whatever becomes of the process, nothing is left behind.
Rule 2: what is read back is what was written, by its hash, or it is refused.
"""

import ctypes
import hashlib
import tempfile
from types import ModuleType
from typing import Any, Iterator, Tuple

from ..capture.tensor_copies import Copies, Pool

CHUNK = 1 << 20  # bytes between two looks whether to stop


class DiskSpill:
    """A file of copies.

    Attributes:
        state: "writing", "written" or "failed". error: why it failed, "" if it was called off.
    """

    def __init__(self, directory: str) -> None:
        self.state = "writing"
        self.error = ""
        self._directory = directory
        self._stop = False
        self._file: Any = None
        self._digest = b""

    def write(self, copies: Copies) -> None:
        """Write all copies; to be called in the background. Any trouble is in `error`."""
        try:
            copies.wait()
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (it outlives this call)
                dir=self._directory, buffering=0
            )
            found = hashlib.sha256()
            for address, size in _chunks(copies):
                if self._stop:
                    break
                piece = ctypes.string_at(address, size)
                found.update(piece)
                _write_all(self._file, piece)
            self._digest = found.digest()
        except Exception as error:
            self.error = str(error) or type(error).__name__
        self.state = "failed" if self.error or self._stop else "written"
        if self.state == "failed":
            self.close()

    def stop(self) -> None:
        """Call the writing off, at the next chunk."""
        self._stop = True

    def read(self, torch: ModuleType, copies: Copies, pool: Pool) -> None:
        """Give the copies their memory and content back.

        Raises:
            OSError: the file cannot be read, or holds something else.
        """
        copies.allocate(torch, pool)
        found = hashlib.sha256()
        self._file.seek(0)
        for address, size in _chunks(copies):
            piece = _read_all(self._file, size)
            found.update(piece)
            ctypes.memmove(address, piece, size)
        if found.digest() != self._digest:
            raise OSError("what the disk gives back is not what was written")

    def close(self) -> None:
        """Give the disk its room back. Safe to repeat."""
        if self._file is not None:
            self._file.close()


def _chunks(copies: Copies) -> Iterator[Tuple[int, int]]:
    """Address and length of every piece of the copies, in their order."""
    for slot in copies.slots:
        start, left = slot.buffer.data_ptr(), slot.buffer.numel() * slot.buffer.element_size()
        while left > 0:
            size = min(left, CHUNK)
            yield start, size
            start, left = start + size, left - size


def _write_all(file: Any, piece: bytes) -> None:
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view) :]


def _read_all(file: Any, size: int) -> bytes:
    pieces = []
    while size > 0:
        piece = file.read(size)
        if not piece:
            raise OSError("the file ends too early")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
