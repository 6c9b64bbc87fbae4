"""Messages to people, off the loop: every channel has a queue and a thread of its own.

Rule: `post` never waits for a network, a terminal or a disk. What came of each message is told
through a callback, for the audit log; a failed delivery changes nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..core.shapes import Message
from ..core.values import Decision
from .lane import Lane, Result, Sender

__all__ = ["Outbox", "Result", "Sender", "message_of"]

DRAIN_S = 5.0
BACKOFF_S = 1.0


def message_of(decision: Decision, run: str, audit_head: str) -> Message:
    """Return what people are told by a `notify_intent`."""
    said = decision.data["message"]
    return Message(
        run=run,
        incident=decision.incident,
        severity=said["severity"],
        title=said["title"],
        verdict=said["verdict"],
        why=said["why"],
        next=said["next"],
        step=said["step"],
        audit_head=audit_head,
    )


class Outbox:
    """Fans messages out to the channels."""

    def __init__(
        self,
        senders: Iterable[Sender],
        on_result: Callable[[Result], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """Start one thread per sender.

        Args:
            on_result: called once for each message that a channel accepted, on that channel's
                thread (or on the caller's of `post` and `close`); it should only queue.
            backoff_s: pause after a first failed try; it doubles from try to try.
        """
        self._monotonic = monotonic
        self._lanes = [Lane(sender, on_result, monotonic, backoff_s) for sender in senders]

    def post(self, message: Message, *, key: str) -> None:
        """Queue `message` for every channel that wants its severity; returns at once.

        A channel that has heard of an incident hears all further words on it, so that nobody waits
        for an end that has come.

        Args:
            key: unique per message and constant over restarts: receivers drop repetitions by it.
        """
        for lane in self._lanes:
            lane.put(message, key)

    @property
    def channels(self) -> list[str]:
        """Names of the channels."""
        return [lane.name for lane in self._lanes]

    def resume(
        self, messages: Sequence[tuple[Message, str]], settled: Mapping[str, Collection[str]]
    ) -> int:
        """Queue what an outbox before this one did not come to; its channels only.

        Args:
            messages: all that were ever posted, each with its key.
            settled: channel of the one before -> keys whose outcome is known.

        Returns:
            The number of messages that are still owed to a channel.
        """
        owed = set()
        for lane in self._lanes:
            if lane.name not in settled:
                continue
            for message, key in messages:
                if key in settled[lane.name]:
                    lane.heard(message.incident)
                elif lane.put(message, key):
                    owed.add(key)
        return len(owed)

    def backlog(self) -> dict[str, dict[str, int]]:
        """Return `{channel: {"waiting": n, "held": n}}`, for the status."""
        return {lane.name: lane.backlog() for lane in self._lanes}

    def close(self, deadline_s: float = DRAIN_S) -> None:
        """Deliver what waits, most severe first, and return after `deadline_s` at the latest."""
        until = self._monotonic() + deadline_s
        for lane in self._lanes:
            lane.drain(until)
        for lane in self._lanes:
            lane.join(max(until - self._monotonic(), 0.0))
