"""What stands in a channel's queue, what becomes of it, and who sends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..core.shapes import Message

RANKS = {"SEV0": 0, "SEV1": 1, "SEV2": 2, "INFO": 3}


class Sender(Protocol):
    """A `core.shapes.Notifier` with its pace; see `notifiers.Sender`, which is the same."""

    name: str
    group_s: float
    gap_s: float
    per_hour: int | None

    @property
    def min_sev(self) -> str: ...

    def send(self, message: Message, *, key: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What a delivery came to.

    Attributes:
        channel: name of the sender.
        keys: all messages that it stood for.
        detail: one line without addresses or secrets.
        tries: calls of the sender.
    """

    channel: str
    keys: tuple[str, ...]
    ok: bool
    detail: str
    tries: int


@dataclass(slots=True)
class Item:
    """A message that waits, and those that joined it."""

    message: Message
    keys: list[str]
    ready_s: float
    number: int
    tries: int = 0
    earlier: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return RANKS[self.message.severity]

    @property
    def order(self) -> tuple[int, int, int]:
        return self.rank, self.tries, self.number
