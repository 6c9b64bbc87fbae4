"""Metrics of a run that only the supervisor knows: restarts, errors, late frames, silent ranks.

Columns of frames, as all metrics: they are judged while any rank steps. A job of which nothing
steps is judged by time alone, see the pack `hang`.

Source: the metric catalogue, table G; the numbers are its own where nothing else is said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ..core.model.events import Announced, Beat, Frame
from ..core.model.failure import THREAD, Failure

RUN_METRICS = RESTARTS, ERRORS, LAG, MISSING = (
    "restart_rate",
    "error_event_rate",
    "metrics_ingest_lag",
    "heartbeat_missing",
)

SECOND = 1_000_000_000
HOUR_NS, HOURS_A_DAY = 3600 * SECOND, 24.0
ONE_TROUBLE_NS = 60 * SECOND  # errors of a class so near to each other; project default
SILENT_NS = 30 * SECOND  # three intervals of 10 s
MULTIPLE = 8  # times the longest of a rank's newest step times, as the pack `hang`
STEPS = 128  # step times kept
STEPPING = "step"

Now = Callable[[], tuple[int, int]]  # time and our time suspended until then, in nanoseconds


class RunMetrics:
    """The metrics of one run.

    Args:
        now: as `job.process.Process.now`.
    """

    def __init__(self, now: Now) -> None:
        self._now = now
        self._judged_from_ns, self._suspended_ns = now()
        self._relaunches: deque[int] = deque()
        self._replaced: dict[int, deque[int]] = {}  # rank -> when a process took another's place
        self._step_ns: dict[int, deque[int]] = {}
        self._newest_ns: dict[int, int] = {}
        self._missing = 0
        self._failures: set[tuple[int, int]] = set()  # pid and time of those that were taken
        self._errors: dict[str, deque[int]] = {}  # class -> when

    def on_failures(self, failures: Iterable[Failure]) -> None:
        """Take the failures that are known of the newest launch, each once.

        One trouble ends many ranks: of a class one counts a minute. Those of other programs, which
        a job may expect, and those that follow from another one do not.
        """
        for failure in failures:
            key = (failure.pid, failure.at_ns)
            if key in self._failures or failure.secondary:
                continue
            if not (failure.leading or failure.kind == THREAD):
                continue
            self._failures.add(key)
            times = self._errors.setdefault(failure.cls or "other", deque())
            if not times or failure.at_ns - times[-1] > ONE_TROUBLE_NS:
                times.append(failure.at_ns)

    def on_relaunch(self) -> None:
        """The policy starts the job again."""
        self._relaunches.append(self._now()[0])
        self._step_ns.clear()
        self._newest_ns.clear()

    def on_announced(self, event: Announced) -> None:
        """A program is the rank now: perhaps in the place of one that did not end well."""
        self._newest_ns.pop(event.rank, None)
        if event.again:
            self._replaced.setdefault(event.rank, deque()).append(event.at_ns)

    def on_beats(self, beats: Iterable[Beat], now_ns: int) -> None:
        """Count the ranks that should run hooks, and did not for 30 s or 8 of their steps."""
        self._missing = sum(
            beat.phase == STEPPING and now_ns - beat.seen_ns > self._patience_ns(beat.rank)
            for beat in beats
        )

    def of_frame(self, frame: Frame, world_size: int, *, leads: bool) -> dict[str, float]:
        """Return what joins a frame that is read now.

        restart_rate is absent before the first restart, error_event_rate before the first error;
        metrics_ingest_lag where we did not watch,
        or were suspended, when the frame was published. These are in the frames of the leader;
        heartbeat_missing is in those of every rank, as the leader may be the silent one.
        """
        before = self._newest_ns.get(frame.rank)
        self._newest_ns[frame.rank] = frame.at_ns
        found: dict[str, float] = {}
        if world_size > 1:
            if before is not None:
                times = self._step_ns.setdefault(frame.rank, deque(maxlen=STEPS))
                times.append(frame.at_ns - before)
            found[MISSING] = float(self._missing)
        if not leads:
            return found
        now_ns, suspended_ns = self._now()
        if suspended_ns != self._suspended_ns:
            self._judged_from_ns, self._suspended_ns = now_ns, suspended_ns
        if frame.at_ns >= self._judged_from_ns:
            found[LAG] = max(0.0, (now_ns - frame.at_ns) / SECOND)
        if self._relaunches or self._replaced:
            found[RESTARTS] = HOURS_A_DAY * self._restarts(now_ns)
        if self._errors:
            counts = {name: _within_hour(times, now_ns) for name, times in self._errors.items()}
            found[ERRORS] = float(sum(counts.values()))
            found |= {f"{ERRORS}.{name}": float(count) for name, count in counts.items()}
        return found

    def _restarts(self, now_ns: int) -> int:
        """Return how often the job was started again in the last hour, by whomever."""
        replaced = [_within_hour(times, now_ns) for times in self._replaced.values()]
        return _within_hour(self._relaunches, now_ns) + max(replaced, default=0)

    def _patience_ns(self, rank: int) -> int:
        return max(SILENT_NS, MULTIPLE * max(self._step_ns.get(rank, ()), default=0))


def _within_hour(times: deque[int], now_ns: int) -> int:
    """Drop the times that are more than an hour ago; return how many are left."""
    while times and now_ns - times[0] > HOUR_NS:
        times.popleft()
    return len(times)
