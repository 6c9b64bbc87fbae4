"""What only several ranks together tell: how far their losses, times and gradients lie apart.

Ranks publish on their own; a step is complete when every rank has published it, and its numbers are
then those of the leader's next frame: one step late, never waited for. Pure arithmetic.

Source: the stability metrics report, rows `loss_dispersion`, `straggler_ratio`,
`grad_direction_consistency` and `param_digest_mismatch`; its `loss_dispersion > 0` is no fault,
ranks read different data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

LOSS, SKETCH, DIGEST = "train_loss_raw", "grad_sketch.", "param_digest."
OWN = ("input_time", "forward_time")
LAG = 64  # steps that may be incomplete before the oldest is dropped

METRICS = (
    "loss_dispersion",
    "loss_outlier_rank",
    "straggler_ratio",
    "straggler_rank",
    "grad_direction_consistency",
    "param_digest_mismatch",
)

Values = Mapping[str, float | None]


class Ranks:
    """Gathers the frames of all ranks of a run, step by step."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], dict[int, Values]] = {}
        self._newest: dict[str, float] = {}

    def add(self, attempt: int, step: int, rank: int, world_size: int, values: Values) -> None:
        """Take one rank's frame."""
        if world_size < 2:
            return
        key = (attempt, step)
        ranks = self._open.setdefault(key, {})
        ranks[rank] = values
        if len(ranks) == world_size:
            self._newest = together([ranks[r] for r in sorted(ranks)])
            self._open = {k: v for k, v in self._open.items() if k > key}
        while len(self._open) > LAG:  # a rank fell silent: its steps never come
            del self._open[min(self._open)]

    def forget(self, rank: int) -> None:
        """Another program is the rank now: its steps may have the numbers of those before it."""
        for ranks in self._open.values():
            ranks.pop(rank, None)

    def newest(self) -> dict[str, float]:
        """Return the numbers of the newest complete step, once."""
        newest, self._newest = self._newest, {}
        return newest


def together(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the numbers of one step of which every rank's values are there.

    loss_dispersion: standard deviation of the raw losses. loss_outlier_rank: the rank whose loss
    is furthest from the median. straggler_ratio: largest over median input and forward time.
    grad_direction_consistency: mean pairwise cosine of the ranks' gradient sketches.
    param_digest_mismatch: runs of weight tensors whose checksums are not the same on all ranks.
    """
    found: dict[str, float] = {}
    losses = [values.get(LOSS) for values in ranks]
    if all(loss is not None and math.isfinite(loss) for loss in losses):
        known = [loss for loss in losses if loss is not None]
        mean, middle = sum(known) / len(known), median(known)
        found["loss_dispersion"] = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        found["loss_outlier_rank"] = float(_furthest(known, middle))
    times = [_own_time(values) for values in ranks]
    if all(time is not None for time in times):
        spent = [time for time in times if time is not None]
        if median(spent) > 0.0:
            found["straggler_ratio"] = max(spent) / median(spent)
            found["straggler_rank"] = float(spent.index(max(spent)))
    sketches = [_sketch(values) for values in ranks]
    if all(sketches):
        found["grad_direction_consistency"] = _mean_cosine(sketches)
    digests = [_digests(values) for values in ranks]
    if digests[0] and all(digest.keys() == digests[0].keys() for digest in digests):
        found["param_digest_mismatch"] = float(
            sum(any(d[name] != first for d in digests) for name, first in digests[0].items())
        )
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _furthest(values: Sequence[float], middle: float) -> int:
    return max(range(len(values)), key=lambda i: abs(values[i] - middle))


def _own_time(values: Values) -> float | None:
    """Return what a rank spent before its first collective, as its host saw it.

    Whole step times are equal on all ranks of a synchronous run, and the waiting is inside the
    backward, so neither would tell the slow rank from the others.
    """
    known = [part for name in OWN if (part := values.get(name)) is not None]
    return sum(known) if known else None


def _sketch(values: Values) -> list[float]:
    found = [v for name, v in values.items() if name.startswith(SKETCH) and v is not None]
    return found if any(found) else []


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
