"""Right behind a step that ended on time: a savepoint, the status, commands of the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..control.commands import Commands
    from ..savepoints.controller import RollbackController
    from .step_tracker import StepTracker


class BetweenSteps:
    """The one place where the probe may hold the job, restore its weights, or stop it."""

    def __init__(self, context: ProbeContext, tracker: StepTracker) -> None:
        self._context, self._tracker = context, tracker
        self._rollbacks: Any = (
            None  # `RollbackController` and `Commands`, once the process is a rank
        )
        self._commands: Any = None

    def connect(self, rollbacks: RollbackController, commands: Commands) -> None:
        """The process is a rank from now on."""
        self._rollbacks, self._commands = rollbacks, commands

    def cross(self) -> None:
        """If a step has just ended on time: keep a savepoint, obey commands.

        Raises:
            KeyboardInterrupt: the supervisor wants the job to stop.
        """
        tracker, context = self._tracker, self._context
        if not tracker.on_time or not context.gate.on:
            return
        tracker.on_time = False
        guard, rollbacks = context.guard, self._rollbacks
        guard.turn()
        if rollbacks.due():
            guard.run(guard.part("savepoints", share=1.0), rollbacks.take_due)
        if context.reporter.status_due():
            guard.run(guard.core, context.reporter.write_status)
        self._commands.run()
