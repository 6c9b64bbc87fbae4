"""Savepoints: the whole state of a training job in memory, to roll back to without a restart.

Rule 1: a rollback is exact or refused; what the job would notice afterwards is named.
Rule 2: taking one costs a walk over the variables and one pass over memory; nothing is allocated
when the job repeats, nothing waits for a device.
Rule 3: the job's objects are referenced weakly. Savepoints go with their optimizer.

`take` and `restore` must be called right after an optimizer step, inside the call that made it:
only then can the step return a second time, from the same place, into the state of an earlier one.
"""

import contextlib
import functools
import weakref
from types import FrameType, ModuleType
from typing import Any, Dict, List, Optional, Tuple

from ..capture.call_stack import (
    CannotRestore,
    FrameLocation,
    driving_frame,
    frame_locations,
    job_frames,
    restore_obstacle,
)
from ..capture.captured_values import Restoration
from ..capture.program_state import OwnModules, ProgramState
from ..capture.tensor_copies import BufferPool, TensorCopies
from ..capture.training_state import TrainingState
from ..capture.type_classes import TypeClasses
from ..capture.variable_walk import VariableWalker
from ..runtime import rng as generators
from ..torch_state.registry import Registry
from . import serialize
from .deserialize import apply_savepoint
from .store import Busy, Savepoint, SavepointStore

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
        replay: Any = None,
        max_disk_bytes: Optional[int] = None,
    ) -> None:
        """
        Args:
            keep: how many at most, 1 or more.
            max_bytes: of host memory for all of them; the oldest are dropped, but one always stays.
            spill: directory for those that do not fit; None: they are lost.
            replay: recorded batches, rewound by a rollback; None: loaders stay where they are.
            max_disk_bytes: of those in `spill`; None: any number.
        """
        self._torch = torch
        self._registry = registry
        self._kinds = TypeClasses(torch)
        self._modules = OwnModules()
        self._replay = replay
        self._store = SavepointStore(torch, keep, max_bytes, spill, max_disk_bytes)
        self._last_seen: List[FrameLocation] = []
        self._last_crossed: Optional[str] = None
        self._permanent_obstacle: Optional[str] = None
        self._taking = False
        self._optimizer_died = functools.partial(_drop_dead_optimizer, weakref.ref(self))

    @property
    def steps(self) -> List[int]:
        """The steps to which a rollback can go, oldest first."""
        self._drop_without_optimizer()
        return [savepoint.step for savepoint in self._store.saved]

    @property
    def held(self) -> int:
        """Bytes of host memory that they take."""
        return self._store.held

    @property
    def busy(self) -> bool:
        """Whether one is being written to disk, so that no other can be taken now."""
        return self._store.busy

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

    def _obstacles(
        self, frames: List[FrameType], now: List[FrameLocation]
    ) -> Tuple[Optional[str], Optional[str]]:
        """Why a rollback can never work here, and what was crossed since the last savepoint.

        Two savepoints together show which frame drives the loop. Crossing a `for` once, as between
        two epochs, only strands the savepoints before it; twice in a row is permanent.
        """
        if self._permanent_obstacle is not None:
            return self._permanent_obstacle, None
        stuck = restore_obstacle(frames, len(frames) - 1, known=False)
        if stuck is not None or not self._last_seen:
            return stuck, None
        start = driving_frame(self._last_seen, now)
        crossed = restore_obstacle(frames, max(start, 0), known=start >= 0)
        return (crossed if crossed == self._last_crossed else None), crossed

    def take(self, step: int, attempt: int, extra: Any) -> Dict[str, int]:
        """Save the job as it is now.

        Args:
            step: 0-based, of the optimizer step that was just made.
            attempt: rollback epoch of that step.
            extra: kept as it is, and returned by `restore`.

        Returns:
            {"step", "bytes", "held"}: bytes of host memory that this savepoint takes, and all.

        Raises:
            CannotRestore: no rollback could ever use it, or not even one fits the budget, and so
                it will be next time. Older savepoints are dropped.
            Busy: an older one is being written to disk, or the retained one leaves no room.
        """
        if self.busy:
            raise Busy("an older savepoint is still being written to disk; ask again later")
        frames = job_frames(self._torch)
        now = frame_locations(frames)
        reason, crossed = self._obstacles(frames, now)
        if reason is not None:
            self._store.clear()
            raise CannotRestore(reason)
        self._drop_without_optimizer()
        if crossed is not None:
            self._store.clear()
        self._last_seen, self._last_crossed = now, crossed
        self._store.keep_only(lambda saved: saved.step < step)
        self._taking = True
        try:
            new = self._new(step, attempt, extra, frames)
        except CannotRestore as refusal:
            self._permanent_obstacle = str(refusal)
            self._store.clear()
            raise
        finally:
            self._taking = False
        self._store.add(new)
        if self._replay is not None:
            new.loaders = self._replay.positions()
            self._replay.drop_before(self._store.saved[0].loaders)
        return {"step": step, "bytes": new.copies.nbytes, "held": self.held}

    def _new(self, step: int, attempt: int, extra: Any, frames: List[FrameType]) -> Savepoint:
        new = self._plan(step, attempt, extra, frames)
        if self._replay is not None:
            room = self._store.max_bytes - new.copies.nbytes
            self._store.reserved = self._replay.reserve(room)
        new.copies.share()
        new.copies.copy(self._store.make_room(new.copies.nbytes))
        return new

    def _plan(self, step: int, attempt: int, extra: Any, frames: List[FrameType]) -> Savepoint:
        """Walk over everything; nothing is copied yet."""
        before = self._store.saved[-1:]
        copies = TensorCopies(self._torch, before[0].copies if before else None)
        new = Savepoint(step, attempt, extra, copies)
        replayed = (lambda _: False) if self._replay is None else self._replay.tracks
        walk = VariableWalker(self._torch, self._kinds, copies, self._registry.saw, replayed)
        new.training = TrainingState(
            self._torch, self._registry, walk, copies, self._optimizer_died
        )
        new.program = ProgramState(frames, self._modules, walk)
        new.training.add_new(self._registry, walk)
        walk.find_shared_iterators()
        new.rng = generators.global_states(self._torch)
        return new

    def restore(self, before_step: int, rng: str) -> Tuple[Dict[str, Any], Any]:
        """Roll back to the newest savepoint before `before_step`; later ones are dropped.

        Args:
            rng: "restore" repeats the same draws; "keep" leaves all generators, and batches drawn
                since, as they are, so that training goes on with other data.

        Returns:
            {"step", "attempt", "bytes", "not_restored"} of the savepoint, and its `extra`.
            not_restored: names of variables that keep their present value.

        Raises:
            CannotRestore: nothing of the job was changed.
        """
        if rng not in ("restore", "keep"):
            raise CannotRestore(f"rng must be 'restore' or 'keep', not {rng!r}")
        saved = self._newest(before_step)
        frames = job_frames(self._torch)
        saved.program.verify(frames)
        saved.training.verify()
        places, keep = saved.training.attributes(), rng == "keep"
        saved.program.verify_iterators(frames, self._modules, places, keep)
        rewinds = self._replay is not None and rng == "restore"
        if rewinds:
            self._replay.verify(saved.loaders)
        self._store.load(saved)
        missed = self._write_back(saved, frames, rng)
        if rewinds:
            self._replay.rewind(saved.loaders)
        result: Dict[str, Any] = {"step": saved.step, "attempt": saved.attempt}
        result["bytes"] = saved.copies.nbytes
        result["not_restored"] = missed
        return result, saved.extra

    def _write_back(self, saved: Savepoint, frames: List[FrameType], rng: str) -> List[str]:
        held = list(self._registry.optimizers)  # keep them alive until all is written
        back = Restoration(
            saved.copies, rng == "keep", self._kinds.is_constant, self._kinds.is_code
        )
        with self._torch.no_grad():
            saved.training.restore(back)
            saved.program.restore(frames, self._modules, back)
        self._torch.clear_autocast_cache()  # holds casts of the weights
        if rng == "restore":
            generators.restore(saved.rng)
        del held
        return back.missed

    def document(self) -> Tuple[Savepoint, Dict[str, Any]]:
        """Return the savepoint that was just taken, pinned, and all of it as plain data.

        While it is pinned its copies do not change, and no other savepoint is taken.

        Raises:
            CannotRestore: another process could not continue from here.
        """
        saved = self._store.saved[-1]
        self._require_movable(job_frames(self._torch))
        document = serialize.document(saved, serialize.names_of(self._registry))
        saved.pinned = True
        return saved, document

    def resume_from(self, document: Dict[str, Any]) -> Tuple[Dict[str, Any], Any]:
        """Continue from a savepoint of another process of the same script; see `restore`.

        Raises:
            CannotRestore: it is of another script, or does not fit; nothing was changed.
        """
        frames = job_frames(self._torch)
        self._require_movable(frames)
        live = self._plan(0, 0, None, frames)
        live.copies.copy(BufferPool())
        missed = apply_savepoint(self._torch, document, live)
        missed += self._write_back(live, frames, "restore")
        return {"step": live.step, "not_restored": missed}, live.extra

    def _require_movable(self, frames: List[FrameType]) -> None:
        reason = restore_obstacle(frames, 0, known=False)
        if reason is not None:
            raise CannotRestore(reason)

    def _newest(self, before_step: int) -> Savepoint:
        had_any = bool(self._store.saved)
        self._drop_without_optimizer()
        for saved in reversed(self._store.saved):
            if saved.step < before_step:
                return saved
        if self._store.saved:
            raise CannotRestore(
                f"there is no savepoint before step {before_step}; the oldest is of step "
                f"{self._store.saved[0].step}"
            )
        if had_any:
            raise CannotRestore("the optimizer of the savepoints no longer exists")
        raise CannotRestore(self._permanent_obstacle or "no savepoint has been taken yet")

    def _drop_without_optimizer(self) -> None:
        self._store.keep_only(lambda saved: saved.training.is_alive())


def _drop_dead_optimizer(owner: "weakref.ref[Savepoints]", optimizer: Any) -> None:
    savepoints = owner()
    if savepoints is not None and not savepoints._taking:  # else the next call drops them
        savepoints._drop_without_optimizer()
