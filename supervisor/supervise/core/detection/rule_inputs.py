"""What a rule must have to be judged: which metrics, and which of them may stand in for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from ..model.decisions import BREACH, OK, UNKNOWN
from ..model.policy import Policy, Rule

MOST = 8  # readable detectors of one rule whose combinations are tried


def can_fire(policy: Policy, rule: Rule, has: Callable[[str], bool]) -> bool:
    """Return whether any readings of the detectors that have their metrics make the rule TRUE.

    A detector without its metrics is UNKNOWN for ever. `a or b` can do without one of the two,
    `a and b` cannot.
    """
    order = list(policy.detectors)
    readable = [name for name in rule.uses if is_readable(policy, name, has)]
    if len(readable) > MOST:
        return len(readable) == len(rule.uses)
    places = [order.index(name) for name in readable]
    codes = [UNKNOWN] * len(order)
    for answers in product((BREACH, OK), repeat=len(places)):
        for place, code in zip(places, answers, strict=True):
            codes[place] = code
        if rule.when(codes) == BREACH:
            return True
    return False


def is_readable(policy: Policy, name: str, has: Callable[[str], bool]) -> bool:
    """Return whether a detector, and what it is coupled with, has the metrics it reads."""
    detector = policy.detectors[name]
    inputs = [is_readable(policy, inner, has) for inner in detector.detectors]
    own = [has(metric) for metric in detector.metrics]
    enough = all if detector.needs_all else any
    return (not own or enough(own)) and (not inputs or enough(inputs))


def missing(policy: Policy, rule: Rule, has: Callable[[str], bool]) -> Sequence[str]:
    """Return the metrics behind a rule that are not there, in order, each once."""
    metrics = [m for name in policy.detectors_of(rule) for m in policy.detectors[name].metrics]
    return list(dict.fromkeys(metric for metric in metrics if not has(metric)))
