"""Plan of a comparison, fixed before the runs, and the outcome of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .arms import LOSS

Status = Literal["pass", "fail", "inconclusive", "void", "not measured", "ignored"]

MARGIN = 0.03  # nat; the least regression that is worth a veto, for a language model
ALPHA = 0.05
LOOKS = (0.5, 1.0)
WARMUP = 50  # steps: the first ones say more about the initialization


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a comparison.

    Attributes:
        metric: the loss, lower is better.
        margin: in its unit; the candidate must be shown to be worse by less.
        alpha: of a wrong PASS, and of a wrong FAIL over all looks; one-sided.
        looks: shares of the steps after which the data may be judged, the last one 1.
        level: of the only look, where looks are planned over seeds; None: by `looks` and `alpha`.
        steps: planned length in steps, None: that of the first baseline, once it has ended.
        warmup: steps left out.
        cpu_time: metric of the job, CPU seconds per step; "" for none.
        evaluation: parts of the names of evaluation files among the recorded inputs.
        ignored: guards that do not count.
    """

    metric: str = LOSS
    margin: float = MARGIN
    alpha: float = ALPHA
    looks: tuple[float, ...] = LOOKS
    level: float | None = None
    steps: int | None = None
    warmup: int = WARMUP
    cpu_time: str = ""
    evaluation: tuple[str, ...] = ("eval", "valid", "val.", "val_", "test")
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one guard or invariant on one pair.

    Attributes:
        kind: "guard" or "invariant".
        pair: 0-based number of the pair.
        baseline, candidate: what was compared, as text; "" where that is nothing.
        text: one sentence with the numbers and the limit.
    """

    kind: str
    name: str
    pair: int
    status: Status
    baseline: str
    candidate: str
    text: str


def shown(value: float | None) -> str:
    """Return a number for a person, "" for none."""
    return "" if value is None else f"{value:.4g}"
