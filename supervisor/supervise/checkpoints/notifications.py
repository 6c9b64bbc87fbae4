"""Output of the checkpoint guard: events for the loop, values for frames, notes for people."""

from __future__ import annotations

from collections import deque

from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.events import Event, Notice
from ..inputs import clock
from .registry import Entry

METRICS = ("checkpoint_ok", "checkpoint_size")


class CheckpointNotifications:
    """Queues filled by any thread and drained by the loop. No method blocks.

    Attributes:
        delivered: ids of the checkpoints whose event the loop has taken.
    """

    def __init__(self) -> None:
        self._events: deque[Notice] = deque()
        self._frames: deque[dict[str, float]] = deque()
        self._notes: set[str] = set()
        self.delivered: set[str] = set()

    def verdict(self, entry: Entry, ok: bool | None) -> None:
        """Report the result of a verification; None: it could not be verified."""
        if ok is None:
            why = "; ".join(entry.problems)
            self.note(f"checkpoint {entry.id} in {entry.path} could not be verified: {why}")
        elif ok:
            self.verified(entry)
        else:
            self.bad(entry)

    def verified(self, entry: Entry, *, first: bool = True) -> None:
        """Report a good checkpoint; the `first` report also fills the metrics of a frame."""
        size = f"{entry.bytes:,} bytes in {entry.path}"
        if entry.resumable == WEIGHTS_ONLY:
            size += "; it holds weights only: the job cannot resume its optimizer from it"
        self._event(entry, True, f"was verified: {size}", measured=first)

    def bad(self, entry: Entry) -> None:
        """Report a bad checkpoint."""
        damage = "; ".join(entry.problems[:3])
        self._event(entry, False, f"is bad: {damage}", measured=True, damage=damage)

    def unavailable(self, entry: Entry, why: str) -> None:
        """Report that a checkpoint is no longer available for a rollback."""
        self._event(entry, False, f"is no longer available: {why}", measured=False)

    def foreign(self, entry: Entry) -> None:
        """Report a checkpoint that is not the job's own, once per reason."""
        why = "; ".join(entry.problems)
        self.note(
            f"{entry.path} is left alone: {why}; `supervise checkpoints RUN` lists all such files",
            once=f"foreign {entry.how} {why}",
        )

    def note(self, sentence: str, once: str = "") -> None:
        """Queue a note for people; notes with the same `once` key are queued once."""
        if once and once in self._notes:
            return
        self._notes.add(once)
        self._events.append(Notice(clock.monotonic_ns(), "note", sentence))

    def take(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events: list[Event] = []
        while self._events:
            event = self._events.popleft()
            events.append(event)
            if event.kind == "checkpoint":
                self.delivered.add(event.data["id"])
        return events

    def frame(self) -> dict[str, float]:
        """Return the metrics of the next checkpoint, `{}` if there is none."""
        return self._frames.popleft() if self._frames else {}

    def _event(
        self, entry: Entry, ok: bool, what: str, *, measured: bool, damage: str = ""
    ) -> None:
        if measured:
            values = [float(ok)]
            # Tensors only: other files in a checkpoint grow independently.
            if ok:
                values.append(float(entry.tensor_bytes or entry.bytes))
            self._frames.append(dict(zip(METRICS, values, strict=False)))
        data = {
            "id": entry.id,
            "step": entry.step,
            "attempt": entry.attempt,
            "path": entry.path,
            "ok": ok,
            "bytes": entry.bytes,
            "seconds": entry.seconds,
            "problems": list(entry.problems),
            "resumable": entry.resumable,
            "damage": damage,
        }
        step = entry.step if entry.step >= 0 else None
        of = "" if step is None else f" of step {step}"
        message = f"checkpoint {entry.id}{of} {what}"
        now_ns = clock.monotonic_ns()
        self._events.append(Notice(now_ns, "checkpoint", message, step=step, data=data))
