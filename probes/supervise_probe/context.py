"""Context of a process: the objects that nearly every part needs, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict

if TYPE_CHECKING:
    from .config import Config
    from .runtime.guard import Gate, Guard
    from .runtime.scalars import Scalars
    from .torch_state.records import Position
    from .torch_state.registry import Registry


@dataclass(eq=False)
class ProbeContext:
    """One for each process: a forked child gets another.

    Attributes:
        torch: the job's module of that name.
        config: what the supervisor asked for.
        guard: runs pieces of the probe, and switches them off.
        gate: whether a hook must keep still.
        registry: which objects of the job are alive.
        scalars: brings numbers to the host.
        position: rank, step and attempt.
        reporter: beats, notices, status.
    """

    torch: Any
    config: Config
    guard: Guard
    gate: Gate
    registry: Registry
    scalars: Scalars
    position: Position
    reporter: Reporter


class Refused(Exception):  # noqa: N818, it is an answer and not a fault
    """A command that cannot be carried out; the text is one sentence for people, `facts` for us."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


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
