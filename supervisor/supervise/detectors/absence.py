"""Absence: no step, no heartbeat, or no process, for too long.

Silence is measured by the time in ticks, and only while the supervisor runs and the job is not
paused. A change of phase restarts it: a run that leaves a ten-minute evaluation is not late.
A metric that stops coming is another thing: its rules become blind (`core/rank_monitor.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..core.model.decisions import BREACH, OK
from ..core.model.events import DEAD, LOADING, SUSPENDED
from ..core.model.interfaces import Clockwork, Detector, Reading
from ..core.model.values import Parsed, Seconds, closed_object_schema, format_seconds, parse_seconds
from ._watch import NEVER, Memory

AFTER = {"min": 120.0, "p99_multiple": 8.0}  # seconds, multiple; project defaults
GRACE = {"startup": 900.0, "checkpoint": 600.0, "eval": 900.0}  # seconds; NVRx sections, rounded up
STEPPING, PAUSED, EXITING = "step", "paused", "exiting"  # phases with special rules
WAITING = (PAUSED, SUSPENDED, LOADING)
TIMES = 128  # step times kept
FEWEST = 20  # step times, the fewest for a 99th percentile
# Ticks come once a second: in a longer gap the supervisor did not run. Short limits, short gaps.
AWAY_NS, LEAST_AWAY_NS = 30_000_000_000, 3_000_000_000
SECOND = 1_000_000_000


if TYPE_CHECKING:
    After = dict[str, float]
else:

    class After(metaclass=Parsed):
        """Limits: `min` is a time, `p99_multiple` a number; each may be left out."""

        @staticmethod
        def decode(value):
            if not isinstance(value, dict) or not value.keys() <= AFTER.keys():
                raise ValueError("not the keys of `after`")
            if type(value.get("p99_multiple", 1)) not in (int, float):
                raise ValueError("p99_multiple is a number")
            return {key: parse_seconds(v) if key == "min" else float(v) for key, v in value.items()}

        @staticmethod
        def encode(value):
            return {key: format_seconds(v) if key == "min" else v for key, v in value.items()}

        @staticmethod
        def schema():
            keys = {"min": Seconds.schema(), "p99_multiple": {"type": "number"}}
            return closed_object_schema(keys)


@dataclass(frozen=True)
class Absence(Detector):
    """BREACH when the `signal` did not come for max(`min`, `p99_multiple` * p99 of the step time).

    `signal: step` waits for frames, `heartbeat` for any hook of the probe. `process` is a BREACH
    when the rank's process has been dead for `min` and none has taken its place; one that ended as
    it meant to is not missed, nor any while the rest of the job works. In a phase named in
    `grace` the limit is at least that long; in any other phase, at least as long as the
    shortest one; in phase `step` there is no grace. Keys left out of `after` and `grace` keep their
    defaults. The percentile is over the newest 128 times between successive steps in phase `step`;
    a time that was a BREACH counts only where the one before it was, too.

    Never a BREACH while paused, at the job's end (`exiting`), while a foreign signal stops the job
    (`suspended`), or while a start-up reads or computes (`loading`). Silence is counted from the
    latest of: the signal, the last change of phase, the first tick. Time between two ticks more
    than a quarter of the limit apart (at least 3 s, at most 30 s) is not counted: the supervisor
    itself was stopped.
    UNKNOWN before the first tick. `rewind` keeps the step times.

    Example:
        {kind: absence, signal: step, after: {min: 120s, p99_multiple: 8}, grace: {startup: 900s}}

    Blind to: slow steps (use `ratio` on step_time), and to a job that changes phases for ever.
    Source: Kubernetes startup and liveness probes; NVIDIA Resiliency Extension (section timeouts).
    """

    reads: ClassVar[str] = "clock"

    signal: Literal["step", "heartbeat", "process"] = "step"
    after: After = field(default_factory=AFTER.copy)
    grace: dict[str, Seconds] = field(default_factory=GRACE.copy)  # by phase

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def start(self) -> AbsenceWatch:
        return AbsenceWatch(self)

    def find_errors(self) -> list[tuple[str, str]]:
        wrong = []
        for key, value in self.after.items():
            if key not in AFTER:
                wrong.append(("after", f"has no key `{key}`; keys are {', '.join(AFTER)}"))
            elif not 0.0 < value < math.inf:
                wrong.append(("after", f"`{key}` must be above zero, not {value}"))
        for phase, value in self.grace.items():
            if phase in (STEPPING, *WAITING):
                wrong.append(("grace", f"phase `{phase}` has no grace"))
            elif not 0.0 < value < math.inf:
                wrong.append(("grace", f"`{phase}` must be above zero seconds, not {value}"))
        return wrong


class AbsenceWatch(Memory, Clockwork):
    """Times in nanoseconds; `times` is a ring of step times and `ordered` the same, ascending."""

    def __init__(self, spec: Absence) -> None:
        self.spec = spec
        deadlines, grace = AFTER | spec.after, GRACE | spec.grace
        self.least_ns = deadlines["min"] * SECOND
        self.multiple = deadlines["p99_multiple"]
        self.grace = {phase: seconds * SECOND for phase, seconds in grace.items()}
        self.shortest = min(self.grace.values())
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.times: list[int] = []
        self.ordered: list[int] = []
        self.at = 0
        self.beat_ns: int | None = None  # newest frame
        self.signal_ns: int | None = None  # newest signal, of whichever kind
        self.since_ns: int | None = None  # silence is counted from here at the earliest
        self.tick_ns: int | None = None
        self.limit_ns = math.nan
        self.phase = ""
        self.stepping = False  # the phase was `step` at every tick since the last frame
        self.late = False  # the newest step time was left out because of a BREACH

    def feed(self, sample: Any, step: int) -> int:
        """Return the last code: a clockwork gets no samples."""
        return self.raw

    def beat(self, at_ns: int, step: int) -> None:
        if self.stepping and self.beat_ns is not None and step == self.last + 1:
            # One stall is not a step time: it would make the limit eight times as long.
            late, self.late = self.raw == BREACH, self.raw == BREACH and not self.late
            if not (late and self.late):
                self._add_step_time(at_ns - self.beat_ns)
        self.beat_ns = at_ns
        self.last = step
        self.stepping = True

    def _add_step_time(self, time: int) -> None:
        if len(self.times) == TIMES:
            del self.ordered[bisect_left(self.ordered, self.times[self.at])]
            self.times[self.at] = time
            self.at = (self.at + 1) % TIMES
        else:
            self.times.append(time)
        insort(self.ordered, time)

    def tick(self, at_ns: int, seen_ns: int | None, phase: str) -> int:
        of_process = self.spec.signal == "process"
        if phase == DEAD and not of_process:  # it is silent as before
            phase = self.phase
        if self.tick_ns is None:
            self.since_ns = at_ns
        elif at_ns - self.tick_ns > self._longest_gap_ns() and self.since_ns is not None:
            silent_before = self.tick_ns - max(self.since_ns, self._last_signal_ns(seen_ns))
            self.since_ns = at_ns - max(silent_before, 0)
        if phase != self.phase:
            self.phase, self.since_ns = phase, at_ns
        if phase != STEPPING:
            self.stepping = False
        self.tick_ns = at_ns
        self.signal_ns = self._last_signal_ns(seen_ns)
        self.limit_ns = self.least_ns
        if not of_process:
            self.limit_ns = max(self.limit_ns, self.multiple * (self.p99_ns() or 0.0))
            if phase != STEPPING:
                self.limit_ns = max(self.limit_ns, self.grace.get(phase, self.shortest))
        missed = phase == DEAD if of_process else phase not in (*WAITING, EXITING)
        self.raw = BREACH if missed and self.silent_ns() > self.limit_ns else OK
        return self.raw

    def _longest_gap_ns(self) -> float:
        limit_ns = self.least_ns if math.isnan(self.limit_ns) else self.limit_ns
        return min(AWAY_NS, max(LEAST_AWAY_NS, limit_ns / 4))

    def _last_signal_ns(self, seen_ns: int | None) -> int:
        """Return the time of the last signal; NEVER before the first."""
        signal = self.beat_ns if self.spec.signal == "step" else seen_ns
        if self.spec.signal == "process":  # counted from its death
            signal = None
        return NEVER if signal is None else signal

    def silent_ns(self) -> int:
        """Return the time without a signal at the last tick."""
        if self.tick_ns is None or self.since_ns is None:
            return 0
        return max(0, self.tick_ns - max(self.since_ns, self.signal_ns or NEVER))

    def p99_ns(self) -> int | None:
        """Return the 99th percentile of the step time, None while there are too few.

        At most the second largest: of fewer than 100 values the percentile would be the longest
        stall.
        """
        count = len(self.ordered)
        rank = min(math.ceil(0.99 * count) - 1, count - 2)
        return self.ordered[rank] if count >= FEWEST else None

    def rewind(self, step: int) -> None:
        self.last = min(self.last, step)
        self.stepping = False  # the rollback itself is not a step

    def numbers(self) -> Reading:
        p99_ns = self.p99_ns()
        return {
            "step": self.last,
            "value": self.silent_ns() / SECOND,
            "threshold": self.limit_ns / SECOND,
            "signal": self.spec.signal,
            "phase": self.phase,
            "p99_s": None if p99_ns is None else p99_ns / SECOND,
            "samples": len(self.ordered),
        }
