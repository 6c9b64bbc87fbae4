"""Collects what happened around an onset, from the frames, the plans and what was noted.

Question 4 of the spike classifier (see `spike`) asks for it when an incident opens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from .band import EXCLUDED, LEAST, PRE, median, spread
from .bank import Bank
from .happened import SCHEDULE, Happened
from .incident import Incident
from .rule import Planned, Policy
from .state import Turn

RATE, SCHEDULED, SKIPPED = "learning_rate", "learning_rate_scheduled", "update_skipped"
BATCH = ("batch_token_entropy", "batch_unique_ratio", "batch_top1_share", "loss_dispersion")
COUNTS = ("tokens_per_update",)  # the denominator of a loss
BEFORE, AFTER, NEAR = 50, 5, 5  # steps around the onset that question 4 looks at
OUTLIER, OUTLIER_SHARE = 8.0, 0.01  # scales, and least share, of a batch that is unlike the others
RATE_SHARE, RATE_FACTOR = 0.1, 3.0  # a learning rate jumped: by a tenth, and 3 times its last step
OWN_JUMP = 2.0  # times its last value a job's own rate explains what follows; project default


def before(bank: Bank, metric: str, onset: int) -> list[float]:
    """Return the values from before an onset that its trend is taken from."""
    return [v for step, v in bank.history.series(metric) if step < onset - EXCLUDED][-PRE:]


def plans(policy: Policy, onset: int) -> list[Planned]:
    """Return the announced events that an onset may belong to."""
    return [p for p in policy.planned if p.from_step - AFTER <= onset <= p.to_step + BEFORE]


def around(turn: Turn, bank: Bank, incident: Incident) -> list[Happened]:
    """Return what happened from 50 steps before the onset to 5 after it, oldest first."""
    onset = incident.breach_step
    own = f"{incident.id}/"  # what was done about it is not its cause
    found = [Happened(plan.from_step, "planned", plan.what) for plan in plans(turn.policy, onset)]
    found += [
        Happened(step, kind, text)
        for step, attempt, kind, text in turn.state.happened
        if onset - BEFORE <= step <= onset + AFTER
        and attempt == incident.attempt
        and not text.startswith(own)
    ]
    found += [*_rates(bank, onset), *_odd(bank, onset), *_marks(bank, onset)]
    return sorted(found, key=lambda event: event.step)


def _rates(bank: Bank, onset: int) -> Iterator[Happened]:
    """Yield jumps of the learning rate; a schedule goes in steps like the one before."""
    points = [p for p in bank.history.series(RATE) if onset - BEFORE - 2 <= p[0] <= onset + AFTER]
    asked = dict(bank.history.series(SCHEDULED))
    for (_, a), (last, b), (step, c) in zip(points, points[1:], points[2:], strict=False):
        jump = abs(c - b)
        if jump <= RATE_SHARE * abs(b) or jump <= RATE_FACTOR * abs(b - a):
            continue
        own = asked.get(step, 0.0) >= OWN_JUMP * asked.get(last, math.inf) > 0.0
        whose = "the job's own learning rate" if own else "learning rate"
        yield Happened(step, SCHEDULE if own else "rate", f"{whose} {b:.3g} to {c:.3g}")


def _odd(bank: Bank, onset: int) -> Iterator[Happened]:
    """Yield batches, and counts of tokens, that were unlike those before."""
    for kind, metrics in (("data", BATCH), ("logging", COUNTS)):
        for metric in metrics:
            usual = before(bank, metric, onset)
            if len(usual) < LEAST:
                continue
            middle = median(usual)
            scale = max(spread(usual, middle), OUTLIER_SHARE * abs(middle) / OUTLIER, 1e-12)
            near = [p for p in bank.history.series(metric) if abs(p[0] - onset) <= NEAR]
            far = max(near, key=lambda p: abs(p[1] - middle), default=None)
            if far is not None and abs(far[1] - middle) > OUTLIER * scale:
                text = f"{metric} {far[1]:.4g}, {middle:.4g} before"
                yield Happened(far[0], kind, text)


def _marks(bank: Bank, onset: int) -> Iterator[Happened]:
    """Yield checkpoints, skipped updates and changes of the loss scale."""

    def near(metric: str) -> list[tuple[int, float]]:
        points = bank.history.series(metric)
        return [p for p in points if onset - BEFORE <= p[0] <= onset + AFTER]

    for step, value in near("checkpoint_time"):
        yield Happened(step, "checkpoint", f"a checkpoint took {value:.3g} s")
    skips = [step for step, value in near(SKIPPED) if value == 1.0]
    if skips:
        yield Happened(skips[0], "skipped", f"{len(skips)} updates were skipped")
    scales = near("loss_scale")
    for (_, a), (step, b) in pairwise(scales):
        if b != a:
            yield Happened(step, "precision", f"loss scale {a:.4g} to {b:.4g}")
            return
