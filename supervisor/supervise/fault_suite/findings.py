"""What each drill showed, and what each monitor is worth by all of them. Delays are in steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from . import departure as of_loss
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
    """One fault with one seed.

    Attributes:
        refused: why the fault could not be injected, "" if it was.
        departed: steps until the loss left its band, None: it never did. size: how far it was off.
        first, page: the first alarm, and the first one of SEV0 or SEV1; of the run without actions.
        detections: the first alarm of each monitor in it, the earliest first.
        lost: nats x steps against the healthy control, without actions. kept: with actions;
            None: it was not tried.
        repeated: steps that the policy had made again.
        final, final_acting, final_healthy: mean of the last losses.
        acts: what the policy did, each with its delay.
        end, end_acting: how the two runs ended, "" as planned.
        harmed: without actions, the run ended early, not finite, or worse than its control.
        moved: metrics that this fault must leave alone, and how many steps later they moved.
        apart: the runs differ before the fault by more than half a spread of the loss: the job does
            not repeat itself, and `lost` is rough.
    """

    fault: str
    seed: int
    refused: str = ""
    injected: int | None = None
    departed: int | None = None
    size: float = 0.0
    first: Detection | None = None
    page: Detection | None = None
    detections: tuple[Detection, ...] = ()
    lost: float = 0.0
    kept: float | None = None
    repeated: int = 0
    final: float = math.nan
    final_acting: float | None = None
    final_healthy: float = math.nan
    acts: tuple[tuple[str, int], ...] = ()
    end: str = ""
    end_acting: str = ""
    harmed: bool = False
    moved: tuple[tuple[str, int], ...] = ()
    apart: bool = False

    @property
    def lead(self) -> int | None:
        """By how many steps the first alarm leads the loss leaving its band; None: no alarm, or
        the loss never left."""
        if self.first is None or self.departed is None:
            return None
        return self.departed - self.first.delay


@dataclass(frozen=True, slots=True)
class Monitor:
    """What one rule showed over a suite.

    Attributes:
        severity: the gravest that it had.
        delays: fault -> steps after the fault, of each run with an alarm of it.
        leads: fault -> steps before the loss left its band, where that happened; below 0: behind.
        false_alarms: its alarms in healthy runs.
        misattributed: faults with an alarm of it though it reads only what they leave alone.
    """

    rule: str
    severity: str
    delays: Mapping[str, Sequence[int]]
    leads: Mapping[str, Sequence[int]]
    false_alarms: int
    misattributed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healthy:
    """A run without a fault. `alarms`: what was detections all the same; `acts`: what was done."""

    seed: int
    steps: int
    final: float
    alarms: tuple[Alarm, ...]
    acts: tuple[tuple[str, int], ...]
    end: str = ""


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one fault and seed. `acting` is None where the policy may not act."""

    drill: Drill
    seed: int
    silent: FaultArm  # without actions
    acting: FaultArm | None
    control: FaultArm


@dataclass(slots=True)
class _Score:
    severity: str
    delays: dict[str, list[int]] = field(default_factory=dict)
    leads: dict[str, list[int]] = field(default_factory=dict)
    false_alarms: int = 0


def finding(runs: Runs, metric: str, planned: int) -> Finding:
    """Return what one fault with one seed showed.

    A monitor whose alarm the healthy control has, too, from the fault on and no later, is not
    counted: that alarm does not come from the fault.

    Args:
        metric: the loss. planned: steps of a whole run.
    """
    fault, seed, silent = runs.drill.text, runs.seed, runs.silent
    onset = silent.injected
    if silent.refused or onset is None:
        why = silent.refused or "the job ended before the step of the fault"
        return Finding(fault, seed, refused=why)
    whole = (0, max(silent.arm.end, runs.control.arm.end))
    loss, healthy = (one.arm.series(metric, *whole) for one in (silent, runs.control))
    left = of_loss.departure(loss, healthy, onset)
    detections = tuple(
        Detection(a.rule, a.severity, a.step - onset) for a in _own(silent, runs.control, onset)
    )
    end = ending(silent, planned)
    final, final_healthy = (of_loss.last_mean(one, TAIL) for one in (loss, healthy))
    spread = of_loss.spread_of(healthy, onset)
    worse = final - final_healthy > max(WORSE * abs(final_healthy), _noise(spread))
    acting = runs.acting
    kept = None if acting is None else acting.arm.series(metric, *whole)
    until = planned if left is None else left.step
    return Finding(
        fault,
        seed,
        injected=onset,
        departed=None if left is None else left.step - onset,
        size=0.0 if left is None else left.size,
        first=detections[0] if detections else None,
        page=next((one for one in detections if one.severity in PAGES), None),
        detections=detections,
        lost=of_loss.lost(loss, healthy, onset),
        kept=None if kept is None else of_loss.lost(kept, healthy, onset),
        repeated=0 if acting is None else acting.repeated,
        final=final,
        final_acting=None if kept is None else of_loss.last_mean(kept, TAIL),
        final_healthy=final_healthy,
        acts=() if acting is None else _acts(acting, onset),
        end=end,
        end_acting="" if acting is None else ending(acting, planned),
        harmed=bool(end) or worse or not math.isfinite(final),
        moved=tuple(_moved(runs, onset, until)),
        apart=_apart(loss, healthy, onset, spread),
    )


def _noise(spread: float) -> float:
    """Return two standard errors of the mean of `TAIL` losses that remember each other."""
    return 2.0 * spread / math.sqrt(TAIL / 4.0) if math.isfinite(spread) else 0.0


def _own(silent: FaultArm, control: FaultArm, onset: int) -> list[Alarm]:
    """Return the first alarm of each monitor, less those that the control has as early."""
    first: dict[str, Alarm] = {}
    for alarm in silent.alarms:
        if alarm.step >= onset:
            first.setdefault(alarm.rule, alarm)
    anyway = {a.rule: a.step for a in reversed(control.alarms) if a.step >= onset}
    found = [a for a in first.values() if not anyway.get(a.rule, a.step + 1) <= a.step]
    return sorted(found, key=lambda a: (a.step, a.severity, a.rule))


def _acts(arm: FaultArm, onset: int) -> tuple[tuple[str, int], ...]:
    return tuple((a.verb, a.step - onset) for a in arm.acts if a.done)


def _moved(runs: Runs, onset: int, until: int) -> list[tuple[str, int]]:
    found = []
    for metric in UNAFFECTED.get(runs.drill.name, ()):
        one, other = (arm.arm.series(metric, 0, until) for arm in (runs.silent, runs.control))
        step = of_loss.moved(one, other, onset, until)
        if step is not None:
            found.append((metric, step - onset))
    return found


def _apart(loss: of_loss.Series, control: of_loss.Series, onset: int, spread: float) -> bool:
    away = [abs(loss[s] - control[s]) for s in loss if s < onset and s in control]
    return bool(away) and not max(away) <= 0.5 * spread


def ending(arm: FaultArm, planned: int) -> str:
    """Return how a run ended, "" as planned."""
    one = arm.arm
    if one.end - one.first >= planned and (not one.crashed or one.stopped):
        return ""
    made = one.end - one.first
    if one.stopped:
        return f"stopped by the suite after {made} steps"
    code = "without a record of it" if one.exit_code is None else f"with code {one.exit_code}"
    return f"ended after {made} steps {code}"


def healthy(seed: int, arm: FaultArm, metric: str, planned: int) -> Healthy:
    """Return what a healthy run showed."""
    loss = arm.arm.series(metric, 0, arm.arm.end)
    acts = _acts(arm, 0)
    end = ending(arm, planned)
    return Healthy(seed, arm.made, of_loss.last_mean(loss, TAIL), arm.alarms, acts, end)


def monitors(
    drills: Sequence[Drill],
    found: Sequence[Finding],
    controls: Sequence[Healthy],
    reads: Mapping[str, Collection[str]],
) -> list[Monitor]:
    """Return every rule with an alarm, the most valuable first.

    Args:
        reads: rule -> the metrics that it reads.
    """
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
    kinds = {drill.text: drill.name for drill in drills}
    made = [
        Monitor(
            rule,
            one.severity,
            one.delays,
            one.leads,
            one.false_alarms,
            tuple(f for f in one.delays if is_unaffected(reads.get(rule, ()), kinds[f])),
        )
        for rule, one in scores.items()
    ]
    return sorted(made, key=_worth)


def _worth(monitor: Monitor) -> tuple[float, ...]:
    """Sort by false alarms, then by how many faults it leads the loss in, then in how
    many it has an alarm."""
    ahead = sum(median(leads) > 0 for leads in monitor.leads.values())
    return (min(1, monitor.false_alarms), -ahead, -len(monitor.delays))
