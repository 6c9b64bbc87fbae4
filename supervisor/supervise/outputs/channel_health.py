"""Health of a channel, and the messages to the other channels when it fails.

A channel has failed as soon as a message is given up, or when no try has succeeded for `FAILED_S`.
It has recovered with the next message that is delivered.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from ..core.model.interfaces import WATCHER, Message

FAILED_S = 20.0  # more than the one timeout of a slow receiver (15 s); project default


@dataclass(frozen=True, slots=True)
class Trouble:
    """State of a failed channel.

    Attributes:
        since_s: start of the first failed try, on the monotonic clock.
        undelivered: messages given up since, and those that were tried and still wait.
        lost: messages given up.
        error: of the newest try; without addresses or secrets.
    """

    channel: str
    since_s: float
    undelivered: int
    lost: int
    error: str


@dataclass(slots=True)
class Health:
    """The record of one channel; callers hold the lock of its queue."""

    error: str = ""
    _since_s: float | None = None
    _lost: int = 0

    def on_try(self, now: float) -> None:
        """Record the start of a try."""
        self._since_s = now if self._since_s is None else self._since_s

    def on_answer(self, error: str | None) -> None:
        """Record the end of a try; None: the message was delivered."""
        self.error = error or ""
        if error is None:
            self._since_s, self._lost = None, 0

    def on_lost(self, count: int, error: str, now: float) -> None:
        """Record messages that were given up."""
        self.on_try(now)
        self._lost += count
        self.error = error

    def trouble(self, channel: str, waiting: int, now: float) -> Trouble | None:
        """Return the state if it has failed; `waiting`: messages tried and not given up."""
        since = self._since_s
        if since is None or not (self._lost or now - since >= FAILED_S):
            return None
        lost = self._lost
        return Trouble(channel, since, lost + waiting, lost, self.error or "no answer yet")


def failed(trouble: Trouble, last: Message, now: float) -> Message:
    """Return the message to the other channels; `last`: any message, for the run and its step."""
    count, lasted = trouble.undelivered, now - trouble.since_s
    since = f"no message was delivered for {lasted:.0f} s; " if lasted >= FAILED_S else ""
    return replace(
        last,
        incident=None,
        kind=WATCHER,
        card=(),
        rules=(),
        severity="SEV2",
        title=f"{trouble.channel}: {_messages(count)} not delivered",
        verdict=f"{since}last error: {trouble.error}",
        why="notifications are not reaching this channel; the run itself goes on as before",
        next=f"check the settings and the service of {trouble.channel}; state of the channels: "
        f"supervise status {shlex.quote(last.directory)}",
        facts=(),
    )


def recovered(trouble: Trouble, last: Message) -> Message:
    """Return the message after the next successful delivery."""
    lost = f"{_messages(trouble.lost)} lost" if trouble.lost else ""
    return replace(
        last,
        incident=None,
        kind=WATCHER,
        card=(),
        rules=(),
        severity="SEV2",
        title=f"{trouble.channel} works again",
        verdict=lost or "the waiting messages are being delivered",
        why="",
        next=f"read them with: supervise why {shlex.quote(last.directory)}" if lost else "",
        facts=(),
    )


def _messages(count: int) -> str:
    return f"{count} message was" if count == 1 else f"{count} messages were"
