"""Since when steps take longer, and which part of a step it is: medians of a few hundred times."""

from __future__ import annotations

from collections.abc import Callable

from ..model.verdicts import PARTS, SlowStep
from .loss_band import median

STEP_TIME = "step_time"
NEWEST, BEFORE = 20, 256  # steps whose median is the new time of a step, and the old one
LEAST = 8  # steps on either side
SLOWER = 1.25  # the limit of the pack `throughput`
MOST_OF_IT = 0.5  # of what a step takes longer; below it several parts are slower
BRIEF_S = 3.0  # of slow steps that are not worth a word, and a look at the host; project default
WAITS = 20.0  # percent of the time, where it is not known how much longer steps take

Series = Callable[[str], list[tuple[int, float]]]


def is_of_others(slow: SlowStep | None, wait: float) -> bool:
    """Return whether steps are slow as they wait for CPUs that others have.

    Args:
        slow: how slow they are, None where that is not known. wait: percent of the time.
    """
    if slow is None:
        return wait >= WAITS
    return wait >= 100.0 * MOST_OF_IT * (1.0 - slow.before_s / slow.now_s)


def find(series: Series, breach: int) -> SlowStep | None:
    """Return since when the newest steps take longer than those before `breach`, None if not.

    Args:
        series: `(step, value)` of a metric, oldest first.
    """
    points = series(STEP_TIME)
    early = [value for step, value in points if step < breach][-BEFORE:]
    late = [value for _, value in points[-NEWEST:]]
    if min(len(early), len(late)) < LEAST:
        return None
    before, now = median(early), median(late)
    if before <= 0.0 or now < SLOWER * before:
        return None
    limit, since = (before * now) ** 0.5, points[-1][0]
    fast = 0
    for step, value in reversed(points):
        fast = 0 if value > limit else fast + 1
        if fast > 1:
            break
        since = step if value > limit else since
    part, part_now = "", 0.0
    grown = MOST_OF_IT * (now - before)
    for name in PARTS:
        values = series(name)
        old = [value for step, value in values if step < since][-BEFORE:]
        new = [value for step, value in values if step >= since][-NEWEST:]
        if not new:
            continue
        excess = median(new) - (median(old) if old else 0.0)
        if excess > grown:
            part, part_now, grown = name, median(new), excess
    return SlowStep(since, before, now, part, part_now)
