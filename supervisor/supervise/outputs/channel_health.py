"""Whether a channel works, and what people are told when it does not.

A channel is broken as soon as a message is given up, or when no try has succeeded for `BROKEN_S`.
It works again with the next message that gets through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.model.interfaces import Message

BROKEN_S = 20.0  # more than the one timeout of a slow receiver (15 s); project default


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a channel.

    Attributes:
        since_s: when the first try without success began, on the monotonic clock.
        undelivered: messages that were given up since, and those that were tried and still wait.
        lost: the former alone.
        error: what the newest try came to; without addresses or secrets.
    """

    channel: str
    since_s: float
    undelivered: int
    lost: int
    error: str


@dataclass(slots=True)
class Health:
    """The record of one channel; its owner's lock is held."""

    error: str = ""
    _since_s: float | None = None
    _lost: int = 0

    def begins(self, now: float) -> None:
        """A try begins."""
        self._since_s = now if self._since_s is None else self._since_s

    def came_to(self, error: str | None) -> None:
        """It is over; None: the message got through."""
        self.error = error or ""
        if error is None:
            self._since_s, self._lost = None, 0

    def lost(self, count: int, error: str, now: float) -> None:
        """So many messages were given up."""
        self.begins(now)
        self._lost += count
        self.error = error

    def trouble(self, channel: str, waiting: int, now: float) -> Trouble | None:
        """Return what is wrong; `waiting`: messages that were tried and are not given up."""
        since = self._since_s
        if since is None or not (self._lost or now - since >= BROKEN_S):
            return None
        lost = self._lost
        return Trouble(channel, since, lost + waiting, lost, self.error or "no answer yet")


def broken(trouble: Trouble, last: Message, now: float) -> Message:
    """Return what the other channels are told; `last`: any message, for the run and its step."""
    count = trouble.undelivered
    lasted = now - trouble.since_s
    since = f"no message got through for {lasted:.0f} s; " if lasted >= BROKEN_S else ""
    return replace(
        last,
        incident=None,
        severity="SEV2",
        title=f"{trouble.channel}: {_messages(count)} not delivered",
        verdict=f"{since}last error: {trouble.error}",
        why="a message that nobody gets is as good as none",
        next=f"nobody hears of the run by {trouble.channel} until it works; supervise status",
        facts=(),
    )


def mended(trouble: Trouble, last: Message) -> Message:
    """Return what is told when a message got through again."""
    lost = f"{_messages(trouble.lost)} never delivered" if trouble.lost else ""
    return replace(
        last,
        incident=None,
        severity="SEV2",
        title=f"{trouble.channel} works again",
        verdict=lost or "what waited is being delivered",
        why="",
        next="supervise why tells them" if lost else "",
        facts=(),
    )


def _messages(count: int) -> str:
    return f"{count} message was" if count == 1 else f"{count} messages were"
