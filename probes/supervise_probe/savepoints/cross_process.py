"""Savepoints on disk for another process of the same script, and going on from one.

For jobs that cannot resume by themselves: the job is started again as ever, its first step is
thrown away, and at the end of it the probe puts everything to where the savepoint left it. What
would not be exact is refused with the reason, and then the job goes on from its own start, which is
for the supervisor to judge: the notice `resume-refused` tells it.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from ..checkpoints.save_reports import about, stamp_of
from ..runtime.guard import describe
from . import files
from .reference_batch import KEY

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..ipc.publisher import Publisher
    from ..runtime.background import Background
    from .reference_batch import ReferenceBatch

    Behind = Callable[[Dict[str, float], int, int, Any], None]

# How long the end of the process waits for a savepoint that is being written, for then a relaunch
# needs the newest one; and how long for its thread to leave torch once it was told to.
EXIT_S, LEAVE_S = 5.0, 5.0


class CrossProcessResume:
    """What one rank leaves to the next process, and takes over from the one before.

    Attributes:
        waiting: this process has not taken over yet.
        why_not: why no savepoint is written, "" while they are.
        wants_a_word: whether there is something to do at this boundary.
    """

    def __init__(
        self,
        context: ProbeContext,
        background: Background,
        publisher: Publisher,
        probe_batch: ReferenceBatch,
        round_size: Callable[[], int],
        from_its_start: Callable[[int], None],
    ) -> None:
        """Begin.

        Args:
            round_size: how many optimizers made the last step.
            from_its_start: the job begins by itself, with so many steps behind it.
        """
        self._context, self._torch = context, context.torch
        self._position, self._reporter = context.position, context.reporter
        self._background, self._publisher = background, publisher
        self._probe_batch = probe_batch
        self._round_size, self._from_its_start = round_size, from_its_start
        self._written: List[Tuple[int, str, float, Any]] = []
        self._failed: List[str] = []
        self._document: Optional[Dict[str, Any]] = None
        self._stop = False
        self.why_not = ""
        self._wanted: Dict[str, Any] = (context.config.savepoints or {}).get("portable") or {}
        self._next = 0
        resume = context.config.resume or {}
        self.waiting = self.wants_a_word = resume.get("how") == "savepoint"
        self._path = str(resume.get("path"))
        publisher.discarding = probe_batch.taking_over = self.waiting

    # ── for the next process ──────────────────────────────────────────────────────────────────

    def took(self, savepoints: Any) -> None:
        """A savepoint was just taken: write it for another process, if it is time."""
        wanted, step = self._wanted, self._position.step - 1
        if not wanted or self.why_not or step < self._next:
            return
        from .manager import CannotRestore

        try:
            saved, document = savepoints.document()
        except CannotRestore as problem:
            self.why_not = str(problem)
            said = f"no savepoint is written for another process: {problem}"
            self._reporter.notice("portable-unavailable", said)
            return
        self._next = self._multiple_behind(step)
        document["round"] = self._round_size()
        path = files.path_of(wanted["directory"], step)
        self._background.do(self._write, saved, document, path)

    def went_to(self, step: int) -> None:
        """The job stands behind `step` again: savepoints of later steps never were."""
        if self._wanted:
            self._next = self._multiple_behind(step)
            # Behind the one that may be on its way to the disk.
            self._background.do(files.remove_behind, self._wanted["directory"], step)

    def _multiple_behind(self, step: int) -> int:
        every = int(self._wanted["every"])
        return (step // every + 1) * every

    def _write(self, saved: Any, document: Dict[str, Any], path: str) -> None:
        began = monotonic()
        try:
            saved.copies.wait()
            files.write(self._torch.save, document, path, lambda: self._stop)
            files.keep_newest(self._wanted["directory"], int(self._wanted["keep"]))
            value = saved.extra[0].get(KEY)
            self._written.append((saved.step, path, monotonic() - began, value))
        except files.Stopped:
            said = f"the savepoint of step {saved.step} was not finished when the process ended"
            self._failed.append(said)
        except Exception as error:
            self._failed.append(f"the savepoint of step {saved.step} could not be written: {error}")
        finally:
            saved.pinned = False
            self.wants_a_word = True

    def report(self) -> None:
        """Tell what was written, and what could not be."""
        while self._written:
            step, path, seconds, value = self._written.pop(0)
            file = stamp_of(path, path)
            if file is None:  # the job went back before it, or there are newer ones
                continue
            data = {"path": path, "step": step, "file": file}
            data.update(about(self._position, seconds, "savepoint"))
            data.update(self._probe_batch.told(value))
            self._reporter.notice(
                "checkpoint-saved", f"the savepoint of step {step} was written", data, step + 1
            )
        while self._failed:
            self._reporter.notice("note", self._failed.pop(0))

    def close(self) -> bool:
        """The process ends; return whether nothing is being written any more.

        What is not written in time is called off: the end of a job is not ours to hold.
        """
        background = self._background
        if not background.close(EXIT_S):
            self._stop = True
            background.close(LEAVE_S)
        self.report()
        return not background.busy

    # ── from the process before ───────────────────────────────────────────────────────────────

    def ends(self, members: List[int]) -> bool:
        """Whether these optimizers make up the step that is to be thrown away."""
        if not self.waiting:
            return False
        if self._document is None:
            try:
                self._document = files.read(self._torch.load, self._path)
                self._document["round"] += 0
            except Exception as error:
                self._refuse(f"{self._path} cannot be read: {error}", made=0)
                return False
        return len(members) >= int(self._document["round"])

    def speak(self, behind: Behind) -> None:
        """Do what there is to do.

        Args:
            behind: given counters, step, attempt, and what the step returned, when the job stands
                behind a savepoint of another process.
        """
        self.wants_a_word = False
        if self.waiting:
            self._take_over(behind)
        self.report()

    def _take_over(self, behind: Behind) -> None:
        """Go on behind the step of the savepoint; the step just made never was."""
        from .manager import CannotRestore, Savepoints

        context, ranks = self._context, self._position.world_size
        assert self._document is not None
        savepoints = Savepoints(self._torch, context.registry, 1, sys.maxsize)
        try:
            if ranks > 1:
                raise CannotRestore(f"one of {ranks} ranks cannot go back alone")
            result, (state, returned) = savepoints.begin_from(self._document)
        except CannotRestore as problem:
            self._refuse(str(problem), made=1)
            return
        except Exception as error:
            self._refuse(describe(error), made=1)
            raise  # to the guard, which knows what is the job's own
        self._end()
        behind(state, result["step"], context.config.attempt, returned)
        self._probe_batch.resumed()
        lost = result["not_restored"]
        said = f"; not restored: {', '.join(lost)}" if lost else ""
        self._reporter.notice(
            "resumed", f"training goes on behind step {result['step']}{said}", result
        )

    def _refuse(self, reason: str, made: int) -> None:
        """Tell that the job begins anew; `made` steps are behind it."""
        self._end()
        self._from_its_start(made)
        self._reporter.notice(
            "resume-refused",
            f"the job begins anew, the savepoint cannot be gone on from: {reason}",
            {"path": self._path, "reason": reason},
        )

    def _end(self) -> None:
        self.waiting, self._document = False, None
        self._publisher.discarding = self._probe_batch.taking_over = False
