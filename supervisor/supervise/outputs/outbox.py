"""Messages to people, off the loop: every channel has a queue and a thread of its own.

Rule: `post` never waits for a network, a terminal or a disk. What came of each message is told
through a callback, for the audit log; a failed delivery changes nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from ..core.model.decisions import Decision
from ..core.model.interfaces import Message
from . import channel_health
from .channel_health import Trouble
from .channel_queue import ChannelQueue
from .messages import Result, Sender, Undelivered

__all__ = ["Outbox", "Result", "Sender", "Trouble", "Undelivered", "message_of"]

CONSOLE = "console"
DRAIN_S = 5.0
CONSOLE_SHARE = 0.1  # of the time that draining may take: what the others came to is told there
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
        self._lanes = [ChannelQueue(sender, on_result, monotonic, backoff_s) for sender in senders]
        self._newest: tuple[Message, str] | None = None
        self._broken: dict[str, Trouble] = {}  # as they are; people have been told of each
        self._said = 0

    def post(self, message: Message, *, key: str) -> None:
        """Queue `message` for every channel that wants its severity; returns at once.

        A channel that has heard of an incident hears all further words on it, so that nobody waits
        for an end that has come.

        Args:
            key: unique per message and constant over restarts: receivers drop repetitions by it.
        """
        self._newest = message, key
        for lane in self._lanes:
            lane.put(message, key)

    @property
    def channels(self) -> list[str]:
        """Names of the channels."""
        return [lane.name for lane in self._lanes]

    def resume(
        self, messages: Sequence[tuple[Message, str, float]], settled: Mapping[str, Collection[str]]
    ) -> int:
        """Queue what an outbox before this one did not come to; its channels only.

        Args:
            messages: all that were ever posted, each with its key and when that was, in seconds on
                the monotonic clock.
            settled: channel of the one before -> keys whose outcome is known.

        Returns:
            The number of messages that are still owed to a channel.
        """
        owed = set()
        for lane in self._lanes:
            if lane.name not in settled:
                continue
            for message, key, due_s in messages:
                if key in settled[lane.name]:
                    lane.heard(message.incident)
                elif lane.put(message, key, due_s=due_s):
                    self._newest = message, key
                    owed.add(key)
        return len(owed)

    def backlog(self) -> dict[str, dict[str, int]]:
        """Return `{channel: {"waiting": n, "held": n}}`, for the status."""
        return {lane.name: lane.backlog() for lane in self._lanes}

    def look(self) -> list[Trouble]:
        """Return which channels are broken. The others are told once of each, and of its mending.

        To be called now and then by the thread that posts; returns at once.
        """
        for lane in self._lanes:
            trouble, before = lane.trouble(), self._broken.get(lane.name)
            if trouble is not None:
                self._broken[lane.name] = trouble
                if before is None:
                    told = partial(channel_health.broken, trouble, now=self._monotonic())
                    self._say(told, [other for other in self._lanes if other is not lane])
            elif before is not None:
                del self._broken[lane.name]
                # Who reads nothing else must know what is missing there.
                readers = [each for each in self._lanes if each is not lane or before.lost]
                self._say(partial(channel_health.mended, before), readers)
        return list(self._broken.values())

    def _say(self, told: Callable[[Message], Message], lanes: Iterable[ChannelQueue]) -> None:
        """Post a word on a channel to others: to the console whatever it wants to hear of."""
        if self._newest is None:
            return
        self._said += 1
        message, key = self._newest  # no key of the same run is given twice, so neither is this
        for lane in lanes:
            if not lane.ending:
                lane.put(told(message), f"{key}:channel-{self._said}", anyhow=lane.name == CONSOLE)

    def cut_short(self) -> None:
        """Let `close`, on another thread, wait no longer for anybody's answer."""
        for lane in self._lanes:
            lane.cut_short()

    def close(self, deadline_s: float = DRAIN_S) -> None:
        """Deliver what waits, most severe first, and return after `deadline_s` at the latest.

        The console comes last, so that it can say which other channel did not deliver.
        """
        began = self._monotonic()
        near = [lane for lane in self._lanes if lane.name == CONSOLE]
        far = [lane for lane in self._lanes if lane.name != CONSOLE]
        for lanes, share in ((far, 1.0 - CONSOLE_SHARE if near else 1.0), (near, 1.0)):
            until = began + share * deadline_s
            for lane in lanes:
                lane.drain(until)
            for lane in lanes:
                lane.join(max(until - self._monotonic(), 0.0))
            self.look()

    def undelivered(self) -> list[Undelivered]:
        """End all channels, also where `close` was cut short, and return the pages they owe.

        Each page is returned once. The terminal owes none: nobody reads it later.
        """
        far = [lane for lane in self._lanes if lane.name != CONSOLE]
        return [page for lane in far for page in lane.undelivered()]
