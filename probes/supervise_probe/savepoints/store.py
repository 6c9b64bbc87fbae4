"""Storage of savepoints: in host memory up to a budget, older ones in files.

Rule 1: the copies in memory never take more than the budget, those being written to disk included.
Rule 2: the job does not wait for a disk. While one savepoint is being written no other is taken;
one that cannot be written is dropped when its memory is needed.
Rule 3: the retained savepoint is dropped last; where no other fits, no new one is taken.
Rule 4: a file has no name, so nothing is left behind; what is read back has the hash of what was
written, or it is refused.
"""

import ctypes
import hashlib
import tempfile
from types import ModuleType
from typing import Any, Callable, Iterator, List, Optional, Tuple

from ..runtime.call_stack import CannotRestore
from ..runtime.files import Background
from ..torch_state.tensor_copies import BufferPool, TensorCopies
from .training_state import TrainingState

STOP_S = 5.0  # a rollback waits so long for the disk to finish its chunk
CHUNK = 1 << 20  # bytes between two checks whether to stop


class Busy(Exception):  # noqa: N818 (temporary)
    """A savepoint cannot be taken just now; the text is one sentence for people."""


class DiskSpill:
    """A file of copies.

    Attributes:
        state: "writing", "written" or "failed". error: why it failed, "" if it was stopped.
    """

    def __init__(self, directory: str) -> None:
        self.state = "writing"
        self.error = ""
        self._directory = directory
        self._stop = False
        self._file: Any = None
        self._digest = b""

    def write(self, copies: TensorCopies) -> None:
        """Write all copies, in the background; an error is kept in `error`."""
        try:
            copies.wait()
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (it outlives this call)
                dir=self._directory, buffering=0
            )
            digest = hashlib.sha256()
            for address, size in _chunks(copies):
                if self._stop:
                    break
                piece = ctypes.string_at(address, size)
                digest.update(piece)
                _write_all(self._file, piece)
            self._digest = digest.digest()
        except Exception as error:
            self.error = str(error) or type(error).__name__
        self.state = "failed" if self.error or self._stop else "written"
        if self.state == "failed":
            self.close()

    def stop(self) -> None:
        """Stop writing at the next chunk."""
        self._stop = True

    def read(self, torch: ModuleType, copies: TensorCopies, pool: BufferPool) -> None:
        """Allocate the copies and read their content.

        Raises:
            OSError: the file cannot be read, or its content changed.
        """
        copies.allocate(torch, pool)
        digest = hashlib.sha256()
        self._file.seek(0)
        for address, size in _chunks(copies):
            piece = _read_all(self._file, size)
            digest.update(piece)
            ctypes.memmove(address, piece, size)
        if digest.digest() != self._digest:
            raise OSError("the content read back differs from what was written")

    def close(self) -> None:
        """Delete the file. Safe to repeat."""
        if self._file is not None:
            self._file.close()


class Savepoint:
    """One savepoint, and where its copies are.

    Attributes:
        older_moments: it has those of the savepoint before, see `Savepoints.take`.
    """

    def __init__(
        self, step: int, attempt: int, extra: Any, copies: TensorCopies, training: TrainingState
    ) -> None:
        self.step, self.attempt, self.extra = step, attempt, extra
        self.copies, self.training = copies, training
        self.spill: Optional[DiskSpill] = None
        self.older_moments = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.copies.nbytes if self.copies.in_memory else 0


class SavepointStore:
    """The newest savepoints, oldest first.

    Attributes:
        saved: the savepoints. disk_errors: sentences about a disk that failed.
        max_bytes: of memory.
        retain_before: the newest savepoint before this step is retained; 0: none is.
    """

    def __init__(
        self,
        torch: ModuleType,
        keep: int,
        max_bytes: int,
        directory: Optional[str],
        max_disk_bytes: Optional[int] = None,
    ) -> None:
        """
        Args:
            directory: for savepoints beyond `max_bytes`; None: these are dropped.
            max_disk_bytes: of all that are there; the oldest are dropped. None: any number.
        """
        self._torch = torch
        self._keep = max(1, keep)
        self.max_bytes = max_bytes
        self.retain_before = 0
        self._directory = directory
        self._max_disk_bytes = max_disk_bytes
        self._background = Background()
        self.savepoints: List[Savepoint] = []
        self.disk_errors: List[str] = []

    @property
    def busy(self) -> bool:
        """Whether a savepoint is being written."""
        return self._background.busy

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all of them take."""
        return sum(savepoint.nbytes for savepoint in self.savepoints)

    @property
    def retained(self) -> Optional[Savepoint]:
        """The one that is dropped last."""
        return next(
            (
                savepoint
                for savepoint in reversed(self.savepoints)
                if savepoint.step < self.retain_before
            ),
            None,
        )

    def make_room(self, nbytes: int) -> BufferPool:
        """Free memory for a new savepoint of `nbytes`; return the buffers for reuse.

        Raises:
            CannotRestore: not even one fits.
            Busy: none fits beside the one that is retained; nothing was dropped.
        """
        if nbytes > self.max_bytes:
            raise CannotRestore(
                f"one savepoint takes {nbytes:,} bytes, more than the {self.max_bytes:,} that are "
                f"allowed for all of them"
            )
        retained, pool = self.retained, BufferPool()
        if retained is not None:
            stays = 0 if _is_written(retained) else retained.nbytes
            if self._keep == 1 or stays + nbytes > self.max_bytes:
                raise Busy(
                    f"the savepoint of step {retained.step} is kept for a possible rollback, and "
                    "there is no room for another beside it"
                )
        for savepoint in self._excess():
            self._drop(savepoint, pool)
        in_memory = self.nbytes
        for savepoint in [candidate for candidate in self.savepoints if candidate.copies.in_memory]:
            if in_memory + nbytes <= self.max_bytes:
                break
            if _is_written(savepoint):
                in_memory -= savepoint.nbytes
                savepoint.copies.release(pool)
            elif savepoint is not retained:
                in_memory -= savepoint.nbytes
                self._drop(savepoint, pool)
        return pool

    def _excess(self) -> List[Savepoint]:
        """Those that exceed `keep` once another one is added, oldest first."""
        retained = self.retained
        candidates = [savepoint for savepoint in self.savepoints if savepoint is not retained]
        return candidates[: max(0, len(self.savepoints) + 1 - self._keep)]

    def add(self, new: Savepoint) -> None:
        """Add a savepoint, and write out those whose memory the next one will need."""
        self.savepoints.append(new)
        if self._directory is None:
            return
        leaving = self._excess()
        staying = [savepoint for savepoint in self.savepoints if savepoint not in leaving]
        needed = sum(savepoint.nbytes for savepoint in staying) + new.copies.nbytes
        needed -= self.max_bytes
        for savepoint in staying:
            if needed <= 0:
                break
            needed -= savepoint.nbytes
            unwritten = savepoint.spill is None or savepoint.spill.state == "failed"
            if savepoint.nbytes and unwritten and self._fits_disk(savepoint):
                savepoint.spill = DiskSpill(self._directory)
                self._background.do(self._write, savepoint)

    def _fits_disk(self, new: Savepoint) -> bool:
        """Drop the oldest on the disk for `new`; return whether it fits then."""
        if self._max_disk_bytes is None:
            return True
        on_disk = [
            savepoint
            for savepoint in self.savepoints
            if savepoint.spill and savepoint.spill.state != "failed"
        ]
        over = sum(savepoint.copies.nbytes for savepoint in (*on_disk, new)) - self._max_disk_bytes
        retained = self.retained
        old = [
            savepoint
            for savepoint in on_disk
            if _is_written(savepoint) and savepoint is not retained
        ]
        if over > sum(savepoint.copies.nbytes for savepoint in old):
            return False
        for savepoint in old:
            if over > 0:
                self._drop(savepoint, None)
                over -= savepoint.copies.nbytes
        return True

    def _write(self, savepoint: Savepoint) -> None:
        spill = savepoint.spill
        if spill is not None:
            spill.write(savepoint.copies)
            if spill.error:
                self.disk_errors.append(
                    f"the savepoint of step {savepoint.step} could not be written to "
                    f"{self._directory}: {spill.error}"
                )

    def load(self, target: Savepoint) -> None:
        """Load the copies of `wanted` into memory; drop all newer savepoints.

        Raises:
            CannotRestore: they cannot be read back; `wanted` is dropped too.
        """
        self.cancel_writes()
        pool = BufferPool()
        for savepoint in [
            candidate for candidate in self.savepoints if candidate.step > target.step
        ]:
            self._drop(savepoint, pool)
        if target.copies.in_memory or target.spill is None:
            return
        self._free_memory(target, pool)
        try:
            target.spill.read(self._torch, target.copies, pool)
        except OSError as error:
            self._drop(target, pool)
            raise CannotRestore(
                f"the savepoint of step {target.step} cannot be read back: {error}"
            ) from error

    def _free_memory(self, target: Savepoint, pool: BufferPool) -> None:
        """Free the memory that `wanted` needs; drop older savepoints that are in memory."""
        for savepoint in list(self.savepoints):
            if self.nbytes + target.copies.nbytes <= self.max_bytes:
                return
            if savepoint is not target and savepoint.copies.in_memory:
                self._drop(savepoint, pool)

    def cancel_writes(self) -> None:
        """Cancel what is being written, before a rollback writes into memory.

        Raises:
            CannotRestore: the disk does not respond.
        """
        for savepoint in self.savepoints:
            if savepoint.spill is not None:
                savepoint.spill.stop()
        if not self._background.close(STOP_S):
            raise CannotRestore("the disk is still busy with an older savepoint; ask again later")
        for savepoint in self.savepoints:
            if savepoint.spill is not None and savepoint.spill.state == "writing":
                savepoint.spill = None  # not started

    def clear(self) -> None:
        """Drop all."""
        self.keep_only(lambda savepoint: False)

    def keep_only(self, is_retained: Callable[[Savepoint], bool]) -> None:
        """Drop those that are not `wanted`."""
        for savepoint in [candidate for candidate in self.savepoints if not is_retained(candidate)]:
            self._drop(savepoint, None)

    def _drop(self, savepoint: Savepoint, pool: Optional[BufferPool]) -> None:
        self.savepoints.remove(savepoint)
        if savepoint.spill is not None:
            savepoint.spill.stop()
            if savepoint.spill.state == "written":
                savepoint.spill.close()
        if pool is not None and savepoint.copies.in_memory:
            savepoint.copies.release(pool)


def _is_written(savepoint: Savepoint) -> bool:
    """Whether all of it is on disk, so that its memory can be reused."""
    return savepoint.spill is not None and savepoint.spill.state == "written"


def _chunks(copies: TensorCopies) -> Iterator[Tuple[int, int]]:
    """Address and length of every piece of the copies, in their order."""
    for slot in copies.slots:
        start, remaining = slot.buffer.data_ptr(), slot.buffer.numel() * slot.buffer.element_size()
        while remaining > 0:
            size = min(remaining, CHUNK)
            yield start, size
            start, remaining = start + size, remaining - size


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
