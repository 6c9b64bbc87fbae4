"""When a savepoint is taken, and how the probe itself goes back with the job.

The probe's own counters (tokens, applied steps) travel inside the savepoint. `Savepoints` does the
work; here is only what belongs to the probe.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Dict, List

from .errors import Refused
from .learning_rate import Ramp

if TYPE_CHECKING:
    from .probe import Probe


class Rollbacks:
    """The savepoints of one rank.

    Attributes:
        result: what the optimizer's step is about to return to the job.
        why_not: why no rollback is possible in this job, "" while it is.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._savepoints: Any = None
        self._next = 0
        self._unfinished: Dict[int, Dict[str, float]] = {}
        self.result: Any = None
        self.why_not = ""
        wanted = probe.config.savepoints
        if not wanted:
            self.why_not = "no savepoints are kept"
            return
        if probe.world_size > 1:
            self.why_not = f"{probe.world_size} ranks need step-fenced commands"
            return
        from .savepoints import Savepoints

        self._every = max(1, int(wanted["every"]))
        self._savepoints = Savepoints(
            probe.torch, probe.registry, int(wanted["keep"]), int(wanted["max_bytes"])
        )

    def never(self, why: str) -> None:
        """No rollback can work in this job, as is known from elsewhere."""
        if self._savepoints is not None:
            self._savepoints = None
            self._probe.notice("rollback-unavailable", f"no rollback is possible: {why}")
        self.why_not = why

    @property
    def steps(self) -> List[int]:
        """The steps that can be gone back to."""
        return [] if self._savepoints is None else list(self._savepoints.steps)

    def due(self) -> bool:
        """Whether it is time for a savepoint. A step that was not finite is nothing to keep."""
        late_enough = self._probe.boundary.number > self._next
        return late_enough and self._savepoints is not None and self._probe.finite

    def regular(self) -> None:
        """Take the savepoint that is due."""
        probe = self._probe
        step = probe.boundary.number - 1
        began = monotonic_ns()
        try:
            self.take()
        except Refused as problem:
            probe.notice("rollback-unavailable", f"no rollback is possible: {problem}")
        self._next = self._multiple_behind(step)
        probe.boundary.hold(monotonic_ns() - began)

    def take(self) -> Dict[str, Any]:
        """Keep the state behind the last step.

        Raises:
            Refused: a rollback can never work in this job; none is tried again.
        """
        if self._savepoints is None:
            raise Refused(self.why_not)
        from .savepoints import CannotRestore

        probe = self._probe
        step = probe.boundary.number - 1
        state = probe.state()
        result = self.result
        if isinstance(result, probe.torch.Tensor):
            result = result.detach().clone()
        try:
            taken: Dict[str, Any] = self._savepoints.take(
                step, probe.boundary.attempt, (state, result)
            )
        except CannotRestore as problem:
            self._savepoints, self.why_not = None, str(problem)
            raise Refused(str(problem)) from problem
        if probe.publisher.waiting:  # this step's own counts are still on a device
            kept = set(self.steps)
            self._unfinished = {k: v for k, v in self._unfinished.items() if k in kept}
            self._unfinished[step] = state
        probe.status_changed()
        return taken

    def finished(self, step: int) -> None:
        """The frame of `step` is complete: so are the counts that its savepoint holds."""
        state = self._unfinished.pop(step, None)
        if state is not None:
            state.update(self._probe.state())

    def do_savepoint(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `savepoint`."""
        return self.take()

    def do_rollback(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `rollback`: `{"before_step", "rng", "rewarm": {"start", "steps"} or None}`."""
        probe, rewarm = self._probe, args.get("rewarm")
        from_step = probe.boundary.number - 1
        result = self.back(int(args["before_step"]), str(args.get("rng", "restore")))
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
        from .savepoints import CannotRestore

        probe = self._probe
        try:
            restored, (state, self.result) = self._savepoints.restore(before_step, rng)
        except CannotRestore as problem:
            raise Refused(str(problem)) from problem
        probe.publisher.flush()
        for collector in probe.collectors.values():
            collector.rewind(state)
        step = int(restored["step"])
        probe.boundary.rewind(step)
        probe.sampling.begin(probe.boundary.number, monotonic_ns())
        probe.drills.end_all()
        self._next = self._multiple_behind(step)
        probe.status_changed()
        return dict(restored)

    def _multiple_behind(self, step: int) -> int:
        return (step // self._every + 1) * self._every
