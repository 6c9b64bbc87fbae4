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
from ..core.model.interfaces import HAS_NOTE, REBASELINE, Detector, Note, Reading
from ..core.model.payload import Json, Payload
from ._baseline import median_of_sorted
from ._watch import Memory, explain_lacks

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
    with a `rebaseline` note; while an incident of it above SEV2 is open, only once a person has
    acknowledged that or denied its remedy, or the weights are known to be good.

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

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if not self.metrics_:
            wrong.append(("metrics", "names no metric"))
        inputs = [*(("announced", metric) for metric in self.announced), ("confirm", self.confirm)]
        for key, input_key in inputs:
            if input_key in self.metrics_:
                wrong.append((key, f"has `{input_key}` itself, which always rises with it"))
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
        self.is_level_held = False
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

    def hold_level(self, *, held: bool) -> None:
        self.is_level_held = held

    def feed(self, sample: Any, step: int) -> int:
        self.raw = UNKNOWN
        if step <= self.last:
            return UNKNOWN
        self.last = step
        spec, groups = self.spec, self.groups.copy()
        rise = self._announced(sample)
        moved = None if spec.confirm is None else sample[self.last_place]
        code, note, jumped, self.worst = UNKNOWN, 0, False, 0
        for index, group in enumerate(groups):
            value = sample[index]
            if value is None or not 0.0 <= value < math.inf:
                continue
            if group[0] < spec.min_:
                groups[index] = _advance(group, value)
                continue
            found, jumps = OK, self._jumps(group, value, rise)
            if jumps and group[5] + 1 >= spec.freeze and not self.is_level_held:
                note, jumps = HAS_NOTE, False
                self.pending_note = self._note(index, group, value)
            elif jumps:
                sure = group[6] or self._is_confirmed(moved)
                found = UNKNOWN if sure is None else BREACH if sure else OK
                jumps = found != OK
            groups[index] = _advance(group, value, jumps, found == BREACH)
            jumped = jumped or jumps
            if found == BREACH and code != BREACH:
                self.worst = index
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
        factor, first_column = 1.0, len(self.groups)
        for index, announced_before in enumerate(self.given):
            now = sample[first_column + index]
            if now is None or not 0.0 < now < math.inf or now == announced_before:
                continue
            factor = max(factor, now / (announced_before or self.groups[0][3] or now))
            self.given = [*self.given[:index], float(now), *self.given[index + 1 :]]
        return factor

    def _jumps(self, group: Group, value: float, announced: float) -> bool:
        """Whether the rate jumps, or is still where it jumped to."""
        spec, (_, top, since, last_value, rise, beyond, _) = self.spec, group
        if beyond or top == 0.0:
            return beyond > 0 and value > spec.over * top
        if value <= spec.over * top or value <= spec.over * last_value * announced:
            return False
        if since >= spec.settle:
            return True
        return value > spec.warmup_jump * top and value - last_value > 2.0 * rise

    def _is_confirmed(self, moved: float | None) -> bool | None:
        """Whether what the rate moves tells of a jump too; None: not known yet."""
        if self.spec.confirm is None:
            return True
        if moved is None or not 0.0 <= moved < math.inf:
            return None
        confirming = (state[3] for state in reversed(self.past))
        recent = list(
            islice(
                (
                    value_seen
                    for value_seen in confirming
                    if value_seen is not None and value_seen >= 0.0
                ),
                RECENT,
            )
        )
        return moved > self.spec.over * median_of_sorted(sorted(recent)) if recent else None

    def _note(self, index: int, group: Group, value: float) -> Note:
        metric, count = self.spec.metrics_[index], self.spec.freeze
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
        self.groups = [
            (*group_state[:3], min(group_state[3], group_state[1]), group_state[4], 0, False)
            for group_state in groups
        ]

    def lacks(self, spacing: int) -> str:
        sample_count = max(group[0] for group in self.groups)
        return explain_lacks(
            sample_count, self.spec.min_ + 1, f"samples of {self.spec.metrics_[0]}"
        )

    def numbers(self) -> Reading:
        samples, top, since, _, _, beyond, _ = self.groups[self.worst]
        is_known = self.raw != UNKNOWN and self.value is not None and top > 0.0
        return {
            "step": self.last,
            "metric": self.spec.metrics_[self.worst],
            "value": self.value,
            "ratio": self.value / top if is_known else None,
            "threshold": self.spec.over,
            "reference": top,
            "settled": since >= self.spec.settle,
            "breaching": beyond,
            "samples": samples,
        }


def _advance(group: Group, value: float, jumps: bool = False, sure: bool = False) -> Group:
    """Return the group with one more sample."""
    samples, top, since, last_value, _, beyond, _ = group
    rise = value - last_value if samples else 0.0
    if jumps:
        return samples + 1, top, since + 1, value, rise, beyond + 1, sure
    grown = value > top or not samples
    return samples + 1, max(top, value), 0 if grown else since + 1, value, rise, 0, False
