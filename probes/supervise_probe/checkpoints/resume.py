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
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

if TYPE_CHECKING:
    from ..context import ProbeContext

    Call = Tuple[Tuple[Any, ...], Dict[str, Any]]

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
        bound = call()
        self._instead_of = bound.arguments.get(parameter)
        bound.arguments[parameter] = self._path
        return bound.args, bound.kwargs

    def began(self, step: int, inexact: str) -> None:
        """Report the outcome of the order: the library starts training at `step` of its own count.

        Args:
            inexact: what it does not restore, "" for nothing.
        """
        if not self._path or not self._open():
            return
        path, self._path = self._path, ""
        if self._refusal:
            self._refuse(path, self._refusal, step)
            return
        asked = "" if self._instead_of is None else f"; the job asked for {self._instead_of!r}"
        for optimizer in list(self._registry.optimizers):
            self._appeared(optimizer)  # for its first batch
        but = f"; {inexact}" if inexact else ""
        data = {"how": "library", "path": path, "step": step, "inexact": inexact}
        message = f"training continues at step {step} from {path}{asked}{but}"
        self._reporter.notice("resumed", message, data)

    def opened(self) -> None:
        """Refuse the order if no library has started: the process is a rank now."""
        if not self._asked:
            self._asked = True
            path, self._path = self._path, ""
            self._refuse(path, ACCELERATE if "accelerate" in sys.modules else UNUSED, made=0)

    def _refuse(self, path: str, why: str, made: int) -> None:
        """Report that the job trains from its own start; it has made `made` steps."""
        self._from_its_start(made)
        data = {"how": "library", "path": path}
        self._reporter.notice("resume-refused", f"training did not resume from {path}: {why}", data)
