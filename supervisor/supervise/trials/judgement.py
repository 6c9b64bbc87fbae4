"""The verdict on a candidate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from .arms import Arm
from .gate_statistics import (
    BLOCKS,
    REPLICATES,
    Differences,
    Effect,
    differences,
    estimate,
    look_levels,
)
from .guards import Check, Plan, Status, guards, invariants

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "VOID"]
Pair = tuple[Arm, Arm]

MISSING = 0.01  # of the planned steps
OUT, SEED, STEPS = "{out}", "{seed}", "{steps}"
PLACE = re.compile(r"\{(?:out|seed|steps)\}")
BASELINE, CANDIDATE = "baseline", "candidate"
GROSS = 3.0  # margins: no drift under which the gate could ever pass is so large; project default


@dataclass(frozen=True, slots=True)
class Look:
    """One planned look at the loss.

    Attributes:
        share: of the planned steps. end: the step it ends before.
        effect: None where it was not reached, or a pair has no step.
        fails: the candidate is shown to be worse, and by more than the margin.
    """

    share: float
    end: int
    effect: Effect | None
    fails: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a comparison.

    Attributes:
        reasons: why the verdict is no PASS, or why it is, the gravest first.
        loss: the status of the loss alone, and a sentence about it.
        effect: of the look that decided, else of the newest one.
        pairs: the differences of each pair on all planned steps.
        noise: the mean differences of the A/A pairs.
        start, end: the first step that counts, and the end (excluded) as planned.
    """

    verdict: Verdict
    reasons: Sequence[str]
    loss: tuple[Status, str]
    effect: Effect | None
    looks: Sequence[Look]
    checks: Sequence[Check]
    pairs: Sequence[Differences]
    noise: Sequence[float]
    start: int
    end: int
    plan: Plan


def judge(pairs: Sequence[Pair], plan: Plan, calibration: Sequence[Pair] = ()) -> Judgement:
    """Judge candidates against baselines.

    The gravest of all findings counts: a crash, a differing invariant (VOID), a failed guard or a
    shown regression (FAIL), whatever is missing (INCONCLUSIVE). PASS must be shown: the upper end
    of the interval is below the margin at the last look, with all guards and invariants good. An
    earlier look can only fail.

    Args:
        pairs: `(baseline, candidate)`, one per seed.
        calibration: pairs of runs of one and the same program.
    """
    first_step = pairs[0][0].first_step
    planned = plan.steps
    if planned is None:
        planned = max(0, pairs[0][0].end - first_step)
    start, end = first_step + plan.warmup, first_step + planned
    differences_of_pairs = [differences(a, b, plan.metric, start, end) for a, b in pairs]
    checks: list[Check] = []
    for number, ((a, b), pair) in enumerate(zip(pairs, differences_of_pairs, strict=True)):
        checks += guards(number, a, b, pair, (start, end), plan)
        checks += invariants(number, a, b, start, end, plan)
    looks = list(_looks(pairs, plan, calibration, start, planned))
    failed = next((look for look in looks if look.fails), None)
    reached = [look for look in looks if look.effect is not None]
    decisive = failed or (reached[-1] if reached else None)
    loss = _loss(looks, failed, differences_of_pairs, plan)
    verdict, reasons = _verdict(checks, *loss)
    aa = [differences(a, b, plan.metric, start, end) for a, b in calibration]
    noise = [fmean(pair.values) for pair in aa if pair.values]
    return Judgement(
        verdict=verdict,
        reasons=reasons,
        loss=loss,
        effect=None if decisive is None else decisive.effect,
        looks=looks,
        checks=checks,
        pairs=differences_of_pairs,
        noise=noise,
        start=start,
        end=end,
        plan=plan,
    )


def _looks(
    pairs: Sequence[Pair], plan: Plan, calibration: Sequence[Pair], start: int, planned: int
) -> Iterator[Look]:
    have = min(min(a.end, b.end) for a, b in pairs)
    first_step = start - plan.warmup
    planned_looks = list(zip(plan.looks, look_levels(plan.looks, plan.alpha), strict=True))
    for share, level in planned_looks if plan.level is None else [(1.0, plan.level)]:
        end = first_step + math.ceil(planned * share)
        differences_of_pairs = [differences(a, b, plan.metric, start, end) for a, b in pairs]
        if end > have or not all(pair.values for pair in differences_of_pairs):
            yield Look(share, end, None, fails=False)
            continue
        aa = [differences(a, b, plan.metric, start, end) for a, b in calibration]
        effect = estimate(differences_of_pairs, level, aa)
        yield Look(share, end, effect, fails=effect.low > 0.0 and effect.mean > plan.margin)


def _loss(
    looks: Sequence[Look],
    failed: Look | None,
    differences_of_pairs: Sequence[Differences],
    plan: Plan,
) -> tuple[Status, str]:
    """Return the status of the loss, and a sentence about it."""
    if failed is not None and failed.effect is not None:
        return "fail", f"{failed.effect.mean:+.4g}, more than the margin of {plan.margin:g}"
    last_effect = looks[-1].effect
    if last_effect is None:
        return "inconclusive", "the planned steps are not complete"
    if last_effect.basis in ("steps", "insufficient"):
        blocks = f"{last_effect.blocks} blocks of {last_effect.length} steps"
        need = f"{BLOCKS} blocks, or {REPLICATES + 1} seeds or A/A pairs"
        return "inconclusive", f"{blocks}, and no variance between pairs; needs {need}"
    missing = max(pair.missing for pair in differences_of_pairs)
    if missing > MISSING:
        return "inconclusive", f"missing at {missing:.1%} of the steps; limit {MISSING:.0%}"
    if not last_effect.high < plan.margin:
        text = f"up to {last_effect.high:+.4g}, not shown to be below the margin of {plan.margin:g}"
        return "inconclusive", text
    return "pass", f"at most {last_effect.high:+.4g}, below the margin of {plan.margin:g}"


def _verdict(checks: Sequence[Check], status: Status, text: str) -> tuple[Verdict, list[str]]:
    """Return the verdict and its reasons, from the checks and the loss."""
    crashed = [c for c in checks if c.name == "crash" and c.status == "fail"]
    if crashed:
        return "FAIL", _texts(crashed)
    void = [c for c in checks if c.status == "void"]
    if void:
        return "VOID", _texts(void)
    grades: tuple[tuple[Status, Verdict], ...] = (
        ("fail", "FAIL"),
        ("inconclusive", "INCONCLUSIVE"),
    )
    for grade, verdict in grades:
        reasons = [f"loss: {text}"] if status == grade else []
        reasons += _texts([c for c in checks if c.status == grade])
        if reasons:
            return verdict, reasons
    return "PASS", [f"loss: {text}"]


def _texts(checks: Sequence[Check]) -> list[str]:
    several = len({c.pair for c in checks}) > 1
    return [f"{c.name}{f' (pair {c.pair + 1})' if several else ''}: {c.text}" for c in checks]


def missing(argv: Sequence[str], seeds: int) -> list[str]:
    """Return the placeholders that a command needs and lacks."""
    needed = [OUT, SEED] if seeds > 1 else [OUT]
    return [name for name in needed if not any(name in argument for argument in argv)]


def filled(argv: Sequence[str], out: str, seed: int, steps: int) -> list[str]:
    """Return a command with its placeholders replaced."""
    values = {OUT: out, SEED: str(seed), STEPS: str(steps)}
    return [PLACE.sub(lambda argument: values[argument[0]], argument) for argument in argv]


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


def is_decided(judgement: Judgement, replicates: int) -> bool:
    """Whether further pairs are not needed: it can no longer pass, and the reason is sure.

    With fewer than `REPLICATES` degrees of freedom between pairs the interval does not show how far
    two runs of one program drift apart. Then a loss fails early only where all of the interval is
    `GROSS` margins away.

    Args:
        replicates: degrees of freedom between the pairs judged, with those of A/A pairs.
    """
    if judgement.effect is None or any(
        check.status in ("fail", "void") for check in judgement.checks
    ):
        return True
    if any(check.name == "crash" and check.status != "pass" for check in judgement.checks):
        return True
    gross = judgement.effect.low > GROSS * judgement.plan.margin
    return judgement.loss[0] == "fail" and (replicates >= REPLICATES or gross)
