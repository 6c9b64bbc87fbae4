"""Join: breaches of several detectors within a few steps, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.model.decisions import BREACH, OK, UNKNOWN
from ..core.model.interfaces import Detector, Reading
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

    def check(self) -> list[tuple[str, str]]:
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
