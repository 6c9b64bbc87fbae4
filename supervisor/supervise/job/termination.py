"""Ending every process of the job, as gently as it lets us: an interrupt, then TERM, then KILL.

For any thread but the main loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..errors import ActionError
from .process import Process
from .ranks.pending_command import PendingCommand

T = TypeVar("T")
LOOP_S = 2.0  # the main loop comes round every few milliseconds; longer than this it is stuck


class Ranks(Protocol):
    """What this needs of the job."""

    process: Process
    standstill: bool

    def ranks(self) -> dict[int, dict[str, Any]]: ...
    def on_loop(self, call: Callable[[], T], timeout_s: float) -> T: ...
    def release_signals(self) -> None: ...
    def forget(self, asked: PendingCommand) -> None: ...
    def ask(
        self, verb: str, args: Mapping[str, Any], *, key: str, partly: bool = False
    ) -> PendingCommand: ...


def halt(job: Ranks, *, grace_s: float, term_s: float) -> dict[str, Any]:
    """Ask at a step boundary, after `grace_s` TERM, after `term_s` KILL, over the whole tree.

    Returns:
        `how` (`interrupt`, `term`, `kill`, or `ended` if it ended by itself meanwhile),
        `returncode`, `survivors`, `interrupt` (what came of asking), `seconds`.
    """
    since = time.monotonic()
    asked_for = _interrupt(job, grace_s)
    ended = job.process.returncode is not None
    job.release_signals()
    seen = job.process.stop(term_s=term_s)
    if ended:
        seen["how"] = "interrupt" if asked_for == "interrupted" else "ended"
    return {**seen, "interrupt": asked_for, "seconds": round(time.monotonic() - since, 3)}


def _interrupt(job: Ranks, grace_s: float) -> str:
    """Ask the ranks to stop at their next step boundary; say what came of it."""
    if job.process.returncode is not None:
        return "skipped: the job has ended"
    if grace_s <= 0:
        return "skipped: no grace"
    if job.standstill:  # one that comes to a step boundary does not stand still
        return "skipped: the job stands still"
    deadline = time.monotonic() + grace_s
    try:
        silent_ns = job.on_loop(lambda: silence_ns(job), min(grace_s, LOOP_S))
    except ActionError as error:
        return f"skipped: {error}"
    if silent_ns is None:
        return "skipped: no probe is attached to the job"
    if silent_ns > grace_s * 1e9:
        return f"skipped: the job was silent for {silent_ns / 1e9:.0f} s"
    key = f"stop-{time.monotonic_ns()}"
    asked = job.ask("stop", {"how": "interrupt"}, key=key, partly=True)
    try:
        answers = asked.wait(max(0.0, deadline - time.monotonic()))
    finally:
        job.forget(asked)
    if not any(ack.ok for ack in answers.values()):
        errors = [ack.error for ack in answers.values() if ack.error]
        return f"not done: {errors[0] if errors else asked.refusal or 'no rank answered'}"
    job.process.wait(max(0.0, deadline - time.monotonic()))
    return "interrupted"


def silence_ns(job: Ranks) -> int | None:
    """On the main loop: how long the rank that was heard last has been silent."""
    heard = [view["seen_ns"] for view in job.ranks().values()]
    return time.monotonic_ns() - max(heard) if heard else None
