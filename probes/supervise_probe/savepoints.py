"""Savepoints: the whole state of a training job in memory, to go back to without a restart.

Rule 1: going back is exact or refused; what the job would notice afterwards is named.
Rule 2: taking one costs a walk over the variables and one pass over memory; nothing is allocated
when the job repeats, nothing waits for a device.
Rule 3: the job's objects are referenced weakly. When an optimizer dies, so do its savepoints.

Both verbs must be called right behind an optimizer step, inside the call that made it: only then
can the step return a second time, from the same place, into the state of an earlier one.
This file orders the parts: `training_state.py` (tensors), `program_state.py` (variables and
place), `rng.py`. It knows no shared memory and no command.
"""

import functools
import weakref
from types import FrameType, ModuleType
from typing import Any, Dict, List, Optional, Tuple

from . import rng as chance
from .copies import Copies, Pool
from .frames import CannotRestore, Step, driver, itinerary, job_frames, why_stuck
from .kinds import Kinds
from .program_state import OwnModules, ProgramState
from .registry import Registry
from .training_state import TrainingState
from .values import Back
from .walk import Walk

__all__ = ["CannotRestore", "Savepoints"]


class _Savepoint:
    """One of them."""

    __slots__ = (
        "__weakref__", "attempt", "copies", "extra", "program", "rng", "step", "training",
    )  # fmt: skip

    def __init__(self, step: int, attempt: int, extra: Any, copies: Copies) -> None:
        self.step, self.attempt, self.extra = step, attempt, extra
        self.copies = copies
        self.training: TrainingState
        self.program: ProgramState
        self.rng: List[chance.State] = []


class Savepoints:
    """The newest savepoints of a job."""

    def __init__(self, torch: ModuleType, registry: Registry, keep: int, max_bytes: int) -> None:
        """
        Args:
            keep: how many at most, 1 or more.
            max_bytes: of host memory for all of them; the oldest give way, but one always stays.
        """
        self._torch = torch
        self._registry = registry
        self._keep = max(1, keep)
        self._max_bytes = max_bytes
        self._kinds = Kinds(torch)
        self._modules = OwnModules()
        self._saved: List[_Savepoint] = []  # oldest first
        self._last_seen: List[Step] = []
        self._last_crossed: Optional[str] = None
        self._never: Optional[str] = None
        self._busy = False
        self._optimizer_died = functools.partial(_forget, weakref.ref(self))

    @property
    def steps(self) -> List[int]:
        """The steps that can be gone back to, oldest first."""
        self._drop_dead()
        return [savepoint.step for savepoint in self._saved]

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
            {"step", "bytes"}: bytes of host memory that this savepoint holds.

        Raises:
            CannotRestore: it could never be gone back to, or not even one fits the budget; asked
                again, `impossible` says the same. Older savepoints are given up with it.
        """
        frames = job_frames(self._torch)
        now = itinerary(frames)
        reason, crossed = self._judge(frames, now)
        if reason is not None:
            self._saved.clear()
            raise CannotRestore(reason)
        self._drop_dead()
        if crossed is not None:
            self._saved.clear()
        self._last_seen, self._last_crossed = now, crossed
        self._saved = [saved for saved in self._saved if saved.step < step]
        self._busy = True
        try:
            new = self._new(step, attempt, extra, frames)
        except CannotRestore as refusal:
            self._never = str(refusal)
            self._saved.clear()
            raise
        finally:
            self._busy = False
        self._saved.append(new)
        return {"step": step, "bytes": new.copies.nbytes}

    def _new(self, step: int, attempt: int, extra: Any, frames: List[FrameType]) -> _Savepoint:
        copies = Copies(self._torch, self._saved[-1].copies if self._saved else None)
        new = _Savepoint(step, attempt, extra, copies)
        walk = Walk(self._torch, self._kinds, copies, self._registry.saw)
        new.training = TrainingState(
            self._torch, self._registry, walk, copies, self._optimizer_died
        )
        new.program = ProgramState(frames, self._modules, walk)
        new.training.add_new(self._registry, walk)
        new.rng = chance.global_states(self._torch)
        copies.copy(self._make_room(copies.nbytes))
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
            CannotRestore: nothing was changed.
        """
        if rng not in ("restore", "keep"):
            raise CannotRestore(f"rng must be 'restore' or 'keep', not {rng!r}")
        saved = self._newest(before_step)
        held = list(self._registry.optimizers)  # none may die before all is written
        frames = job_frames(self._torch)
        saved.program.verify(frames)
        saved.training.verify()
        back = Back(saved.copies, rng == "keep", self._kinds.is_constant, self._kinds.is_code)
        with self._torch.no_grad():
            saved.training.restore(back)
            saved.program.restore(frames, self._modules, back)
        self._torch.clear_autocast_cache()  # holds casts of the weights
        if rng == "restore":
            chance.restore(saved.rng)
        del held
        self._saved = [other for other in self._saved if other.step <= saved.step]
        result: Dict[str, Any] = {"step": saved.step, "attempt": saved.attempt}
        result["bytes"] = saved.copies.nbytes
        result["not_restored"] = back.missed
        return result, saved.extra

    def _newest(self, before_step: int) -> _Savepoint:
        had_any = bool(self._saved)
        self._drop_dead()
        for saved in reversed(self._saved):
            if saved.step < before_step:
                return saved
        if self._saved:
            raise CannotRestore(
                f"there is no savepoint before step {before_step}; the oldest is of step "
                f"{self._saved[0].step}"
            )
        if had_any:
            raise CannotRestore("the optimizer of the savepoints no longer exists")
        raise CannotRestore(self._never or "no savepoint has been taken yet")

    def _make_room(self, nbytes: int) -> Pool:
        """Give up old savepoints for a new one of `nbytes`; their buffers are used again."""
        if nbytes > self._max_bytes:
            raise CannotRestore(
                f"one savepoint takes {nbytes:,} bytes, more than the {self._max_bytes:,} that are "
                f"allowed for all of them"
            )
        pool = Pool()
        held = sum(saved.copies.nbytes for saved in self._saved)
        while self._saved and (len(self._saved) >= self._keep or held + nbytes > self._max_bytes):
            oldest = self._saved.pop(0)
            held -= oldest.copies.nbytes
            pool.give(oldest.copies)
        return pool

    def _drop_dead(self) -> None:
        self._saved = [saved for saved in self._saved if saved.training.is_alive()]


def _forget(owner: "weakref.ref[Savepoints]", optimizer: Any) -> None:
    savepoints = owner()
    if savepoints is not None and not savepoints._busy:  # else the next call does it
        savepoints._drop_dead()
