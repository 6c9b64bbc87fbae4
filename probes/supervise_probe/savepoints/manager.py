"""Savepoints: the whole state of a training job in memory, to roll back to without a restart.

A rollback rewinds the loop: model, optimizer, variables and place in the program go back together.
Where the loop cannot be rewound, as a `for` statement or a library's, only what the updates changed
goes back, and the loop goes on with the next batch and the schedule as it is.

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
    """The newest savepoints of a job.

    Attributes:
        why_keep: why the loop cannot be rewound, "" while it can: savepoints have no more than the
            weights and what belongs to them.
    """

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
        self.why_keep = ""
        self._permanent_obstacle: Optional[str] = None
        self._taking = False
        self._optimizer_died = functools.partial(_drop_dead_optimizer, weakref.ref(self))

    @property
    def steps(self) -> List[int]:
        """The steps to which a rollback can go, oldest first."""
        self._drop_without_optimizer()
        return [savepoint.step for savepoint in self._store.saved]

    @property
    def with_older_moments(self) -> List[int]:
        """Those of them with the moments of the savepoint before."""
        return [savepoint.step for savepoint in self._store.saved if savepoint.older_moments]

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

    def _watch_loop(self, frames: List[FrameType]) -> None:
        """Find out whether the loop can never be rewound.

        Two savepoints together show which frame drives the loop. Crossing a `for` once, as between
        two epochs, only means that the loop cannot go back behind it; twice in a row is permanent.
        """
        now = frame_locations(frames)
        stuck = restore_obstacle(frames, len(frames) - 1, known=False)
        crossed: Optional[str] = None
        if stuck is None and self._last_seen:
            start = driving_frame(self._last_seen, now)
            crossed = restore_obstacle(frames, max(start, 0), known=start >= 0)
            stuck = crossed if crossed == self._last_crossed else None
        self._last_seen, self._last_crossed = now, crossed
        if stuck is not None:
            self.why_keep, self._replay, self._store.reserved = stuck, None, 0

    def take(
        self, step: int, attempt: int, extra: Any, older_moments: bool = False
    ) -> Dict[str, int]:
        """Save the job as it is now.

        Args:
            step: 0-based, of the optimizer step that was just made.
            attempt: rollback epoch of that step.
            extra: kept as it is, and returned by `restore`.
            older_moments: those that the optimizers have now may be damaged. Those of the newest
                older savepoint are not: updates were made with them. Only while the loop goes on.

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
        older = next((saved for saved in reversed(self._store.saved) if saved.step < step), None)
        if older_moments and (older is None or not older.copies.in_memory):
            raise Busy("no older savepoint is in memory")
        if self._permanent_obstacle is not None:
            raise CannotRestore(self._permanent_obstacle)
        self._taking = True
        try:
            frames = job_frames(self._torch)
            if not self.why_keep:
                self._watch_loop(frames)
            self._drop_without_optimizer()
            self._store.keep_only(lambda saved: saved.step < step)
            new = self._new(step, attempt, extra, frames)
        except CannotRestore as refusal:
            self._permanent_obstacle = str(refusal)
            self._store.clear()
            raise
        finally:
            self._taking = False
        if older_moments and older is not None:
            self._with_older_moments(new, older)
        self._store.add(new)
        if self._replay is not None:
            new.loaders = self._replay.positions()
            self._replay.drop_before(self._store.saved[0].loaders)
        return {"step": step, "bytes": new.copies.nbytes, "held": self.held}

    def _with_older_moments(self, new: Savepoint, older: Savepoint) -> None:
        """Let `new` have the optimizer state that `older` has: the one time that copies are waited
        for, since somebody wrote that state, which few jobs do and none is let do often."""
        if older not in self._store.saved or not older.copies.in_memory:
            raise Busy("the older savepoint has left no room for another")
        new.copies.wait()
        states = [held for o in self._registry.optimizers for held in o.state.values()]
        tensors = [t for held in states for t in held.values() if self._torch.is_tensor(t)]
        if not new.copies.take_over(older.copies, tensors):
            raise Busy("there are moments that the older savepoint does not have")
        new.older_moments = True

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
        keeps = bool(self.why_keep)
        if keeps:
            self._registry.roots()  # finds modules that were made before anybody looked
        new.training = TrainingState(
            self._torch, self._registry, walk, copies, self._optimizer_died, keeps
        )
        if keeps:
            new.training.verify_weights()
            return new
        new.program = ProgramState(frames, self._modules, walk)
        new.training.add_new(self._registry, walk)
        walk.find_shared_iterators()
        new.rng = generators.global_states(self._torch)
        return new

    def restore(
        self, before_step: int, rng: str, loop: str, sign: int = 0
    ) -> Tuple[Dict[str, Any], Any]:
        """Roll back to the newest savepoint before `before_step`; later ones are dropped.

        Args:
            sign: the step of the first sign of trouble; one with older moments need only be from
                before that. 0: such ones are as others.
            rng: "restore" repeats the same draws; "keep" leaves all generators, and batches drawn
                since, as they are, so that training goes on with other data.
            loop: "rewind" takes the loop back too; "keep" lets it go on; "auto" rewinds it where
                that is possible. `rng` "restore" needs a loop that is rewound.

        Returns:
            {"step", "attempt", "bytes", "not_restored", "loop"} of the savepoint, and its `extra`;
            "older_moments", true, where `sign` allows it and `before_step` does not.
            not_restored: names of variables that keep their present value; those that belong to a
            loop that goes on are not named. loop: "rewind", or "keep" and `why_keep`, the reason.

        Raises:
            CannotRestore: nothing of the job was changed.
        """
        if rng not in ("restore", "keep"):
            raise CannotRestore(f"rng must be 'restore' or 'keep', not {rng!r}")
        if loop not in ("auto", "rewind", "keep"):
            raise CannotRestore(f"loop must be 'auto', 'rewind' or 'keep', not {loop!r}")
        saved = self._newest(before_step, sign)
        frames = job_frames(self._torch)
        saved.training.verify()
        why = "" if loop == "keep" else self._rewind_obstacle(saved, frames, rng)
        if why and (loop == "rewind" or rng == "restore"):
            raise CannotRestore(why)
        rewind = loop != "keep" and not why
        if not rewind:
            saved.training.verify_weights()
        self._store.load(saved)
        missed = self._write_back(saved, frames, rng, rewind)
        if rewind and self._replay is not None and rng == "restore":
            self._replay.rewind(saved.loaders)
        result: Dict[str, Any] = {"step": saved.step, "attempt": saved.attempt}
        result["bytes"] = saved.copies.nbytes
        result["not_restored"] = missed
        result["loop"] = "rewind" if rewind else "keep"
        if why:
            result["why_keep"] = why
        if saved.step >= before_step:
            result["older_moments"] = True
        return result, saved.extra

    def _rewind_obstacle(self, saved: Savepoint, frames: List[FrameType], rng: str) -> str:
        """Return why the loop cannot be taken back to this savepoint, "" when it can."""
        if saved.program is None:
            return self.why_keep
        try:
            saved.program.verify(frames)
            places = saved.training.attributes()
            saved.program.verify_iterators(frames, self._modules, places, rng == "keep")
            if self._replay is not None and rng == "restore":
                self._replay.verify(saved.loaders)
        except CannotRestore as obstacle:
            return str(obstacle)
        return ""

    def _write_back(
        self, saved: Savepoint, frames: List[FrameType], rng: str, rewind: bool
    ) -> List[str]:
        held = list(self._registry.optimizers)  # keep them alive until all is written
        back = Restoration(
            saved.copies, rng == "keep", self._kinds.is_constant, self._kinds.is_code
        )
        with self._torch.no_grad():
            if rewind:
                saved.training.restore(back)
                saved.program.restore(frames, self._modules, back)
            else:
                saved.training.restore_weights(back)
        self._torch.clear_autocast_cache()  # holds casts of the weights
        if rewind and rng == "restore":
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
        missed += self._write_back(live, frames, "restore", rewind=True)
        return {"step": live.step, "not_restored": missed}, live.extra

    def _require_movable(self, frames: List[FrameType]) -> None:
        reason = restore_obstacle(frames, 0, known=False)
        if reason is not None:
            raise CannotRestore(reason)

    def _newest(self, before_step: int, sign: int) -> Savepoint:
        had_any = bool(self._store.saved)
        self._drop_without_optimizer()
        for saved in reversed(self._store.saved):
            if saved.step < (max(sign, before_step) if saved.older_moments else before_step):
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
