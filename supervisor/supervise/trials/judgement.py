"""The verdict on a candidate: the plan of the comparison, fixed before the runs, and its checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median, stdev, variance
from typing import Literal

from .arms import (
    GRADIENT,
    LOSS,
    LR_SCALE,
    MEMORY,
    OVERFLOW,
    PROBE_LOSS,
    SKIPPED,
    TOKENS,
    UPDATE,
    Arm,
)
from .gate_statistics import (
    BLOCKS,
    REPLICATES,
    Differences,
    Effect,
    arm_differences,
    estimate_difference,
    look_levels,
)

Status = Literal["pass", "fail", "inconclusive", "void", "not measured", "ignored"]

MARGIN = 0.03  # nat; the least regression that is worth a veto, for a language model
ALPHA = 0.05
LOOKS = (0.5, 1.0)
WARMUP = 50  # steps: the first ones say more about the initialization
NORM_RATIO = 2.0
BLOCK = 25  # steps
PERCENTILE = 0.99
MEMORY_POINTS = 5.0  # of the device's memory, in percent
SKIP_SHARE = 0.01  # of the updates
SPIKE = 8.0  # robust standard deviations
SPIKE_FLOOR = 8.0  # a spike is at least SPIKE / SPIKE_FLOOR margins high
SPIKE_OF = (3, 5)  # so many of so many steps
AROUND = 25  # steps on either side, whose differences are the noise
MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
PROBE_DEVIATIONS = 3.0
CPU_RATIO = 1.1
NAMES = (
    *("crash", "interventions", "non_finite", "loss_spikes", GRADIENT, UPDATE, *MEMORY),
    *("skipped_updates", PROBE_LOSS, "throughput"),
)
IGNORABLE_GUARDS = tuple(name for name in NAMES if name not in ("crash", "non_finite"))
Series = Mapping[int, float]
CheckResult = tuple[Status, str, str, str]  # status, of the baseline, of the candidate, text
ERRORS = 3.0  # standard errors: how far means of batches of changing length may lie apart
HASHED = "sha256:"
MAX_NAMED = 3


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


def number_text(value: float | None) -> str:
    """Return a number for a person, "" for none."""
    return "" if value is None else f"{value:.4g}"


def check_guards(
    pair: int,
    baseline: Arm,
    candidate: Arm,
    differences: Differences,
    span: tuple[int, int],
    plan: Plan,
) -> Iterator[Check]:
    """Yield the check of each guard of NAMES.

    Args:
        span: the first step after the warm-up, and the end (excluded). Norms, memory, skips and the
            probe loss are taken from there, what is not finite and crashes from the whole run.
    """
    start, end = span
    arms = (baseline, candidate)

    def compared(metric: str, compare: Callable[[Series, Series], CheckResult]) -> CheckResult:
        a, b = (arm.series(metric, start, end) for arm in arms)
        return _absent(a, b) or compare(a, b)

    checks: list[tuple[str, Callable[[], CheckResult]]] = [
        ("crash", lambda: _crash(*arms, None if plan.steps is None else end)),
        ("interventions", lambda: _interventions(*arms)),
        ("non_finite", lambda: _non_finite(*arms, plan.metric)),
        ("loss_spikes", lambda: _spikes(differences, plan.margin)),
        (GRADIENT, lambda: compared(GRADIENT, partial(_norm, least=0.0))),
        (UPDATE, lambda: compared(UPDATE, partial(_norm, least=1.0 / NORM_RATIO))),
        (MEMORY[0], lambda: compared(MEMORY[0], _memory)),
        (MEMORY[1], lambda: compared(MEMORY[1], _memory)),
        ("skipped_updates", lambda: compared(SKIPPED, _skips)),
        (PROBE_LOSS, lambda: compared(PROBE_LOSS, partial(_probe, margin=plan.margin))),
        ("throughput", lambda: _throughput(arms, start, end, plan.cpu_time)),
    ]
    for name, check in checks:
        status, old, new, text = check()
        if name in plan.ignored and name in IGNORABLE_GUARDS and status != "pass":
            status, text = "ignored", f"{status}: {text}"
        yield Check("guard", name, pair, status, old, new, text)


def _absent(baseline: Series, candidate: Series) -> CheckResult | None:
    if baseline and candidate:
        return None
    if not baseline and not candidate:
        return "not measured", "", "", "neither run has this metric"
    whose = "candidate" if baseline else "baseline"
    return "inconclusive", "", "", f"the {whose} does not have this metric"


def _crash(baseline: Arm, candidate: Arm, planned: int | None) -> CheckResult:
    """Judge how the runs ended.

    A baseline with all `planned` steps may go on, or end otherwise; a candidate may then be stopped
    by a signal to its supervisor.
    """
    old, new = _end(baseline), _end(candidate)
    if candidate.has_crashed and candidate.stopped:
        if planned is not None and candidate.end >= planned:
            return "pass", old, new, "the candidate was stopped after all planned steps"
        text = "the candidate was stopped by a signal before all planned steps"
        return "inconclusive", old, new, text
    if candidate.has_crashed:
        text = f"the candidate ended with exit code {candidate.exit_code}"
        return "fail", old, new, text
    enough = planned is not None and baseline.end >= planned
    needed = [("candidate", candidate), *([] if enough else [("baseline", baseline)])]
    for name, arm in needed:
        if not arm.has_ended_well:
            reason = f"ended with {_end(arm)}" if arm.has_crashed else "has no record of its end"
            text = f"the {name} {'is still running' if arm.live else reason}"
            return "inconclusive", old, new, text
    return "pass", old, new, "the candidate ended with exit code 0"


def _end(arm: Arm) -> str:
    if arm.live:
        return "running"
    return "unknown" if arm.exit_code is None else f"exit {arm.exit_code}"


def _interventions(baseline: Arm, candidate: Arm) -> CheckResult:
    old, new = _touched(baseline), _touched(candidate)
    texts = old or "none", new or "none"
    if new:
        return "fail", texts[0], texts[1], f"the supervisor had to act on the candidate: {new}"
    if old:
        text = f"the supervisor acted on the baseline: {old}"
        return "inconclusive", texts[0], texts[1], text
    return "pass", texts[0], texts[1], "no step was made again, no learning rate was scaled"


def _touched(arm: Arm) -> str:
    if arm.attempts:
        return f"{arm.attempts} rollbacks or restarts"
    scaled = [s for s, values in arm.steps.items() if values.get(LR_SCALE, 1.0) != 1.0]
    return f"learning rate scaled at step {min(scaled)}" if scaled else ""


def _non_finite(baseline: Arm, candidate: Arm, metric: str) -> CheckResult:
    ours, theirs = _bad_steps(baseline, metric), _bad_steps(candidate, metric)
    old, new = f"{len(ours)} steps", f"{len(theirs)} steps"
    if theirs:
        return "fail", old, new, f"the candidate is not finite at step {theirs[0]}"
    if ours:
        return "inconclusive", old, new, f"the baseline is not finite at step {ours[0]}"
    if not any(metric in values for values in candidate.steps.values()):
        return "inconclusive", old, new, f"the candidate has no {metric}"
    return "pass", old, new, "loss, gradient norm and update norm are finite"


def _bad_steps(arm: Arm, metric: str) -> list[int]:
    """Return the steps with a value that is not finite; a caught overflow is fine."""
    steps = []
    for step, values in sorted(arm.steps.items()):
        names = (metric,) if values.get(OVERFLOW, 0.0) > 0.0 else (metric, GRADIENT, UPDATE)
        if not all(math.isfinite(values.get(name, 0.0)) for name in names):
            steps.append(step)
    return steps


def _spikes(differences: Differences, margin: float) -> CheckResult:
    if not differences.values:
        return "inconclusive", "", "", "no step has a loss in both runs"
    values = differences.values
    away = [_deviations(values, index, margin) for index in range(len(values))]
    high = [value > SPIKE for value in away]
    need, window = SPIKE_OF
    recent = [sum(high[max(0, n + 1 - window) : n + 1]) for n in range(len(high))]
    spikes = [n for n in range(len(high)) if high[n] and recent[n] >= need]
    worst = number_text(max(away))
    if spikes:
        step = differences.steps[spikes[0]]
        text = f"{need} of {window} steps up to step {step} are {SPIKE:g} deviations high"
        return "fail", "", worst, text
    text = f"{worst} robust deviations at most; limit {SPIKE:g}, {need} of {window}"
    return "pass", "", worst, text


def _deviations(values: Sequence[float], index: int, margin: float) -> float:
    """Return how far a difference is above those around it: their noise falls with the loss."""
    near = values[max(0, index - AROUND) : index + AROUND + 1]
    middle = median(near)
    spread = MAD * median(abs(value - middle) for value in near)
    return (values[index] - middle) / max(spread, margin / SPIKE_FLOOR, 1e-12)


def _norm(baseline: Series, candidate: Series, *, least: float) -> CheckResult:
    """Compare the 99th percentile of blocks, block by block; the median of the ratios counts.

    One heavy batch is no regression, and neither is the end of a run that has learned its data by
    heart: there two runs of one program have norms that differ by factors.
    """
    first_step = min([*baseline, *candidate])
    ours, theirs = (_blocks(series, first_step) for series in (baseline, candidate))
    old, new = (median(blocks.values()) if blocks else math.nan for blocks in (ours, theirs))
    ratios = [
        theirs[block] / ours[block] for block in ours if block in theirs and ours[block] > 0.0
    ]
    if not ratios:
        return "inconclusive", number_text(old), number_text(new), "not positive and finite"
    ratio = median(ratios)
    text = f"{ratio:.3g} times the baseline; limit {least:g} to {NORM_RATIO:g}"
    status: Status = "pass" if least <= ratio <= NORM_RATIO else "fail"
    return status, number_text(old), number_text(new), text


def _blocks(series: Series, first_step: int) -> dict[int, float]:
    """Return the 99th percentile of each block; `_bad_steps` counts what is not finite."""
    blocks: dict[int, list[float]] = {}
    for step, value in series.items():
        if math.isfinite(value):
            blocks.setdefault((step - first_step) // BLOCK, []).append(value)
    return {n: sorted(block)[int(PERCENTILE * (len(block) - 1))] for n, block in blocks.items()}


def _limited(old: float, new: float, text: str, *, is_worse: bool) -> CheckResult:
    """Return the outcome for two numbers; inconclusive where one is not finite."""
    status: Status = "fail" if is_worse else "pass"
    if not (math.isfinite(old) and math.isfinite(new)):
        status, text = "inconclusive", "not finite"
    return status, number_text(old), number_text(new), text


def _memory(baseline: Series, candidate: Series) -> CheckResult:
    old, new = max(baseline.values()), max(candidate.values())
    text = f"{new - old:+.3g} points; limit {MEMORY_POINTS:+g}"
    return _limited(old, new, text, is_worse=new - old > MEMORY_POINTS)


def _skips(baseline: Series, candidate: Series) -> CheckResult:
    old, new = (fmean(series.values()) for series in (baseline, candidate))
    text = f"{new:.2%} of the updates against {old:.2%}; limit {SKIP_SHARE:+.0%}"
    return _limited(old, new, text, is_worse=new - old > SKIP_SHARE)


def _probe(baseline: Series, candidate: Series, *, margin: float) -> CheckResult:
    """Compare the loss of the pinned batch at the samples of the second half."""
    common = [step for step in baseline if step in candidate]
    common = common[len(common) // 2 :]
    if not common:
        return "inconclusive", "", "", "no step has it in both runs"
    old, new = (fmean(arm[step] for step in common) for arm in (baseline, candidate))
    if math.isfinite(old) and not math.isfinite(new):
        return "fail", number_text(old), number_text(new), "not finite"
    losses = [candidate[step] - baseline[step] for step in common]
    limit = max(margin, PROBE_DEVIATIONS * stdev(losses) if len(losses) > 1 else 0.0)
    text = f"{new - old:+.4g} on the pinned batch; limit {limit:+.4g}"
    return _limited(old, new, text, is_worse=new - old > limit)


def _throughput(arms: Sequence[Arm], start: int, end: int, metric: str) -> CheckResult:
    """Compare CPU time per step: on a shared machine the time of day measures the neighbours."""
    measured = [arm.cpu_s for arm in arms if arm.cpu_s is not None]
    if not metric and len(measured) == len(arms):
        return _cpu_time(*measured)
    if not metric:
        text = "inconclusive: no CPU time per step (--cpu-time METRIC); time of day is not judged"
        return "not measured", "", "", text
    a, b = (arm.series(metric, start, end) for arm in arms)
    if not (a and b):
        return "inconclusive", "", "", f"{metric} is not in both runs"
    return _cpu_time(*(median(series.values()) for series in (a, b)))


def _cpu_time(old: float, new: float) -> CheckResult:
    if not (math.isfinite(old) and math.isfinite(new) and old > 0.0):
        return "inconclusive", number_text(old), number_text(new), "not positive and finite"
    text = f"{new / old:.3g} times the baseline's; limit {CPU_RATIO:g}"
    return _limited(old, new, text, is_worse=new > CPU_RATIO * old)


def check_invariants(
    pair: int, baseline: Arm, candidate: Arm, start: int, end: int, plan: Plan
) -> Iterator[Check]:
    """Yield the check of each invariant."""
    yield _tokens(pair, baseline, candidate, start, end)
    for name, is_evaluation in (("data_manifest", False), ("eval_artifact", True)):
        ours, theirs = (
            _select(arm.inputs, plan.evaluation, is_evaluation) for arm in (baseline, candidate)
        )
        yield _files(name, pair, ours, theirs)


def _tokens(pair: int, baseline: Arm, candidate: Arm, start: int, end: int) -> Check:
    a, b = (list(arm.series(TOKENS, start, end).values()) for arm in (baseline, candidate))
    if not (a and b):
        whose = " and ".join(
            name for name, series in (("baseline", a), ("candidate", b)) if not series
        )
        status: Status = "not measured" if not a and not b else "inconclusive"
        means = [number_text(fmean(values)) if values else "" for values in (a, b)]
        return _check("tokens_per_update", pair, status, means, f"not measured in the {whose}")
    old, new = fmean(a), fmean(b)
    if not (math.isfinite(old) and math.isfinite(new)):
        means = [number_text(old), number_text(new)]
        return _check("tokens_per_update", pair, "inconclusive", means, "not finite")
    is_equal = old == new or abs(new - old) <= ERRORS * math.sqrt(_error(a) + _error(b))
    text = f"{number_text(old)} in the baseline, {number_text(new)} in the candidate"
    status = "pass" if is_equal else "void"
    return _check("tokens_per_update", pair, status, [number_text(old), number_text(new)], text)


def _error(values: Sequence[float]) -> float:
    """Return the square of the standard error of a mean."""
    return variance(values) / len(values) if len(values) > 1 else 0.0


def _select(
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
    counts = [f"{len(inputs)} files" for inputs in (baseline, candidate)]
    if differ:
        further = f" and {len(differ) - MAX_NAMED} more" * (len(differ) > MAX_NAMED)
        text = f"differs: {', '.join(differ[:MAX_NAMED])}{further}"
        return _check(name, pair, "void", counts, text)
    unknown = [file for file in files if not baseline[file].startswith(HASHED)]
    if unknown:
        text = f"{unknown[0]} was {baseline[unknown[0]]}"
        return _check(name, pair, "inconclusive", counts, text)
    return _check(name, pair, "pass", counts, f"the same {len(files)} files")


def _check(name: str, pair: int, status: Status, values: Sequence[str], text: str) -> Check:
    return Check("invariant", name, pair, status, values[0], values[1], text)


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


def judge_gate(pairs: Sequence[Pair], plan: Plan, calibration: Sequence[Pair] = ()) -> Judgement:
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
    differences_of_pairs = [arm_differences(a, b, plan.metric, start, end) for a, b in pairs]
    checks: list[Check] = []
    for number, ((a, b), pair) in enumerate(zip(pairs, differences_of_pairs, strict=True)):
        checks += check_guards(number, a, b, pair, (start, end), plan)
        checks += check_invariants(number, a, b, start, end, plan)
    looks = list(_looks(pairs, plan, calibration, start, planned))
    failed = next((look for look in looks if look.fails), None)
    reached = [look for look in looks if look.effect is not None]
    decisive = failed or (reached[-1] if reached else None)
    loss = _loss(looks, failed, differences_of_pairs, plan)
    verdict, reasons = _verdict(checks, *loss)
    aa = [arm_differences(a, b, plan.metric, start, end) for a, b in calibration]
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
        differences_of_pairs = [arm_differences(a, b, plan.metric, start, end) for a, b in pairs]
        if end > have or not all(pair.values for pair in differences_of_pairs):
            yield Look(share, end, None, fails=False)
            continue
        aa = [arm_differences(a, b, plan.metric, start, end) for a, b in calibration]
        effect = estimate_difference(differences_of_pairs, level, aa)
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


def find_missing_placeholders(argv: Sequence[str], seeds: int) -> list[str]:
    """Return the placeholders that a command needs and lacks."""
    needed = [OUT, SEED] if seeds > 1 else [OUT]
    return [name for name in needed if not any(name in argument for argument in argv)]


def fill_placeholders(argv: Sequence[str], out: str, seed: int, steps: int) -> list[str]:
    """Return a command with its placeholders replaced."""
    values = {OUT: out, SEED: str(seed), STEPS: str(steps)}
    return [PLACE.sub(lambda argument: values[argument[0]], argument) for argument in argv]


def arm_order(number: int) -> tuple[str, str]:
    """Return the order of the arms of pair `number` (0-based): A B, B A, A B.

    What changes on the machine with time meets both arms.
    """
    return (BASELINE, CANDIDATE) if number % 2 == 0 else (CANDIDATE, BASELINE)


def plan_look(plan: Plan, pairs: int, seeds: int) -> Plan:
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
