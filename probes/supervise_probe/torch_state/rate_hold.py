"""Learning rates kept at their last healthy level: no group has more, whatever the job asks for.

The level is constant: of a schedule that moved on below a jump nobody knows how far. It binds only
while the job asks for more. Groups are counted flat over the optimizers, as in the metrics.
"""

from __future__ import annotations

from typing import Deque, Dict, List, Optional, Tuple

# Of a healthy rate: more is a jump, and not a schedule's slope (0 of 298 006 rows of recorded
# schedules were over 1.5 times their largest rate so far).
JUMP = 1.5
FAR = 2.5  # of the rate in the step before; `over` of update_scale.lr_guard_far
LATE = 16  # steps that a jump may be confirmed behind its own step; project default
KEPT = 128  # changes of the rates that are known of an optimizer; project default
Trail = Deque[Tuple[int, List[Optional[float]]]]  # (step, rates of its groups), at each change


def note(trail: Trail, step: int, rates: List[Optional[float]]) -> None:
    """Take down the rates of a step, if they are others than before."""
    if trail and trail[-1][1] == rates:
        return
    while trail and trail[-1][0] >= step:  # the run went back
        trail.pop()
    trail.append((step, rates))


def is_far(trail: Trail, rates: List[Optional[float]]) -> bool:
    """Whether the first group is about to have a rate far above that of the step before."""
    newest = trail[-1][1][:1] if trail else []
    return bool(newest and rates and newest[0] and rates[0] and rates[0] > FAR * newest[0])


def healthy(trail: Trail, group: int, before_step: int) -> Optional[float]:
    """Return the rate of a group before the step `before`, and what it became without a jump.

    None where it is not known, or was 0: a group that is thawed has no level.
    """
    level: Optional[float] = None
    top = 0.0
    for step, rates in trail:
        rate = rates[group] if group < len(rates) else None
        if rate is None:
            continue
        if level is None and step >= before_step and len(trail) < KEPT:
            break
        if level is not None and step >= before_step - LATE and rate > JUMP * max(level, top):
            break
        level, top = rate, max(top, rate)
    return level or None


def requested(trail: Trail, at_step: int) -> List[Optional[float]]:
    """Return the rates that were asked for in the step `at`, the oldest known ones before that."""
    newest: List[Optional[float]] = []
    for step, rates in trail:
        if step > at_step and newest:
            break
        newest = rates
    return newest


class RateHold:
    """The levels of one order.

    Attributes:
        levels: by number of the group. since: the step that they are from before.
        release: steps without more than its level in any group, after which it is over; 0: never.
        used: of the first group, the share of its own rate that it has.
    """

    __slots__ = ("_back", "_last", "_over", "_quiet", "levels", "release", "since", "used")

    def __init__(
        self, levels: Dict[int, float], since: int, release: int, newest: Dict[int, float]
    ) -> None:
        """Begin; `last`: what the job has asked for last, by number of the group."""
        self.levels, self.since, self.release, self._last = levels, since, release, newest
        self._back, self._over, self._quiet, self.used = False, False, 0, 1.0

    def limit(self, number: int, rate: float, step: int) -> Optional[float]:
        """Return what a group may have where it asks for more, None where it does not.

        A rate that falls from its jump to what a warm-up may have come to meanwhile is healthy, and
        so is what it becomes from there without another jump.
        """
        level, newest = self.levels.get(number), self._last.get(number, 0.0)
        self._last[number] = rate
        if level is None or rate <= level:
            return None
        # Linear in the steps: a warm-up from 0 at the first step.
        if rate <= JUMP * level * max(1.0, (step + 1) / max(1, self.since)):
            self._back = self._back or newest > JUMP * rate
            if self._back:
                self.levels[number] = rate
                self.since = step + 1
                return None
        self._over = True
        return level

    def advance(self) -> bool:
        """A step ended; return whether the hold has."""
        self._quiet = 0 if self._over else self._quiet + 1
        self._over = False
        return 0 < self.release <= self._quiet
