"""Messages to people: every channel has a queue and a thread of its own.

Rule: `post` never waits for a network, a terminal or a disk. A callback reports the outcome of each
message for the audit log; a failed delivery changes nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import cast

from ..core.model.decisions import Notified
from ..core.model.interfaces import Kind, Message, Severity, fill_paths
from ..core.run_notices import news_of
from . import delivery
from ._channel_settings import Route, Sender
from .delivery import Backlog, ChannelQueue, Result, Trouble, Undelivered

__all__ = ["Outbox", "Result", "Sender", "Trouble", "Undelivered", "message_of"]

CONSOLE = "console"
DRAIN_S = 5.0
CONSOLE_SHARE = 0.1  # of the draining time: it reports the failures of the others
BACKOFF_S = 1.0


def message_of(
    decision: Notified, run: str, audit_head: str, directory: str = "RUN", job: str = "COMMAND"
) -> Message:
    """Return the message of a `notify_intent`.

    Its commands name `directory` in place of RUN, and `job` in place of COMMAND.
    """
    text = decision.message
    return Message(
        run=run,
        incident=decision.incident,
        severity=cast(Severity, text.severity),
        title=text.title,
        news=news_of(text),
        verdict=fill_paths(text.verdict, directory),
        why=fill_paths(text.why, directory),
        next=text.advice.filled(directory, job),
        step=text.step,
        audit_head=audit_head,
        directory=directory,
        kind=cast(Kind, text.kind),
        rules=tuple(text.rules),
        request=text.request,
        acknowledged_by=text.acknowledged_by,
        incident_severity=text.incident_severity,
        form=text.form,
        rule=str(text.facts.get("rule", "")),
        subject=str(text.facts.get("subject", "")),
        to_all=text.to_all,
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
        routes: Mapping[str, Route] | None = None,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Start one thread per sender.

        Args:
            on_result: called once for each message that a channel accepted, on that channel's
                thread (or on the caller's of `post` and `close`); it should only queue.
            backoff_s: pause after a first failed try; it doubles from try to try.
            routes: channel -> which messages it takes; all where it is not in it.
            wall: the time of day, for quiet hours.
        """
        self._monotonic = monotonic
        self._queues = [
            ChannelQueue(
                sender, on_result, monotonic, backoff_s, (routes or {}).get(sender.name), wall
            )
            for sender in senders
        ]
        self._newest: tuple[Message, str] | None = None
        self._failed: dict[str, Trouble] = {}  # reported to the other channels
        self._posts = 0
        self._far: set[str] = set()  # requests that a channel other than the console has

    def post(self, message: Message, *, key: str) -> bool:
        """Queue `message` for every channel that takes its severity; returns at once.

        A channel that was notified of an incident gets all further messages on it, down to its end.

        Args:
            key: unique per message and constant over restarts; receivers deduplicate by it.

        Returns:
            Whether a channel took it.
        """
        self._newest = message, key
        channels = [queue.name for queue in self._queues if queue.put(message, key)]
        self._note_request(message, channels)
        return bool(channels)

    def reaches_people(self, result: Result) -> bool:
        """Return whether a request was delivered by a channel that people are known to read.

        That is any but the console, which may be a file, unless no other has the request.
        """
        near = result.channel == CONSOLE and result.request in self._far
        return bool(result.ok and result.request) and not near

    def _note_request(self, message: Message, channels: Collection[str]) -> None:
        if message.request and {*channels} - {CONSOLE}:
            self._far.add(message.request)

    @property
    def channels(self) -> list[str]:
        """Names of the channels."""
        return [queue.name for queue in self._queues]

    def resume(
        self, messages: Sequence[tuple[Message, str, float]], settled: Mapping[str, Collection[str]]
    ) -> int:
        """Queue the messages without an outcome in the outbox of a supervisor that died.

        Args:
            messages: all that were posted, each with its key and time on the monotonic clock.
            settled: channel of that outbox -> keys with a known outcome. Other channels get none.

        Returns:
            The number of messages queued for at least one channel.
        """
        queued_keys = set()
        for queue in self._queues:
            if queue.name not in settled:
                continue
            for message, key, due_s in messages:
                if key in settled[queue.name]:
                    queue.mark_reached(message.incident)
                elif queue.put(message, key, due_s=due_s):
                    self._note_request(message, [queue.name])
                    self._newest = message, key
                    queued_keys.add(key)
        return len(queued_keys)

    def backlog(self) -> dict[str, Backlog]:
        """Return how many messages wait for each channel."""
        return {queue.name: queue.backlog() for queue in self._queues}

    def check_channels(self) -> list[Trouble]:
        """Return the failed channels; the others get one message per failure and recovery.

        Called now and then by the thread that posts; returns at once.
        """
        for queue in self._queues:
            trouble, previous = queue.trouble(), self._failed.get(queue.name)
            if trouble is not None:
                self._failed[queue.name] = trouble
                if previous is None:
                    make = partial(delivery.build_failed_message, trouble, now=self._monotonic())
                    self._notify(
                        make,
                        [other_queue for other_queue in self._queues if other_queue is not queue],
                    )
            elif previous is not None:
                del self._failed[queue.name]
                # Readers of this channel only must know what it has lost.
                readers = [
                    reader for reader in self._queues if reader is not queue or previous.lost
                ]
                self._notify(partial(delivery.build_recovered_message, previous), readers)
        return list(self._failed.values())

    def _notify(self, make: Callable[[Message], Message], queues: Iterable[ChannelQueue]) -> None:
        """Post a message about a channel to others; to the console at any severity."""
        if self._newest is None:
            return
        self._posts += 1
        message, key = self._newest  # keys are unique in a run, so the derived key is too
        for queue in queues:
            if not queue.is_ending:
                queue.put(
                    make(message), f"{key}:channel-{self._posts}", force=queue.name == CONSOLE
                )

    def abort_close(self) -> None:
        """Let `close`, on another thread, return without waiting for receivers."""
        for queue in self._queues:
            queue.abort_join()

    def close(self, deadline_s: float = DRAIN_S) -> None:
        """Deliver waiting messages, most severe first, within `deadline_s`.

        The console comes last, so that it reports which other channel failed.
        """
        start_s = self._monotonic()
        near = [queue for queue in self._queues if queue.name == CONSOLE]
        far = [queue for queue in self._queues if queue.name != CONSOLE]
        for queues, share in ((far, 1.0 - CONSOLE_SHARE if near else 1.0), (near, 1.0)):
            until = start_s + share * deadline_s
            for queue in queues:
                queue.drain(until)
            for queue in queues:
                queue.join(max(until - self._monotonic(), 0.0))
            self.check_channels()

    def undelivered(self) -> list[Undelivered]:
        """End all channels, also after `abort_close`, and return the undelivered messages once.

        The console has none: it is not read after the run.
        """
        far = [queue for queue in self._queues if queue.name != CONSOLE]
        return [item for queue in far for item in queue.undelivered()]
