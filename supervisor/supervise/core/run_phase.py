"""Phase of the run, and the learning rate as a cause: what a rule counts for may depend on both.

`early` lasts while the learning rate warms up (`lr_phase` below 1) and for the policy's `warmup`
frames at least, and never comes back in a training session. One that is first seen beyond that
many steps, as a log that begins at step 7000, has its start behind it: only its rate can be early.
`late` is where a decay has taken the rate to half of its highest: the second half of a linear or
cosine decay, and all of a staircase after its first large step. `steady` is the rest, and where
nothing is known of the rate.

That a rate moved first proves nothing: schedules move in each step. It was tested as the cause when
the same weights were good at lower rates for long, and the update has grown as the rate has; or
when the trouble comes back behind a rollback at the rate that had it before (see `closing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .model.policy import EARLY, LATE, STEADY, Policy
from .notices import RateGrew
from .trends import EXCLUDED, find_jump, median

Series = Sequence[tuple[int, float]]  # (step, value), ascending
SETTLED, NEAR = 32, 1.1  # frames at a rate, within a tenth, that are no harm; project defaults
GOOD = 128  # frames with weights that were good: OLMo-core's window, as the baselines' of nano
TIMES = 1.5  # of a good rate: no schedule of 298 006 recorded rows rose as far in a step
LOWER = 0.5  # of a rate that the trouble came back at is tried next; project default


@dataclass(frozen=True, slots=True)
class RateCause:
    """What is known of the rate, of the first parameter group.

    Attributes:
        used: the greatest one in use in the steps up to the first breach.
        cleared: it did no harm in as many steps before as it takes to see that.
        limit: the most that is taken to be good, where it was tested as the cause; else None.
        reason: it is to blame, in words; "" where it was not tested.
    """

    used: float
    cleared: bool
    limit: float | None = None
    reason: str = ""


class RateJump(NamedTuple):
    """A learning rate that left its schedule: at which step, from what, to what."""

    step: int
    before: float
    after: float


def find_rate_jump(rates: Series, onset: int, highest: float) -> RateJump | None:
    """Return the jump of the learning rate near an onset, None for none; see `find_jump`."""
    jump = find_jump(rates, onset, highest)
    if jump is None:
        return None
    return RateJump(jump.step, jump.before, max(rate for step, rate in rates if step >= jump.step))


def find_rate_cause(
    rates: Series, updates: Series, onset: int, highest: float, *, warms_up: bool
) -> RateCause | None:
    """Return what the frames tell of the rate, None where it is not known.

    Args:
        rates, updates: the learning rate in use and the norm of the update.
        highest: rate of the run, but for the newest `GOOD` frames at least.
        warms_up: the schedule rises, as it is meant to.
    """
    near = [rate for step, rate in rates if onset - EXCLUDED <= step <= onset]
    used = max(near, default=0.0)
    if used <= 0.0:
        return None
    rates_before = sorted((rate for step, rate in rates if step < onset - EXCLUDED), reverse=True)
    if sum(rate * NEAR >= used for rate in rates_before) >= SETTLED:
        return RateCause(used, cleared=True)
    good = rates_before[GOOD - 1] if len(rates_before) >= GOOD else 0.0
    is_known = good > 0.0 and not warms_up and used > NEAR * highest
    if not is_known or used < TIMES * good or not _oversized(dict(rates), updates, onset, good):
        return RateCause(used, cleared=False)
    reason = (
        f"the weights were good at rates up to {good:.3g}, and updates grew with the rate since"
    )
    return RateCause(used, cleared=False, limit=good, reason=reason)


def find_rate_growth(rates: Series, onset: int) -> RateGrew | None:
    """Return since when the rate has grown without a fall, None if by less than `TIMES`."""
    rates_before = [point for point in rates if point[0] <= onset and point[1] > 0.0]
    if not rates_before:
        return None
    _, used = since, lowest = rates_before[-1]
    for step, rate in reversed(rates_before):
        if rate > lowest:
            break
        if rate < lowest:
            since, lowest = step, rate
    if used < TIMES * lowest:
        return None
    return RateGrew(times=used / lowest, since=since, value=used)


def _oversized(rates: dict[int, float], updates: Series, onset: int, good: float) -> bool:
    """Return whether the update has grown with the rate."""
    begin = onset - EXCLUDED
    usual = [u for step, u in updates if step < begin and rates.get(step, math.inf) <= good]
    near = [u for step, u in updates if begin <= step <= onset]
    return bool(usual and near) and max(near) >= TIMES * median(usual)


def rate_cause_after_relapse(
    used: float, cause_before: RateCause, limit_tried: float | None
) -> RateCause | None:
    """Return what it proves that a trouble came back at the rate `used`, None where it is nothing.

    Args:
        cause_before: what was known. limit_tried: the limit in force, None without.
    """
    if used < LOWER * (cause_before.used if limit_tried is None else limit_tried):
        return None  # far below the rate that it began at: another cause
    limit = LOWER * min(used, used if limit_tried is None else limit_tried)
    reason = f"the trouble came back at a rate of {used:.3g} behind a rollback"
    return RateCause(used, cleared=False, limit=limit, reason=reason)


LR_PHASE = "lr_phase"
STABLE, DECAY, REWARM, SEARCH = 1.0, 2.0, 3.0, 4.0  # where these parts of `lr_phase` begin
LOW = 0.5  # of the highest rate; project default


@dataclass(slots=True)
class RunPhase:
    """The phase now.

    Attributes:
        name: `early`, `steady` or `late`. highest: the highest rate so far; `settled` without the
            newest 128 frames at least.
    """

    name: str = EARLY
    highest: float = 0.0
    settled: float = 0.0
    _settles: float = 0.0
    _first_step: int | None = None
    _written: Policy | None = None
    _in_force: Policy | None = None

    def advance_phase(
        self,
        step: int,
        lr_phase: float | None,
        rate: float | None,
        *,
        frames_seen: int,
        warmup: int,
    ) -> bool:
        """Take a frame of the leading rank; return whether another phase begins.

        Args:
            frames_seen: frames of this training session, this one included.
            warmup: the policy's, in frames.
        """
        previous_name = self.name
        if self._first_step is None:
            self._first_step = step
        warms_up = frames_seen < warmup and self._first_step < warmup
        if rate is not None and rate > self.highest:
            self.highest = rate
        if frames_seen % GOOD == 0:
            self.settled, self._settles = self._settles, self.highest
        is_rising = lr_phase is not None and (lr_phase < STABLE or lr_phase >= SEARCH)
        if previous_name == EARLY and (warms_up or is_rising):
            return False
        if lr_phase is None or rate is None:
            self.name = LATE if previous_name == LATE else STEADY
        elif lr_phase < REWARM:  # our own ramp after a rollback is no phase of the run
            low = lr_phase >= DECAY and rate <= LOW * self.highest
            self.name = LATE if low else STEADY
        else:
            self.name = STEADY if previous_name == EARLY else previous_name
        return self.name != previous_name

    def policy_in_phase(self, policy: Policy) -> Policy:
        """Return a policy as it is in this phase."""
        if self._written is not policy:
            self._written, self._in_force = policy, policy.in_phase(self.name)
        assert self._in_force is not None
        return self._in_force

    def policy_of_new_phase(self, policy: Policy) -> Policy:
        """Return a policy as it is in the phase that has just begun."""
        self._written = None
        return self.policy_in_phase(policy)
