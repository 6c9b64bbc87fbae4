"""Since when steps take longer, and which part of a step it is: medians of a few hundred times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .loss_band import median

STEP_TIME = "step_time"
PARTS = {  # metric -> where the time goes
    "input_time": "waiting for data",
    "forward_time": "in the forward pass",
    "backward_time": "in the backward pass",
    "optimizer_time": "in the optimizer",
    "checkpoint_time": "writing checkpoints",
    "other_time": "reading data, or other code outside of forward, backward and optimizer",
}
NEWEST, BEFORE = 20, 256  # steps whose median is the new time of a step, and the old one
LEAST = 8  # steps on either side
SLOWER = 1.25  # the limit of the pack `throughput`
MOST_OF_IT = 0.5  # of what a step takes longer; below it several parts are slower

Series = Callable[[str], list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Steps that take longer.

    Attributes:
        since: the first such step. before_s, now_s: what a step took, and takes.
        part: the metric of the part that explains most of it, "" for none; part_s: what that takes.
    """

    since: int
    before_s: float
    now_s: float
    part: str = ""
    part_s: float = 0.0

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> SlowStep | None:
        """Return what `data` gave for a record."""
        return cls(**record) if record else None

    def data(self) -> dict[str, Any]:
        """Return it as an audit record holds it."""
        return asdict(self)

    @property
    def cause(self) -> str:
        """Return where the time goes, "" where that is not one part."""
        if not self.part:
            return ""
        return f"{PARTS[self.part]}, {_duration(self.part_s)} of {_duration(self.now_s)}"

    @property
    def text(self) -> str:
        """Return it in one line."""
        text = f"steps take {self.now_s / self.before_s:.2g}x as long since step {self.since}"
        return (
            f"{text}: {self.cause or f'{_duration(self.now_s)}, {_duration(self.before_s)} before'}"
        )


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


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"
