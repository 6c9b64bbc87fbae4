"""Frames, completed by metrics of the machine, of several ranks, and of the run.

All are columns of the frame, so that one frame is all that a rule has to read. Numbers of the host
and of all ranks together are in the frames of the rank that leads. A value that is not known now is
absent. Restarts, errors, late frames and silent ranks are judged while any rank steps; a job of
which nothing steps is judged by time alone, see the pack `hang`.

Ranks publish on their own; a step is complete when every rank has published it, and its numbers are
then those of the leader's next frame: one step late, never waited for. A `loss_dispersion` above 0
is no fault, since ranks read different data. Pure arithmetic; its numbers are project defaults.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import median, median_low, stdev

from ..core.frames import TOKENS, Values, can_fold_norm, combine_rank_values
from ..core.model.events import Announced, Beat, Event, Frame
from ..core.model.failure import THREAD_FAILURE, Failure
from .run_course import Judged, RunCourse, is_run_course_input

LOSS, SKETCH, DIGEST = "train_loss_raw", "grad_sketch.", "param_digest."
NORM, ENTROPY = "grad_global_norm", "batch_token_entropy"
SKIPPED = "update_skipped"
# What a rank does by itself; the backward is not of them, for there it waits for the others.
PARTS = (("input_time",), ("forward_time", "optimizer_time"), ("other_time",))
OWN_STEPS = 16  # ranks take turns in being late, as with sequences of many lengths: a median
# Between ranks, with the rank that differs.
DIFFERENCES = {
    "skip_mismatch": "skip_mismatch_rank",
    "param_digest_mismatch": "param_digest_rank",
}
MAX_OPEN_STEPS = 64  # steps that may be incomplete before the oldest is dropped

CROSS_RANK_METRICS = (
    "job_loss",
    "job_tokens",
    "job_grad_norm",
    "loss_dispersion",
    "batch_dispersion",
    "loss_outlier_rank",
    "straggler_ratio",
    "straggler_rank",
    "straggler_part",
    "grad_direction_consistency",
    "param_digest_mismatch",
    "param_digest_rank",
    "skip_mismatch",
    "skip_mismatch_rank",
)


class Ranks:
    """Gathers the frames of all ranks of a run, step by step."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], dict[int, Values]] = {}
        self._own = OwnTimes()
        self._newest: dict[str, float] = {}
        self._replicas = False  # the newest step whose gradients were all finite said so

    def add(self, attempt: int, step: int, rank: int, world_size: int, values: Values) -> None:
        """Take one rank's frame."""
        key = (attempt, step)
        ranks = self._open.setdefault(key, {})
        ranks[rank] = values
        if len(ranks) == world_size:
            complete = [ranks[r] for r in sorted(ranks)]
            joined = {**join_ranks(complete), **self._own.add(complete)}
            if self._replicas:
                joined |= disagreeing_skips(complete)
            self._newest = carry_over_differences(self._newest, joined)
            self._replicas = are_replicas(complete, self._replicas)
            self._open = {k: v for k, v in self._open.items() if k > key}
        while len(self._open) > MAX_OPEN_STEPS:  # a rank fell silent: its steps never come
            del self._open[min(self._open)]

    def forget(self, rank: int) -> None:
        """Another program is the rank now: its steps may have the numbers of those before it."""
        self._replicas = False
        for ranks in self._open.values():
            ranks.pop(rank, None)

    def newest(self) -> dict[str, float]:
        """Return the numbers of the newest complete step, once."""
        newest, self._newest = self._newest, {}
        return newest


class OwnTimes:
    """What each rank spends by itself in a step, outside collectives and the backward.

    Whole step times are equal on all ranks of a synchronous run, and most waiting is inside the
    backward, so neither would tell the slow rank from the others. Not seen is a rank that is slower
    in its backward alone, or on a device that the host does not wait for.
    """

    def __init__(self) -> None:
        self._steps: deque[list[tuple[float, ...]]] = deque(maxlen=OWN_STEPS)
        self._times: deque[float] = deque(maxlen=OWN_STEPS)

    def add(self, ranks: Sequence[Values]) -> dict[str, float]:
        """Take a complete step; return what the newest `OWN_STEPS` tell, as medians over them.

        straggler_ratio: step time over what it were if the slowest rank were like the median one.
        straggler_rank: that rank. straggler_part: what it is slow at, an index into `PARTS`.
        """
        step = max((values.get("step_time") or 0.0 for values in ranks), default=0.0)
        if step <= 0.0 or any(values.get("other_time") is None for values in ranks):
            return {}
        if self._steps and len(self._steps[-1]) != len(ranks):
            self._steps.clear()
            self._times.clear()
        self._times.append(step)
        self._steps.append(
            [tuple(sum(values.get(n) or 0.0 for n in names) for names in PARTS) for values in ranks]
        )
        usual = [
            [median(parts) for parts in zip(*rows, strict=True)]
            for rows in zip(*self._steps, strict=True)
        ]
        compute = [sum(parts) for parts in usual]
        slow = compute.index(max(compute))
        step = median(self._times)
        remainder = max(step - (compute[slow] - median_low(compute)), 1e-3 * step)
        medians = [median_low(column) for column in zip(*usual, strict=True)]
        excess = [
            mine - median_time for mine, median_time in zip(usual[slow], medians, strict=True)
        ]
        return {
            "straggler_ratio": step / remainder,
            "straggler_rank": float(slow),
            "straggler_part": float(excess.index(max(excess))),
        }


def join_ranks(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the numbers of one step of which every rank's values are there.

    loss_dispersion: standard deviation of the raw losses. loss_outlier_rank: the rank whose loss
    is furthest from the median; between two, the one with the higher loss.
    batch_dispersion: standard deviation of the entropies of the ranks' own tokens.
    grad_direction_consistency: mean pairwise cosine of the ranks' gradient sketches.
    param_digest_mismatch: runs of weight tensors whose checksums are not the same on all ranks.
    param_digest_rank: the first rank whose checksums are not those of most; between two, the other.
    """
    job_values = whole_job_metrics(ranks)
    losses = [values.get(LOSS) for values in ranks]
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(finite) == len(ranks):
        job_values["loss_dispersion"] = stdev(finite)
        job_values["loss_outlier_rank"] = float(_furthest(finite, median_low(finite)))
    entropies = [e for values in ranks if (e := values.get(ENTROPY)) is not None]
    if len(entropies) == len(ranks):
        job_values["batch_dispersion"] = stdev(entropies)
    sketches = [_sketch(values) for values in ranks]
    if all(sketches):
        job_values["grad_direction_consistency"] = _mean_cosine(sketches)
    digests = [_digests(values) for values in ranks]
    if digests[0] and all(digest.keys() == digests[0].keys() for digest in digests):
        job_values["param_digest_mismatch"] = float(
            sum(any(d[name] != first for d in digests) for name, first in digests[0].items())
        )
        usual = max(digests, key=digests.count)
        odd = next((rank for rank, digest in enumerate(digests) if digest != usual), None)
        if odd is not None:
            job_values["param_digest_rank"] = float(odd)
    return {name: value for name, value in job_values.items() if math.isfinite(value)}


def are_replicas(ranks: Sequence[Values], was_same: bool) -> bool:
    """Return whether the ranks are replicas: their gradients are the same, to the bit.

    Not the norms of their weights, which ranks measure on samples of their own where steps are
    short. A step in which one's are not finite, 0 or not measured says nothing; `before` stands.
    """
    norms = [values.get(NORM) for values in ranks]
    if any(not norm or not math.isfinite(norm) for norm in norms):
        return was_same
    return len(set(norms)) == 1


def carry_over_differences(
    earlier: Mapping[str, float], newest: dict[str, float]
) -> dict[str, float]:
    """Return the numbers of the newest step, with differences of earlier ones that no frame has.

    Where frames come in bursts, several steps are complete before the next frame of the leader.
    """
    for name, place in DIFFERENCES.items():
        if name in earlier and earlier[name] > newest.get(name, -1.0):
            newest |= {key: earlier[key] for key in (name, place) if key in earlier}
    return newest


def disagreeing_skips(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the numbers of replicas that did not all do the same with an update.

    skip_mismatch: ranks that skipped an update which most of them made, or made one which most
    skipped. skip_mismatch_rank: the first of them; between two, the one that skipped.
    """
    skipped = [values.get(SKIPPED) for values in ranks]
    if any(skip is None for skip in skipped):
        return {}
    alone = [rank for rank, is_skipped in enumerate(skipped) if is_skipped]
    if 2 * len(alone) > len(skipped):
        alone = [rank for rank, is_skipped in enumerate(skipped) if not is_skipped]
    mismatch = {"skip_mismatch": float(len(alone))}
    return mismatch | ({"skip_mismatch_rank": float(alone[0])} if alone else {})


def whole_job_metrics(ranks: Sequence[Values]) -> dict[str, float]:
    """Return what the job as a whole has in one step, for people; rules judge the job's own frame.

    job_loss, job_tokens, job_grad_norm: see `core.frames`. The norm is absent where
    the ranks do not say how it adds up and do not agree.
    """
    rows = dict(enumerate(ranks))
    values = combine_rank_values(rows, 0, (LOSS, TOKENS, NORM), len(rows))
    if not can_fold_norm(ranks, NORM):
        del values[NORM]
    names = {LOSS: "job_loss", TOKENS: "job_tokens", NORM: "job_grad_norm"}
    return {names[name]: value for name, value in values.items() if value is not None}


def _furthest(values: Sequence[float], middle: float) -> int:
    return max(range(len(values)), key=lambda i: abs(values[i] - middle))


def _sketch(values: Values) -> list[float]:
    sketch = [v for name, v in values.items() if name.startswith(SKETCH) and v is not None]
    return sketch if any(sketch) else []


def _digests(values: Values) -> dict[str, float]:
    return {n: v for n, v in values.items() if n.startswith(DIGEST) and v is not None}


def _mean_cosine(sketches: Sequence[Sequence[float]]) -> float:
    """Return the mean over pairs; |sum of unit vectors|^2 holds all of them at once."""
    units = []
    for sketch in sketches:
        norm = math.sqrt(sum(x * x for x in sketch))
        units.append([x / norm for x in sketch])
    total = [math.fsum(column) for column in zip(*units, strict=True)]
    n = len(units)
    return (math.fsum(x * x for x in total) - n) / (n * (n - 1))


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
            if not (failure.leading or failure.kind == THREAD_FAILURE):
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

    def count_silent_ranks(self, beats: Iterable[Beat], now_ns: int) -> None:
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
        previous_ns = self._newest_ns.get(frame.rank)
        self._newest_ns[frame.rank] = frame.at_ns
        values: dict[str, float] = {}
        if world_size > 1:
            if previous_ns is not None:
                times = self._step_ns.setdefault(frame.rank, deque(maxlen=STEPS))
                times.append(frame.at_ns - previous_ns)
            values[MISSING] = float(self._missing)
        if not leads:
            return values
        now_ns, suspended_ns = self._now()
        if suspended_ns != self._suspended_ns:
            self._judged_from_ns, self._suspended_ns = now_ns, suspended_ns
        if frame.at_ns >= self._judged_from_ns:
            values[LAG] = max(0.0, (now_ns - frame.at_ns) / SECOND)
        if self._relaunches or self._replaced:
            values[RESTARTS] = HOURS_A_DAY * self._restarts(now_ns)
        if self._errors:
            counts = {name: _within_hour(times, now_ns) for name, times in self._errors.items()}
            values[ERRORS] = float(sum(counts.values()))
            values |= {f"{ERRORS}.{name}": float(count) for name, count in counts.items()}
        return values

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


Machine = Callable[[int, bool], Mapping[str, float]]


class _Rank:
    """What one rank announced, and the columns that were added to that.

    Columns stay where they were first announced, whoever has more to say later: what was kept of
    earlier frames stays readable.
    """

    def __init__(self, announced: Announced, columns: Sequence[str] = ()) -> None:
        self.added = list(columns)
        self.columns = list(columns)
        self._arrange: Callable[[Sequence[float | None]], tuple[float | None, ...]] = tuple
        self.announce(announced)

    def announce(self, announced: Announced) -> None:
        """The probe announced its names, perhaps again."""
        self.own = announced
        self._inputs = [
            (name, i) for i, name in enumerate(announced.names) if is_run_course_input(name)
        ]
        self.added = [name for name in self.added if name not in announced.names]
        self._lay_out()

    def add(self, names: Sequence[str]) -> None:
        """Make room for these."""
        self.added += names
        self._lay_out()

    def course(self, frame: Frame) -> dict[str, float]:
        """Return what the metrics of the whole course read of a frame of the probe."""
        values, width = frame.values, len(frame.values)
        inputs = ((name, values[i]) for name, i in self._inputs if i < width)
        return {name: value for name, value in inputs if value is not None}

    def _lay_out(self) -> None:
        source = [*self.own.names, *self.added]
        self.columns += [name for name in source if name not in self.columns]
        self.known = frozenset(self.columns)
        places = [source.index(name) for name in self.columns]
        several = len(places) > 1 and places != list(range(len(places)))
        self._arrange = itemgetter(*places) if several else tuple

    def announcement(self) -> Announced:
        """Return what the rank announced, with our columns."""
        return replace(self.own, names=tuple(self.columns))

    def complete(self, frame: Frame, beside: Mapping[str, float]) -> Frame:
        """Return the frame with the values of our columns."""
        blank = (None,) * (len(self.own.names) - len(frame.values))
        row = (*frame.values, *blank, *map(beside.get, self.added))
        return Frame(frame.at_ns, frame.rank, frame.attempt, frame.step, self._arrange(row))


class FrameEnricher:
    """Completes the events of a run's segments, in their order.

    Args:
        machine: `(pid, leads)` -> newest values of the machine, by metric id.
        now: for the metrics of the run, see `RunMetrics`; None: without them.
        judged: see `RunCourse`.
    """

    def __init__(
        self, machine: Machine, now: Now | None = None, judged: Judged | None = None
    ) -> None:
        self._machine = machine
        self._run = None if now is None else RunMetrics(now)
        self._ranks: dict[int, _Rank] = {}
        self._before: dict[int, Announced] = {}
        self._together = Ranks()
        self._course = RunCourse(judged)

    def recall(self, announced: Announced) -> None:
        """Let a rank keep the columns that it had under a supervisor before this one."""
        self._before[announced.rank] = announced

    def on_relaunch(self, failures: Iterable[Failure]) -> None:
        """The policy starts the job again, after these."""
        if self._run is not None:
            self._run.on_failures(failures)
            self._run.on_relaunch()

    def on_beats(self, beats: Iterable[Beat], failures: Iterable[Failure], now_ns: int) -> None:
        """Take the ranks' signs of life, and what is known of their ends."""
        beats = list(beats)
        for beat in beats:
            if beat.rank == min(self._ranks, default=None):
                self._course.on_phase(beat.phase)
        if self._run is not None:
            self._run.on_failures(failures)
            self._run.count_silent_ranks(beats, now_ns)

    def complete(self, event: Event) -> list[Event]:
        """Return what stands for `event`: itself, completed, perhaps behind a new announcement."""
        if isinstance(event, Announced):
            rank_columns = self._ranks.get(event.rank)
            if (
                rank_columns is None or rank_columns.own.program != event.program
            ):  # it starts from nothing
                self._together.forget(event.rank)
                if self._run is not None:
                    self._run.on_announced(event)
                previous = self._before.pop(event.rank, None)
                is_same_segment = previous is not None and previous.segment == event.segment
                columns = previous.names if previous is not None and is_same_segment else ()
                rank_columns = self._ranks[event.rank] = _Rank(event, columns)
            else:
                rank_columns.announce(event)
            return [rank_columns.announcement()]
        if isinstance(event, Frame) and event.rank in self._ranks:
            return self._frame(self._ranks[event.rank], event)
        return [event]

    def _frame(self, rank: _Rank, frame: Frame) -> list[Event]:
        announced = rank.own
        leads = frame.rank == min(self._ranks)
        if announced.world_size > 1:
            values = dict(zip(announced.names, frame.values, strict=False))
            self._together.add(frame.attempt, frame.step, frame.rank, announced.world_size, values)
        beside = dict(self._machine(announced.pid, leads))
        if leads:
            beside |= self._together.newest()
            beside |= self._course.add(frame, announced.world_size, rank.course(frame))
        if self._run is not None:
            beside |= self._run.of_frame(frame, announced.world_size, leads=leads)
        events: list[Event] = []
        if unknown := beside.keys() - rank.known:
            rank.add([name for name in beside if name in unknown])
            events.append(replace(rank.announcement(), at_ns=frame.at_ns))
        if rank.added:
            frame = rank.complete(frame, beside)
        return [*events, frame]
