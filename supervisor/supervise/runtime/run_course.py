"""Metrics that follow from the frames of the leading rank: of its losses, its times and its layers.

All are pure arithmetic over what the probe published, so that they cost the job nothing. What is
not known yet is absent. Constants are project defaults where no source is named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean, median

from ..core.frames import LOSS, Values
from ..core.model.events import Frame
from ..core.model.policy import Policy, ScalingLaw
from ..core.run_state import State
from ..detectors import Collapse

Judged = Callable[[], tuple[Policy, State]]

SPIKE_METRICS = SCORE, COUNT = "spike_score", "spike_count"
LOST, COMPUTE = "train_time_linearity", "compute_time_frac"
SWING, SLICES = "layer_swing", "slice_val_shift"
COLLAPSE, LAW = "collapse_residual", "scaling_law_residual"
NEW, PRINT = "batch_new_share", "batch_fingerprint"
COURSE_METRICS = (*SPIKE_METRICS, LOST, COMPUTE, SWING, SLICES, COLLAPSE, LAW, NEW)
SECOND = 1_000_000_000
DEVICE = "gpu_mem_allocated"
SLICE, LAYER = "slice_val_loss.", "layer_weight_std."
INPUTS = frozenset(
    (
        *(LOSS, "train_loss", "tokens_applied", "batch_copies", "val_loss", "checkpoint_time"),
        *("step_time", "forward_time", "backward_time", "optimizer_time", LAW, DEVICE, PRINT),
    )
)


def is_run_course_input(name: str) -> bool:
    """Return whether a metric of the probe is an input of these."""
    return name in INPUTS or name.startswith((SLICE, LAYER))


class Spikes:
    """Counts spikes of the loss as OLMo 2 does: the share of points far above their past.

    Constants: of the paper, but for `FEW` and `APART`, project defaults.
    """

    WINDOW, DEVIATIONS = 1000, 7.0
    FEW = 100  # points that have a deviation
    APART = 50  # steps from one spike to the next

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=self.WINDOW)
        self._hits: deque[bool] = deque(maxlen=self.WINDOW)
        self._sum = self._square = 0.0  # of the values; they are a screen, and summed again
        self._count, self._newest, self._taken = 0, -self.APART, 0

    def add(self, step: int, loss: float | None) -> dict[str, float]:
        """Take the loss of a step; return the metrics, once the window is full."""
        if loss is None or not math.isfinite(loss):
            return {}
        if len(self._values) >= self.FEW:
            is_far = self._is_far(loss)
            self._hits.append(is_far)
            if is_far:
                self._count += not 0 <= step - self._newest < self.APART
                self._newest = step
        oldest = self._values[0] if len(self._values) == self.WINDOW else 0.0
        self._values.append(loss)
        self._taken += 1
        self._sum += loss - oldest
        self._square += loss * loss - oldest * oldest
        if self._taken % self.WINDOW == 0:
            self._sum = math.fsum(self._values)
            self._square = math.fsum(value * value for value in self._values)
        if len(self._hits) < self.WINDOW:
            return {}
        return {SCORE: 100.0 * sum(self._hits) / self.WINDOW, COUNT: float(self._count)}

    def _is_far(self, loss: float) -> bool:
        n = len(self._values)
        rise = loss - self._sum / n
        spread = self._square / n - (self._sum / n) ** 2
        if rise <= 0.0 or spread > (rise / (self.DEVIATIONS - 1.0)) ** 2:
            return False
        mean = math.fsum(self._values) / n
        square = math.fsum((value - mean) ** 2 for value in self._values) / n
        return 0.0 < square <= ((loss - mean) / self.DEVIATIONS) ** 2


class LostTime:
    """The share of time that is lost between steps: what their median does not explain.

    Of the newest half hour, and of at most `STEPS` steps. A step during which the job evaluated,
    saved, or was stopped has a cause that is known, and counts on neither side.
    """

    PERIOD_NS = 1800 * SECOND
    STEPS, EVERY = 4096, 128
    CAUSES = ("val_loss", "checkpoint_time")  # in the frame of the step behind them

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque(maxlen=self.STEPS)  # of a step; its time, ns
        self._newest: Frame | None = None
        self._is_explained = False
        self._taken = 0

    def on_phase(self, phase: str) -> None:
        """The leading rank is in this phase now."""
        self._is_explained |= phase != "step"

    def add(self, frame: Frame, values: Values) -> dict[str, float]:
        """Take a frame; return the metric every `EVERY` of them."""
        newest, self._newest, at_ns = self._newest, frame, frame.at_ns
        is_explained, self._is_explained = self._is_explained, False
        if newest is None or (newest.attempt, newest.step) != (frame.attempt, frame.step - 1):
            return {}
        if at_ns <= newest.at_ns:
            return {}
        if is_explained or any(values.get(cause) is not None for cause in self.CAUSES):
            return {}
        self._ends.append((at_ns, at_ns - newest.at_ns))
        while at_ns - self._ends[0][0] > self.PERIOD_NS:
            self._ends.popleft()
        self._taken += 1
        if self._taken % self.EVERY or len(self._ends) < self.EVERY:
            return {}
        times = [time for _, time in self._ends]
        whole = sum(times)
        return {LOST: max(0.0, 100.0 * (1.0 - median(times) * len(times) / whole))}


class LayerSwing:
    """How far the layers' weights swing to and fro together, in percent.

    Of the logs of `layer_weight_std.<i>` the differences of second order, in which a steady growth
    is zero, however far apart the samples are: the root mean square of their mean over layers,
    where layers are alike in them and the sign goes to and fro; else 0.
    """

    LAYERS, SAMPLES = 4, 10
    ALIKE, TURNS = 0.8, 4  # mean correlation of two layers; changes of sign

    def __init__(self) -> None:
        self._rows: deque[tuple[float, ...]] = deque(maxlen=self.SAMPLES + 2)
        self._steps: deque[int] = deque(maxlen=self.SAMPLES + 2)
        self._attempt = 0

    def add(self, frame: Frame, values: Values) -> dict[str, float]:
        """Take a frame; return the metric where it is a sample, once there are enough."""
        if values.get(f"{LAYER}0") is None:
            return {}
        stds = [values.get(f"{LAYER}{layer}") for layer in range(8)]
        row = tuple(math.log(std) for std in stds if std is not None and 0.0 < std < math.inf)
        is_other = self._attempt != frame.attempt  # the weights of a checkpoint
        if is_other or (
            self._rows and (len(self._rows[-1]) != len(row) or frame.step <= self._steps[-1])
        ):
            self._attempt = frame.attempt
            self._rows.clear()
            self._steps.clear()
        self._rows.append(row)
        self._steps.append(frame.step)
        if len(row) < self.LAYERS or len(self._rows) < self.SAMPLES + 2:
            return {}
        layers = [_second_order(self._steps, series) for series in zip(*self._rows, strict=True)]
        common = [fmean(column) for column in zip(*layers, strict=True)]
        turns = sum(a * b < 0.0 for a, b in pairwise(common))
        if turns < self.TURNS or _mean_correlation(layers) < self.ALIKE:
            return {SWING: 0.0}
        return {SWING: 100.0 * math.sqrt(fmean(value * value for value in common))}


def _second_order(steps: Iterable[int], series: Iterable[float]) -> list[float]:
    """Return twice how far each but the first and last is below the line between its neighbours."""
    points = [*zip(steps, series, strict=True)]
    return [
        2.0 * ((a * (v - u) + c * (u - t)) / (v - t) - b)
        for (t, a), (u, b), (v, c) in zip(points, points[1:], points[2:], strict=False)
    ]


def _mean_correlation(series: list[list[float]]) -> float:
    """Return the mean over pairs, of series around zero; of one that is zero 0."""
    units = []
    for values in series:
        norm = math.sqrt(math.fsum(value * value for value in values))
        units.append([value / norm if norm else 0.0 for value in values])
    total = [math.fsum(column) for column in zip(*units, strict=True)]
    n = len(units)
    return (math.fsum(value * value for value in total) - n) / (n * (n - 1))


class SliceShift:
    """How far one slice of the evaluation went its own way, in scales of such ways so far.

    A slice's way is the change of its loss since the evaluation before, less the median of all. A
    sudden gain counts as a loss does: it may be data of the slice that came into training.
    """

    LEAST, KEPT = 8, 32  # ways that make a scale
    FLOOR = 0.002  # of the loss, as the scale at least

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._ways: dict[str, deque[float]] = {}

    def add(self, values: Values) -> dict[str, float]:
        """Take a frame; return the metric where it is an evaluation, once scales are known."""
        losses = {
            name: value
            for name, value in values.items()
            if name.startswith(SLICE) and value is not None and math.isfinite(value)
        }
        if not losses:
            return {}
        before, self._before = self._before, losses
        changes = {name: loss - before[name] for name, loss in losses.items() if name in before}
        if len(changes) < 3:  # of two nobody can tell which one went
            return {}
        usual, shifts = median(changes.values()), []
        for name, change in changes.items():
            ways = self._ways.setdefault(name, deque(maxlen=self.KEPT))
            if len(ways) >= self.LEAST:
                scale = max(1.4826 * median(map(abs, ways)), self.FLOOR * abs(losses[name]), 1e-9)
                shifts.append(abs(change - usual) / scale)
            ways.append(change - usual)
        return {SLICES: max(shifts)} if shifts else {}


class NewBatches:
    """The share of the newest batches that did not come shortly before, in percent.

    By their fingerprints, so that it is known in each step, however rarely tokens are looked at.
    """

    STEPS = 32  # whose share it is; and how far back a batch is looked for

    def __init__(self) -> None:
        self._prints: deque[tuple[int, float]] = deque(maxlen=self.STEPS)  # by step
        self._are_new: deque[bool] = deque(maxlen=self.STEPS)
        self._attempt = 0

    def add(self, frame: Frame, values: Values) -> dict[str, float]:
        """Take a frame; return the metric, once there are enough batches."""
        fingerprint, step = values.get(PRINT), frame.step
        if frame.attempt != self._attempt:  # steps are made again, perhaps of the same batches
            self._attempt = frame.attempt
            while self._prints and self._prints[-1][0] >= step:
                self._prints.pop()
        if fingerprint is None:
            return {}
        self._are_new.append(all(fingerprint != earlier for _, earlier in self._prints))
        self._prints.append((step, fingerprint))
        if len(self._are_new) < self.STEPS:
            return {}
        return {NEW: 100.0 * sum(self._are_new) / self.STEPS}


class LawResidual:
    """The mean loss since the last time, less what the law says, every fiftieth more tokens."""

    PART = 1.02
    TOKENS = "tokens_applied"

    def __init__(self, law: ScalingLaw) -> None:
        self.law = law
        self._next = 0.0
        self._losses: list[float] = []
        self._logs: list[float] = []

    def add(self, values: Values, world: int) -> dict[str, float]:
        """Take a frame of one rank of so many."""
        tokens, loss = values.get(self.TOKENS), values.get("train_loss", values.get(LOSS))
        if not tokens or loss is None or not math.isfinite(loss):
            return {}
        tokens *= world / max(1.0, values.get("batch_copies") or 1.0)  # ranks that read the same
        self._losses.append(loss - self.law.at(tokens))
        if tokens < self._next:
            return {}
        is_first, self._next = not self._next, tokens * self.PART
        residual, self._losses = fmean(self._losses), []
        return {} if is_first else {LAW: residual}


class ComputeShare:
    """The share of the step in which the model and its optimizer run, on the host.

    Absent where a device computes: of that the host sees when work was handed over. Of `EVERY`
    steps together.
    """

    EVERY = 10  # steps: of one in 10 the probe says whether there is a device
    PARTS = ("forward_time", "backward_time", "optimizer_time")

    def __init__(self) -> None:
        self._steps, self._parts = 0.0, 0.0
        self._taken = 0
        self._has_device = False

    def add(self, values: Values) -> dict[str, float]:
        """Take a frame; return the metric every `EVERY` of them."""
        self._has_device |= DEVICE in values
        step = values.get("step_time")
        parts = [part for name in self.PARTS if (part := values.get(name)) is not None]
        if not step or len(parts) < len(self.PARTS) or self._has_device:
            return {}
        self._steps += step
        self._parts += math.fsum(parts)
        self._taken += 1
        if self._taken % self.EVERY:
            return {}
        share, self._steps, self._parts = self._parts / self._steps, 0.0, 0.0
        return {COMPUTE: min(100.0, 100.0 * share)}


def _collapse_residual(state: State) -> dict[str, float]:
    """Return the newest residual of the policy's own collapse detector, of the frame before."""
    if (leader := state.leader()) is None:
        return {}
    monitor = state.monitors[leader]
    watches = zip(monitor.detectors, monitor.watches, strict=True)
    residuals = [w.numbers()["residual"] for (_, of), w in watches if isinstance(of, Collapse)]
    sure = [residual for residual in residuals if isinstance(residual, float)]
    return {COLLAPSE: sure[-1]} if sure else {}


class RunCourse:
    """All of them, for one run.

    Args:
        judged: returns the policy in force and the state of the run; None: of neither any metric.
    """

    def __init__(self, judged: Judged | None) -> None:
        self._spikes, self._lost, self._compute = Spikes(), LostTime(), ComputeShare()
        self._swing, self._slices, self._batches = LayerSwing(), SliceShift(), NewBatches()
        self._judged = judged
        self._law: LawResidual | None = None

    def on_phase(self, phase: str) -> None:
        """The leading rank is in this phase now."""
        self._lost.on_phase(phase)

    def add(self, frame: Frame, world: int, values: Values) -> dict[str, float]:
        """Take a frame of the leading rank, and its inputs; return what joins it."""
        beside = self._spikes.add(frame.step, values.get(LOSS))
        beside |= self._lost.add(frame, values)
        beside |= self._batches.add(frame, values)
        beside |= self._swing.add(frame, values)
        for metric in (self._compute, self._slices):
            beside |= metric.add(values)
        if self._judged is None:
            return beside
        policy, state = self._judged()
        law = policy.job.scaling_law
        if law is not None and LAW not in values:
            if self._law is None or self._law.law != law:  # as of a policy that was reloaded
                self._law = LawResidual(law)
            beside |= self._law.add(values, world)
        return beside | _collapse_residual(state)
