"""Savepoints: the whole state of a training job in memory, to go back to without a restart.

Rule 1: going back is exact or refused; what the job would notice afterwards is named.
Rule 2: taking one costs a walk over the variables and one pass over memory; nothing is allocated
when the job repeats, nothing waits for a device.
Rule 3: the job's objects are referenced weakly. When an optimizer dies, so do its savepoints.

Both verbs must be called right behind an optimizer step, inside the call that made it: only then
can the step return a second time, from the same place, into the state of an earlier one. This file
orders the parts: `capture/training_state.py` (tensors), `capture/program_state.py` (variables and
place), `runtime/rng.py`. It knows no shared memory and no command.
"""

import contextlib
import functools
import weakref
from types import FrameType, ModuleType
from typing import Any, Dict, List, Optional, Tuple

from ..capture.call_stack import CannotRestore, Step, driver, itinerary, job_frames, why_stuck
from ..capture.captured_values import Back
from ..capture.program_state import OwnModules, ProgramState
from ..capture.tensor_copies import Copies, Pool
from ..capture.training_state import TrainingState
from ..capture.type_classes import Kinds
from ..capture.variable_walk import VariableWalker
from ..runtime import rng as chance
from ..torch_state.registry import Registry
from . import serialize
from .apply import apply_savepoint
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
        tape: Any = None,
        max_disk_bytes: Optional[int] = None,
    ) -> None:
        """
        Args:
            keep: how many at most, 1 or more.
            max_bytes: of host memory for all of them; the oldest give way, but one always stays.
            spill: directory for those that give way; None: they are lost.
            tape: the `BatchTape` that goes back too; None: loaders stay where they are.
            max_disk_bytes: of those in `spill`; None: any number.
        """
        self._torch = torch
        self._registry = registry
        self._kinds = Kinds(torch)
        self._modules = OwnModules()
        self._tape = tape
        self._shelf = SavepointStore(torch, keep, max_bytes, spill, max_disk_bytes)
        self._last_seen: List[Step] = []
        self._last_crossed: Optional[str] = None
        self._never: Optional[str] = None
        self._taking = False
        self._optimizer_died = functools.partial(_forget, weakref.ref(self))

    @property
    def steps(self) -> List[int]:
        """The steps that can be gone back to, oldest first."""
        self._drop_dead()
        return [savepoint.step for savepoint in self._shelf.saved]

    @property
    def held(self) -> int:
        """Bytes of host memory that they take."""
        return self._shelf.held

    @property
    def busy(self) -> bool:
        """Whether one is being written to disk, so that no other can be taken now."""
        return self._shelf.busy

    def spare(self, before_step: int) -> None:
        """Keep the newest one of a step before that, whatever else gives way; 0: none."""
        self._shelf.spare_before = before_step

    def troubles(self) -> List[str]:
        """Sentences about a disk that failed, each told once."""
        told, self._shelf.troubles = self._shelf.troubles, []
        return told

    def close(self) -> None:
        """Give all of them up; nothing is being written any more, or the disk hangs."""
        with contextlib.suppress(CannotRestore):
            self._shelf.settle()
        self._shelf.clear()

    def impossible(self) -> Optional[str]:
        """Why a rollback can never work where the job stands now, or None; about 0.1 ms.

        Which frame drives the loop shows when two savepoints are compared. Crossing a `for` once,
        as between two epochs, only strands the savepoints before it; twice in a row is for good.
        """
        try:
            frames = job_frames(self._torch)
        except CannotRestore as refusal:
            return str(refusal)
        return self._judge(frames, itinerary(frames))[0]

    def _judge(
        self, frames: List[FrameType], now: List[Step]
    ) -> Tuple[Optional[str], Optional[str]]:
        """Why it can never work, and what was crossed since the last savepoint."""
        if self._never is not None:
            return self._never, None
        stuck = why_stuck(frames, len(frames) - 1, known=False)
        if stuck is not None or not self._last_seen:
            return stuck, None
        start = driver(self._last_seen, now)
        crossed = why_stuck(frames, max(start, 0), known=start >= 0)
        return (crossed if crossed == self._last_crossed else None), crossed

    def take(self, step: int, attempt: int, extra: Any) -> Dict[str, int]:
        """Remember the job as it is now.

        Args:
            step: 0-based, of the optimizer step that was just made.
            attempt: rollback epoch of that step.
            extra: whatever the caller wants back from `restore`; kept as it is.

        Returns:
            {"step", "bytes", "held"}: bytes of host memory that this savepoint takes, and all.

        Raises:
            CannotRestore: it could never be gone back to, or not even one fits the budget; asked
                again, `impossible` says the same. Older savepoints are given up with it.
            Busy: an older one is being written to disk, or the one to be kept leaves no room.
        """
        if self.busy:
            raise Busy("an older savepoint is still being written to disk; ask again later")
        frames = job_frames(self._torch)
        now = itinerary(frames)
        reason, crossed = self._judge(frames, now)
        if reason is not None:
            self._shelf.clear()
            raise CannotRestore(reason)
        self._drop_dead()
        if crossed is not None:
            self._shelf.clear()
        self._last_seen, self._last_crossed = now, crossed
        self._shelf.keep_only(lambda saved: saved.step < step)
        self._taking = True
        try:
            new = self._new(step, attempt, extra, frames)
        except CannotRestore as refusal:
            self._never = str(refusal)
            self._shelf.clear()
            raise
        finally:
            self._taking = False
        self._shelf.add(new)
        if self._tape is not None:
            new.mark = self._tape.mark()
            self._tape.forget_before(self._shelf.saved[0].mark)
        return {"step": step, "bytes": new.copies.nbytes, "held": self.held}

    def _new(self, step: int, attempt: int, extra: Any, frames: List[FrameType]) -> Savepoint:
        new = self._plan(step, attempt, extra, frames)
        if self._tape is not None:
            room = self._shelf.max_bytes - new.copies.nbytes
            self._shelf.reserved = self._tape.reserve(room)
        new.copies.share()
        new.copies.copy(self._shelf.make_room(new.copies.nbytes))
        return new

    def _plan(self, step: int, attempt: int, extra: Any, frames: List[FrameType]) -> Savepoint:
        """Look at everything; nothing is copied yet."""
        before = self._shelf.saved[-1:]
        copies = Copies(self._torch, before[0].copies if before else None)
        new = Savepoint(step, attempt, extra, copies)
        taped = _never if self._tape is None else self._tape.knows
        walk = VariableWalker(self._torch, self._kinds, copies, self._registry.saw, taped)
        new.training = TrainingState(
            self._torch, self._registry, walk, copies, self._optimizer_died
        )
        new.program = ProgramState(frames, self._modules, walk)
        new.training.add_new(self._registry, walk)
        walk.settle()
        new.rng = chance.global_states(self._torch)
        return new

    def restore(self, before_step: int, rng: str) -> Tuple[Dict[str, Any], Any]:
        """Go back to the newest savepoint of a step before `before_step`; later ones are dropped.

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
        places, keep = saved.training.places(), rng == "keep"
        saved.program.verify_streams(frames, self._modules, places, keep)
        rewinds = self._tape is not None and rng == "restore"
        if rewinds:
            self._tape.verify(saved.mark)
        self._shelf.bring(saved)
        missed = self._write_back(saved, frames, rng)
        if rewinds:
            self._tape.rewind(saved.mark)
        result: Dict[str, Any] = {"step": saved.step, "attempt": saved.attempt}
        result["bytes"] = saved.copies.nbytes
        result["not_restored"] = missed
        return result, saved.extra

    def _write_back(self, saved: Savepoint, frames: List[FrameType], rng: str) -> List[str]:
        held = list(self._registry.optimizers)  # none may die before all is written
        back = Back(saved.copies, rng == "keep", self._kinds.is_constant, self._kinds.is_code)
        with self._torch.no_grad():
            saved.training.restore(back)
            saved.program.restore(frames, self._modules, back)
        self._torch.clear_autocast_cache()  # holds casts of the weights
        if rng == "restore":
            chance.restore(saved.rng)
        del held
        return back.missed

    def document(self) -> Tuple[Savepoint, Dict[str, Any]]:
        """Return the savepoint that was just taken, pinned, and all of it as plain data.

        Its copies stay as they are while it is pinned, and no other savepoint is taken.

        Raises:
            CannotRestore: another process could not go on from here.
        """
        saved = self._shelf.saved[-1]
        self._require_movable(job_frames(self._torch))
        document = serialize.document(saved, serialize.names_of(self._registry))
        saved.pinned = True
        return saved, document

    def begin_from(self, document: Dict[str, Any]) -> Tuple[Dict[str, Any], Any]:
        """Go on from a savepoint of another process of the same script; see `restore`.

        Raises:
            CannotRestore: it is of another script, or does not fit; nothing was changed.
        """
        frames = job_frames(self._torch)
        self._require_movable(frames)
        live = self._plan(0, 0, None, frames)
        live.copies.copy(Pool())
        missed = apply_savepoint(self._torch, document, live)
        missed += self._write_back(live, frames, "restore")
        return {"step": live.step, "not_restored": missed}, live.extra

    def _require_movable(self, frames: List[FrameType]) -> None:
        reason = why_stuck(frames, 0, known=False)
        if reason is not None:
            raise CannotRestore(reason)

    def _newest(self, before_step: int) -> Savepoint:
        had_any = bool(self._shelf.saved)
        self._drop_dead()
        for saved in reversed(self._shelf.saved):
            if saved.step < before_step:
                return saved
        if self._shelf.saved:
            raise CannotRestore(
                f"there is no savepoint before step {before_step}; the oldest is of step "
                f"{self._shelf.saved[0].step}"
            )
        if had_any:
            raise CannotRestore("the optimizer of the savepoints no longer exists")
        raise CannotRestore(self._never or "no savepoint has been taken yet")

    def _drop_dead(self) -> None:
        self._shelf.keep_only(lambda saved: saved.training.is_alive())


def _never(iterator: Any) -> bool:
    """Whether it gives again what it gave, where nothing is taped."""
    return False


def _forget(owner: "weakref.ref[Savepoints]", optimizer: Any) -> None:
    savepoints = owner()
    if savepoints is not None and not savepoints._taking:  # else the next call does it
        savepoints._drop_dead()
