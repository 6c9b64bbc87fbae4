"""When a savepoint is taken, and how the probe itself goes back with the job.

The probe's own counters (tokens, applied steps) travel inside the savepoint. `Savepoints` does the
work; here is only what belongs to the probe, with what else going back needs: the tape, the steps
to skip, and the savepoints for another process.
"""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

from ..capture import optimizer_reset
from ..errors import Refused
from ..runtime.background import Background
from ..torch_state.learning_rate import Ramp
from . import skip_ranges
from .batch_replay import BatchTape
from .cross_process import Handover
from .reference_batch import ProbeBatch
from .step_history import Tape

if TYPE_CHECKING:
    from ..probe import Probe


class Rollbacks:
    """The savepoints of one rank.

    Attributes:
        background: for what is written to disk beside the training.
        tape: the newest steps. skips: those whose update is dropped.
        batches: what loaders gave since the oldest savepoint, None where none can go back.
        handover: savepoints for another process, and the one that this process begins with.
        probe_batch: tells whether weights that were gone back to are those that were kept.
        result: what the optimizer's step is about to return to the job.
        why_not: why no rollback is possible in this job, "" while it is.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._savepoints: Any = None
        self._next, self._every = 0, 1
        self._waits = ""  # why no savepoint is taken for now, as it was told
        self._unfinished: Dict[int, Dict[str, float]] = {}
        self.result: Any = None
        self.why_not = ""
        self.background = Background()
        self.tape = Tape(probe, self.background)
        self.skips = skip_ranges.Skips(probe, self.tape)
        self.handover = Handover(probe, self)
        self.probe_batch = ProbeBatch(probe, self)
        self.batches: Optional[BatchTape] = None
        wanted = probe.config.savepoints
        if not wanted:
            self.why_not = "no savepoints are kept"
            return
        if probe.world_size > 1:
            self.why_not = f"{probe.world_size} ranks need step-fenced commands"
            return
        from .manager import Savepoints

        self._every = max(1, int(wanted["every"]))
        max_bytes = int(wanted["max_bytes"])
        self.batches = BatchTape(probe, max_bytes)
        self._savepoints = Savepoints(
            probe.torch,
            probe.registry,
            int(wanted["keep"]),
            max_bytes,
            wanted.get("spill", os.path.dirname(probe.config.marks)),
            self.batches,
            wanted.get("max_disk_bytes"),
        )

    def never(self, why: str) -> None:
        """No rollback can work in this job, as is known from elsewhere."""
        if self._savepoints is not None:
            self._savepoints, self.batches = None, None
            self._probe.notice("rollback-unavailable", f"no rollback is possible: {why}")
        self.why_not = why

    @property
    def steps(self) -> List[int]:
        """The steps that can be gone back to."""
        return [] if self._savepoints is None else list(self._savepoints.steps)

    def due(self) -> bool:
        """Whether it is time for a savepoint. A step that was not finite is nothing to keep.

        While an older one is on its way to the disk, the next has to wait.
        """
        if self.handover.wants_a_word:
            return True
        if self._probe.boundary.number <= self._next or self._savepoints is None:
            return False
        return self._probe.finite and not self._savepoints.busy

    def regular(self) -> None:
        """Take the savepoint that is due, or go on from that of another process."""
        probe = self._probe
        if self.handover.wants_a_word:
            self.handover.speak()
            return
        step = probe.boundary.number - 1
        began = monotonic_ns()
        try:
            self.take()
        except Refused as problem:
            if self._savepoints is None:
                probe.notice("rollback-unavailable", f"no rollback is possible: {problem}")
            elif str(problem) != self._waits:
                self._waits = str(problem)
                probe.notice("note", f"no savepoint is taken for now: {problem}")
        else:
            self._waits = ""
            for trouble in self._savepoints.troubles():
                probe.notice("note", f"{trouble}; it is given up when its memory is needed")
        self._next = self._multiple_behind(step)
        probe.boundary.hold(monotonic_ns() - began)

    def take(self) -> Dict[str, Any]:
        """Keep the state behind the last step.

        Raises:
            Refused: a rollback can never work in this job, and none is tried again; or the disk
                is busy with an older savepoint, or one that is to stay leaves no room.
        """
        if self._savepoints is None:
            raise Refused(self.why_not)
        from .manager import Busy, CannotRestore

        probe = self._probe
        step = probe.boundary.number - 1
        state = probe.state()
        result = self.result
        if isinstance(result, probe.torch.Tensor):
            result = result.detach().clone()
        self.probe_batch.join(state)
        self._savepoints.spare(probe.writer.spare_before(monotonic_ns()))
        try:
            taken: Dict[str, Any] = self._savepoints.take(
                step, probe.boundary.attempt, (state, result)
            )
        except Busy as problem:
            raise Refused(str(problem)) from problem
        except CannotRestore as problem:
            self._savepoints, self.batches, self.why_not = None, None, str(problem)
            raise Refused(str(problem)) from problem
        self.handover.took(self._savepoints)
        if probe.publisher.waiting:  # this step's own counts are still on a device
            kept = set(self.steps)
            self._unfinished = {k: v for k, v in self._unfinished.items() if k in kept}
            self._unfinished[step] = state
        probe.status_changed()
        return taken

    def finished(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """The frame of `step` is complete: so are the counts that its savepoint holds."""
        self.tape.remember(step, attempt, values)
        state = self._unfinished.pop(step, None)
        if state is not None:
            state.update(self._probe.state())

    def do_savepoint(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `savepoint`."""
        return self.take()

    def do_rollback(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `rollback`.

        Args:
            args: `before_step`; `rng`: "restore" or "keep"; `rewarm`: `{"start", "steps"}` or None;
                `skip`: the first and the last step whose update is dropped when it comes again;
                `moments`: "restore" or "zero".
        """
        probe, rewarm, skip = self._probe, args.get("rewarm"), args.get("skip")
        rng, zero = str(args.get("rng", "restore")), args.get("moments") == "zero"
        from_step = probe.boundary.number - 1
        steps = skip_ranges.parse(skip) if skip is not None else None
        if steps is not None and rng != "restore":
            raise Refused("skip needs rng=restore, which brings the same batches again")
        if zero:
            optimizer_reset.check(probe.boundary.optimizers())
        result = self.back(int(args["before_step"]), rng)
        if zero:
            optimizer_reset.zero(probe.torch, probe.boundary.optimizers())
        if steps is not None:
            self.skips.order(*steps)
        if rewarm:
            probe.rate.warming = Ramp(float(rewarm["start"]), int(rewarm["steps"]))
        return {**result, "attempt": probe.boundary.attempt, "from_step": from_step}

    def back(self, before_step: int, rng: str) -> Dict[str, Any]:
        """Go back to the newest savepoint before `before_step`.

        Raises:
            Refused: there is none, or it cannot be restored here.
        """
        if self._savepoints is None:
            raise Refused(self.why_not)
        from .manager import CannotRestore

        probe = self._probe
        try:
            restored, (state, self.result) = self._savepoints.restore(before_step, rng)
        except CannotRestore as problem:
            raise Refused(str(problem)) from problem
        probe.publisher.flush()
        for collector in probe.collectors.values():
            collector.rewind(state)
        self.went_to(int(restored["step"]), probe.boundary.attempt + 1, self.result)
        if rng == "restore":
            self.tape.expect(int(restored["step"]) + 1, exact=True)
        else:
            self.tape.expect_nothing()
        self.probe_batch.restored(state)
        return dict(restored)

    def went_to(self, step: int, attempt: int, result: Any) -> None:
        """The job stands behind `step` again, which returned `result`: so does the probe."""
        probe = self._probe
        self.result = result
        probe.boundary.rewind(step, attempt)
        probe.sampling.begin(probe.boundary.number, monotonic_ns())
        probe.drills.end_all()
        self._next = self._multiple_behind(step)
        self.handover.went_to(step)
        probe.status_changed()

    def close(self) -> None:
        """The process ends."""
        try:
            if self._savepoints is not None:
                self._savepoints.close()
        finally:
            if self.handover.close():  # else the background may be at the tape's own file
                self.tape.close()

    def _multiple_behind(self, step: int) -> int:
        return (step // self._every + 1) * self._every
