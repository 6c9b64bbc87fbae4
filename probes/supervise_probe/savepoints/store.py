"""Where savepoints are kept: in host memory up to a budget, older ones in files.

Rule 1: the copies in memory never take more than the budget, those being written to disk included;
only a rollback in the middle of writing one for another process may have that one on top.
Rule 2: the job does not wait for a disk. While one savepoint is being written no other is taken;
one that cannot be written is given up when its memory is needed.
Rule 3: all others give way before the one that is spared; where there is no room beside it, no new
one is taken.
"""

from types import ModuleType
from typing import Any, Callable, List, Optional

from ..capture.call_stack import CannotRestore
from ..capture.tensor_copies import Copies, Pool
from ..runtime.background import Background
from .disk_spill import DiskSpill

STOP_S = 5.0  # how long a rollback waits for the disk to take the chunk it is at


class Busy(Exception):  # noqa: N818 (it can be asked again)
    """A savepoint cannot be taken just now; the text is one sentence for people."""


class Savepoint:
    """One savepoint: the parts that `Savepoints` fills in, and where its copies are.

    Attributes:
        pinned: its copies are being read, and must stay as they are.
        mark: where the loaders stood.
    """

    __slots__ = (
        "__weakref__",
        "attempt",
        "copies",
        "extra",
        "mark",
        "pinned",
        "program",
        "rng",
        "spill",
        "step",
        "training",
    )

    def __init__(self, step: int, attempt: int, extra: Any, copies: Copies) -> None:
        self.step, self.attempt, self.extra = step, attempt, extra
        self.copies = copies
        self.spill: Optional[DiskSpill] = None
        self.pinned = False
        self.mark: List[Any] = []
        self.training: Any = None
        self.program: Any = None
        self.rng: List[Any] = []

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return self.copies.nbytes if self.copies.in_memory else 0


class SavepointStore:
    """The newest savepoints, oldest first.

    Attributes:
        saved: the savepoints. troubles: sentences about a disk that failed, for whoever tells.
        max_bytes: of memory. reserved: how many of these are somebody else's.
        spare_before: the newest savepoint of a step before that is spared; 0: none is.
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
            directory: for savepoints beyond `max_bytes`; None: these are given up.
            max_disk_bytes: of all that are there; the oldest give way. None: any number.
        """
        self._torch = torch
        self._keep = max(1, keep)
        self.max_bytes = max_bytes
        self.reserved = self.spare_before = 0
        self._directory = directory
        self._max_disk_bytes = max_disk_bytes
        self._background = Background()
        self.saved: List[Savepoint] = []
        self.troubles: List[str] = []

    @property
    def busy(self) -> bool:
        """Whether a savepoint is being written."""
        return self._background.busy or any(saved.pinned for saved in self.saved)

    @property
    def held(self) -> int:
        """Bytes of host memory that all of them take."""
        return sum(saved.held for saved in self.saved)

    @property
    def spared(self) -> Optional[Savepoint]:
        """The one that all others give way before."""
        return next((each for each in reversed(self.saved) if each.step < self.spare_before), None)

    def make_room(self, nbytes: int) -> Pool:
        """Make memory free for a new savepoint of `nbytes`; its buffers are used again.

        Raises:
            CannotRestore: not even one fits.
            Busy: none fits beside the one that is spared; nothing was given up.
        """
        if nbytes > self.max_bytes:
            raise CannotRestore(
                f"one savepoint takes {nbytes:,} bytes, more than the {self.max_bytes:,} that are "
                f"allowed for all of them"
            )
        spared, pool = self.spared, Pool()
        if spared is not None:
            stays = 0 if _written(spared) else spared.held
            if self._keep == 1 or stays + self.reserved + nbytes > self.max_bytes:
                raise Busy(
                    f"the savepoint of step {spared.step} is kept for a rollback that may come, "
                    "and there is no room for another beside it"
                )
        for saved in self._excess():
            self._drop(saved, pool)
        held = self.held + self.reserved
        for saved in [saved for saved in self.saved if saved.copies.in_memory]:
            if held + nbytes <= self.max_bytes:
                break
            if _written(saved):
                held -= saved.held
                saved.copies.release(pool)
            elif saved is not spared:
                held -= saved.held
                self._drop(saved, pool)
        return pool

    def _excess(self) -> List[Savepoint]:
        """Those that are too many as soon as there is another one, the oldest first."""
        spared = self.spared
        others = [saved for saved in self.saved if saved is not spared]
        return others[: max(0, len(self.saved) + 1 - self._keep)]

    def add(self, new: Savepoint) -> None:
        """Take a new savepoint in, and write out what the next one will need the memory of."""
        self.saved.append(new)
        if self._directory is None:
            return
        going = self._excess()
        staying = [saved for saved in self.saved if saved not in going]
        needed = sum(saved.held for saved in staying) + new.copies.nbytes + self.reserved
        needed -= self.max_bytes
        for saved in staying:
            if needed <= 0:
                break
            needed -= saved.held
            unwritten = saved.spill is None or saved.spill.state == "failed"
            if saved.held and unwritten and self._fits_disk(saved):
                saved.spill = DiskSpill(self._directory)
                self._background.do(self._write, saved)

    def _fits_disk(self, new: Savepoint) -> bool:
        """Give up the oldest on the disk for `new`; return whether that fits then."""
        if self._max_disk_bytes is None:
            return True
        there = [saved for saved in self.saved if saved.spill and saved.spill.state != "failed"]
        over = sum(saved.copies.nbytes for saved in (*there, new)) - self._max_disk_bytes
        spared = self.spared
        old = [saved for saved in there if _written(saved) and saved is not spared]
        if over > sum(saved.copies.nbytes for saved in old):
            return False
        for saved in old:
            if over > 0:
                self._drop(saved, None)
                over -= saved.copies.nbytes
        return True

    def _write(self, saved: Savepoint) -> None:
        spill = saved.spill
        if spill is not None:
            spill.write(saved.copies)
            if spill.error:
                self.troubles.append(
                    f"the savepoint of step {saved.step} could not be written to "
                    f"{self._directory}: {spill.error}"
                )

    def bring(self, wanted: Savepoint) -> None:
        """Have the copies of `wanted` in memory; all newer savepoints are given up for it.

        Raises:
            CannotRestore: the disk does not give them back; `wanted` is given up too.
        """
        self.settle()
        pool = Pool()
        for saved in [saved for saved in self.saved if saved.step > wanted.step]:
            self._drop(saved, pool)
        if wanted.copies.in_memory or wanted.spill is None:
            return
        self._make_way(wanted, pool)
        try:
            wanted.spill.read(self._torch, wanted.copies, pool)
        except OSError as error:
            self._drop(wanted, pool)
            raise CannotRestore(
                f"the savepoint of step {wanted.step} cannot be read back: {error}"
            ) from error

    def _make_way(self, wanted: Savepoint, pool: Pool) -> None:
        """Free the memory that `wanted` needs; older savepoints that are in memory give way."""
        for saved in list(self.saved):
            if self.held + self.reserved + wanted.copies.nbytes <= self.max_bytes:
                return
            if saved is not wanted and saved.copies.in_memory:
                self._drop(saved, pool)

    def settle(self) -> None:
        """Call off what is being written; a rollback is about to write into memory.

        Raises:
            CannotRestore: the disk does not let go.
        """
        for saved in self.saved:
            if saved.spill is not None:
                saved.spill.stop()
        if not self._background.close(STOP_S):
            raise CannotRestore("the disk is still busy with an older savepoint; ask again later")
        for saved in self.saved:
            if saved.spill is not None and saved.spill.state == "writing":
                saved.spill = None  # its turn never came

    def clear(self) -> None:
        """Give all of them up."""
        self.keep_only(lambda saved: False)

    def keep_only(self, wanted: Callable[[Savepoint], bool]) -> None:
        """Give up those that are not `wanted`."""
        for saved in [saved for saved in self.saved if not wanted(saved)]:
            self._drop(saved, None)

    def _drop(self, saved: Savepoint, pool: Optional[Pool]) -> None:
        self.saved.remove(saved)
        if saved.spill is not None:
            saved.spill.stop()
            if saved.spill.state == "written":
                saved.spill.close()
        if pool is not None and saved.copies.in_memory and not saved.pinned:
            saved.copies.release(pool)


def _written(saved: Savepoint) -> bool:
    """Whether it is on disk as a whole, so that its memory can be given away."""
    return saved.spill is not None and saved.spill.state == "written"
