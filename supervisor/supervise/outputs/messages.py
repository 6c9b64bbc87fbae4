"""What stands in a channel's queue, what becomes of it, and who sends it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from ..core.model.interfaces import Message

RANKS = {"SEV0": 0, "SEV1": 1, "SEV2": 2, "INFO": 3}
PAGES = ("SEV0", "SEV1")  # kept beyond the end of a run when nobody got them


class Sender(Protocol):
    """A `core.model.interfaces.Notifier` with its pace; the same as `notifiers.Sender`."""

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


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A page that its channel did not get through before the end of the run.

    Attributes:
        keys: all messages that it stands for; it was posted under the first one.
        age_s: seconds since it was due.
        error: what the newest try came to, "" without one.
    """

    channel: str
    message: Message
    keys: tuple[str, ...]
    age_s: float
    tries: int
    error: str


@dataclass(slots=True)
class Item:
    """A message that waits, and those that joined it."""

    message: Message
    keys: list[str]
    ready_s: float
    number: int
    due_s: float  # on the monotonic clock
    tries: int = 0
    error: str = ""  # of the newest try
    earlier: list[str] = field(default_factory=list)

    def tell_earlier(self) -> None:
        """Say in the message what joined it."""
        if self.earlier:
            facts = (*self.message.facts, ("before that", " · ".join(self.earlier[-3:])))
            self.message, self.earlier = replace(self.message, facts=facts), []

    @property
    def rank(self) -> int:
        return RANKS[self.message.severity]

    @property
    def order(self) -> tuple[int, int, int]:
        return self.rank, self.tries, self.number
