"""Was it the learning rate? Weighed when an incident opens, from the frames that its rank kept.

That a rate moved first proves nothing: schedules move in each step. It was tested as the cause when
the same weights were good at lower rates for long, and the update has grown as the rate has; or
when the trouble comes back behind a rollback at the rate that had it before (see
`runbooks/lower_rate`). A rate that the run had for a while before, without trouble, is not to blame
for what happens at it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .loss_band import EXCLUDED, median

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
        why: it is to blame, in words; "" where it was not tested.
    """

    used: float
    cleared: bool
    limit: float | None = None
    why: str = ""


def weigh(
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
    before = sorted((rate for step, rate in rates if step < onset - EXCLUDED), reverse=True)
    if sum(rate * NEAR >= used for rate in before) >= SETTLED:
        return RateCause(used, cleared=True)
    good = before[GOOD - 1] if len(before) >= GOOD else 0.0
    known = good > 0.0 and not warms_up and used > NEAR * highest
    if not known or used < TIMES * good or not _oversized(dict(rates), updates, onset, good):
        return RateCause(used, cleared=False)
    why = f"the weights were good at rates up to {good:.3g}, and updates grew with the rate since"
    return RateCause(used, cleared=False, limit=good, why=why)


def growth(rates: Series, onset: int) -> str:
    """Return in words since when the rate has grown without a fall, "" if by less than `TIMES`."""
    before = [point for point in rates if point[0] <= onset and point[1] > 0.0]
    if not before:
        return ""
    _, used = since, lowest = before[-1]
    for step, rate in reversed(before):
        if rate > lowest:
            break
        if rate < lowest:
            since, lowest = step, rate
    if used < TIMES * lowest:
        return ""
    return f"the learning rate grew {used / lowest:.2g} times since step {since}, to {used:.3g}"


def _oversized(rates: dict[int, float], updates: Series, onset: int, good: float) -> bool:
    """Return whether the update has grown with the rate."""
    begin = onset - EXCLUDED
    usual = [u for step, u in updates if step < begin and rates.get(step, math.inf) <= good]
    near = [u for step, u in updates if begin <= step <= onset]
    return bool(usual and near) and max(near) >= TIMES * median(usual)


def came_back(used: float, before: RateCause, tried: float | None) -> RateCause | None:
    """Return what it proves that a trouble came back at the rate `used`, None where it is nothing.

    Args:
        before: what was known. tried: the limit in force, None without.
    """
    if used < LOWER * (before.used if tried is None else tried):
        return None  # far below the rate that it began at: another cause
    limit = LOWER * min(used, used if tried is None else tried)
    why = f"the trouble came back at a rate of {used:.3g} behind a rollback"
    return RateCause(used, cleared=False, limit=limit, why=why)
