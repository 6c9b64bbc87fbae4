"""Savepoints: weights, buffers, optimizer and scaler of a training job in memory, to roll back to.

What updates change goes back; the loop goes on with the next batch and the schedule as it is, with
other random numbers than before: a job must not draw the bad batch once more.

Rule 1: taking one costs a pass over memory; nothing is allocated when the job repeats, nothing
waits for a device.
Rule 2: the job's objects are referenced weakly. Savepoints go with their optimizer.

`take` and `restore` must be called between two updates, with none under way.
"""

import contextlib
import functools
import weakref
from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple

from ..runtime.call_stack import CannotRestore, job_frames
from ..torch_state.registry import Registry
from ..torch_state.tensor_copies import TensorCopies
from .store import Busy, Savepoint, SavepointStore
from .training_state import TrainingState

__all__ = ["Busy", "CannotRestore", "Savepoints"]


class Savepoints:
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
        self._optimizer_died = functools.partial(_drop_dead_optimizer, weakref.ref(self))

    @property
    def steps(self) -> List[int]:
        """The steps to which a rollback can go, oldest first."""
        self._drop_without_optimizer()
        return [savepoint.step for savepoint in self._store.savepoints]

    @property
    def with_older_moments(self) -> List[int]:
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

    def newest_weights(self) -> List[Tuple[Any, Any]]:
        """Return the job's parameters on the CPU, each with its copy in the newest savepoint."""
        self._drop_without_optimizer()
        newest = self._store.savepoints[-1] if self._store.savepoints else None
        if newest is None or not newest.copies.in_memory:
            return []
        copies, numbers = newest.copies, {p.number for p in newest.training.parameters.values()}
        slots = [(number, copies.slots[number]) for number in sorted(numbers)]
        plain = [(n, s) for n, s in slots if s.bulk and s.spec is None and s.device.type == "cpu"]
        pairs = [(copies.original(number), slot.buffer) for number, slot in plain]
        return [(weight, copy) for weight, copy in pairs if weight is not None]

    def retain_before(self, before_step: int) -> None:
        """Keep the newest one before this step longer than all others; 0: none."""
        self._store.retain_before = before_step

    def disk_errors(self) -> List[str]:
        """Return sentences about a disk that failed, each one once."""
        errors, self._store.disk_errors = self._store.disk_errors, []
        return errors

    def close(self) -> None:
        """Drop all; nothing is being written any more, or the disk hangs."""
        with contextlib.suppress(CannotRestore):
            self._store.cancel_writes()
        self._store.clear()

    def take(
        self, step: int, attempt: int, extra: Any, older_moments: bool = False
    ) -> Dict[str, int]:
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
                has moments in memory.
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
            self._store.keep_only(lambda savepoint: savepoint.step < step)
            new = self._new(step, attempt, extra)
        except CannotRestore:
            self._store.clear()
            raise
        finally:
            self._taking = False
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
        states = [state for o in self._registry.optimizers for state in o.state.values()]
        tensors = [
            t for param_state in states for t in param_state.values() if self._torch.is_tensor(t)
        ]
        if not new.copies.take_over(older.copies, tensors):
            raise Busy("there are moments that the older savepoint does not have")
        new.older_moments = True

    def restore(self, before_step: int, sign: int = 0) -> Tuple[Dict[str, Any], Any]:
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
        savepoint.training.verify()
        self._store.load(savepoint)
        optimizers = list(self._registry.optimizers)  # keep them alive until all is written
        with self._torch.no_grad():
            missed = savepoint.training.restore()
        self._torch.clear_autocast_cache()  # holds casts of the weights
        del optimizers
        result: Dict[str, Any] = {"step": savepoint.step, "attempt": savepoint.attempt}
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
        self._store.keep_only(lambda savepoint: savepoint.training.is_alive())


def _drop_dead_optimizer(owner: "weakref.ref[Savepoints]", optimizer: Any) -> None:
    savepoints = owner()
    if savepoints is not None and not savepoints._taking:  # else the next call drops them
        savepoints._drop_without_optimizer()
