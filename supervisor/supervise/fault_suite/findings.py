"""Results of each drill, and the value of each monitor over all of them. Delays are in steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from .departure import RECENT, Series, departure, last_mean, lost, moved, spread_of
from .fault_arm import PAGES, Alarm, FaultArm
from .unaffected import UNAFFECTED, is_unaffected

TAIL = 20  # steps of a final loss
WORSE = 0.015  # of the final loss, with 2 spreads: a run is harmed; as the proving ground counts


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
        return next((one for one in self.detections if one.severity in PAGES), None)


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


def unhealthy(arm: FaultArm, metric: str, planned: int, at: int) -> str:
    """Return why a healthy run cannot be a control, "" if it can.

    Args:
        metric: the loss. planned: steps of a whole run. at: step of the faults.
    """
    if text := ending(arm, planned):
        return text
    loss = arm.arm.series(metric, 0, arm.arm.first + planned)
    before = sum(step < at and math.isfinite(value) for step, value in loss.items())
    if not loss:
        return f"has no {metric}"
    if before < RECENT:
        return f"has {before} values of {metric} before step {at}; {RECENT} are needed"
    if not all(map(math.isfinite, loss.values())):
        return f"has a {metric} that is not finite"
    return ""


def finding(runs: Runs, metric: str, planned: int, reads: Mapping[str, Collection[str]]) -> Finding:
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
        why = unattended.refused or "the job ended before the step of the fault"
        return Finding(fault, seed, excluded=why)
    if runs.control.acts:
        return Finding(fault, seed, excluded="the healthy run of this seed was acted on")
    last = runs.control.arm.first + planned
    loss, healthy = (one.arm.series(metric, 0, last) for one in (unattended, runs.control))
    if not loss or math.isnan(spread_of(healthy, onset)):
        return Finding(fault, seed, excluded=f"too few values of {metric}")
    left = departure(loss, healthy, onset)
    alarms = list(_detections(unattended, runs.control, onset, last))
    wrong = [a.rule for a in alarms if is_unaffected(reads.get(a.rule, ()), runs.drill.name)]
    end = ending(unattended, planned)
    final, final_healthy = last_mean(loss, TAIL), last_mean(healthy, TAIL)
    noise = spread_of(healthy, onset)
    margin = max(WORSE * abs(final_healthy), 2.0 * noise / math.sqrt(TAIL / 4.0))
    kept = None if acting is None else acting.arm.series(metric, 0, last)
    end_acting = "" if acting is None else ending(acting, planned)
    met = acting is not None and acting.injected is not None and not end_acting
    return Finding(
        fault,
        seed,
        injected=onset,
        departed=None if left is None else left.step - onset,
        size=0.0 if left is None else left.size,
        detections=tuple(alarm for alarm in alarms if alarm.rule not in wrong),
        misattributed=tuple(wrong),
        lost=None if end else lost(loss, healthy, onset),
        lost_acting=lost(kept, healthy, onset) if met and kept is not None else None,
        repeated=0 if acting is None else acting.repeated,
        final=final,
        final_acting=None if kept is None else last_mean(kept, TAIL),
        final_healthy=final_healthy,
        acts=() if acting is None else _acts(acting, onset),
        end=end,
        end_acting=end_acting,
        harmed=bool(end) or not final - final_healthy <= margin,
        lower=final_healthy - final > margin,
        moved=tuple(_moved(runs, onset, last if left is None else left.step)),
        not_repeatable=_differs(loss, healthy, onset, noise),
    )


def _detections(
    unattended: FaultArm, control: FaultArm, onset: int, last: int
) -> Iterator[Detection]:
    """Yield the first alarm of each monitor, less those that the control has as early."""
    first: dict[str, Alarm] = {}
    for alarm in unattended.alarms:
        if onset <= alarm.step < last:
            first.setdefault(alarm.rule, alarm)
    anyway = {a.rule: a.step for a in reversed(control.alarms) if a.step >= onset}
    own = [a for a in first.values() if not anyway.get(a.rule, a.step + 1) <= a.step]
    for alarm in sorted(own, key=lambda a: (a.step, a.severity, a.rule)):
        yield Detection(alarm.rule, alarm.severity, alarm.step - onset)


def _acts(arm: FaultArm, onset: int) -> tuple[tuple[str, int], ...]:
    return tuple((a.verb, a.step - onset) for a in arm.acts if a.done)


def _moved(runs: Runs, onset: int, until: int) -> Iterator[tuple[str, int]]:
    for metric in UNAFFECTED.get(runs.drill.name, ()):
        one, other = (a.arm.series(metric, 0, until) for a in (runs.unattended, runs.control))
        step = moved(one, other, onset, until)
        if step is not None:
            yield metric, step - onset


def _differs(loss: Series, control: Series, onset: int, noise: float) -> bool:
    away = [abs(loss[s] - control[s]) for s in loss if s < onset and s in control]
    return bool(away) and not max(away) <= 0.5 * noise


def ending(arm: FaultArm, planned: int) -> str:
    """Return how a run ended, "" as planned."""
    one = arm.arm
    made = one.end - one.first if one.steps else 0
    if made >= planned and (not one.crashed or one.stopped):
        return ""
    if one.stopped:
        return f"stood still and was stopped after {made} steps"
    code = "without a record of it" if one.exit_code is None else f"with code {one.exit_code}"
    return f"ended after {made} steps {code}"


def healthy(seed: int, arm: FaultArm, metric: str, planned: int) -> Healthy:
    """Return what a healthy run showed."""
    last = arm.arm.first + planned
    loss = arm.arm.series(metric, 0, last)
    alarms = tuple(alarm for alarm in arm.alarms if alarm.step < last)
    return Healthy(seed, len(arm.arm.steps), last_mean(loss, TAIL), alarms, _acts(arm, 0))


def monitors(found: Sequence[Finding], controls: Sequence[Healthy]) -> list[Monitor]:
    """Return every rule with an alarm of its own or a false one, the most valuable first."""
    scores: dict[str, _Score] = {}
    for one in found:
        for alarm in one.detections:
            of_rule = scores.setdefault(alarm.rule, _Score(alarm.severity))
            of_rule.severity = min(of_rule.severity, alarm.severity)
            of_rule.delays.setdefault(one.fault, []).append(alarm.delay)
            if one.departed is not None:
                of_rule.leads.setdefault(one.fault, []).append(one.departed - alarm.delay)
    for control in controls:
        for false in control.alarms:
            scores.setdefault(false.rule, _Score(false.severity)).false_alarms += 1
    wrong: dict[str, dict[str, None]] = {}
    for one in found:
        for rule in one.misattributed:
            wrong.setdefault(rule, {})[one.fault] = None
            scores.setdefault(rule, _Score("SEV2"))
    made = [
        Monitor(
            rule,
            one.severity,
            one.delays,
            one.leads,
            one.false_alarms,
            tuple(wrong.get(rule, ())),
        )
        for rule, one in scores.items()
    ]
    return sorted(made, key=_worth)


def _worth(monitor: Monitor) -> tuple[float, ...]:
    """Sort by false and misattributed alarms, then by the faults in which it leads the loss, then
    by those in which it has an alarm."""
    ahead = sum(median(leads) > 0 for leads in monitor.leads.values())
    wrong = bool(monitor.false_alarms or monitor.misattributed)
    return (wrong, -ahead, -len(monitor.delays))
