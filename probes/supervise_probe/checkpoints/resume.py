"""Resuming from a checkpoint that a library wrote, in a job whose own call does not ask for it.

The script may have no argument by which it resumes. Where a library trains, its own call can be
given the checkpoint: `Trainer.train(resume_from_checkpoint=...)` of transformers, and `ckpt_path`
of Lightning's `Trainer.fit`. This applies to the first call of the process, on every rank; a later
one is another training of the same script.

The library decides how exact that is. transformers restores weights, optimizer, schedule, random
state and the position in the data: bit for bit, unless `ignore_data_skip` is set. Lightning
restores weights, optimizer, schedule and its counters, but no random state, and inside an epoch its
loader restarts that epoch: batches are repeated, and as many at its end are never used.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Optional

from .. import wire

if TYPE_CHECKING:
    from ..collectors.progress import FrameworkCollector
    from ..context import ProbeContext
    from ..torch_state.records import Position

if TYPE_CHECKING:
    from ..context import ProbeContext

    Call = tuple[tuple[Any, ...], dict[str, Any]]

UNUSED = (
    "this job makes its first step outside of Trainer.train and Lightning's fit, the only calls "
    "that can be given a checkpoint from outside; give the script an argument by which it resumes"
)
ACCELERATE = (
    "Accelerator.load_state has to be called by the script itself, between its own prepare and its "
    "own loop; give the script an argument by which it resumes"
)


class Resume:
    """The order to resume from a library's checkpoint, in one process."""

    def __init__(
        self,
        context: ProbeContext,
        open_: Callable[[], bool],
        appeared: Callable[[Any], None],
        from_its_start: Callable[[int], None],
    ) -> None:
        """Read the order.

        Args:
            open_: makes this process a rank, unless it is one; returns whether it is one.
            appeared: called with an optimizer before its first step.
            from_its_start: called when the job trains from its own start, with the steps made.
        """
        order = context.config.resume or {}
        self._registry, self._reporter = context.registry, context.reporter
        self._open, self._appeared, self._from_its_start = open_, appeared, from_its_start
        self._path = str(order["path"]) if order.get("how") == "library" else ""
        self._asked = not self._path  # no checkpoint to pass on, or it was passed
        self._refusal = ""
        self._instead_of: Any = None

    def steer(
        self,
        call: Callable[[], inspect.BoundArguments],
        parameter: str,
        unfit: Callable[[str], str],
    ) -> Optional[Call]:
        """Return a training call's arguments with the checkpoint; None: unchanged.

        Args:
            call: binds the arguments of the job.
            parameter: the one that names a checkpoint.
            unfit: returns why the library cannot resume from this path, "" where it can.
        """
        if self._asked:
            return None
        self._asked = True
        self._refusal = unfit(self._path)
        if self._refusal:
            return None
        target = call()
        self._instead_of = target.arguments.get(parameter)
        target.arguments[parameter] = self._path
        return target.args, target.kwargs

    def report_outcome(self, step: int, not_restored: str) -> None:
        """Report the outcome of the order: the library starts training at `step` of its own count.

        Args:
            not_restored: what it does not restore, "" for nothing.
        """
        if not self._path or not self._open():
            return
        path, self._path = self._path, ""
        if self._refusal:
            self._refuse(path, self._refusal, step)
            return
        requested = "" if self._instead_of is None else f"; the job asked for {self._instead_of!r}"
        for optimizer in list(self._registry.optimizers):
            self._appeared(optimizer)  # for its first batch
        but = f"; {not_restored}" if not_restored else ""
        data = {"how": "library", "path": path, "step": step, "inexact": not_restored}
        message = f"training continues at step {step} from {path}{requested}{but}"
        self._reporter.notice("resumed", message, data)

    def refuse_unstarted_order(self) -> None:
        """Refuse the order if no library has started: the process is a rank now."""
        if not self._asked:
            self._asked = True
            path, self._path = self._path, ""
            self._refuse(path, ACCELERATE if "accelerate" in sys.modules else UNUSED, attempts=0)

    def _refuse(self, path: str, reason: str, attempts: int) -> None:
        """Report that the job trains from its own start; it has made `made` steps."""
        self._from_its_start(attempts)
        data = {"how": "library", "path": path}
        self._reporter.notice(
            "resume-refused", f"training did not resume from {path}: {reason}", data
        )


REPORTED_MAX = 64  # paths
ENVELOPE = 96  # bytes of a letter beside message and data

Reported = dict[str, tuple[int, int]]  # path -> attempt and step


class SaveReports:
    """Reports a checkpoint once per path and step.

    Attributes:
        saving: a save is in progress; one inside another is part of it.
        batch_facts: returns what joins a report, about the probe batch.

    Args:
        settle: ends a step without an optimizer, if there is one.
    """

    def __init__(
        self, context: ProbeContext, library: FrameworkCollector, settle: Callable[[], None]
    ) -> None:
        self._position, self._reporter = context.position, context.reporter
        self._library, self._settle = library, settle
        self.batch_facts: Callable[[], dict[str, Any]] = dict
        self._counters: Callable[[], dict[str, float]] = dict
        self.saving = False

    def connect(
        self, batch_facts: Callable[[], dict[str, Any]], counters: Callable[[], dict[str, float]]
    ) -> None:
        """Add what these return to each report: about the probe batch, and the counters."""
        self.batch_facts, self._counters = batch_facts, counters

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self._position.step

    def enter_checkpoint_phase(self) -> None:
        """Set the phase "checkpoint": a save begins."""
        self.saving = True
        self._reporter.beat("checkpoint")

    def leave_checkpoint_phase(self) -> None:
        """Reset the phase: the save ended or raised."""
        self.saving = False
        self._reporter.beat("step")

    def report(
        self, reported: Reported, path: str, seconds: float, method: str, target: Any
    ) -> None:
        """Report a save, and add its time to the next frame.

        Args:
            reported: earlier reports of the same way of saving. path: the file, or its path.
        """
        self._settle()
        self._library.save_ended(seconds)
        position = self._position
        moment = (position.attempt, position.step)
        if reported.get(path) == moment:
            return
        while len(reported) >= REPORTED_MAX:
            del reported[next(iter(reported))]
        reported[path] = moment
        data = {
            "path": path,
            "step": position.step,
            "file": file_stamp(target, path),
            **self.facts(seconds, method),
            **self.batch_facts(),
        }
        self.send(f"step {position.step} was saved by {method}", data)

    def send(self, message: str, data: dict[str, Any]) -> None:
        """Report a save; what only an evaluation needs is left out where paths take the room."""
        if len(json.dumps([message, data], default=str).encode()) > wire.LETTER_ROOM - ENVELOPE:
            data.pop("evaluation", None)
            (data.get("probe_batch") or {}).pop("model", None)
        self._reporter.notice("checkpoint-saved", message, data)

    def facts(self, seconds: float, method: str) -> dict[str, Any]:
        """Return the facts of a save that has just ended."""
        return {**save_facts(self._position, seconds, method), "counters": self._counters()}


def save_facts(position: Position, seconds: float, method: str) -> dict[str, Any]:
    """Return the facts of any save; the supervisor reads them as a `SaveReport`."""
    return {
        "attempt": position.attempt,
        "seconds": round(seconds, 3),
        "how": method,
        "ranks": position.world_size,
        "python": sys.executable,
    }


def path_of_target(target: Any) -> str:
    """Return the absolute path of a path or of an open file with a name, else ""."""
    if not isinstance(target, (str, os.PathLike)):
        target = getattr(target, "name", None)
    if isinstance(target, os.PathLike):
        target = os.fspath(target)
    if not isinstance(target, str) or "://" in target:
        return ""
    return os.path.abspath(target)


def file_stamp(target: Any, path: str) -> Optional[dict[str, int]]:
    """Return what identifies the file after a rename, None where that is unknown.

    Device and inode, size in bytes, and time of writing by the clock of its file system.
    """
    try:
        number = target.fileno() if hasattr(target, "fileno") else path
        status = os.stat(number)
    except (OSError, ValueError):
        return None
    device, inode = status.st_dev, status.st_ino
    return {
        "device": device,
        "inode": inode,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
