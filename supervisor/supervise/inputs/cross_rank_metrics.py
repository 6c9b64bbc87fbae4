"""Metrics across ranks: the spread of their losses, times and gradients.

Ranks publish on their own; a step is complete when every rank has published it, and its numbers are
then those of the leader's next frame: one step late, never waited for. Pure arithmetic.

Source: the stability metrics report, rows `loss_dispersion`, `straggler_ratio`,
`grad_direction_consistency` and `param_digest_mismatch`; its `loss_dispersion > 0` is no fault,
ranks read different data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low, stdev

from ..core.analysis.job_numbers import TOKENS, Values, adds_up, fold

LOSS, SKETCH, DIGEST = "train_loss_raw", "grad_sketch.", "param_digest."
NORM, ENTROPY = "grad_global_norm", "batch_token_entropy"
SKIPPED = "update_skipped"
# What a rank does by itself; the backward is not of them, for there it waits for the others.
PARTS = (("input_time",), ("forward_time", "optimizer_time"), ("other_time",))
OWN_STEPS = 16  # ranks take turns in being late, as with sequences of many lengths: a median
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
        if world_size < 2:
            return
        key = (attempt, step)
        ranks = self._open.setdefault(key, {})
        ranks[rank] = values
        if len(ranks) == world_size:
            complete = [ranks[r] for r in sorted(ranks)]
            self._newest = {**together(complete), **self._own.add(complete)}
            if self._replicas:
                self._newest |= skips_apart(complete)
            self._replicas = hold_the_same(complete, self._replicas)
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
        own = [sum(parts) for parts in usual]
        slow = own.index(max(own))
        step = median(self._times)
        rest = max(step - (own[slow] - median_low(own)), 1e-3 * step)
        others = [median_low(column) for column in zip(*usual, strict=True)]
        excess = [mine - other for mine, other in zip(usual[slow], others, strict=True)]
        return {
            "straggler_ratio": step / rest,
            "straggler_rank": float(slow),
            "straggler_part": float(excess.index(max(excess))),
        }


def together(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the numbers of one step of which every rank's values are there.

    loss_dispersion: standard deviation of the raw losses. loss_outlier_rank: the rank whose loss
    is furthest from the median; between two, the one with the higher loss.
    batch_dispersion: standard deviation of the entropies of the ranks' own tokens.
    grad_direction_consistency: mean pairwise cosine of the ranks' gradient sketches.
    param_digest_mismatch: runs of weight tensors whose checksums are not the same on all ranks.
    param_digest_rank: the first rank whose checksums are not those of most; between two, the other.
    """
    found = job_numbers(ranks)
    losses = [values.get(LOSS) for values in ranks]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(known) == len(ranks):
        found["loss_dispersion"] = stdev(known)
        found["loss_outlier_rank"] = float(_furthest(known, median_low(known)))
    entropies = [e for values in ranks if (e := values.get(ENTROPY)) is not None]
    if len(entropies) == len(ranks):
        found["batch_dispersion"] = stdev(entropies)
    sketches = [_sketch(values) for values in ranks]
    if all(sketches):
        found["grad_direction_consistency"] = _mean_cosine(sketches)
    digests = [_digests(values) for values in ranks]
    if digests[0] and all(digest.keys() == digests[0].keys() for digest in digests):
        found["param_digest_mismatch"] = float(
            sum(any(d[name] != first for d in digests) for name, first in digests[0].items())
        )
        usual = max(digests, key=digests.count)
        odd = next((rank for rank, digest in enumerate(digests) if digest != usual), None)
        if odd is not None:
            found["param_digest_rank"] = float(odd)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def hold_the_same(ranks: Sequence[Values], before: bool) -> bool:
    """Return whether the ranks are replicas: their gradients are the same, to the bit.

    Not the norms of their weights, which ranks measure on samples of their own where steps are
    short. A step in which one's are not finite, 0 or not measured says nothing; `before` stands.
    """
    norms = [values.get(NORM) for values in ranks]
    if any(not norm or not math.isfinite(norm) for norm in norms):
        return before
    return len(set(norms)) == 1


def skips_apart(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the numbers of replicas that did not all do the same with an update.

    skip_mismatch: ranks that skipped an update which most of them made, or made one which most
    skipped. skip_mismatch_rank: the first of them; between two, the one that skipped.
    """
    skipped = [values.get(SKIPPED) for values in ranks]
    if any(each is None for each in skipped):
        return {}
    alone = [rank for rank, each in enumerate(skipped) if each]
    if 2 * len(alone) > len(skipped):
        alone = [rank for rank, each in enumerate(skipped) if not each]
    found = {"skip_mismatch": float(len(alone))}
    return found | ({"skip_mismatch_rank": float(alone[0])} if alone else {})


def job_numbers(ranks: Sequence[Values]) -> dict[str, float]:
    """Return what the job as a whole has in one step, for people; rules judge the job's own frame.

    job_loss, job_tokens, job_grad_norm: see `core.analysis.job_numbers`. The norm is absent where
    the ranks do not say how it adds up and do not agree.
    """
    rows = dict(enumerate(ranks))
    found = fold(rows, 0, (LOSS, TOKENS, NORM), len(rows))
    if not adds_up(ranks, NORM):
        del found[NORM]
    names = {LOSS: "job_loss", TOKENS: "job_tokens", NORM: "job_grad_norm"}
    return {names[name]: value for name, value in found.items() if value is not None}


def _furthest(values: Sequence[float], middle: float) -> int:
    return max(range(len(values)), key=lambda i: abs(values[i] - middle))


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
