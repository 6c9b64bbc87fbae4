"""Invariants of both arms: where one differs, the comparison is void."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance

from .arms import TOKENS, Arm
from .plan import Check, Plan, Status, shown

ERRORS = 3.0  # standard errors: how far means of batches of changing length may lie apart
HASHED = "sha256:"
MAX_NAMED = 3


def invariants(
    pair: int, baseline: Arm, candidate: Arm, start: int, end: int, plan: Plan
) -> Iterator[Check]:
    """Yield the check of each invariant."""
    yield _tokens(pair, baseline, candidate, start, end)
    for name, is_evaluation in (("data_manifest", False), ("eval_artifact", True)):
        ours, theirs = (
            _chosen(arm.inputs, plan.evaluation, is_evaluation) for arm in (baseline, candidate)
        )
        yield _files(name, pair, ours, theirs)


def _tokens(pair: int, baseline: Arm, candidate: Arm, start: int, end: int) -> Check:
    a, b = (list(arm.series(TOKENS, start, end).values()) for arm in (baseline, candidate))
    if not (a and b):
        whose = " and ".join(
            name for name, found in (("baseline", a), ("candidate", b)) if not found
        )
        status: Status = "not measured" if not a and not b else "inconclusive"
        means = [shown(fmean(one)) if one else "" for one in (a, b)]
        return _check("tokens_per_update", pair, status, means, f"not measured in the {whose}")
    before, after = fmean(a), fmean(b)
    if not (math.isfinite(before) and math.isfinite(after)):
        means = [shown(before), shown(after)]
        return _check("tokens_per_update", pair, "inconclusive", means, "not finite")
    same = before == after or abs(after - before) <= ERRORS * math.sqrt(_error(a) + _error(b))
    text = f"{shown(before)} in the baseline, {shown(after)} in the candidate"
    status = "pass" if same else "void"
    return _check("tokens_per_update", pair, status, [shown(before), shown(after)], text)


def _error(values: Sequence[float]) -> float:
    """Return the square of the standard error of a mean."""
    return variance(values) / len(values) if len(values) > 1 else 0.0


def _chosen(
    inputs: Mapping[str, str] | None, names: Sequence[str], is_evaluation: bool
) -> dict[str, str] | None:
    if inputs is None:
        return None
    return {
        name: digest
        for name, digest in inputs.items()
        if any(part in name.lower() for part in names) == is_evaluation
    }


def _files(
    name: str, pair: int, baseline: Mapping[str, str] | None, candidate: Mapping[str, str] | None
) -> Check:
    if not baseline and not candidate:
        text = "no such file was recorded; name them in job.manifest of the policy"
        return _check(name, pair, "not measured", ["", ""], text)
    if baseline is None or candidate is None:
        whose = "baseline" if baseline is None else "candidate"
        return _check(name, pair, "inconclusive", ["", ""], f"the {whose} has no identity")
    files = sorted(baseline.keys() | candidate.keys())
    differ = [file for file in files if baseline.get(file) != candidate.get(file)]
    counts = [f"{len(one)} files" for one in (baseline, candidate)]
    if differ:
        more = f" and {len(differ) - MAX_NAMED} more" * (len(differ) > MAX_NAMED)
        text = f"differs: {', '.join(differ[:MAX_NAMED])}{more}"
        return _check(name, pair, "void", counts, text)
    unknown = [file for file in files if not baseline[file].startswith(HASHED)]
    if unknown:
        text = f"{unknown[0]} was {baseline[unknown[0]]}"
        return _check(name, pair, "inconclusive", counts, text)
    return _check(name, pair, "pass", counts, f"the same {len(files)} files")


def _check(name: str, pair: int, status: Status, values: Sequence[str], text: str) -> Check:
    return Check("invariant", name, pair, status, values[0], values[1], text)
