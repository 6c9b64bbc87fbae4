"""The training thread: the one that steps first, until it stops and another one goes on.

One thread is watched at a time, and all others run free: numbers of two trainings are never mixed.
The one that is watched stays while it gives any sign of life. It is followed by another that steps
an optimizer when it has ended, or when it has been still for long and the other made several steps
meanwhile. A thread that waits for another is believed sooner: `Thread.join`, `Future.result`.

What is not seen: the steps of the new thread until then. The first is seen from its forward on; of
threads that begin together, the first frames may hold the others' inputs: a hook that asked before
anybody was watched can be interrupted right behind its question.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..collectors import Plan
    from ..context import ProbeContext
    from .batch_observer import BatchObserver
    from .step_tracker import StepTracker

STEPS = 3  # of another thread, since the newest of the one that is watched
WAITING_NS, STILL_NS = 1_000_000_000, 10_000_000_000  # well below the time that makes a hang
USUAL = 8  # times the usual time between two steps of the thread that is watched


class TrainingThread:
    """The threads of one process, as far as they train."""

    def __init__(
        self, context: ProbeContext, tracker: StepTracker, plan: Plan, batches: BatchObserver
    ) -> None:
        self._context, self._gate = context, context.gate
        self._tracker, self._plan, self._batches = tracker, plan, batches
        self._lock = threading.Lock()
        self._began = 0, 0  # when the one that is watched was first, and how many steps were before
        self._seen = 0, 0  # its steps
        self._others = 0  # steps of others since then
        self._announced = False

    def begins(self) -> None:
        """The process becomes a rank in this thread, by a backward or a step."""
        if self._gate.thread is None:
            self._watch()

    def steps_first(self) -> bool:
        """Whether this thread is the first to step, and is watched from here on."""
        gate, guard, watched = self._gate, self._context.guard, self._gate.thread
        if self._tracker.entries or watched in (None, get_ident()) or not gate.on:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._tracker.entries or gate.thread != watched:
                return False
            self._watch()
            guard.run(guard.core, self._forget)
        finally:
            self._lock.release()
        return not gate.absent()

    def _watch(self) -> None:
        self._gate.thread = get_ident()
        self._began = monotonic_ns(), self._tracker.entries

    def _forget(self) -> None:
        """What was seen since the last step is another thread's."""
        self._batches.look()
        self._plan.run("forget")

    def stepped(self, optimizer: Any) -> None:
        """A step that is not looked at has just been made, perhaps in another thread."""
        gate, guard, watched = self._gate, self._context.guard, self._gate.thread
        if watched is None or get_ident() == watched or not gate.on:
            return
        position = self._tracker.entries, self._context.position.step
        if position != self._seen:
            self._seen, self._others = position, 0
        self._others += 1
        if not self._stopped(watched) or not self._lock.acquire(blocking=False):
            return
        try:
            if gate.thread == watched:  # else a third one was faster
                guard.run(guard.core, self._follow, optimizer)
        finally:
            self._lock.release()

    def _stopped(self, watched: int) -> bool:
        """Whether the thread that is watched trains no more, as far as that is known."""
        gate = self._gate
        frame = sys._current_frames().get(watched)
        if frame is None:
            return True
        if self._others < STEPS or gate.inside or gate.in_backward or gate.in_forward:
            return False
        waits = frame.f_globals is vars(threading)
        newest: int = self._context.reporter.writer.heard_ns()
        began, previous = self._began
        usual = (newest - began) // max(1, self._tracker.entries - previous)
        limit = max(WAITING_NS if waits else STILL_NS, USUAL * usual)
        return monotonic_ns() - newest > limit

    def _follow(self, optimizer: Any) -> None:
        """This thread is watched from now on; it stands right behind its step."""
        reporter = self._context.reporter
        self._watch()
        self._tracker.pass_on(optimizer)
        self._forget()
        reporter.beat("step")
        if not self._announced:
            self._announced = True
            name = threading.current_thread().name
            reporter.notice(
                "note", f"the thread {name!r} trains from now on; the one before stopped"
            )
