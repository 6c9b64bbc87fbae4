"""Savepoints on disk for another process of the same script, and resuming from one.

For jobs that cannot resume by themselves: the same command is started, its first step is discarded,
and at the end of it the probe restores the savepoint. What would not be exact is refused with the
reason; the job then trains from its own start, and the notice `resume-refused` lets the supervisor
judge that.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from ..checkpoints.save_reports import save_facts, stamp_of
from ..runtime.guard import describe
from . import files

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..ipc.publisher import Publisher
    from ..runtime.background import Background
    from .reference_batch import ReferenceBatch

    Resumed = Callable[[Dict[str, float], int, int, Any], None]

# At the end of the process: the wait for a savepoint that is being written, since a relaunch needs
# the newest one; and then for its thread to leave torch.
EXIT_S, LEAVE_S = 5.0, 5.0


class CrossProcessResume:
    """What one rank leaves to the next process, and resumes from the one before.

    Attributes:
        waiting: this process is to resume and has not yet.
        why_not: why no savepoint is written, "" while they are.
        pending: whether there is something to do at this step boundary.
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
        """
        Args:
            round_size: returns how many optimizers made the last step.
            from_its_start: called when the job trains from its own start, with the steps made.
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
        self.waiting = self.pending = resume.get("how") == "savepoint"
        self._path = str(resume.get("path"))
        publisher.discarding = probe_batch.resuming = self.waiting

    # ── for the next process ──────────────────────────────────────────────────────────────────

    def savepoint_taken(self, savepoints: Any) -> None:
        """Write the savepoint that was just taken for another process, if one is due."""
        wanted, step = self._wanted, self._position.step - 1
        if not wanted or self.why_not or step < self._next:
            return
        from .manager import CannotRestore

        try:
            saved, document = savepoints.document()
        except CannotRestore as problem:
            self.why_not = str(problem)
            text = f"no savepoint is written for another process: {problem}"
            self._reporter.notice("portable-unavailable", text)
            return
        self._next = self._next_multiple(step)
        document["round"] = self._round_size()
        path = files.path_of(wanted["directory"], step)
        self._background.do(self._write, saved, document, path)

    def rolled_back_to(self, step: int) -> None:
        """Remove the savepoints of steps after `step`."""
        if self._wanted:
            self._next = self._next_multiple(step)
            # In the queue after the one that may be being written.
            self._background.do(files.remove_after, self._wanted["directory"], step)

    def _next_multiple(self, step: int) -> int:
        every = int(self._wanted["every"])
        return (step // every + 1) * every

    def _write(self, saved: Any, document: Dict[str, Any], path: str) -> None:
        began = monotonic()
        try:
            saved.copies.wait()
            files.write(self._torch.save, document, path, lambda: self._stop)
            files.keep_newest(self._wanted["directory"], int(self._wanted["keep"]))
            value = self._probe_batch.value_in(saved.extra[0])
            self._written.append((saved.step, path, monotonic() - began, value))
        except files.Stopped:
            self._failed.append(
                f"the savepoint of step {saved.step} was not finished when the process ended"
            )
        except Exception as error:
            self._failed.append(f"the savepoint of step {saved.step} could not be written: {error}")
        finally:
            saved.pinned = False
            self.pending = True

    def report(self) -> None:
        """Report what was written, and what could not be."""
        while self._written:
            step, path, seconds, value = self._written.pop(0)
            file = stamp_of(path, path)
            if file is None:  # removed: the job rolled back, or there are newer ones
                continue
            data = {"path": path, "step": step, "file": file}
            data.update(save_facts(self._position, seconds, "savepoint"))
            data.update(self._probe_batch.facts_of(value))
            self._reporter.notice(
                "checkpoint-saved", f"the savepoint of step {step} was written", data, step + 1
            )
        while self._failed:
            self._reporter.notice("note", self._failed.pop(0))

    def close(self) -> bool:
        """End writing with the process; return whether nothing is being written any more.

        What is not written in time is cancelled, so that the end of the job is not delayed.
        """
        background = self._background
        if not background.close(EXIT_S):
            self._stop = True
            background.close(LEAVE_S)
        self.report()
        return not background.busy

    # ── from the process before ───────────────────────────────────────────────────────────────

    def ends_discarded_step(self, members: List[int]) -> bool:
        """Whether these optimizers complete the first step, which is discarded."""
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

    def run_pending(self, resumed: Resumed) -> None:
        """Resume if this process is to, and report what was written.

        Args:
            resumed: called with counters, step, attempt, and what the step returned, once another
                process's savepoint is restored.
        """
        self.pending = False
        if self.waiting:
            self._resume(resumed)
        self.report()

    def _resume(self, resumed: Resumed) -> None:
        """Continue after the step of the savepoint; the step just made is discarded."""
        from .manager import CannotRestore, Savepoints

        context, ranks = self._context, self._position.world_size
        assert self._document is not None
        savepoints = Savepoints(self._torch, context.registry, 1, sys.maxsize)
        try:
            if ranks > 1:
                raise CannotRestore(f"one of {ranks} ranks cannot roll back alone")
            result, (state, returned) = savepoints.resume_from(self._document)
        except CannotRestore as problem:
            self._refuse(str(problem), made=1)
            return
        except Exception as error:
            self._refuse(describe(error), made=1)
            raise  # the guard tells the job's own errors from the probe's
        self._end()
        resumed(state, result["step"], context.config.attempt, returned)
        self._probe_batch.resumed()
        lost = result["not_restored"]
        missing = f"; not restored: {', '.join(lost)}" if lost else ""
        text = f"training continues after step {result['step']}{missing}"
        self._reporter.notice("resumed", text, result)

    def _refuse(self, reason: str, made: int) -> None:
        """Report that the job trains from its own start; it has made `made` steps."""
        self._end()
        self._from_its_start(made)
        self._reporter.notice(
            "resume-refused",
            f"training restarts from scratch: savepoint not usable: {reason}",
            {"path": self._path, "reason": reason},
        )

    def _end(self) -> None:
        self.waiting, self._document = False, None
        self._publisher.discarding = self._probe_batch.resuming = False
