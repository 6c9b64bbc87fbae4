"""Shared parts of all watches: the order of steps, notes, and the debounce.

A step id must be newer than the last one. An older or equal step is not processed: it reads UNKNOWN
and changes nothing. So a frame that arrives twice has no effect, and a run that goes back without
`rewind` reads UNKNOWN, never OK.

Debounce, from raw codes to readings: `for: k` is `m_of_n: [k, k]`, k breaching samples in a row. A
reading becomes BREACH when at least m of the last n known samples breached. It ends when that no
longer holds and the sample is past `clear`, the bound that replaces the threshold during a BREACH.
An UNKNOWN sample is not counted: it reads UNKNOWN and neither advances nor resets the count.
`rewind` resets the count: it belongs to steps that were undone.

With `unit: steps` a sample counts for each step since the known one before it, so `for: 3` of a
metric that is sampled every 8 steps is one sample. It never counts for more than `for`, or half of
m: `m_of_n` is a vote, and one strange sample is none.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Note, Watch
from ..core.model.values import Unit

LEAST = 12  # samples that have a spread, whatever their spacing; project default
LONGEST = 1024  # samples in `for` or `m_of_n`; the count is one integer of that many bits
NEVER = -1  # the last step of a watch without samples
UNBEGUN = -2  # in the place of the step before the first frame, which may be NEVER


def explain_lacks(count: float, least: int, subject: str) -> str:
    """Return the sentence of `Watch.lacks`, "" when there are enough."""
    return f"{count:.0f} {subject}, needs {least}" if count < least else ""


class AmountDetector(Detector):
    """A metric, and the amount that each of its values is of, which need not be known."""

    reads: ClassVar[str] = "metrics"
    measures_descent: ClassVar[bool] = True

    metric: str
    amount: str

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.amount)

    @property
    def subjects(self) -> tuple[str, ...]:
        return (self.metric,)

    @property
    def needs_all(self) -> bool:
        return False


class MetricDetector(Detector):
    """A detector of one metric."""

    metric: str

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)


class Memory(Watch):
    """A watch that knows its last sample.

    Attributes:
        last: newest step processed, NEVER before the first. value: the last sample.
        pending_note: what `note` returns next.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; subclasses add their own."""
        self.last = NEVER
        self.forget_last()

    def rewind(self, step: int) -> None:
        self.drop_after(step)
        self.forget_last()
        self.last = min(self.last, step)

    def drop_after(self, step: int) -> None:
        """Drop the samples after `step`; subclasses that keep samples do."""

    def forget_last(self) -> None:
        """Forget the last sample and its verdict; subclasses add their own."""
        self.raw = UNKNOWN
        self.value: Any = None
        self.pending_note = Note()

    def note(self) -> Note:
        note, self.pending_note = self.pending_note, Note()
        return note


class Debounced(Memory):
    """A watch with `for`, `m_of_n` and `clear`; `bits` holds the last n breaches, newest lowest.

    Attributes:
        each: how often the sample counts. known: the step up to which samples stand for steps.
    """

    def __init__(self, for_: int, m_of_n: tuple[int, int] | None, unit: Unit = "rows") -> None:
        self.need, window = m_of_n if m_of_n is not None else (for_, for_)
        self.mask = (1 << window) - 1
        self.by_steps = unit == "steps"
        self.most_each = for_ if m_of_n is None else (self.need + 1) // 2
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.each, self.known = 1, UNBEGUN

    def rewind(self, step: int) -> None:
        super().rewind(step)
        self.each, self.known = 1, step

    def measure_sample_spacing(self, sample: Any, step: int) -> None:
        """With `unit: steps`: how many steps the sample at `step`, if known, stands for."""
        if self.known == UNBEGUN:
            self.known = step - 1
        if sample is not None and sample - sample == 0.0:
            self.each = min(step - self.known, self.most_each)
            self.known = step

    def forget_last(self) -> None:
        super().forget_last()
        self.clear_verdict()

    def clear_verdict(self) -> None:
        """Forget the breaches that were counted."""
        self.bits = 0
        self.firing = False

    def debounce(self, breach: bool, is_held: bool) -> int:
        """Count a known sample and return the reading; `is_held`: it is not yet past `clear`."""
        weight = self.each
        breaches = (1 << weight) - 1 if breach else 0
        bits = self.bits = (self.bits << weight | breaches) & self.mask
        if bits.bit_count() >= self.need:
            self.firing = True
        elif self.firing and not is_held:
            self.firing = False
        return BREACH if self.firing else OK

    def counts(self) -> dict[str, int]:
        """Return the numbers of the debounce; `oldest`: samples since the first that breached."""
        window = self.mask.bit_length()
        vote = {"oldest": self.bits.bit_length()} if self.need < window else {}
        return {"breaching": self.bits.bit_count(), "needed": self.need, "of": window, **vote}


def check_quota(for_: int, m_of_n: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Return what is wrong with `for` and `m_of_n`, by YAML key."""
    if not 1 <= for_ <= LONGEST:
        return [("for", f"must be 1 to {LONGEST} samples, not {for_}")]
    if m_of_n is None:
        return []
    if for_ != 1:
        return [("m_of_n", "give `for` or `m_of_n`, not both")]
    m, n = m_of_n
    if not 1 <= m <= n <= LONGEST:
        return [("m_of_n", f"must be [m, n] with 1 <= m <= n <= {LONGEST}, not [{m}, {n}]")]
    return []


def check_bounds(
    bounds: dict[str, float | None], clear: float | None = None
) -> list[tuple[str, str]]:
    """Check that exactly one bound is given, and that `clear` is on its safe side.

    The names of upper bounds end with `gt` or `gte`, those of lower bounds with `lt` or `lte`.
    """
    configured = [(name, value) for name, value in bounds.items() if value is not None]
    names = ", ".join(f"`{name}`" for name in bounds)
    if len(configured) != 1:
        return [
            (configured[1][0] if configured else next(iter(bounds)), f"give exactly one of {names}")
        ]
    name, limit = configured[0]
    if not math.isfinite(limit):
        return [(name, f"must be a finite number, not {limit}")]
    if clear is None:
        return []
    if not math.isfinite(clear):
        return [("clear", f"must be a finite number, not {clear}")]
    upper = name.endswith(("gt", "gte"))
    if clear < limit if upper else clear > limit:
        return []
    return [("clear", f"must be {'below' if upper else 'above'} `{name}` ({limit}), not {clear}")]


def check_window(
    window: int, min_: int, freeze: int, rel_floor: float, abs_floor: float, least: int
) -> list[tuple[str, str]]:
    """Check the keys of a baseline. least: the smallest `min` that has a spread."""
    wrong = []
    if not least <= min_ <= window:
        wrong.append(("min", f"must be {least} to `window` ({window}), not {min_}"))
    if not 1 <= freeze <= window:
        wrong.append(("freeze", f"must be 1 to `window` ({window}), not {freeze}"))
    return wrong + check_floors(rel_floor, abs_floor, "a series that is all zeros has no scale")


def check_floors(rel_floor: float, abs_floor: float, why: str) -> list[tuple[str, str]]:
    """Check the floors of a scale. why: why `abs_floor` must not be 0."""
    wrong = []
    for name, floor in (("rel_floor", rel_floor), ("abs_floor", abs_floor)):
        if not 0.0 <= floor < math.inf:
            wrong.append((name, f"must be zero or a positive number, not {floor}"))
    if abs_floor == 0.0:
        wrong.append(("abs_floor", f"must not be 0: {why}"))
    return wrong


def check_clear(clear: float | None, name: str, limit: float, unit: str) -> list[tuple[str, str]]:
    """Check a bound that counts scales or spreads, and a `clear` between 0 and it."""
    wrong = []
    if not 0.0 < limit < math.inf:
        wrong.append((name, f"must be a positive number of {unit}, not {limit}"))
    if clear is not None and not 0.0 < clear < limit:
        wrong.append(("clear", f"must be above 0 and below `{name}` ({limit}), not {clear}"))
    return wrong
