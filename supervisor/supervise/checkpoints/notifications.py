"""What the guard has to say: events for the loop, values for frames, sentences for people."""

from __future__ import annotations

from collections import deque

from ..core.model.events import Event, Notice
from ..inputs import clock
from .registry import Entry

METRICS = ("checkpoint_ok", "checkpoint_size")


class CheckpointNotifications:
    """Collects from any thread; the loop takes. Nothing here waits.

    Attributes:
        delivered: ids of the checkpoints that the loop has heard of.
    """

    def __init__(self) -> None:
        self._events: deque[Notice] = deque()
        self._frames: deque[dict[str, float]] = deque()
        self._said: set[str] = set()
        self.delivered: set[str] = set()

    def judged(self, entry: Entry, ok: bool | None) -> None:
        """Tell the verdict; None: there can be none, people should know why."""
        if ok is None:
            why = "; ".join(entry.problems)
            self.say(f"checkpoint {entry.id} in {entry.path} is not verified: {why}")
        elif ok:
            self.verified(entry)
        else:
            self.bad(entry)

    def verified(self, entry: Entry, *, first: bool = True) -> None:
        """Tell that a checkpoint is good; with the `first` word a frame gets its numbers."""
        size = f"{entry.bytes:,} bytes in {entry.path}"
        self._tell(entry, True, f"was verified: {size}", first)

    def bad(self, entry: Entry) -> None:
        """Tell that it is bad."""
        self._tell(entry, False, f"is bad: {'; '.join(entry.problems[:3])}", True)

    def gone(self, entry: Entry, why: str) -> None:
        """Tell that it cannot be gone back to any more."""
        self._tell(entry, False, f"is gone: {why}", False)

    def alien(self, entry: Entry) -> None:
        """Tell that one is not the job's own; of the first that is so for a reason."""
        why = "; ".join(entry.problems)
        self.say(
            f"{entry.path} is left alone: {why}; so is what else `supervise checkpoints` calls so",
            once=f"alien {entry.how} {why}",
        )

    def say(self, sentence: str, once: str = "") -> None:
        """Tell people something, of the same `once` only the first time."""
        if once and once in self._said:
            return
        self._said.add(once)
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
        """Return the values of the next checkpoint, `{}` if none."""
        return self._frames.popleft() if self._frames else {}

    def _tell(self, entry: Entry, ok: bool, what: str, measured: bool) -> None:
        if measured:
            values = [float(ok)]
            if ok:  # of tensors: what a library writes beside them grows by its own rules
                values.append(float(entry.tensors or entry.bytes))
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
        }
        step = entry.step if entry.step >= 0 else None
        of = "" if step is None else f" of step {step}"
        message = f"checkpoint {entry.id}{of} {what}"
        now_ns = clock.monotonic_ns()
        self._events.append(Notice(now_ns, "checkpoint", message, step=step, data=data))
