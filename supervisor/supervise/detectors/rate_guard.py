"""Rate guard: a learning rate that leaves the range that its own schedule has shown.

Schedules rise slowly, or to where they have been. A jump above all that is known before the loss
tells, and needs no threshold from data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import NOTE, REBASELINE, Detector, Note, Reading
from ..core.model.payload import Json, Payload
from ._baseline import median
from ._watch import Memory, needs

KEPT = 256  # samples that `rewind` can restore
RECENT = 16  # samples of `confirm`; project default
# Of one group: samples; the greatest that did not jump; samples since it grew; the newest sample;
# by how much it rose; samples of the jump under way; whether that is confirmed.
Group = tuple[int, float, int, float, float, int, bool]


@dataclass(frozen=True)
class RateGuard(Detector):
    """BREACH when a rate jumps above `over` times its greatest so far, until it is back there.

    A jump is also above `over` times the sample before. While the greatest grew within the newest
    `settle` samples, a schedule warms up: there a jump is above `warmup_jump` times the greatest,
    by a rise more than twice the one before. Each of `metrics` is the rate of one parameter group;
    one in breach is enough.

    As far as one of `announced` rises in the same step, all rates may: the job's own scheduler said
    so, or a scale of ours is over. Its first sample is compared with the first of `metrics` before.
    `confirm` is what a rate moves: a jump is none when
    its first known sample from there on is not above `over` times the median of its newest 16. A
    rate that was zero so far may be anything. After `freeze` samples of a jump it is the level,
    with a `rebaseline` note.

    UNKNOWN before `min` samples, while `confirm` is awaited, and for absent, NaN and negative
    samples. `rewind` keeps what was before, over 256 samples.

    Example:
        {kind: rate_guard, metrics: [learning_rate], confirm: update_norm}

    Blind to: what happens within the range, such as a rate times three after a decay to a tenth;
        growth below `over` a sample; a rate that was wrong from the start.
    Source: 1.5: no row of 298 006 in 156 recorded schedules, and each of 28 recorded faults.
    """

    reads: ClassVar[str] = "metrics"

    metrics_: tuple[str, ...] = ("learning_rate",)
    announced: tuple[str, ...] = ()  # other metrics
    confirm: str | None = None  # another metric
    over: float = 1.5  # times the greatest rate so far
    warmup_jump: float = 2.5  # times it; a linear warm-up comes to 2 in its second step
    settle: int = 64  # samples; project default
    min_: int = 16  # samples; project default
    freeze: int = 512  # samples of a jump; project default

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.metrics_, *self.announced, *filter(None, (self.confirm,)))

    @property
    def needs_all(self) -> bool:
        return False

    def start(self) -> RateGuardWatch:
        return RateGuardWatch(self)

    def check(self) -> list[tuple[str, str]]:
        wrong = []
        if not self.metrics_:
            wrong.append(("metrics", "names no metric"))
        others = [*(("announced", each) for each in self.announced), ("confirm", self.confirm)]
        for key, other in others:
            if other in self.metrics_:
                wrong.append((key, f"has `{other}` itself, which always rises with it"))
        for name, times in (("over", self.over), ("warmup_jump", self.warmup_jump)):
            if not 1.0 < times < math.inf:
                wrong.append((name, f"must be above 1, not {times}"))
        for name, samples in (("settle", self.settle), ("freeze", self.freeze)):
            if samples < 1:
                wrong.append((name, f"must be at least 1 sample, not {samples}"))
        if self.min_ < 2:
            wrong.append(("min", f"must be at least 2 samples, not {self.min_}"))
        return wrong


class RateGuardWatch(Memory):
    """The groups now, and as they were after each of the newest samples.

    `given` are the newest announced values, 0 before the first; `worst` is the place of the group
    that the numbers are about. `past` also has what confirms, None where absent or within a jump.
    """

    def __init__(self, spec: RateGuard) -> None:
        self.spec = spec
        self.last_place = len(spec.metrics) - 1
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.groups: list[Group] = [(0, 0.0, 0, 0.0, 0.0, 0, False)] * len(self.spec.metrics_)
        self.given = [0.0] * len(self.spec.announced)
        self.past: list[tuple[int, list[Group], list[float], float | None]] = []

    def forget_last(self) -> None:
        super().forget_last()
        self.worst = 0

    def feed(self, sample: Any, step: int) -> int:
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        spec, groups = self.spec, self.groups.copy()
        rise = self._announced(sample)
        moved = None if spec.confirm is None else sample[self.last_place]
        code, note, jumped, self.worst = UNKNOWN, 0, False, 0
        for place, group in enumerate(groups):
            value = sample[place]
            if value is None or not 0.0 <= value < math.inf:
                continue
            if group[0] < spec.min_:
                groups[place] = _after(group, value)
                continue
            found, jumps = OK, self._jumps(group, value, rise)
            if jumps and group[5] + 1 >= spec.freeze:
                note, jumps = NOTE, False
                self.pending_note = self._note(place, group, value)
            elif jumps:
                sure = group[6] or self._is_confirmed(moved)
                found = UNKNOWN if sure is None else BREACH if sure else OK
                jumps = found != OK
            groups[place] = _after(group, value, jumps, found == BREACH)
            jumped = jumped or jumps
            if found == BREACH and code != BREACH:
                self.worst = place
            if found == BREACH or code == UNKNOWN:
                code = found
        self.groups, self.value = groups, sample[self.worst]
        self.past.append((step, groups, self.given, None if jumped else moved))
        if len(self.past) > 2 * KEPT:
            del self.past[:-KEPT]
        self.raw = code
        return code | note

    def _announced(self, sample: Any) -> float:
        """Return how many times more than before is announced; 1 where nothing is."""
        found, first = 1.0, len(self.groups)
        for place, before in enumerate(self.given):
            now = sample[first + place]
            if now is None or not 0.0 < now < math.inf or now == before:
                continue
            found = max(found, now / (before or self.groups[0][3] or now))
            self.given = [*self.given[:place], float(now), *self.given[place + 1 :]]
        return found

    def _jumps(self, group: Group, value: float, announced: float) -> bool:
        """Whether the rate jumps, or is still where it jumped to."""
        spec, (_, top, since, last, rise, beyond, _) = self.spec, group
        if beyond or top == 0.0:
            return beyond > 0 and value > spec.over * top
        if value <= spec.over * top or value <= spec.over * last * announced:
            return False
        if since >= spec.settle:
            return True
        return value > spec.warmup_jump * top and value - last > 2.0 * rise

    def _is_confirmed(self, moved: float | None) -> bool | None:
        """Whether what the rate moves tells of a jump too; None: not known yet."""
        if self.spec.confirm is None:
            return True
        if moved is None or not 0.0 <= moved < math.inf:
            return None
        known = (one[3] for one in reversed(self.past))
        recent = list(islice((one for one in known if one is not None and one >= 0.0), RECENT))
        return moved > self.spec.over * median(sorted(recent)) if recent else None

    def _note(self, place: int, group: Group, value: float) -> Note:
        metric, count = self.spec.metrics_[place], self.spec.freeze
        text = f"{metric}: {count} samples above {self.spec.over:g} times "
        text += f"{group[1]:.6g}; {value:.6g} is its level now"
        details: dict[str, Json] = {"metric": metric, "reference": value, "samples": count}
        return Note(REBASELINE, text, Payload({**details, "before": {"reference": group[1]}}))

    def drop_after(self, step: int) -> None:
        while self.past and self.past[-1][0] > step:
            del self.past[-1]
        if not self.past:  # further back than what is kept
            self.reset()
            return
        _, groups, self.given, _ = self.past[-1]
        # A jump that goes on is one again.
        self.groups = [(*one[:3], min(one[3], one[1]), one[4], 0, False) for one in groups]

    def lacks(self, spacing: int) -> str:
        most = max(group[0] for group in self.groups)
        return needs(most, self.spec.min_ + 1, f"samples of {self.spec.metrics_[0]}")

    def numbers(self) -> Reading:
        samples, top, since, _, _, beyond, _ = self.groups[self.worst]
        known = self.raw != UNKNOWN and self.value is not None and top > 0.0
        return {
            "step": self.last,
            "metric": self.spec.metrics_[self.worst],
            "value": self.value,
            "ratio": self.value / top if known else None,
            "threshold": self.spec.over * top,
            "reference": top,
            "settled": since >= self.spec.settle,
            "breaching": beyond,
            "samples": samples,
        }


def _after(group: Group, value: float, jumps: bool = False, sure: bool = False) -> Group:
    """Return the group with one more sample."""
    samples, top, since, last, _, beyond, _ = group
    rise = value - last if samples else 0.0
    if jumps:
        return samples + 1, top, since + 1, value, rise, beyond + 1, sure
    grown = value > top or not samples
    return samples + 1, max(top, value), 0 if grown else since + 1, value, rise, 0, False
