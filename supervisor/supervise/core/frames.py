"""Frames of ranks: the job's own one per step, its numbers, and those kept to answer questions.

The frame of the rank that leads is held until all ranks have sent that step, and then says of the
metrics in `JOB` what the job says: what each rank has of them is in its own frame. What lacks ranks
after `HOLD_NS` is made without them: then means are of those that are there, and sums and norms are
absent; `job_ranks` says how many they are. Means are weighted by targets. Ranks of other machines,
which nobody here can see, count as those of this one.

Folds events in the order of the journal and looks at no clock, so that a replay makes the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from .model.events import Frame

Row = tuple[float | None, ...]  # the values of a frame

LOSS = "train_loss_raw"
STATISTICS = "running_stats_broken"  # counted once a loss or gradient was not finite
# What shows a forward pass that was NaN or Inf: loss, gradients, updates that were left out.
FORWARD = (LOSS, "grad_global_norm", "nonfinite_discards", "update_skipped")
STATISTICS_LAG = 2  # steps from a NaN to a count of statistics on an accelerator, elsewhere 1
PROBES = ("fixed_probe_loss", "val_loss")  # the first that has enough values answers
FRAMES = 640  # the 266 before an onset, and as many as it takes to answer
EVALUATIONS = 64
THROUGHPUT = frozenset(  # of all steps, so a busy machine moves them
    (
        *("step_time", "tokens_per_sec", "mfu", "gpu_util", "dataloader_stall_frac"),
        *("comm_time_frac", "compute_time_frac", "train_time_linearity"),
    )
)
# A sample of these stands for so long at least: what slows a machine down lasts as long whatever a
# step takes. Just below the 0.1 s of which 30 are the 3 s that slow steps must last.
SAMPLE_NS = 90_000_000
# At the start a sample is this part of the time so far: a job of short steps that slows down within
# seconds has samples enough to compare with. Of 16 the 64 that are asked for come too late, and 64
# are so short that two seconds of a busy machine are a slowdown.
SAMPLES_AT_START = 24


@dataclass(frozen=True)
class BrokenForward:
    """A forward pass that was NaN or Inf, which running statistics keep.

    Attributes:
        step: of it; None where no frame shows which it was. counted: the first step whose
            statistics are known to be broken. skipped: its update was skipped.
    """

    step: int | None
    counted: int
    skipped: bool = False


def find_broken_forward(rows: Iterable[tuple[int, Row]], counted: int) -> BrokenForward:
    """Return what broke running statistics that are counted on from a step.

    A loss says more than gradients: those overflow now and then while a scaler looks for its scale.

    Args:
        rows: step and values of `FORWARD`, newest first.
    """
    near: list[tuple[int, Row]] = []
    for step, values in rows:
        near.append((step, values))
        if step < counted - STATISTICS_LAG:
            break
    losses, others = list[BrokenForward](), list[BrokenForward]()
    discards_before = math.inf
    for step, (loss, grad, discards, skipped) in reversed(near):
        is_discarded, discards_before = (discards or 0.0) > discards_before, discards or 0.0
        if not counted - STATISTICS_LAG <= step < counted:
            continue
        forward = BrokenForward(step, counted, skipped == 1.0)
        if loss is not None and not math.isfinite(loss):
            losses.append(forward)
        elif (grad is not None and not math.isfinite(grad)) or is_discarded or forward.skipped:
            others.append(forward)
    return next(iter(losses + others), BrokenForward(None, counted))


class MeanValues:
    """Means of some columns over the frames of SAMPLE_NS or a little more; one frame as it is.

    At the start a sample is shorter: see SAMPLES_AT_START.

    Attributes:
        due: the newest frame ended a sample. steps: of the newest samples, oldest first.
    """

    __slots__ = ("_began_ns", "_columns", "_passed_ns", "_sums", "due", "steps")

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=FRAMES)
        self._began_ns: int | None = None
        self._passed_ns = 0
        self.restart_columns(())

    def restart_columns(self, columns: Iterable[int]) -> None:
        """Begin a sample of these columns with the next frame."""
        self.due = True
        self._columns = tuple(sorted({*columns}))
        self._sums = [(0.0, 0)] * len(self._columns)

    def add(self, at_ns: int, step: int, row: Row) -> Row:
        """Take a frame; return the row of means where it ends a sample, else `row`."""
        single = self.due
        since_ns = SAMPLE_NS if self._began_ns is None else at_ns - self._began_ns
        self.due = not 0 <= since_ns < min(SAMPLE_NS, self._passed_ns // SAMPLES_AT_START)
        if self.due:
            if self._began_ns is not None:
                self._passed_ns += min(max(since_ns, 0), SAMPLE_NS)
            self._began_ns = at_ns
            self.steps.append(step)
            if single:
                return row
        for place, column in enumerate(self._columns):
            value, (total, count) = row[column], self._sums[place]
            if value is not None and value - value == 0.0:
                self._sums[place] = total + value, count + 1
        if not self.due:
            return row
        means = list(row)
        for column, (total, count) in zip(self._columns, self._sums, strict=True):
            means[column] = total / count if count else None
        self._sums = [(0.0, 0)] * len(self._columns)
        return tuple(means)

    def rewind(self, step: int) -> None:
        """Forget the frames behind `step`."""
        self.restart_columns(self._columns)
        while self.steps and self.steps[-1] > step:
            self.steps.pop()


class History:
    """Frames, oldest first, in ascending steps.

    Attributes:
        frames: `add` appends to it.
        probed: `(name, column)` of the evaluations that this rank publishes.
        levels: `(metric, breach)` -> the level before it as these frames show it, once asked for.
    """

    __slots__ = ("evaluations", "frames", "levels", "names", "probed")

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=FRAMES)
        self.evaluations: deque[tuple[str, int, float]] = deque(maxlen=EVALUATIONS)
        self.names: tuple[str, ...] = ()
        self.probed: tuple[tuple[str, int], ...] = ()
        self.levels: dict[tuple[str, int], float | None] = {}

    def announce(self, names: tuple[str, ...], *, fresh: bool) -> None:
        """Bind names to columns. `fresh`: another process, whose frames are another story."""
        if fresh:
            self.evaluations.clear()
        if fresh or names[: len(self.names)] != self.names:  # or else columns have moved
            self.frames.clear()
            self.levels = {}
        self.names = names
        self.probed = tuple((name, names.index(name)) for name in PROBES if name in names)

    def add(self, frame: Frame) -> None:
        """Take the next frame."""
        self.frames.append(frame)
        if self.levels:
            self.levels = {}
        for name, column in self.probed:
            value = frame.values[column] if column < len(frame.values) else None
            if value is not None and value - value == 0.0:
                self.evaluations.append((name, frame.step, value))

    def rewind(self, step: int) -> None:
        """The run goes on with `step`: forget what was seen from there on."""
        while self.frames and self.frames[-1].step >= step:
            self.frames.pop()
        self.levels = {}
        while self.evaluations and self.evaluations[-1][1] >= step:
            self.evaluations.pop()

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of the frames kept, oldest first, where the value is finite."""
        if metric not in self.names:
            return []
        column = self.names.index(metric)
        rows = ((f.step, f.values[column]) for f in self.frames if column < len(f.values))
        return [(step, value) for step, value in rows if value is not None and value - value == 0.0]

    def newest_rows(self, metrics: Sequence[str]) -> Iterator[tuple[int, Row]]:
        """Yield the step and the values of these metrics of each frame, newest first."""
        columns = [self.names.index(m) if m in self.names else FRAMES for m in metrics]
        for frame in reversed(self.frames):
            values, count = frame.values, len(frame.values)
            yield frame.step, tuple(values[c] if c < count else None for c in columns)

    def has_recent_value(self, metric: str, frames: int) -> bool:
        """Return whether the metric was finite in any of the newest `frames` frames."""
        if metric not in self.names:
            return False
        column = self.names.index(metric)
        for frame in islice(reversed(self.frames), frames):
            value = frame.values[column] if column < len(frame.values) else None
            if value is not None and value - value == 0.0:
                return True
        return False

    def has_consecutive_values(self, metric: str) -> bool:
        """Return whether the metric was finite in two frames running, newest looked at first."""
        if metric not in self.names:
            return False
        column, was_finite = self.names.index(metric), False
        for frame in reversed(self.frames):
            value = frame.values[column] if column < len(frame.values) else None
            now = value is not None and value - value == 0.0
            if now and was_finite:
                return True
            was_finite = now
        return False


MEANS = ("train_loss_raw", "train_loss", "train_loss_ema", "val_loss")
TOKENS = "tokens_per_update"
SUMS = (TOKENS, "tokens_seen", "tokens_applied", "tokens_per_sec")
NORMS = {  # metric -> norm, what its square is the sum of, and what that is divided by
    "grad_global_norm": ("grad_global_norm", "grad_norm_share", ""),
    "update_norm": ("update_norm", "update_square_share", ""),
    "update_to_weight": ("update_norm", "update_square_share", "weight_square_share"),
}
EQUAL = 1e-9  # relative: shares of replicas
ALIKE = 1e-5  # relative: ranks that hold the same gradients add them in the same order

Values = Mapping[str, float | None]


def combine_rank_values(
    rows: Mapping[int, Values],
    leader: int,
    names: Collection[str],
    world_size: int,
    *,
    is_complete: bool = True,
) -> dict[str, float | None]:
    """Return what the job says of the metrics in `JOB` that its leader has.

    Args:
        rows: the values of each rank.
        is_complete: no rank is missing that should be there.
    """
    scale = max(1.0, world_size / len(rows)) if is_complete else None
    every = list(rows.values())
    found: dict[str, float | None] = {name: _mean(every, name) for name in MEANS if name in names}
    for name in SUMS:
        if name in names:
            parts = [_over(values.get(name), values.get("batch_copies") or 1.0) for values in every]
            found[name] = _total(parts, scale)
    for name in NORMS:
        if name in names:
            found[name] = _norm(every, name, rows[leader].get(name), world_size, scale)
    return found


def can_fold_norm(ranks: Sequence[Values], name: str) -> bool:
    """Return whether ranks say how a norm of the job is made of theirs, or all have the same."""
    root, share, _ = NORMS[name]
    present = [values[name] for values in ranks if values.get(name) is not None]
    if all(values.get(root) is None or values.get(share) is not None for values in ranks):
        return True
    return len(present) == len(ranks) and all(
        math.isclose(value or 0.0, present[0] or 0.0, rel_tol=ALIKE) for value in present
    )


def _mean(rows: Sequence[Values], name: str) -> float | None:
    """Return the mean over ranks, weighted by their targets where all know these."""
    present = [(value, v.get(TOKENS)) for v in rows if (value := v.get(name)) is not None]
    if not present:
        return None
    weights = [weight for _, weight in present if weight is not None]
    if len(weights) < len(present) or not sum(weights):
        weights = [1.0] * len(present)
    pairs = [(value, w) for (value, _), w in zip(present, weights, strict=True) if w]
    if len({value for value, _ in pairs}) == 1:
        return pairs[0][0]
    return _sum(value * w for value, w in pairs) / _sum(w for _, w in pairs)


def _norm(
    rows: Sequence[Values], name: str, own_value: float | None, world_size: int, scale: float | None
) -> float | None:
    root, share, below = NORMS[name]
    values = [v[name] for v in rows if v.get(name) is not None]
    alike = own_value is not None and values.count(own_value) == len(values)
    shares = [v.get(share) for v in rows]
    if root == name == "grad_global_norm":  # a root itself
        shares = [None if x is None else x * x for x in shares]
    replicas = (_is_replica(v.get(root), x, world_size) for v, x in zip(rows, shares, strict=True))
    if alike and all(replicas):
        return own_value  # of replicas: that of one is that of the job
    if any(value is not None and value - value != 0.0 for value in values):
        return math.nan
    if any(v.get(root) is not None and x is None for v, x in zip(rows, shares, strict=True)):
        return (
            own_value  # nobody knows how the weights are spread: the leader's part stands for all
        )
    square = _total(shares, scale)
    of = _total([v.get(below) for v in rows], scale) if below else 1.0
    return math.sqrt(square / of) if square is not None and of else None


def _is_replica(root: float | None, share: float | None, world_size: int) -> bool:
    """Return whether a rank holds all of it, as the others do; True where nobody knows."""
    if root is None or share is None:
        return True
    return math.isclose(share * world_size, root * root, rel_tol=EQUAL)


def _total(parts: Sequence[float | None], scale: float | None) -> float | None:
    """Return the sum over the job, None where a part of it is missing."""
    present = [part for part in parts if part is not None]
    if scale is None or not present or len(present) < len(parts):
        return None
    return _sum(present) * scale


def _sum(parts: Iterable[float]) -> float:
    """Return the sum, in which the order of the ranks does not matter to the last bit."""
    present = list(parts)
    return math.fsum(present) if all(map(math.isfinite, present)) else sum(present)


def tokens_of_rank(values: Values) -> float:
    """Return what one rank adds to the tokens of its step: ranks that read one batch share it."""
    tokens = _over(values.get(TOKENS), values.get("batch_copies") or 1.0)
    return tokens if tokens is not None and math.isfinite(tokens) else 0.0


def _over(value: float | None, copies: float) -> float | None:
    return None if value is None else value / copies


JOB = frozenset((*MEANS, *SUMS, *NORMS, "step_time"))
COLUMNS = ("job_ranks", "nonfinite_rank")  # in front of those that a rank announces
HOLD_NS = 5_000_000_000  # while the leader goes on, or nobody does; project default
MISSES = 8  # steps in a row without a rank, after which nobody waits for it; project default
LAG = 64  # frames that are held at most

Key = tuple[int, int]


class JobFrames:
    """The frames of a job's ranks that are not judged yet.

    Attributes:
        leader: the lowest rank that has sent a frame, None before the first.
    """

    def __init__(self) -> None:
        self.leader: int | None = None
        self._names: dict[int, tuple[str, ...]] = {}
        self._missed: dict[int, int] = {}
        self._steps: dict[Key, dict[int, Values]] = {}
        self._held: deque[tuple[Frame, int]] = deque()  # with the time when it came
        self._made_last: Key = (-1, -1)
        self._newest_ns = 0

    def announce(self, rank: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """A rank announced its columns; return those that its frames have from now on."""
        self._names[rank], self._missed[rank] = names, 0
        return COLUMNS + names

    def forget(self, rank: int) -> None:
        """Another program is that rank now, and may begin again at any step."""
        for rows in self._steps.values():
            rows.pop(rank, None)
        self._made_last = (-1, -1)

    def remove(self, rank: int) -> None:
        """Nobody is that rank any more: no step waits for it."""
        for rows in self._steps.values():
            rows.pop(rank, None)
        self._names.pop(rank, None)
        self._missed.pop(rank, None)
        if self.leader == rank:
            self.leader = None
            self._held.clear()

    def add(self, frame: Frame, at_ns: int, world_size: int) -> list[Frame]:
        """Take a rank's frame; return what can be judged, the job's own behind those of ranks."""
        rank, key, ready = frame.rank, (frame.attempt, frame.step), list[Frame]()
        self._newest_ns = at_ns
        if self.leader is None or rank < self.leader:
            ready += [_plain(frame_held) for frame_held, _ in self._held]
            self._held.clear()
            self.leader = rank
        if rank == self.leader:
            self._held.append((frame, at_ns))
        else:
            ready.append(_plain(frame))
        if key > self._made_last:
            names = self._names.get(rank, ())
            self._steps.setdefault(key, {})[rank] = dict(zip(names, frame.values, strict=False))
            self._missed[rank] = 0
            while len(self._steps) > LAG:
                del self._steps[min(self._steps)]
        return ready + self._ready(world_size, at_ns)

    def release_overdue(self, at_ns: int, world_size: int) -> list[Frame]:
        """Return the frames that waited for other ranks for too long."""
        return self._ready(world_size, at_ns)

    def flush(self, world_size: int) -> list[Frame]:
        """Return all frames that wait for other ranks, of what is there."""
        return self._ready(world_size, None)

    def _ready(self, world_size: int, at_ns: int | None) -> list[Frame]:
        ready: list[Frame] = []
        while self._held:
            oldest, came_ns = self._held[0]
            rows = self._steps.get(_key(oldest), {})
            missing = {r for r, count in self._missed.items() if count < MISSES} - rows.keys()
            if missing and at_ns is not None and not self._is_overdue(came_ns, at_ns):
                break
            self._held.popleft()
            for rank in missing:
                self._missed[rank] += 1
            self._made_last = _key(oldest)
            self._steps = {
                key: rows_of_step for key, rows_of_step in self._steps.items() if key > _key(oldest)
            }
            ready.append(self._combined(oldest, rows, world_size, is_complete=not missing))
        return ready

    def _is_overdue(self, came_ns: int, at_ns: int) -> bool:
        """Return whether the oldest frame is held for too long; a recording has a row a second."""
        idle = len(self._held) > 1 or at_ns - self._newest_ns > HOLD_NS
        return len(self._held) > LAG or (at_ns - came_ns > HOLD_NS and idle)

    def _combined(
        self, frame: Frame, rows: Mapping[int, Values], world_size: int, *, is_complete: bool
    ) -> Frame:
        names = self._names.get(frame.rank, ())
        rows = {**rows, frame.rank: dict(zip(names, frame.values, strict=False))}
        combined = combine_rank_values(rows, frame.rank, names, world_size, is_complete=is_complete)
        odd = next((r for r in sorted(rows) if not _finite(rows[r])), None)
        own_values = zip(names, frame.values, strict=False)
        values = tuple(combined.get(name, value) for name, value in own_values)
        columns_ahead = (float(len(rows)), None if odd is None else float(odd))
        return replace(frame, values=columns_ahead + values)


def _finite(values: Values) -> bool:
    present = (values.get(name) for name in (MEANS[0], *NORMS))
    return all(value is None or math.isfinite(value) for value in present)


def _key(frame: Frame) -> Key:
    return frame.attempt, frame.step


def _plain(frame: Frame) -> Frame:
    """Return the frame of a rank beside the job's."""
    return replace(frame, values=(None, None, *frame.values))
