"""Arms of a trial: their commands, their order, and the looks over seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .effect import REPLICATES
from .judgement import Judgement
from .plan import Plan
from .significance import look_levels

OUT, SEED, STEPS = "{out}", "{seed}", "{steps}"
PLACE = re.compile(r"\{(?:out|seed|steps)\}")
BASELINE, CANDIDATE = "baseline", "candidate"
GROSS = 3.0  # margins: no drift under which the gate could ever pass is so large; project default


def missing(argv: Sequence[str], seeds: int) -> list[str]:
    """Return the placeholders that a command needs and lacks."""
    needed = [OUT, SEED] if seeds > 1 else [OUT]
    return [name for name in needed if not any(name in one for one in argv)]


def filled(argv: Sequence[str], out: str, seed: int, steps: int) -> list[str]:
    """Return a command with its placeholders replaced."""
    values = {OUT: out, SEED: str(seed), STEPS: str(steps)}
    return [PLACE.sub(lambda found: values[found[0]], one) for one in argv]


def arm_order(number: int) -> tuple[str, str]:
    """Return the order of the arms of pair `number` (0-based): A B, B A, A B.

    What changes on the machine with time meets both arms.
    """
    return (BASELINE, CANDIDATE) if number % 2 == 0 else (CANDIDATE, BASELINE)


def plan_of(plan: Plan, pairs: int, seeds: int) -> Plan:
    """Return the plan of the look at the first `pairs` of `seeds` pairs.

    Each pair adds the same share of the data, so alpha is spent over pairs as over steps.
    """
    levels = look_levels([(number + 1) / seeds for number in range(seeds)], plan.alpha)
    return replace(plan, looks=(1.0,), level=levels[pairs - 1])


def is_decided(found: Judgement, replicates: int) -> bool:
    """Whether further pairs are not needed: it can no longer pass, and the reason is sure.

    With fewer than `REPLICATES` degrees of freedom between pairs the interval does not show how far
    two runs of one program drift apart. Then a loss fails early only where all of the interval is
    `GROSS` margins away.

    Args:
        replicates: degrees of freedom between the pairs judged, with those of A/A pairs.
    """
    if found.effect is None or any(check.status in ("fail", "void") for check in found.checks):
        return True
    if any(check.name == "crash" and check.status != "pass" for check in found.checks):
        return True
    gross = found.effect.low > GROSS * found.plan.margin
    return found.loss[0] == "fail" and (replicates >= REPLICATES or gross)
