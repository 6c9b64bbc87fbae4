"""One command on its way to the ranks, and the judgement over what came back.

Shared between the performer's thread, which waits, and the main loop, which sends and files acks;
everything here is touched under the condition that both know (see `controller`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...core.model.events import Beat
from ...errors import ActionError


class Ack(Protocol):
    """What a probe answered to a command."""

    @property
    def key(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def ok(self) -> bool: ...
    @property
    def result(self) -> Mapping[str, Any]: ...
    @property
    def error(self) -> str | None: ...


class Rank(Protocol):
    """What this needs of a rank's segment."""

    @property
    def pid(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def send(self, key: str, verb: str, args: Mapping[str, Any]) -> None: ...
    def acks(self) -> list[Any]: ...
    def lease(self, until_ns: int) -> None: ...
    def beat(self) -> Beat: ...
    def status(self) -> dict[str, Any]: ...
    def step_ns(self) -> int | None: ...
    def collective(self) -> Any: ...


class Ranks(Protocol):
    """What this needs of the segments, and the directory in shared memory that they are in."""

    @property
    def directory(self) -> Path: ...
    @property
    def ranks(self) -> Mapping[int, Rank]: ...
    def keep_signals(self, until_ns: int) -> None: ...


class PendingCommand:
    """A command on its way: who was asked, who answered, who never will."""

    def __init__(self, verb: str, key: str, wakeup: threading.Condition) -> None:
        self.verb = verb
        self.key = key
        self.sent: dict[int, Rank] | None = None  # None until the main loop sent it
        self.answers: dict[int, Ack] = {}
        self.lost: dict[int, str] = {}  # rank -> why it will not answer
        self.refusal: str | None = None  # why it was not sent at all
        self.withdrawn = False  # that is because the action is to ask nothing more of the job
        self._wakeup = wakeup

    def wait(self, timeout_s: float) -> dict[int, Ack]:
        """Wait until every rank answered or cannot; return the answers there are."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self.settled, timeout_s)
            return dict(self.answers)

    @property
    def settled(self) -> bool:
        """Whether every rank answered or cannot."""
        if self.refusal is not None:
            return True
        return self.sent is not None and self.sent.keys() <= self.answers.keys() | self.lost.keys()


def judge(asked: PendingCommand, answers: Mapping[int, Ack], deadline_s: float) -> None:
    """Raise `ActionError` unless every rank that was asked did it."""
    verb = asked.verb
    refused = [(rank, ack) for rank, ack in sorted(answers.items()) if not ack.ok]
    if refused:
        rank, first = refused[0]
        nowhere = len(refused) == len(asked.sent or {})
        meant = nowhere and all(ack.result.get("refused") is True for _, ack in refused)
        raise ActionError(f"rank {rank} refused {verb}: {first.error}", refused=meant)
    silent = sorted(set(asked.sent or {}) - set(answers))
    if asked.sent is None:
        why, meant = asked.refusal or "the main loop is busy", asked.withdrawn
        raise ActionError(f"{verb} was not sent: {why}", refused=meant)
    if not silent:
        return
    why = asked.refusal or "; ".join(asked.lost[rank] for rank in silent if rank in asked.lost)
    why = why or f"no answer within {deadline_s:g} s from rank {', '.join(map(str, silent))}"
    partly = f" after {len(answers)} of {len(asked.sent)} ranks did it: they may differ now"
    raise ActionError(f"{verb}: {why}{partly if answers else ''}")


def ending(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"
