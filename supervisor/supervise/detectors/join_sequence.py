"""Join and sequence: breaches of several detectors within a few steps, in any order or in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import HAS_NOTE, NEAR_MISS, Detector, Note, Reading
from ..core.model.payload import Payload
from ._watch import NEVER, Memory


@dataclass(frozen=True)
class Join(Detector):
    """BREACH while each of `all` (one of `any`) breached at most `within` steps ago.

    The breaches are raw ones, before `for`, `m_of_n` and `clear`. An UNKNOWN is remembered for
    `within` steps too, behind a breach: the reading is UNKNOWN when it depends on one. `rewind`
    forgets everything.

    Example:
        {kind: join, all: [loss_z, grad_z], within: 5}

    Blind to: order (use `sequence`), and to how often each one breached.
    Source: in public post-mortems the update norm leads the gradient norm or follows it; a watcher
        calibrated on healthy public runs takes six deviations of both for eight of one.
    """

    reads: ClassVar[str] = "detectors"

    all: tuple[str, ...] = ()  # names of detectors
    any: tuple[str, ...] = ()
    within: int = 5  # steps; project default

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def detectors(self) -> tuple[str, ...]:
        return self.all or self.any

    @property
    def needs_all(self) -> bool:
        return not self.any

    def start(self) -> JoinWatch:
        return JoinWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if bool(self.all) == bool(self.any):
            wrong.append(("all", "give exactly one of `all`, `any`, with names of detectors"))
        if self.within < 0:
            wrong.append(("within", f"must be zero or more steps, not {self.within}"))
        return wrong


class JoinWatch(Memory):
    """`breached` and `unsure` hold the last step of each code per detector, NEVER when none."""

    def __init__(self, spec: Join) -> None:
        self.spec = spec
        self.within = spec.within
        self.every = bool(spec.all)
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.breached = [NEVER] * len(self.spec.detectors)
        self.unsure = [NEVER] * len(self.spec.detectors)
        self.quiet_from = 0  # first step at which nothing is remembered any more

    def feed(self, sample: Any, step: int) -> int:
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if not any(sample):
            if step >= self.quiet_from:
                self.raw = OK
                return OK
        else:
            self.quiet_from = step + self.within + 1
            for index, code in enumerate(sample):
                if code == BREACH:
                    self.breached[index] = step
                elif code == UNKNOWN:
                    self.unsure[index] = step
        since = max(step - self.within, 0)
        codes = [
            BREACH if breached >= since else UNKNOWN if unsure >= since else OK
            for breached, unsure in zip(self.breached, self.unsure, strict=True)
        ]
        self.raw = min(codes) if self.every else max(codes)
        return self.raw

    def drop_after(self, step: int) -> None:
        self.reset()

    def numbers(self) -> Reading:
        names = self.spec.detectors
        last_breaches = {n: s for n, s in zip(names, self.breached, strict=True) if s != NEVER}
        return {
            "step": self.last,
            "value": len(
                [step for step in last_breaches.values() if step >= self.last - self.within]
            ),
            "threshold": len(names) if self.every else 1,
            "within": self.within,
            "last_breach": last_breaches,
        }


ATTEMPT_CHANGE = "attempt_change"


@dataclass(frozen=True)
class Sequence(Detector):
    """BREACH at a step t that ends a match t1 <= t2 <= ... <= t with t - t1 <= `within`.

    `steps` names detectors; what counts is their raw breach, before `for`, `m_of_n` and `clear`.
    With `same_step: false` the steps of a match must all differ. After a match all partial ones are
    dropped, so one incident is one match, and the reading is a BREACH for that step only.

    `until` names a detector whose breach drops all partial matches, before the stages of that step
    are looked at. `until: attempt_change` may be written; it is always so: `rewind` drops them.

    UNKNOWN when no match is certain but one is possible, were the UNKNOWN stages breaches. A
    partial match of at least two stages that lacked only its last one when its time ran out gives a
    `near_miss` note.

    Example:
        {kind: sequence, steps: [grad_z, update_z, loss_z], within: 8, until: attempt_change}

    Blind to: the same trouble in another order (use `join`), and to stages that breach more than
        `within` steps apart.
    Source: Flink CEP (within, skip past last event, timed-out partial matches); public post-mortems
        of training spikes for the order gradient, update, loss.
    """

    reads: ClassVar[str] = "detectors"

    steps: tuple[str, ...]  # names of detectors, in order
    within: int = 8  # steps from first to last; project default
    until: str | None = None  # name of a detector, or attempt_change
    same_step: bool = True  # one step may hold several stages: they are published together

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def detectors(self) -> tuple[str, ...]:
        if self.until is None or self.until == ATTEMPT_CHANGE:
            return self.steps
        return (*self.steps, self.until)

    def start(self) -> BreachSequenceWatch:
        return BreachSequenceWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        if len(self.steps) < 2:
            wrong.append(("steps", f"a sequence has at least two steps, not {len(self.steps)}"))
        if self.within < 0:
            wrong.append(("within", f"must be zero or more steps, not {self.within}"))
        if not self.same_step and self.within < len(self.steps) - 1:
            wrong.append(("within", f"{len(self.steps)} different steps never fit {self.within}"))
        if self.until in self.steps:
            wrong.append(("until", f"`{self.until}` is one of the steps: it could never match"))
        return wrong


class BreachSequenceWatch(Memory):
    """`sure` and `maybe` hold the latest start per stage or NEVER, `seen` its last breach.

    The matcher keeps, per stage, the latest start of all partial matches up to it: with a limit on
    the whole span no other partial match can do better. A second row of starts counts UNKNOWN as
    BREACH, and so holds the possible matches.
    """

    def __init__(self, spec: Sequence) -> None:
        self.spec = spec
        self.within = spec.within
        self.stops = len(spec.detectors) > len(spec.steps)
        stages = range(len(spec.steps))
        self.order = tuple(stages if spec.same_step else reversed(stages))
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._drop()
        self.seen = [NEVER] * len(self.spec.steps)
        self.last_match: dict[str, int | dict[str, int]] = {}

    def _drop(self) -> None:
        self.sure = [NEVER] * len(self.spec.steps)
        self.maybe = [NEVER] * len(self.spec.steps)
        self.live = False  # any of them is set

    def feed(self, sample: Any, step: int) -> int:
        if step <= self.last:
            self.raw = UNKNOWN
            return UNKNOWN
        self.last = step
        if not self.live and not any(sample):
            self.raw = OK
            return OK
        note = self._expire(step)
        if self.stops and sample[-1] != OK:
            self.sure = [NEVER] * len(self.sure)
            if sample[-1] == BREACH:
                self.maybe = [NEVER] * len(self.maybe)
        for stage in self.order:
            code = sample[stage]
            if code == OK:
                continue
            start = self.maybe[stage - 1] if stage else step
            if start != NEVER:
                self.maybe[stage] = start  # never older than the one it replaces
            if code == BREACH:
                self.seen[stage] = step
                start = self.sure[stage - 1] if stage else step
                if start != NEVER:
                    self.sure[stage] = start
        self.raw = self._verdict(step)
        return self.raw | note

    def _expire(self, step: int) -> int:
        """Drop the partial matches older than `within`; NOTE when one of them was a near miss."""
        oldest = step - self.within
        missed = self.sure[-2] if len(self.sure) > 2 else NEVER
        note = 0
        if NEVER < missed < oldest:
            steps = {n: s for n, s in zip(self.spec.steps, self.seen, strict=True) if s >= missed}
            lacking = self.spec.steps[-1]
            text = f"{', '.join(steps)} breached from step {missed}, "
            text += f"but {lacking} did not within {self.within} steps"
            self.pending_note = Note(NEAR_MISS, text, Payload({"steps": steps, "lacking": lacking}))
            note = HAS_NOTE
        for row in (self.sure, self.maybe):
            for stage, start in enumerate(row):
                if start < oldest:
                    row[stage] = NEVER
        return note

    def _verdict(self, step: int) -> int:
        """Return the code of this step from the starts that reached the last stage."""
        start, possible = self.sure[-1], self.maybe[-1]
        self.sure[-1] = self.maybe[-1] = NEVER
        if start != NEVER:
            names = zip(self.spec.steps, self.seen, strict=True)
            self.last_match = {
                "first_step": start,
                "last_step": step,
                "steps": {name: breach_step for name, breach_step in names if breach_step >= start},
            }
            self._drop()
            return BREACH
        self.live = any(waiting != NEVER for waiting in self.maybe)
        return UNKNOWN if possible != NEVER else OK

    def drop_after(self, step: int) -> None:
        self.reset()

    def lacks(self, spacing: int) -> str:
        stages = len(self.spec.steps)
        if self.spec.same_step or spacing * (stages - 1) <= self.within:
            return ""
        return f"rows are {spacing} steps apart, {stages} of them never within {self.within}"

    def numbers(self) -> Reading:
        names = self.spec.steps
        return {
            "step": self.last,
            "value": self.last_match.get("last_step"),
            "threshold": self.within,
            "within": self.within,
            "match": self.last_match,
            "last_breach": {n: s for n, s in zip(names, self.seen, strict=True) if s != NEVER},
        }
