"""Reports of this process to the supervisor beside its frames: beats, notices, its status."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, Callable, Dict

STATUS_EVERY = 64  # steps between two statuses when nothing happened


class Reporter:
    """Silent until the process is a rank.

    Attributes:
        writer: of this rank's segment, None before there is one.
        phase: of the newest beat.
        held: the job is paused: its status cannot wait for the end of a step.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.writer: Any = None
        self._mailbox: Any = None
        self._phases: Dict[str, int] = {}
        self._describe: Callable[[], Dict[str, Any]] = dict
        self.phase, self.held = "", False
        self._due, self._age = True, 0

    def connect(
        self,
        writer: Any,
        mailbox: Any,
        phases: Dict[str, int],
        describe: Callable[[], Dict[str, Any]],
    ) -> None:
        """The process is a rank from now on.

        Args:
            phases: number of each phase on the wire. describe: returns the status.
        """
        self.writer, self._mailbox = writer, mailbox
        self._phases, self._describe = phases, describe

    def beat(self, phase: str) -> None:
        """Show a sign of life."""
        if self.writer is not None:
            self.phase = phase
            self.writer.beat(monotonic_ns(), self._phases[phase])

    def notice(self, kind: str, message: str, data: Any = None, step: int = -1) -> None:
        """Say something about the watching itself, at the step under way or at `step`."""
        if self._mailbox is not None:
            notice_step = self._position.step if step < 0 else step
            self._mailbox.notice(kind, message, notice_step, data or {})
            self.status_changed()

    def status_changed(self) -> None:
        """The status is to be written at the next boundary; at once while the job is held."""
        self._due = True
        if self.held:
            self.write_status()

    def status_due(self) -> bool:
        """A step ended: whether the status is to be written now."""
        self._age += 1
        return self._due or self._age >= STATUS_EVERY

    def write_status(self) -> None:
        """Write it now."""
        self._due, self._age = False, 0
        if self.writer is not None:
            self.writer.status(self._describe())


class Position:
    """Written by the wiring (rank) and by the step tracker; read by nearly every part.

    Attributes:
        rank, world_size: as the process group or the launcher says.
        step: number of the one under way.
        attempt: counts launches and rollbacks of the run.
        held_ns: since the last step ended, the time in which the probe held the job: it is no part
            of a step's time.
    """

    __slots__ = ("attempt", "held_ns", "rank", "step", "world_size")

    def __init__(self, step: int, attempt: int) -> None:
        self.rank, self.world_size = 0, 1
        self.step, self.attempt = step, attempt
        self.held_ns = 0
