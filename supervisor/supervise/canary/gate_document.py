"""A judgement as data, which every report is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from .arms import Arm
from .effect import Differences
from .judgement import Judgement, Pair

SCHEMA = "supervise/canary/v1"
POINTS = 200  # of a plotted series; each is the mean of the steps around it


def gate_document(
    found: Judgement, pairs: Sequence[Pair], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a judgement as plain data; numbers may be infinite or NaN.

    Args:
        pairs: the runs that were judged.
        notes: sentences about how they were made.
    """
    plan = found.plan
    status, text = found.loss
    return {
        "schema": SCHEMA,
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "notes": list(notes),
        "metric": plan.metric,
        "margin": plan.margin,
        "alpha": plan.alpha,
        "steps": {"first": found.start, "end": found.end},
        "loss": {"status": status, "text": text},
        "effect": None if found.effect is None else asdict(found.effect),
        "looks": [asdict(look) for look in found.looks],
        "pairs": [
            _pair(a, b, one, plan.metric, found.start, found.end)
            for (a, b), one in zip(pairs, found.pairs, strict=True)
        ],
        "calibration": list(found.noise),
        "checks": [asdict(check) for check in found.checks],
    }


def _pair(
    baseline: Arm, candidate: Arm, one: Differences, metric: str, start: int, end: int
) -> dict[str, Any]:
    return {
        "baseline": baseline.name,
        "candidate": candidate.name,
        "mean": fmean(one.values) if one.values else None,
        "paired": one.paired,
        "compared": one.compared,
        "missing": one.missing,
        "series": {
            "baseline": thinned(baseline.series(metric, start, end)),
            "candidate": thinned(candidate.series(metric, start, end)),
            "difference": thinned(dict(zip(one.steps, one.values, strict=True))),
        },
    }


def thinned(series: dict[int, float]) -> list[tuple[int, float]]:
    """Return at most `POINTS` points `(step, mean)`."""
    points = list(series.items())
    size = max(1, -(-len(points) // POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]
