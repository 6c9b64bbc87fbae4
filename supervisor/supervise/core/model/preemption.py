"""Signals that wait for a checkpoint of the job, with their deadlines.

Pure: the caller reads the clock.

A request to end the job is a signal whose default action ends it, or a cause of ours (walltime, a
drain file). While a checkpoint is on its way the signal is held; it is passed on when the
checkpoint is there, when there will be none, when the same signal comes again, and at the latest at
the deadline. Nothing here waits, so whoever holds the clock decides how late that can be.

Holding is possible only while it is offered. An offer runs out by itself: a loop that hangs cannot
order a checkpoint, so what comes then is passed on at once.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

# The signals of schedulers before the end of an allocation; the default action of each is the end.
HOLDABLE = ("SIGTERM", "SIGUSR1", "SIGUSR2")
GRACE_S = 20.0  # Kubernetes and Slurm kill 30 s after TERM; the rest is for the job's own end
ECHO_S = 1.0  # Slurm signals all processes of a step, and `srun` passes on what it gets itself
MARGIN_S = 120.0  # before the end of the allocation; sbatch examples use `--signal=USR1@60` to 120


@dataclass(frozen=True, slots=True)
class Request:
    """A request that waits: its cause, and when it came and ends to wait."""

    cause: str
    since_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """How a request ended.

    Attributes:
        refusal: why there is no checkpoint, "" where there is one.
        signals: names of the signals that waited, in the order in which they are passed on.
    """

    cause: str
    refusal: str
    waited_s: float
    signals: tuple[str, ...]


class Preemption:
    """The requests to end one process of the job.

    Attributes:
        request: the one that waits, None for none.
        settled: those that ended, oldest first; for the reader to take.
    """

    def __init__(self) -> None:
        self.request: Request | None = None
        self.settled: deque[Settled] = deque()
        self._held: list[str] = []
        self._came_s: dict[str, float] = {}  # of what is held
        self._grace_s, self._offered_until_s = 0.0, -math.inf
        self._is_over = False  # the process has had its checkpoint, or its signal

    def hold_signals_until(self, grace_s: float, until_s: float) -> None:
        """Hold the signals that come up to `until_s`, each for at most `grace_s`."""
        self._grace_s, self._offered_until_s = grace_s, until_s

    def withdraw(self) -> None:
        """Hold no further signal."""
        self._offered_until_s = -math.inf

    def can_hold(self, name: str, now_s: float) -> bool:
        """Return whether a signal with its default action would be held."""
        offered = now_s <= self._offered_until_s and not self._is_over
        return name in HOLDABLE and (self.request is not None or offered)

    @property
    def is_over(self) -> bool:
        """Whether the process has had its checkpoint, or a signal that waited for one."""
        return self._is_over

    def is_echo(self, name: str, now_s: float) -> bool:
        """Return whether a signal is the one that waits, on another way."""
        return name in self._held and now_s - self._came_s[name] < ECHO_S

    def on_signal(self, name: str, now_s: float, *, handled: bool) -> list[str]:
        """Take a signal; return those to be passed on now, in their order.

        Args:
            handled: the job handles or ignores it, so it must reach the job at once.
        """
        if name in self._held:
            return [*self.settle_and_release_signals(now_s, f"a second {name} came"), name]
        if handled or not self.can_hold(name, now_s):
            return [name]
        latest_s = now_s + self._grace_s
        if self.request is None:
            self.request = Request(name, now_s, latest_s)
        else:
            earlier_s = min(self.request.deadline_s, latest_s)
            self.request = replace(self.request, deadline_s=earlier_s)
        self._held.append(name)
        self._came_s[name] = now_s
        return []

    def request_checkpoint(self, cause: str, now_s: float, deadline_s: float) -> bool:
        """Ask for a checkpoint without a signal; False: another request waits, or it is over."""
        if self.request is not None or self._is_over:
            return False
        self.request = Request(cause, now_s, deadline_s)
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The signals that wait, in the order in which they came."""
        return tuple(self._held)

    @property
    def holds_signal(self) -> bool:
        """Whether a signal waits."""
        return bool(self._held)

    def settle_and_release_signals(self, now_s: float, refusal: str = "") -> list[str]:
        """The checkpoint is there, or will not be; return the signals to be passed on."""
        if self.request is None:
            return []
        signals, self._held = self._held, []
        waited_s = now_s - self.request.since_s
        self.settled.append(Settled(self.request.cause, refusal, waited_s, tuple(signals)))
        self.request = None
        self._is_over = self._is_over or bool(signals) or not refusal
        return signals

    def expire(self, now_s: float) -> list[str]:
        """Return the signals whose time is up."""
        if self.request is None or now_s < self.request.deadline_s:
            return []
        waited_s = self.request.deadline_s - self.request.since_s
        return self.settle_and_release_signals(now_s, f"it was not written within {waited_s:.0f} s")

    def reset_and_release_signals(self, now_s: float) -> list[str]:
        """Another process takes the place of this one; return what waited, which is for it."""
        signals = self.settle_and_release_signals(now_s, "the job was being started again")
        self._is_over = False
        self.withdraw()
        return signals
