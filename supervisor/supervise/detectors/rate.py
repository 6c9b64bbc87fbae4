"""Rate: how often an event occurred in the newest steps.

Steps whose sample is absent or was lost may have been events: they count as missing, and the
reading is OK only if it would be OK with all of them as events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
from ._watch import Memory


@dataclass(frozen=True)
class Rate(Detector):
    """BREACH when the `event` came in `count_gte` of the last `window` steps, or a share of them.

    `event` is a metric that is 0 when nothing happened. `share_gte` is of the whole window, also in
    the first `window` steps of a run: 0.05 of 200 is 10 events. It lasts until fewer than `clear`
    came, in the unit of the bound. Lost steps and absent or NaN samples count as possible events;
    such a sample itself is read as UNKNOWN. `rewind` is exact over `window` steps.

    Example:
        {kind: rate, event: update_skipped, window: 200, count_gte: 10, clear: 4}

    Blind to: how large an event was, and to bursts shorter than the window needs (use `threshold`
        with `m_of_n`).
    Source: torch.amp.GradScaler doubles its scale every 2000 clean steps, so a healthy run skips
        about one step in 2000; the bounds are project defaults.
    """

    event: str
    window: int = 200  # steps
    count_gte: int | None = None  # events in the window
    share_gte: float | None = None  # 0 to 1 of the window
    clear: float | None = None  # events or share, as the bound; None: the bound itself

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.event,)

    def start(self) -> RateWatch:
        return RateWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        if self.window < 1:
            return [("window", f"must be at least 1 step, not {self.window}")]
        bounds = (("count_gte", self.count_gte, self.window), ("share_gte", self.share_gte, 1))
        limits = [(name, bound, most) for name, bound, most in bounds if bound is not None]
        if len(limits) != 1:
            return [("count_gte", "give exactly one of `count_gte`, `share_gte`")]
        name, limit, highest = limits[0]
        if not 0 < limit <= highest:
            return [(name, f"must be above 0 and at most {highest}, not {limit}")]
        if self.clear is not None and not 0 < self.clear < limit:
            return [("clear", f"must be above 0 and below `{name}` ({limit}), not {self.clear}")]
        return []

    def least_event_count(self, bound: float) -> int:
        """Return the least number of events that reaches a bound, in its unit."""
        if self.share_gte is None:
            return math.ceil(bound)
        count = int(bound * self.window)
        while count / self.window < bound:
            count += 1
        return count


class RateWatch(Memory):
    """Keeps the steps of events and of missing samples, ascending, for two windows."""

    def __init__(self, spec: Rate) -> None:
        self.spec = spec
        self.window = spec.window
        limit = spec.share_gte if spec.count_gte is None else spec.count_gte
        self.need_events = spec.least_event_count(limit or 0)
        self.need_clear = (
            self.need_events if spec.clear is None else spec.least_event_count(spec.clear)
        )
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.events: list[int] = []
        self.missing: list[int] = []

    def forget_last(self) -> None:
        super().forget_last()
        self.firing = False

    def feed(self, sample: Any, step: int) -> int:
        self.value = sample
        last_step = self.last
        if step <= last_step:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if step - last_step > 1 and last_step >= 0:
            self.missing.extend(range(max(last_step + 1, step - 2 * self.window), step))
        absent = sample is None or sample - sample != 0.0
        if absent:
            self.missing.append(step)
        elif sample:
            self.events.append(step)
        since = step - self.window
        quiet = not (self.firing or absent or (self.events and self.events[-1] > since))
        if quiet and not (self.missing and self.missing[-1] > since):
            self.raw = OK
            return OK
        came, maybe = self._within(self.events, step), self._within(self.missing, step)
        if absent:
            self.raw = UNKNOWN
            return UNKNOWN
        self.raw = _code_for(self.need_events, came, maybe)
        if not self.firing or self.raw == BREACH:
            self.firing = self.raw == BREACH
            return self.raw
        clear_code = _code_for(self.need_clear, came, maybe)
        self.firing = clear_code != OK
        return clear_code

    def _within(self, steps: list[int], step: int) -> int:
        """Count the steps in the window; drop those that no rewind over a window can reach."""
        old = bisect_right(steps, step - self.window)
        if old > self.window:
            del steps[: old - self.window]
            old = self.window
        return len(steps) - old

    def drop_after(self, step: int) -> None:
        del self.events[bisect_right(self.events, step) :]
        del self.missing[bisect_right(self.missing, step) :]

    def numbers(self) -> Reading:
        came = self._within(self.events, self.last)
        return {
            "step": self.last,
            "event": self.spec.event,
            "value": came,
            "sample": self.value,
            "share": came / self.window,
            "threshold": self.need_events,
            "clear": self.need_clear,
            "missing": self._within(self.missing, self.last),
            "window": self.window,
            "steps": [max(0, self.last - self.window + 1), self.last],
        }


def _code_for(need: int, came: int, maybe: int) -> int:
    """Return the code of `came` events, and up to `maybe` more, against the bound `need`."""
    return BREACH if came >= need else UNKNOWN if came + maybe >= need else OK
