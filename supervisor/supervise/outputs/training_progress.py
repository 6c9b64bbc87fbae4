"""Progress of the training: loss, speed, planned length, and a curve of the whole run.

Plain data for `state.json`. A frame costs a microsecond here, and the curve has a fixed size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from ..core.model.events import Frame

# The first that has a value counts: of all ranks together, else of one (design/rulings.md, Values).
LOSSES = ("job_loss", "train_loss", "train_loss_raw")
JOB_TOKENS, RANK_TOKENS = "job_tokens", "tokens_per_update"
SPEED_FRAMES = 64  # that the speed is the mean of; project default
PAUSE_STEPS = 20  # times the median step: longer than a checkpoint mostly is; project default
POINTS = 128  # of the curve at most; half as many after it was thinned
# Options of training scripts that give the optimizer steps of the whole run: Trainer, Lightning,
# nanoGPT, Megatron-LM, torchtitan, diffusers, and this project's example.
PLANNED = (
    *("max_steps", "max_iters", "steps", "num_steps", "total_steps", "train_iters", "max_step"),
    *("num_iterations", "max_train_steps", "training_steps", "training.steps"),
)


class Curve:
    """The loss over the whole run in at most POINTS points.

    A point is the highest loss of `stride` frames, so that no spike is lost; NaN counts as highest.
    When all points are used up, two become one.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._left = 0  # frames that the newest point still takes

    def add(self, step: int, loss: float) -> None:
        """Take the loss of one frame."""
        if self._left:
            self.losses[-1] = _higher(self.losses[-1], loss)
            self._left -= 1
            return
        if len(self.steps) == POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=True)
            self.losses = [_higher(a, b) for a, b in pairs]
            self.steps = self.steps[::2]
            self.stride *= 2
        self.steps.append(step)
        self.losses.append(loss)
        self._left = self.stride - 1


class TrainingProgress:
    """What the frames of a run show of its progress.

    Args:
        argv: the job's command, where the planned length may be.
    """

    def __init__(self, argv: Sequence[str] = ()) -> None:
        self._given = planned_in(argv)
        self._columns: dict[int, tuple[Sequence[str], tuple[int, int], list[int]]] = {}
        self._steps: dict[int, int] = {}  # rank -> newest step
        self._attempt = -1
        self._recent: deque[tuple[int, int]] = deque(maxlen=SPEED_FRAMES)  # of the leader: ns, step
        self._loss: tuple[int, str, float] | None = None  # rank, metric, value
        self._tokens: tuple[float, str] | None = None  # of an update, and of what
        self._curve = Curve()

    def take(self, names: Sequence[str], frame: Frame) -> None:
        """Take a frame and the names of its values."""
        if frame.attempt < self._attempt:
            return
        if frame.attempt > self._attempt:
            self._attempt = frame.attempt
            self._steps.clear()
            self._recent.clear()
        rank, values = frame.rank, frame.values
        self._steps[rank] = frame.step
        known = self._columns.get(rank)
        if known is None or known[0] is not names:
            known = self._columns[rank] = _columns(names)
        if rank == min(self._steps):
            if self._recent and frame.step <= self._recent[-1][1]:
                self._recent.clear()
            self._recent.append((frame.at_ns, frame.step))
            self._tokens = _tokens(values, known[1])
        if self._loss is None or rank <= self._loss[0]:
            self._take_loss(names, frame, known[2])

    def _take_loss(self, names: Sequence[str], frame: Frame, columns: Sequence[int]) -> None:
        for column in columns:
            loss = _value(frame.values, column)
            if loss is not None:
                self._loss = frame.rank, names[column], loss
                self._curve.add(frame.step, loss)
                return
            if self._loss is not None and self._loss[1] == names[column]:
                return  # absent in this step: another metric would bend the curve

    def facts(
        self, planned: int | None, now_ns: int, probe: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return loss, speed, time left, the curve, and how far each rank lags.

        What is not known is None: `steps_per_s` before two steps, `tokens_per_s` of a job without
        tokens, `eta_s` without a planned length. `tokens_of` is `job`, or `rank` for the leader's.

        Args:
            planned: optimizer steps of a whole run, from the policy (`job.steps`).
            probe: the status of a rank, in which a library may say the same; before the command.
        """
        total, origin = (planned, "job.steps") if planned else self._given
        reported = (probe or {}).get("planned_steps")
        if not planned and isinstance(reported, int) and reported > 0:
            total, origin = reported, str((probe or {}).get("library", ""))
        speed = self._speed()
        step = max(self._steps.values(), default=-1)
        left = None if total is None else max(0, total - 1 - step)
        rank, metric, loss = self._loss or (None, None, None)
        tokens, of_what = self._tokens or (None, None)
        return {
            "loss": loss,
            "loss_metric": metric,
            "loss_rank": rank,
            "steps_per_s": speed,
            "tokens_per_s": speed * tokens if speed and tokens else None,
            "tokens_of": of_what,
            "last_step_s": round((now_ns - self._recent[-1][0]) / 1e9, 1) if self._recent else None,
            "planned_steps": total,
            "planned_by": origin if total is not None else None,
            "eta_s": round(left / speed) if left is not None and speed else None,
            "lag": {str(r): step - at for r, at in sorted(self._steps.items())},
            "curve": {"steps": self._curve.steps, "loss": self._curve.losses},
        }

    def _speed(self) -> float | None:
        """Return the steps per second; what took as long as many steps was a pause."""
        spans = [(b - a, to - since) for (a, since), (b, to) in pairwise(self._recent)]
        typical = median(ns / steps for ns, steps in spans) if spans else 0.0
        kept = [(ns, steps) for ns, steps in spans if ns / steps <= PAUSE_STEPS * typical]
        took_ns = sum(ns for ns, _ in kept)
        return sum(steps for _, steps in kept) / (took_ns / 1e9) if took_ns > 0 else None


def planned_in(argv: Sequence[str]) -> tuple[int | None, str]:
    """Return the planned steps in a job's command, and the option that says so.

    Two options that disagree are none.
    """
    found: dict[str, int] = {}
    for this, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = this.partition("=")
        text = value if equals else following
        option = name.lstrip("-").replace("-", "_").lower()
        if option in PLANNED and (equals or name.startswith("--")) and text.isdecimal():
            found[f"{name}={text}" if equals else f"{name} {text}"] = int(text)
    if len(set(found.values())) != 1:
        return None, ""
    origin, total = next(iter(found.items()))
    return (total, origin) if total > 0 else (None, "")


def _columns(names: Sequence[str]) -> tuple[Sequence[str], tuple[int, int], list[int]]:
    places = {name: i for i, name in enumerate(names)}
    tokens = places.get(JOB_TOKENS, -1), places.get(RANK_TOKENS, -1)
    return names, tokens, [places[name] for name in LOSSES if name in places]


def _tokens(values: Sequence[float | None], columns: tuple[int, int]) -> tuple[float, str] | None:
    for column, of_what in zip(columns, ("job", "rank"), strict=True):
        tokens = _value(values, column)
        if tokens is not None:
            return tokens, of_what
    return None


def _value(values: Sequence[float | None], column: int) -> float | None:
    return values[column] if 0 <= column < len(values) else None


def _higher(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b


def read_curve(training: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return steps and losses of the curve in a status; non-finite ones are text there."""
    curve = training.get("curve") or {}
    return list(curve.get("steps") or ()), [float(x) for x in curve.get("loss") or ()]
