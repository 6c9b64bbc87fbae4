"""Departure of a series from the band of its healthy control, and the loss of a run against it.

The control is the healthy run of the same seed: it reads the same batches, so most of the noise of
a batch is in both. The band around its loss is as wide as that of one run around its own trend
(`core.trends`): 6 spreads and 5 % for one loss, 4 spreads and 1 % for the median of 20.
Steps at which the control is not finite tell nothing and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from ..core.trends import BAND_MADS, BAND_SHARE, STEP_MADS, STEP_SHARE, robust_spread
from .arms import PAGES, Alarm, FaultArm

Series = Mapping[int, float]

TOGETHER = 20  # steps of a median
RECENT = 64  # healthy values before a fault that tell how wide a band is
LEAST = 8  # of these, to tell at all
STILL_MADS = 6.0  # of a metric that a fault should leave alone: as for one loss
# A metric that never varies has no spread; rounding on another path of the program is no move.
STILL_SHARE = 1e-6
RATE, TOKENS, UNIQUE = "learning_rate", "tokens_per_update", "batch_unique_ratio"
GRADIENT, UPDATE = "grad_global_norm", "update_norm"
DATA = (TOKENS, UNIQUE)
UNAFFECTED: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (RATE, *DATA),
    "bad_batch": (RATE, TOKENS),
    "batch_cut": (RATE,),
    "bit_flip": (RATE, *DATA),
    "data_order": (RATE, TOKENS),
    "eval_mismatch": (RATE, *DATA, GRADIENT, UPDATE),
    "guard_off": (RATE, *DATA),
    "lr_spike": DATA,
    "moments": (RATE, *DATA),
    "nan_grad": (RATE, *DATA),
    "overflow_storm": (RATE, *DATA),
    "repeated_tokens": (RATE, TOKENS),
    "router": (RATE, *DATA),
    "schedule_restart": DATA,
    "shuffled_labels": (RATE, *DATA),
    "slow_compute": (RATE, *DATA, GRADIENT, UPDATE),
    "slow_input": (RATE, *DATA, GRADIENT, UPDATE),
    "weight_noise": (RATE, *DATA),
}
# What a clock measures; only faults that wait change it. A neighbour on the machine does, too, so a
# monitor of these with an alarm for another fault has measured the machine.
TIMED = frozenset(
    ("step_time", "input_time", "forward_time", "backward_time", "optimizer_time", "other_time")
) | frozenset(("tokens_per_sec", "mfu", "dataloader_stall_frac", "comm_time", "comm_time_frac"))
WAITING = frozenset(("slow_compute", "slow_input", "hang"))
METRICS = tuple(sorted({metric for unaffected in UNAFFECTED.values() for metric in unaffected}))
TAIL = 20  # steps of a final loss
WORSE = 0.015  # of the final loss, with 2 spreads: a run is harmed; as the proving ground counts


@dataclass(frozen=True, slots=True)
class Departure:
    """The loss left its band.

    Attributes:
        step: of the first loss outside, or of the last one of a median outside.
        size: difference to the control there, in the unit of the loss; NaN: it was not finite.
    """

    step: int
    size: float


def spread_of(series: Series, onset: int) -> float:
    """Return the spread of a series around its trend before `onset`; NaN: too few values.

    By successive differences, which a trend hardly touches (von Neumann, 1941): 1.4826 x the median
    deviation of those, over the root of 2.
    """
    values_before = [series[step] for step in sorted(series) if step < onset]
    values = [value for value in values_before if math.isfinite(value)][-RECENT:]
    if len(values) < LEAST:
        return math.nan
    steps = [b - a for a, b in pairwise(values)]
    return robust_spread(steps, median(steps)) / math.sqrt(2.0)


def find_departure(run: Series, control: Series, onset: int) -> Departure | None:
    """Return when a loss left the band of its control, at or after `onset`; None: it never did.

    None, too, where the control has fewer than 8 losses before the onset: it has no band.
    """
    noise = spread_of(control, onset)
    if math.isnan(noise):
        return None
    recent: list[float] = []
    for step in sorted(run):
        if step < onset or not math.isfinite(control.get(step, math.nan)):
            continue
        if not math.isfinite(run[step]):
            return Departure(step, math.nan)
        level, away = abs(control[step]), run[step] - control[step]
        recent = [*recent[1 - TOGETHER :], away]
        if abs(away) > max(STEP_MADS * noise, STEP_SHARE * level):
            return Departure(step, away)
        width = max(BAND_MADS * noise / math.sqrt(TOGETHER / 4.0), BAND_SHARE * level)
        if len(recent) == TOGETHER and abs(median(recent)) > width:
            return Departure(step, median(recent))
    return None


def sum_excess_loss(run: Series, control: Series, onset: int) -> float:
    """Return the sum of the loss minus that of the control from `onset` on, nats x steps.

    Over the steps that both have; infinite once a loss is not finite. Below 0 the run did better.
    """
    total = 0.0
    for step, value in run.items():
        if step < onset or not math.isfinite(control.get(step, math.nan)):
            continue
        if not math.isfinite(value):
            return math.inf
        total += value - control[step]
    return total


def find_moved_metrics(run: Series, control: Series, onset: int, until: int) -> int | None:
    """Return the first step from `onset` to `until` (excluded) at which a metric left its control.

    By more than 6 spreads of the control around its trend, and of the difference before the onset.
    None: it did not, or there are too few values before the onset to tell.
    """
    differences = {step: run[step] - control[step] for step in run if step in control}
    own_spread, apart = spread_of(control, onset), spread_of(differences, onset)
    if math.isnan(own_spread) or math.isnan(apart):
        return None
    noise = STILL_MADS * max(own_spread, apart)
    for step in sorted(differences):
        limit = max(noise, STILL_SHARE * abs(control[step]))
        if onset <= step < until and not abs(differences[step]) <= limit:
            return step
    return None


def last_mean(series: Series, count: int) -> float:
    """Return the mean of the last `count` values; NaN without any."""
    tail: Sequence[float] = [series[step] for step in sorted(series)[-count:]]
    return sum(tail) / len(tail) if tail else math.nan


def is_unaffected(metrics: Collection[str], fault: str) -> bool:
    """Return whether a monitor of these metrics measures nothing that a fault changes."""
    judged_metrics = (
        set(metrics) - set(UNAFFECTED.get(fault, ())) - (frozenset() if fault in WAITING else TIMED)
    )
    return bool(metrics) and not judged_metrics


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault of a suite. `text`: as `--drill` takes it, without the step; `name`: its kind."""

    text: str
    name: str


@dataclass(frozen=True, slots=True)
class Detection:
    """A monitor raised an alarm. `delay`: steps from the fault on."""

    rule: str
    severity: str
    delay: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault with one seed. Unattended is the run without actions, acting that with them.

    Attributes:
        excluded: why nothing is judged, "" where it is: the fault cannot act on this job, or did
            not come; the run has no loss; its control is not healthy.
        departed: steps until the loss left its band, None: it never did. size: how far it was off.
        detections: the first alarm of each monitor in the unattended run, the earliest first.
        misattributed: monitors with an alarm that read only what this fault leaves alone; these are
            not among the detections.
        lost: nats x steps against the control, unattended; None: the run ended early.
        lost_acting: the same of the acting run; None: not tried, the fault did not come, or the run
            ended early.
        repeated: steps that the acting run made again.
        final, final_acting, final_healthy: mean of the last losses.
        acts: what the policy did, each with its delay.
        end, end_acting: how the two runs ended, "" as planned.
        harmed: the unattended run ended early, not finite, or worse than its control.
        lower: its loss ended lower than that of its control by as much.
        moved: metrics that this fault must leave alone, and how many steps later they moved.
        not_repeatable: the runs differ before the fault by more than half a spread of the loss, so
            that what was lost is rough.
    """

    fault: str
    seed: int
    excluded: str = ""
    injected: int | None = None
    departed: int | None = None
    size: float = 0.0
    detections: tuple[Detection, ...] = ()
    misattributed: tuple[str, ...] = ()
    lost: float | None = None
    lost_acting: float | None = None
    repeated: int = 0
    final: float = math.nan
    final_acting: float | None = None
    final_healthy: float = math.nan
    acts: tuple[tuple[str, int], ...] = ()
    end: str = ""
    end_acting: str = ""
    harmed: bool = False
    lower: bool = False
    moved: tuple[tuple[str, int], ...] = ()
    not_repeatable: bool = False

    @property
    def page(self) -> Detection | None:
        """The first alarm of SEV0 or SEV1."""
        return next((finding for finding in self.detections if finding.severity in PAGES), None)


@dataclass(frozen=True, slots=True)
class Monitor:
    """What one rule showed over a suite.

    Attributes:
        severity: the gravest that it had.
        delays: fault -> steps after the fault, of each run with an alarm of it.
        leads: fault -> steps before the loss left its band, where that happened; below 0: behind.
        false_alarms: its alarms in healthy runs.
        misattributed: faults with an alarm of it though it reads only what they leave alone; these
            are not among the delays.
    """

    rule: str
    severity: str
    delays: Mapping[str, Sequence[int]]
    leads: Mapping[str, Sequence[int]]
    false_alarms: int
    misattributed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healthy:
    """A run without a fault: its alarms are false, and so are its actions."""

    seed: int
    steps: int
    final: float
    alarms: tuple[Alarm, ...]
    acts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one fault and seed. `acting` is None where the policy may not act."""

    drill: Drill
    seed: int
    unattended: FaultArm
    acting: FaultArm | None
    control: FaultArm


@dataclass(slots=True)
class _Score:
    severity: str
    delays: dict[str, list[int]] = field(default_factory=dict)
    leads: dict[str, list[int]] = field(default_factory=dict)
    false_alarms: int = 0


def explain_unhealthy(arm: FaultArm, metric: str, planned: int, fault_step: int) -> str:
    """Return why a healthy run cannot be a control, "" if it can.

    Args:
        metric: the loss. planned: steps of a whole run.
    """
    if text := describe_end(arm, planned):
        return text
    loss = arm.arm.series(metric, 0, arm.arm.first_step + planned)
    values_before = sum(step < fault_step and math.isfinite(value) for step, value in loss.items())
    if not loss:
        return f"has no {metric}"
    if values_before < RECENT:
        return (
            f"has {values_before} values of {metric} before step {fault_step}; {RECENT} are needed"
        )
    if not all(map(math.isfinite, loss.values())):
        return f"has a {metric} that is not finite"
    return ""


def summarize_fault(
    runs: Runs, metric: str, planned: int, reads: Mapping[str, Collection[str]]
) -> Finding:
    """Return what one fault with one seed showed.

    A monitor whose alarm the healthy control has, too, from the fault on and no later, is not
    counted: that alarm does not come from the fault. Nothing after the planned steps is counted.

    Args:
        metric: the loss. planned: steps of a whole run.
        reads: rule -> the metrics that it reads.
    """
    fault, seed, unattended, acting = runs.drill.text, runs.seed, runs.unattended, runs.acting
    onset = unattended.injected
    if unattended.refused or onset is None:
        reason = unattended.refused or "the job ended before the step of the fault"
        return Finding(fault, seed, excluded=reason)
    if runs.control.acts:
        return Finding(fault, seed, excluded="the healthy run of this seed was acted on")
    end_step = runs.control.arm.first_step + planned
    loss, healthy = (
        fault_arm.arm.series(metric, 0, end_step) for fault_arm in (unattended, runs.control)
    )
    if not loss or math.isnan(spread_of(healthy, onset)):
        return Finding(fault, seed, excluded=f"too few values of {metric}")
    departure = find_departure(loss, healthy, onset)
    alarms = list(_detections(unattended, runs.control, onset, end_step))
    wrong = [a.rule for a in alarms if is_unaffected(reads.get(a.rule, ()), runs.drill.name)]
    end = describe_end(unattended, planned)
    final, final_healthy = last_mean(loss, TAIL), last_mean(healthy, TAIL)
    noise = spread_of(healthy, onset)
    margin = max(WORSE * abs(final_healthy), 2.0 * noise / math.sqrt(TAIL / 4.0))
    acting_loss = None if acting is None else acting.arm.series(metric, 0, end_step)
    end_acting = "" if acting is None else describe_end(acting, planned)
    is_comparable = acting is not None and acting.injected is not None and not end_acting
    return Finding(
        fault,
        seed,
        injected=onset,
        departed=None if departure is None else departure.step - onset,
        size=0.0 if departure is None else departure.size,
        detections=tuple(alarm for alarm in alarms if alarm.rule not in wrong),
        misattributed=tuple(wrong),
        lost=None if end else sum_excess_loss(loss, healthy, onset),
        lost_acting=sum_excess_loss(acting_loss, healthy, onset)
        if is_comparable and acting_loss is not None
        else None,
        repeated=0 if acting is None else acting.repeated,
        final=final,
        final_acting=None if acting_loss is None else last_mean(acting_loss, TAIL),
        final_healthy=final_healthy,
        acts=() if acting is None else _acts(acting, onset),
        end=end,
        end_acting=end_acting,
        harmed=bool(end) or not final - final_healthy <= margin,
        lower=final_healthy - final > margin,
        moved=tuple(_moved(runs, onset, end_step if departure is None else departure.step)),
        not_repeatable=_differs(loss, healthy, onset, noise),
    )


def _detections(
    unattended: FaultArm, control: FaultArm, onset: int, end_step: int
) -> Iterator[Detection]:
    """Yield the first alarm of each monitor, less those that the control has as early."""
    first_alarms: dict[str, Alarm] = {}
    for alarm in unattended.alarms:
        if onset <= alarm.step < end_step:
            first_alarms.setdefault(alarm.rule, alarm)
    anyway = {a.rule: a.step for a in reversed(control.alarms) if a.step >= onset}
    own_alarms = [a for a in first_alarms.values() if not anyway.get(a.rule, a.step + 1) <= a.step]
    for alarm in sorted(own_alarms, key=lambda a: (a.step, a.severity, a.rule)):
        yield Detection(alarm.rule, alarm.severity, alarm.step - onset)


def _acts(arm: FaultArm, onset: int) -> tuple[tuple[str, int], ...]:
    return tuple((a.verb, a.step - onset) for a in arm.acts if a.is_done)


def _moved(runs: Runs, onset: int, until: int) -> Iterator[tuple[str, int]]:
    for metric in UNAFFECTED.get(runs.drill.name, ()):
        unattended, control = (
            a.arm.series(metric, 0, until) for a in (runs.unattended, runs.control)
        )
        step = find_moved_metrics(unattended, control, onset, until)
        if step is not None:
            yield metric, step - onset


def _differs(loss: Series, control: Series, onset: int, noise: float) -> bool:
    away = [abs(loss[s] - control[s]) for s in loss if s < onset and s in control]
    return bool(away) and not max(away) <= 0.5 * noise


def describe_end(arm: FaultArm, planned: int) -> str:
    """Return how a run ended, "" as planned."""
    run = arm.arm
    steps = run.end - run.first_step if run.steps else 0
    if steps >= planned and (not run.has_crashed or run.stopped):
        return ""
    if run.stopped:
        return f"stood still and was stopped after {steps} steps"
    code = "without a record of it" if run.exit_code is None else f"with code {run.exit_code}"
    return f"ended after {steps} steps {code}"


def summarize_healthy_run(seed: int, arm: FaultArm, metric: str, planned: int) -> Healthy:
    """Return what a healthy run showed."""
    end_step = arm.arm.first_step + planned
    loss = arm.arm.series(metric, 0, end_step)
    alarms = tuple(alarm for alarm in arm.alarms if alarm.step < end_step)
    return Healthy(seed, len(arm.arm.steps), last_mean(loss, TAIL), alarms, _acts(arm, 0))


def summarize_monitors(findings: Sequence[Finding], controls: Sequence[Healthy]) -> list[Monitor]:
    """Return every rule with an alarm of its own or a false one, the most valuable first."""
    scores: dict[str, _Score] = {}
    for finding in findings:
        for alarm in finding.detections:
            of_rule = scores.setdefault(alarm.rule, _Score(alarm.severity))
            of_rule.severity = min(of_rule.severity, alarm.severity)
            of_rule.delays.setdefault(finding.fault, []).append(alarm.delay)
            if finding.departed is not None:
                of_rule.leads.setdefault(finding.fault, []).append(finding.departed - alarm.delay)
    for control in controls:
        for false in control.alarms:
            scores.setdefault(false.rule, _Score(false.severity)).false_alarms += 1
    wrong: dict[str, dict[str, None]] = {}
    for finding in findings:
        for rule in finding.misattributed:
            wrong.setdefault(rule, {})[finding.fault] = None
            scores.setdefault(rule, _Score("SEV2"))
    rows = [
        Monitor(
            rule,
            score.severity,
            score.delays,
            score.leads,
            score.false_alarms,
            tuple(wrong.get(rule, ())),
        )
        for rule, score in scores.items()
    ]
    return sorted(rows, key=_worth)


def _worth(monitor: Monitor) -> tuple[float, ...]:
    """Sort by false and misattributed alarms, then by the faults in which it leads the loss, then
    by those in which it has an alarm."""
    ahead = sum(median(leads) > 0 for leads in monitor.leads.values())
    wrong = bool(monitor.false_alarms or monitor.misattributed)
    return (wrong, -ahead, -len(monitor.delays))
