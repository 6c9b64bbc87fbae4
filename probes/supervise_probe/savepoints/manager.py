"""Savepoints: weights, buffers, optimizer and scaler of a training job in memory, to roll back to.

What updates change goes back; the loop goes on with the next batch and the schedule as it is, with
other random numbers than before: a job must not draw the bad batch once more.

Rule 1: taking one costs a pass over memory; nothing is allocated when the job repeats, nothing
waits for a device.
Rule 2: the job's objects are referenced weakly. Savepoints go with their optimizer.

`save` and `restore` must be called between two updates, with none under way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import tempfile
import weakref
from types import ModuleType
from typing import Any, Callable, Iterator, Optional

from ..runtime.call_stack import CannotRestore, job_frames
from ..runtime.files import Background
from ..torch_state.registry import Registry
from ..torch_state.structure import nested_leaves
from ..torch_state.tensor_copies import BufferPool, TensorCopies
from .training_state import STATE_DEPTH, SwappedOut, TrainingState

STOP_S = 5.0  # a rollback waits so long for the disk to finish its chunk
CHUNK = 1 << 20  # bytes between two checks whether to stop
SWAPPED_OUT = 8  # times in a row are the way of a job, not its generation; project default


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
        older_moments: it has those of the savepoint before, see `SavepointManager.save`.
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

    Rule 1: the copies in memory never take more than the budget, those being written to disk
    included. Rule 2: the job does not wait for a disk. While one savepoint is being written no
    other is taken; one that cannot be written is dropped when its memory is needed. Rule 3: the
    retained savepoint is dropped last; where no other fits, no new one is taken. Rule 4: a file has
    no name, so nothing is left behind; what is read back has the hash of what was written, or it is
    refused.

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
        self.savepoints: list[Savepoint] = []
        self.disk_errors: list[str] = []

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

    def _excess(self) -> list[Savepoint]:
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
        self.drop_unless(lambda savepoint: False)

    def drop_unless(self, is_retained: Callable[[Savepoint], bool]) -> None:
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


def _chunks(copies: TensorCopies) -> Iterator[tuple[int, int]]:
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


__all__ = ["Busy", "CannotRestore", "SavepointManager"]


class SavepointManager:
    """The newest savepoints of a job."""

    def __init__(
        self,
        torch: ModuleType,
        registry: Registry,
        keep: int,
        max_bytes: int,
        spill: Optional[str] = None,
        max_disk_bytes: Optional[int] = None,
    ) -> None:
        """
        Args:
            keep: how many at most, 1 or more.
            max_bytes: of host memory for all of them; the oldest are dropped, but one always stays.
            spill: directory for those that do not fit; None: they are lost.
            max_disk_bytes: of those in `spill`; None: any number.
        """
        self._torch = torch
        self._registry = registry
        self._store = SavepointStore(torch, keep, max_bytes, spill, max_disk_bytes)
        self._taking = False
        self._swapped_out = 0  # times in a row
        self._optimizer_died = functools.partial(_drop_dead_optimizer, weakref.ref(self))

    @property
    def steps(self) -> list[int]:
        """The steps to which a rollback can go, oldest first."""
        self._drop_without_optimizer()
        return [savepoint.step for savepoint in self._store.savepoints]

    @property
    def steps_with_older_moments(self) -> list[int]:
        """Those of them with the moments of the savepoint before."""
        return [savepoint.step for savepoint in self._store.savepoints if savepoint.older_moments]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that they take."""
        return self._store.nbytes

    @property
    def busy(self) -> bool:
        """Whether one is being written to disk, so that no other can be taken now."""
        return self._store.busy

    def newest_weights(self) -> list[tuple[Any, Any]]:
        """Return the job's parameters on the CPU, each with its copy in the newest savepoint."""
        self._drop_without_optimizer()
        newest = self._store.savepoints[-1] if self._store.savepoints else None
        if newest is None or not newest.copies.in_memory:
            return []
        copies, numbers = newest.copies, {p.number for p in newest.training.parameters.values()}
        slots = [(number, copies.slots[number]) for number in sorted(numbers)]
        plain = [(n, s) for n, s in slots if s.bulk and s.spec is None and s.device.type == "cpu"]
        pairs = [(copies.live_tensor(number), slot.buffer) for number, slot in plain]
        return [(weight, copy) for weight, copy in pairs if weight is not None]

    def retain_before(self, before_step: int) -> None:
        """Keep the newest one before this step longer than all others; 0: none."""
        self._store.retain_before = before_step

    def disk_errors(self) -> list[str]:
        """Return sentences about a disk that failed, each one once."""
        errors, self._store.disk_errors = self._store.disk_errors, []
        return errors

    def close(self) -> None:
        """Drop all; nothing is being written any more, or the disk hangs."""
        with contextlib.suppress(CannotRestore):
            self._store.cancel_writes()
        self._store.clear()

    def become_inert(self) -> None:
        """Drop no memory, as in a forked child, where freeing pinned memory would call CUDA.

        Its handles of the files are closed: they would keep the parent's on the disk.
        """
        self._taking = True  # the end of an optimizer drops nothing
        for savepoint in self._store.savepoints:
            if savepoint.spill is not None:
                savepoint.spill.close()

    def save(
        self, step: int, attempt: int, extra: Any, older_moments: bool = False
    ) -> dict[str, int]:
        """Save the weights and what belongs to them as they are now.

        Args:
            step: 0-based, of the optimizer step that was just made.
            attempt: rollback epoch of that step.
            extra: kept as it is, and returned by `restore`.
            older_moments: those that the optimizers have now may be damaged. Those of the newest
                older savepoint are not: updates were made with them.

        Returns:
            {"step", "bytes", "held"}: bytes of host memory that this savepoint takes, and all.

        Raises:
            CannotRestore: no rollback could ever use it, or not even one fits the budget, and so
                it will be next time. Older savepoints are dropped.
            Busy: an older one is being written to disk, or the retained one leaves no room, or none
                has moments in memory, or the job has swapped weights or optimizer state out, but
                not `SWAPPED_OUT` times in a row.
        """
        if self.busy:
            raise Busy("an older savepoint is still being written to disk; ask again later")
        older = next(
            (savepoint for savepoint in reversed(self._store.savepoints) if savepoint.step < step),
            None,
        )
        if older_moments and (older is None or not older.copies.in_memory):
            raise Busy("no older savepoint is in memory")
        self._taking = True
        try:
            job_frames(self._torch)  # refuses a step inside of backward
            self._drop_without_optimizer()
            self._store.drop_unless(lambda savepoint: savepoint.step < step)
            new = self._new(step, attempt, extra)
        except CannotRestore as problem:
            self._swapped_out += 1
            if isinstance(problem, SwappedOut) and self._swapped_out < SWAPPED_OUT:
                raise Busy(str(problem)) from problem
            self._store.clear()
            raise
        finally:
            self._taking = False
        self._swapped_out = 0
        if older_moments and older is not None:
            self._with_older_moments(new, older)
        self._store.add(new)
        return {"step": step, "bytes": new.copies.nbytes, "held": self.nbytes}

    def _new(self, step: int, attempt: int, extra: Any) -> Savepoint:
        """Look at everything first, then make all copies at once."""
        newest = self._store.savepoints[-1:]
        copies = TensorCopies(self._torch, newest[0].copies if newest else None)
        self._registry.roots()  # finds modules that were made before anybody looked
        training = TrainingState(self._torch, self._registry, copies, self._optimizer_died)
        new = Savepoint(step, attempt, extra, copies, training)
        copies.share()
        copies.copy(self._store.make_room(copies.nbytes))
        return new

    def _with_older_moments(self, new: Savepoint, older: Savepoint) -> None:
        """Let `new` have the optimizer state that `older` has: the one time that copies are waited
        for, since somebody wrote that state, which few jobs do and none is let do often."""
        if older not in self._store.savepoints or not older.copies.in_memory:
            raise Busy("the older savepoint has left no room for another")
        new.copies.wait()
        states = [[*optimizer.state.values()] for optimizer in self._registry.optimizers]
        tensors = filter(self._torch.is_tensor, nested_leaves(states, STATE_DEPTH + 2))
        if not new.copies.copy_from_older(older.copies, tensors):
            raise Busy("there are moments that the older savepoint does not have")
        new.older_moments = True

    def restore(self, before_step: int, sign: int = 0) -> tuple[dict[str, Any], Any]:
        """Write back the newest savepoint before `before_step`; later ones are dropped.

        Args:
            sign: the step of the first sign of trouble; one with older moments need only be from
                before that. 0: such ones are as others.

        Returns:
            {"step", "attempt", "bytes", "not_restored"} of the savepoint, and its `extra`;
            "older_moments", true, where `sign` allows it and `before_step` does not.
            not_restored: names of state that keeps its present value.

        Raises:
            CannotRestore: nothing of the job was changed.
        """
        savepoint = self._newest(before_step, sign)
        job_frames(self._torch)
        savepoint.training.raise_unless_restorable()
        self._store.load(savepoint)
        optimizers = list(self._registry.optimizers)  # keep them alive until all is written
        with self._torch.no_grad():
            missed = savepoint.training.restore()
        self._torch.clear_autocast_cache()  # holds casts of the weights
        del optimizers
        result: dict[str, Any] = {"step": savepoint.step, "attempt": savepoint.attempt}
        result["bytes"] = savepoint.copies.nbytes
        result["not_restored"] = missed
        if savepoint.step >= before_step:
            result["older_moments"] = True
        return result, savepoint.extra

    def _newest(self, before_step: int, sign: int) -> Savepoint:
        had_any = bool(self._store.savepoints)
        self._drop_without_optimizer()
        for savepoint in reversed(self._store.savepoints):
            if savepoint.step < (
                max(sign, before_step) if savepoint.older_moments else before_step
            ):
                return savepoint
        if self._store.savepoints:
            raise CannotRestore(
                f"there is no savepoint before step {before_step}; the oldest is of step "
                f"{self._store.savepoints[0].step}"
            )
        if had_any:
            raise CannotRestore("the optimizer of the savepoints no longer exists")
        raise CannotRestore("no savepoint has been taken yet")

    def _drop_without_optimizer(self) -> None:
        self._store.drop_unless(lambda savepoint: savepoint.training.is_alive())


def _drop_dead_optimizer(owner: "weakref.ref[SavepointManager]", optimizer: Any) -> None:
    savepoints = owner()
    if savepoints is not None and not savepoints._taking:  # else the next call drops them
        savepoints._drop_without_optimizer()
