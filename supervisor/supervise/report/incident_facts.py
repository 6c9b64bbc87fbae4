"""Facts of an incident in its audit records: rules, actions, verification, messages, status.

A fact without a record is None, never guessed.

A tape holds a few signals around the beginning of an incident, in a bounded number of points: all
frames of one rank from just before it opened, then those since; where they become too many, every
second one goes, and of two neighbours the worse one stays. The same frames give the same points,
live and read back from the journal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, log
from typing import cast

from msgspec.structs import asdict, replace

from ..core.frames import Row
from ..core.model import decisions, formats
from ..core.model.events import Frame
from ..core.model.interfaces import Reading, ReadingValue
from ..core.model.payload import NOTHING, SLOWING, Drill, Payload
from ..core.model.policy import Policy, Rule
from ..core.model.verdicts import NO, Rejoined, SlowStep
from ..core.notices import breach_headline, describe_end
from ..core.rule_scope import MACHINE
from ..core.rule_scope import is_machine_rule as is_of_machine
from ..core.trends import LEAST, Change, find_change, find_jump
from .incident_report import (
    Action,
    Approval,
    Bundle,
    Check,
    Code,
    Condition,
    Delivery,
    FiredRule,
    Moment,
    Move,
    Onset,
    Past,
    SentMessage,
    Series,
    Status,
    Suppression,
    TimelineEntry,
    UnchangedArea,
)
from .records import (
    DONE,
    FAILED,
    Record,
    SendResult,
    decision_detail,
    find_action_outcome,
    notices_of_kind,
)

RuleOf = Callable[[str], Rule | None]

MOMENTS = 200  # of a timeline: an incident that lasts for days is read at both of its ends
ENDS = {
    decisions.RECOVERED: Status.RECOVERED,
    decisions.CLEARED: Status.CLEARED,
    decisions.REBASELINED: Status.NOT_RECOVERED,
    decisions.RELEASED: Status.RELEASED,
    decisions.SUPERSEDED: Status.SUPERSEDED,
    decisions.SESSION_ENDED: Status.SESSION_ENDED,
}
VERIFY = decisions.VerificationPassed.KIND
REFUSALS = (decisions.RunbookRefused, decisions.RunbookWithdrawn)
CLEARLY = 2.0  # times the width of a band, to be out of it for good; project default
NEAR = 50  # steps before the first breach at which a drill counts as its cause


def moment_of_record(record: Record) -> Moment:
    """Return when and where a record was made."""
    return Moment(*_moment(record))


def _moment(record: Record) -> tuple[int, int, int, str | None]:
    return record.seq, record.step, record.attempt, record.wall


def fired_rules(incident: Iterable[Record], rule_of: RuleOf) -> list[FiredRule]:
    """Return the rules that fired, each with where it is written, in the order of the records."""
    rows = []
    for record in incident:
        decision = record.decision
        if isinstance(decision, decisions.RuleFired):
            rule = rule_of(str(decision.rule))
            rows.append(
                FiredRule(
                    **asdict(decision),
                    record=record.seq,
                    wall=record.wall,
                    title=rule.title if rule else "",
                    location=rule.location if rule else "",
                    runbook=rule.runbook if rule else None,
                )
            )
    return rows


def fired_readings(
    incident: Iterable[Record],
) -> Iterator[tuple[decisions.RuleFired, str, Reading]]:
    """Yield `(rule, detector, numbers)` of each reading of a rule that fired."""
    for record in incident:
        if isinstance(record.decision, decisions.RuleFired):
            for name, numbers in record.decision.numbers.items():
                yield record.decision, name, numbers


def metrics_in_breach(incident: Iterable[Record]) -> list[str]:
    """Return the metrics in breach when the rules fired."""
    names: dict[str, None] = {}
    for _, _, numbers in fired_readings(incident):
        if numbers.get("code") == "BREACH":
            metrics = (
                formats.reading_text(numbers, "metric"),
                *formats.reading_names(numbers, "nonfinite"),
            )
            names.update((str(name), None) for name in metrics if name)
    return list(names)


def measured_conditions(
    incident: Iterable[Record], series: Series | None, breach: int
) -> list[Condition]:
    """Return what each detector of the rules measured when it fired: value, limit, and the past.

    Of a detector that several rules read the first breach counts.
    """
    rows: dict[str, Condition] = {}
    for rule, name, numbers in fired_readings(incident):
        is_breach = numbers.get("code") == "BREACH"
        if name not in rows or (is_breach and not rows[name].is_breach):
            rows[name] = _condition(name, rule, decisions.decode_numbers(numbers), series, breach)
    return sorted(rows.values(), key=lambda condition: not condition.is_breach)


def _condition(
    name: str, rule: decisions.RuleFired, numbers: Reading, series: Series | None, breach: int
) -> Condition:
    key, measured = formats.measured_number(numbers)
    past = _past(numbers, key, measured, series, breach)
    limit = _limit(numbers.get("threshold"))
    if numbers.get("direction") == "low" and isinstance(measured, float):  # sums have no sign
        measured = -measured
        limit = -limit if isinstance(limit, float) else limit
    levels = (
        formats.finite_number(numbers.get(k)) for k in ("median", "reference", "level", "before")
    )
    return Condition(
        detector=name,
        rule=str(rule.rule),
        severity=str(rule.severity),
        step=rule.step,
        is_breach=numbers.get("code") == "BREACH",
        code=cast(Code, formats.reading_text(numbers, "code") or "UNKNOWN"),
        metric=formats.reading_text(numbers, "metric") or None,
        value=_scalar(formats.judged_value(key, numbers)),
        measure=key,
        measured=measured,
        limit=limit,
        baseline=next((value for value in levels if value is not None), None),
        signal=formats.reading_text(numbers, "signal") or None,
        nonfinite=list(map(str, formats.reading_names(numbers, "nonfinite"))),
        module=formats.reading_text(numbers, "where"),
        text=formats.format_reading(numbers),
        past=past,
    )


def _scalar(value: ReadingValue) -> float | None:
    return value if isinstance(value, int | float) else None


def _limit(value: ReadingValue) -> float | str | None:
    return value if isinstance(value, int | float | str) else None


def _past(
    numbers: Reading, key: str, measured: float | str | None, series: Series | None, breach: int
) -> Past | None:
    """Return how near the metric was to its limit before: its farthest value, measured as now.

    None where that cannot be known: no frames, no baseline, or a measure that takes many values.
    """
    limit, now = formats.finite_number(numbers.get("threshold")), formats.finite_number(measured)
    metric = formats.reading_text(numbers, "metric")
    if series is None or metric not in series.signals or limit is None or now is None:
        return None
    measure = _measure(numbers, key)
    if measure is None:
        return None
    end = max(0, series.opened_at - 1)  # the frame that fired is no past
    past = [
        (measure(v), step)
        for v, step in zip(series.signals[metric][:end], series.steps[:end], strict=True)
        if v is not None and math.isfinite(v) and step < breach
    ]
    if not past:
        return None
    upwards = (now >= limit) is (numbers.get("code") == "BREACH")
    farthest, step = max(past) if upwards else min(past)
    return Past(measured=farthest, step=step, frames=len(past))


def _measure(numbers: Reading, key: str) -> Callable[[float], float] | None:
    """Return the function that makes what is compared with the limit from a value."""
    if key == "value" and "last_block" not in numbers:
        return lambda value: value
    reference = formats.finite_number(numbers.get("reference"))
    if key == "ratio" and reference:
        return lambda value: value / reference
    median = formats.finite_number(numbers.get("median"))
    scale = formats.finite_number(numbers.get("scale"))
    if key != "z" or median is None or not scale:
        return None
    if numbers.get("transform") == "log":
        return lambda value: (log(value) - log(median)) / scale if min(value, median) > 0.0 else inf
    return lambda value: (value - median) / scale if numbers.get("transform") != "abs" else inf


def intended_actions(incident: Iterable[Record]) -> list[Action]:
    """Return every action that was intended, with its outcome and what was observed of it."""
    rows: dict[str, Action] = {}
    started: dict[str, int] = {}
    for record in incident:
        decision = record.decision
        start: dict[str, bool | str] = {}  # what became of the newest start
        if isinstance(decision, decisions.NoticeTaken) and decision.what == "resume-refused":
            start = {"resumed": False}
        elif isinstance(decision, decisions.VerificationFailed) and decision.start_ended:
            start = {"start_ended": decision.start_ended}
        if start:
            starts = [row for row in rows.values() if row.verb == "relaunch" and row.ok]
            for row in starts[-1:]:
                rows[row.id] = replace(row, result=row.result.extended(**start))
        elif isinstance(decision, decisions.ActionPlanned):
            order = decision.action
            started[order.id] = record.mono_ns
            rows[order.id] = Action(
                *_moment(record),
                id=order.id,
                verb=order.verb,
                runbook=order.runbook,
                args=Payload(decisions.decode_numbers(order.args)),
                touches_job=order.touches_job,
                is_undo="undo-" in order.id,
                outcome="no outcome on record",
                ok=None,
                result=NOTHING,
                took_s=None,
                outcome_record=None,
            )
        elif (ending := find_action_outcome(decision)) is not None and ending[0] in rows:
            name, outcome, result = ending
            rows[name] = replace(
                rows[name],
                ok={DONE: True, FAILED: False}.get(outcome),
                outcome="done" if outcome == DONE else record.reason,
                result=Payload(decisions.decode_numbers(result)),
                took_s=(record.mono_ns - started[name]) / 1e9,
                outcome_record=record.seq,
                error=decision.error if isinstance(decision, decisions.ActionFailed) else "",
            )
    return list(rows.values())


def evidence_bundles(actions: Iterable[Action]) -> list[Bundle]:
    """Return the evidence bundles of the snapshots."""
    effects = [action.effect for action in actions if action.verb == "snapshot" and action.ok]
    return [Bundle(e.path, e.sha256, list(e.files), list(e.missing)) for e in effects if e.path]


def verification_checks(incident: Iterable[Record]) -> list[Check]:
    """Return what was verified, refused and withdrawn, in order."""
    return [
        Check(
            *_moment(record),
            kind=decision_detail(record.decision),
            text=record.reason,
            remedy=getattr(record.decision, "remedy", ""),
        )
        for record in incident
        if record.kind == VERIFY or isinstance(record.decision, REFUSALS)
    ]


def refused_runbooks(incident: Iterable[Record]) -> list[tuple[int, str]]:
    """Return the records of runbooks that were refused and withdrawn, with the reason.

    Of a runbook it is the newest one.
    """
    texts: dict[tuple[str, str], tuple[int, str]] = {}
    for record in incident:
        decision = record.decision
        if isinstance(decision, REFUSALS):
            text = record.reason
            if isinstance(decision, decisions.RunbookWithdrawn):
                text = f"{decision.runbook} not carried out at step {record.step}: {decision.cause}"
            texts[decision.WHAT, decision.runbook] = record.seq, text
    return list(texts.values())


def suppressed_actions(incident: Iterable[Record]) -> list[Suppression]:
    """Return what was not done, and what kept it; of modes that do not act, the plan."""
    return [
        Suppression(
            *_moment(record),
            rule=decision.rule or "",
            text=record.reason,
            suppressed_by=decision.suppressed_by,
            runbook=decision.runbook,
            plan=list(decision.would or ()),
        )
        for record in incident
        if isinstance(decision := record.decision, decisions.Suppressed)
    ]


def newest_approval(incident: Iterable[Record]) -> Approval | None:
    """Return the newest request to a person, with its answer; None where nobody was asked."""
    request: Approval | None = None
    asked_ns = 0
    for record in incident:
        decision = record.decision
        if isinstance(decision, decisions.ApprovalRequested):
            asked_ns = record.mono_ns
            request = Approval(
                *_moment(record),
                id=decision.id,
                runbook=decision.runbook,
                plan=list(decision.args),
                timeout_s=decision.timeout_s,
                on_timeout=decision.on_timeout,
                answer=None,
                answer_text="",
                args_sha256=decision.args_sha256,
            )
        elif (
            isinstance(decision, decisions.ApprovalSettled)
            and request
            and decision.id == request.id
        ):
            took_s = (record.mono_ns - asked_ns) / 1e9
            request = replace(
                request,
                answer=decision.what,
                answer_text=record.reason,
                operator=decision.operator,
                took_s=took_s,
            )
    return request


def sent_messages(records: Iterable[Record], incident: Iterable[Record]) -> list[SentMessage]:
    """Return what people were sent, and what became of it per channel."""
    results: dict[str, list[Delivery]] = {}
    for record in records:
        if record.kind == "notify_result":
            sent = record.data.read(SendResult)
            delivery = Delivery(ok=sent.ok, tries=sent.tries, text=record.reason)
            for key in sent.keys:
                results.setdefault(key.rpartition(":")[2], []).append(delivery)
    return [
        SentMessage(
            *_moment(record),
            severity=decision.message.severity,
            title=decision.message.title,
            next=decision.message.advice.text,
            delivered=results.get(str(record.seq), []),
        )
        for record in incident
        if isinstance(decision := record.decision, decisions.Notified)
    ]


def skipped_steps(
    records: Iterable[Record], breach: int, incident: Sequence[Record], tape: Tape | None
) -> list[int]:
    """Return the steps from the first breach to the end whose update a safeguard skipped."""
    noticed = {
        notice.at_step
        for record, notice in notices_of_kind(records, "safeguard")
        if record.seq <= incident[-1].seq
        and str(notice.details.get("order")).startswith("skip_")
        and not notice.details.get("stopped")
        and notice.at_step is not None
    }
    reasons = [] if tape is None else tape.points("skip_reason")
    noticed |= {step for step, reason in reasons if reason in SAFEGUARDS}
    return sorted(step for step in noticed if step >= breach)


def good_steps(incident: Sequence[Record], policy: Policy | None) -> tuple[int, int] | None:
    """Return how many steps without trouble followed what helped, and how many are required.

    None where nothing was verified, or a rule of the incident fired behind that.
    """
    passed = [r for r in incident if isinstance(r.decision, decisions.VerificationPassed)]
    if not passed or policy is None:
        return None
    newest = passed[-1]
    later = (r.decision for r in incident if r.seq > newest.seq)
    if any(isinstance(d, decisions.RuleFired | decisions.IncidentHeld) for d in later):
        return None
    steps = incident[-1].step - newest.step
    return max(0, steps), policy.probation_steps


ENDING = frozenset(("hang", "crash", "blackout"))  # of the machine, too


def find_drill(
    records: Iterable[Record], opened: Record, breach: int, onset: Onset, *, of_machine: bool
) -> tuple[str, int] | None:
    """Return `(fault, step)` of the newest drill that may have caused it, None for none.

    It began shortly before, and what it does shows in what the incident is about.
    """
    newest = None
    for record, notice in notices_of_kind(records, "drill"):
        drill = notice.details.read(Drill)
        step = record.step if notice.at_step is None else notice.at_step
        latest = max(breach, opened.step) if onset.metric is None else onset.latest
        is_near = breach - NEAR <= step <= latest + 1
        is_earlier = record.seq <= opened.seq
        fault = drill.fault
        fits = fault in SLOWING | ENDING if of_machine else fault not in SLOWING
        if fault and fits and not drill.refused and is_near and is_earlier:
            newest = fault, step
    return newest


def is_about_machine(
    conditions: Sequence[Condition], policy: Policy | None, rule: str | None
) -> bool:
    """Return whether the rules of an incident say nothing about the weights.

    Without conditions, as where a rule waited before it spoke, the one that opened it decides.
    """
    metrics = {c.metric for c in conditions if c.is_breach}
    metrics |= {name for c in conditions for name in c.nonfinite}
    if conditions:
        return metrics - {None} <= MACHINE
    rules = () if policy is None else policy.rules
    return policy is not None and any(r.id == rule and is_of_machine(policy, r) for r in rules)


def fill_values_and_baselines(
    conditions: Sequence[Condition], tape: Tape | None, moves: Sequence[Move]
) -> list[Condition]:
    """Return the conditions with values of the frames: just before the onset, and where it fired.

    A detector's own baseline may be old, or of a part of the steps. Of a signal whose onset is not
    known its frames do not tell which were healthy.
    """
    rows, levels = [], {move.metric: move.level for move in moves}
    for condition in conditions:
        points = [] if tape is None or condition.metric is None else tape.points(condition.metric)
        value, level = condition.value, condition.baseline
        if value is None:
            value = dict(points).get(condition.step)
        if points and condition.measure != "difference":
            level = levels.get(str(condition.metric))
        rows.append(replace(condition, value=value, baseline=level))
    return rows


def find_onset(moves: Sequence[Move], breach: int, slow: SlowStep | None) -> Onset:
    """Return where it began: with the signal that moved first, else with the first breach."""
    if slow is not None:
        return Onset(slow.since, slow.since, slow.since, "step_time")
    if not moves:
        return Onset(breach, breach, breach, None)
    first = moves[0]
    return Onset(first.first_step, first.earliest_step, first.latest_step, first.metric)


LAST = 16  # newest frames that say how it is now; project default


def build_timeline(incident: Sequence[Record], opened: Record) -> list[TimelineEntry]:
    """Return what happened in order; the middle of a very long one is counted only."""
    rows = [
        TimelineEntry(
            *_moment(record),
            kind=f"{record.kind} {decision_detail(record.decision)}".rstrip(),
            since_s=round((record.mono_ns - opened.mono_ns) / 1e9, 3),
            text=_moment_text(record),
        )
        for record in incident
    ]
    if len(rows) <= MOMENTS:
        return rows
    half = MOMENTS // 2
    text = f"{len(rows) - MOMENTS} records: supervise audit show"
    return [*rows[:half], replace(rows[half], kind="left out", text=text), *rows[-half:]]


def _moment_text(record: Record) -> str:
    """Return what a record says beside its kind."""
    match record.decision:
        case decisions.IncidentClosed() as closed:
            return describe_end(closed)
        case decisions.IncidentHeld() as held:
            return held.cause
        case decisions.RuleFired() as fired:
            return f"{fired.rule}: {breach_headline(fired.numbers, fired.when)}"
        case decisions.RuleCleared() | decisions.RuleJoined() as change:
            return str(change.rule)
    return record.reason


def status_of(incident: Sequence[Record]) -> Status:
    """Return the status of an incident from its records."""
    status, acted, stopped, withdrawn = Status.OPEN, False, False, False
    verified = differs = False
    orders: dict[str, decisions.ActionOrder] = {}
    for record in incident:
        decision = record.decision
        if isinstance(decision, decisions.ActionPlanned):
            orders[decision.action.id] = decision.action
            status = status if status in (Status.HELD, Status.WAITING) else Status.ACTING
        elif isinstance(decision, decisions.ActionFinished) and decision.action.id in orders:
            order = orders[decision.action.id]
            acted, stopped = acted or order.touches_job, stopped or order.verb == "stop"
        elif isinstance(decision, decisions.VerificationPassed):
            verified, status = True, Status.WATCHING
        elif isinstance(decision, decisions.ApprovalRequested):
            status = Status.WAITING
        elif isinstance(decision, decisions.ApprovalSettled) and status == Status.WAITING:
            status = Status.OPEN
        elif isinstance(decision, decisions.StateChanged) and status == Status.ACTING:
            status = Status.OPEN if decision.after == "suspect" else status
        elif isinstance(decision, decisions.RunbookWithdrawn):
            withdrawn, status = True, Status.OPEN
        elif isinstance(decision, decisions.IncidentHeld):
            status = Status.HELD
        elif isinstance(decision, decisions.StepDiffers):
            differs |= decision.what == "differs"
        elif isinstance(decision, decisions.IncidentClosed):
            status = _status_of_end(decision, stopped=stopped)
            if status == Status.RECOVERED:
                status = Status.DIFFERS if differs else status if verified else Status.DONE
            if status == Status.CLEARED and withdrawn and not acted:
                status = Status.WITHDRAWN
    return status


def is_loss_still_out(rejoined: Rejoined) -> bool:
    """Return whether the newest losses are clearly out of the band, or not finite."""
    residual, width = rejoined.residual, rejoined.band
    if not isinstance(residual, float) or not isinstance(width, float):
        return rejoined.answer == NO  # such a loss has no distance
    return rejoined.answer == NO and residual > CLEARLY * width


def _status_of_end(closed: decisions.IncidentClosed, *, stopped: bool) -> Status:
    """Return the status by the outcome, and how the job ended where that has ended it."""
    if closed.outcome != decisions.JOB_ENDED:
        return ENDS[closed.outcome]
    if closed.asked:
        return Status.ASKED
    if stopped:
        return Status.STOPPED
    if closed.returncode:
        return Status.DOWN
    rejoined = None if closed.spike is None else closed.spike.questions.rejoined
    is_ill = rejoined is not None and rejoined.excursion and is_loss_still_out(rejoined)
    is_ill = is_ill and closed.spike is not None and not closed.spike.no_objective
    return Status.UNRECOVERED if is_ill else Status.JOB_ENDED


LOSSES = ("train_loss_raw", "train_loss")
LATEST = (*LOSSES, "learning_rate", "step_time")  # of which a card tells the newest level
SIGNALS = ("learning_rate", "update_norm", "grad_global_norm")  # beside the loss
MAX_SIGNALS = 8
MAX_RANKS = 64  # each holds up to 241 frames while an incident is open; project default
BEFORE, AFTER = 256, 180  # points; project defaults
WHOLE = 32  # of those after, which no thinning touches: what moved first is read from them
SHOWN = 60  # of those before, in a report
# A signal moved: by a share of its value before, and beyond its own noise. A loss by less: it is
# what all are watched for. What fell to more than half has come back from what raised it.
MOVED, LOSS_MOVED, FELL = 0.25, 0.02, 0.5
RATE = "learning_rate"
COUNTERS = ("steps_seen", "tokens_seen")  # that one stands still is a consequence, seen late
INTENDED = ("learning_rate_expected", "learning_rate_initial")  # of the schedule, not in use
SAFEGUARDS = (2.0, 4.0)  # values of `skip_reason`: one of the probe's safeguards skipped the update
# What may explain a trouble of the training, or stay as before: area -> metrics, as they begin.
AREAS: Mapping[str, tuple[str, ...]] = {
    "token statistics": ("batch_token", "batch_unique", "batch_top1", "tokens_per_update"),
    "attention": ("attn_", "max_attn_logit"),
    "routing": ("router_", "moe_"),
    "spread of the ranks": ("loss_dispersion", "batch_dispersion", "straggler_ratio"),
    "ranks": ("param_digest_mismatch",),
    "precision": ("loss_scale", "overflow"),
    "schedule": (RATE,),
}

BARS = "▁▂▃▄▅▆▇█"
BACK, BROKEN = "⟲", "!"
COLUMNS = 40

Values = Mapping[str, float | None]
Point = tuple[int, int, Values]  # attempt, step, values


@dataclass(slots=True)
class Tape:
    """The frames of one rank around an incident.

    Attributes:
        before, after: points; `stride`: frames that one of `after` stands for, but for the first
            `WHOLE`.
        latest: metric -> `(step, value)` of the newest frames, for `LATEST`.
        nonfinite_span: first and last step of the newest losses if they are not finite, else None.
    """

    rank: int
    points_before: list[Point] = field(default_factory=list)
    points_since: list[Point] = field(default_factory=list)
    stride: int = 1
    latest: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    nonfinite_span: tuple[int, int] | None = None
    _cell: list[Point] = field(default_factory=list)

    def add(self, attempt: int, step: int, values: Values, *, opened: bool) -> None:
        """Add the next frame; `opened`: the incident was open by then."""
        point = (attempt, step, values)
        loss = next((v for name in LOSSES if (v := values.get(name)) is not None), None)
        if loss is not None:
            start = step if self.nonfinite_span is None else min(step, self.nonfinite_span[0])
            self.nonfinite_span = None if math.isfinite(loss) else (start, step)
        for name in LATEST:
            value = values.get(name)
            if value is not None and math.isfinite(value):
                self.latest.setdefault(name, deque(maxlen=LAST)).append((step, value))
        if not opened:
            self.points_before.append(point)
            del self.points_before[:-BEFORE]
            return
        self._cell.append(point)
        if len(self._cell) < self.stride and self._cell[0][0] == attempt:
            return
        self.points_since += _worst(self._cell)
        self._cell.clear()
        if len(self.points_since) > AFTER:
            whole, rest = self.points_since[:WHOLE], self.points_since[WHOLE:]
            pairs = (rest[n : n + 2] for n in range(0, len(rest), 2))
            self.points_since = whole + [point for pair in pairs for point in _worst(pair)]
            self.stride *= 2

    def newest(self, metric: str) -> list[tuple[int, float]]:
        """Return the newest `(step, value)` of a metric of `LATEST`, in any attempt.

        Of all frames: a point of the tape is the worst of several, and says too much.
        """
        return list(self.latest.get(metric, ()))

    def has_loss(self) -> bool:
        """Return whether any point holds a loss."""
        points = (*self.points_before, *self.points_since, *self._cell)
        return any(values.get(name) is not None for _, _, values in points for name in LOSSES)

    def names(self) -> list[str]:
        """Return the metrics of the points before the incident opened."""
        return list({name: None for _, _, values in self.points_before for name in values})

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return `(step, value)` of a metric in the attempt in which the incident opened."""
        points = [*self.points_before, *self.points_since, *self._cell]
        attempt = (self.points_before or points)[-1][0]
        return [
            (step, value)
            for of_point, step, values in points
            if of_point == attempt and (value := values.get(metric)) is not None
        ]

    def newest_rows(self, attempt: int, metrics: Sequence[str]) -> Iterator[tuple[int, Row]]:
        """Yield the step and the values of these metrics of each point, newest first."""
        for of_point, step, values in reversed(
            (*self.points_before, *self.points_since, *self._cell)
        ):
            if of_point == attempt:
                yield step, tuple(values.get(metric) for metric in metrics)

    def series(self, metrics: Iterable[str] = ()) -> Series | None:
        """Return the series of the report, None without a frame.

        Args:
            metrics: further ones, those that the rules read.
        """
        before = self.points_before[-SHOWN:]
        points = [*before, *self.points_since, *_worst(self._cell)]
        if not points:
            return None
        present = {name for _, _, values in points for name, v in values.items() if v is not None}
        names = [next((n for n in LOSSES if n in present), "")]
        names += [name for name in (*SIGNALS, *metrics) if name in present]
        names = list(dict.fromkeys(filter(None, names)))[:MAX_SIGNALS]
        steps = [step for _, step, _ in points]
        return Series(
            rank=self.rank,
            steps=steps,
            attempts=[attempt for attempt, _, _ in points],
            opened_at=len(before),
            stride=self.stride,
            window=[min(steps), max(steps)],
            signals={name: [values.get(name) for _, _, values in points] for name in names},
        )


class Tapes:
    """The frames of all ranks around an incident; `select` returns the one of its report."""

    def __init__(self) -> None:
        self._tapes: dict[int, Tape] = {}

    def add(self, frame: Frame, names: Sequence[str], *, opened: bool) -> None:
        """Add the next frame of any of the first `MAX_RANKS` ranks; see `Tape.add`."""
        if frame.rank not in self._tapes and len(self._tapes) == MAX_RANKS:
            return
        tape = self._tapes.setdefault(frame.rank, Tape(frame.rank))
        pairs = zip(names, frame.values, strict=False)
        values = {name: value for name, value in pairs if value is not None}
        tape.add(frame.attempt, frame.step, values, opened=opened)

    def select(self, rank: int | None) -> Tape | None:
        """Return the tape of that rank if it has a loss, else that of the first one with a loss."""
        order = sorted(self._tapes.values(), key=lambda tape: (tape.rank != rank, tape.rank))
        return next((tape for tape in order if tape.has_loss()), next(iter(order), None))


def _worst(points: Sequence[Point]) -> list[Point]:
    """Return the point with the highest loss of each attempt; a loss that is not finite is worst.

    Of points without a loss it is the newest one.
    """
    worst: dict[int, Point] = {}
    for point in points:
        previous = worst.get(point[0])
        if previous is None or _height(point) >= _height(previous):
            worst[point[0]] = point
    return list(worst.values())


def _height(point: Point) -> float:
    loss = next((v for name in LOSSES if (v := point[2].get(name)) is not None), -math.inf)
    return math.inf if math.isnan(loss) else loss


def loss_metric_of(series: Series | None) -> str:
    """Return the name of the loss in a series, "" for none."""
    return next((name for name in LOSSES if series and name in series.signals), "")


def find_moves(tape: Tape | None, names: Iterable[str], breach: int, highest: float) -> list[Move]:
    """Return which signals left their course around the first breach, the earliest first.

    Args:
        highest: learning rate of the run before.
    """
    rows: list[Move] = []
    if tape is None:
        return rows
    for name in names:
        if name in COUNTERS:
            continue
        points = tape.points(name)
        jump = find_jump(points, breach, highest)
        change = jump if name.startswith(RATE) else find_change(points, breach)
        if change is not None and (move := _move(name, points, change)) is not None:
            rows.append(move)
    order = {name: n for n, name in enumerate((RATE, "update_norm"))}
    return sorted(rows, key=lambda move: (move.first_step, order.get(move.metric, 9)))


def _move(name: str, points: Sequence[tuple[int, float]], change: Change) -> Move | None:
    """Return a change with its farthest value, None where that is not far."""
    since = [(step, value) for step, value in points if step >= change.step]
    if name in LOSSES and not change.is_up:  # it falls anyway: only a sudden fall is one
        since = since[:LEAST]
    broken = next((point for point in since if not math.isfinite(point[1])), None)
    sign = 1.0 if change.is_up else -1.0
    peak_step, peak = broken or max(since, key=lambda point: sign * point[1])
    least = MOVED if change.is_up or name.startswith(RATE) else FELL
    if name in LOSSES and change.is_up:
        least = LOSS_MOVED
    if math.isfinite(peak) and abs(peak - change.before) < least * abs(change.before):
        return None
    return Move(
        metric=name,
        level=change.before,
        peak=peak,
        peak_step=peak_step,
        first_step=change.step,
        earliest_step=change.earliest,
        latest_step=change.latest,
        ratio=peak / change.before if math.isfinite(peak) and change.before != 0.0 else None,
    )


def group_by_area(
    tape: Tape | None, conditions: Sequence[Condition], breach: int, highest: float
) -> tuple[dict[str, Move], list[UnchangedArea]]:
    """Return the areas with a metric that left its course around the first breach, and the others.

    An area that was measured too rarely before it, or not since, is in neither.
    """
    changed: dict[str, Move] = {}
    unchanged: list[UnchangedArea] = []
    if tape is None:
        return changed, unchanged
    in_breach = {condition.metric for condition in conditions if condition.is_breach}
    for area, prefixes in AREAS.items():
        names = [name for name in tape.names() if name.startswith(prefixes)]
        names = [name for name in names if not name.startswith(INTENDED)]
        measured = [name for name in names if _is_judged(tape.points(name), breach)]
        if left := find_moves(tape, measured, breach, highest):
            changed[area] = left[0]
        elif measured and in_breach.isdisjoint(names):
            stayed = all(_stayed(tape.points(name), breach) for name in measured)
            if stayed or area == "schedule":
                unchanged.append(UnchangedArea(area, measured))
    return changed, unchanged


def _is_judged(points: Sequence[tuple[int, float]], breach: int) -> bool:
    """Return whether there are samples enough before a breach, and one since."""
    return bool(points) and points[-1][0] >= breach and sum(s < breach for s, _ in points) >= LEAST


def _stayed(points: Sequence[tuple[int, float]], breach: int) -> bool:
    """Return whether all samples since a breach are where the oldest were.

    What a rule has seen late may have been otherwise for long, which is its course by then.
    """
    oldest = [value for _, value in points[: max(LEAST, len(points) // 4)]]
    reach = max(oldest) - min(oldest)
    since = (value for step, value in points if step >= breach)
    return all(min(oldest) - reach <= value <= max(oldest) + reach for value in since)


def attempt_starts(series: Series) -> list[int]:
    """Return the indices of the points before which another attempt began."""
    return [n + 1 for n, (a, b) in enumerate(pairwise(series.attempts)) if b != a]


def sparkline(values: Sequence[float | None], attempts: Sequence[int]) -> str:
    """Return one bar for every few values, the worst of them; "" without a value.

    `!` is NaN or Inf; a rollback or relaunch, where `attempts` grows, is `⟲`.

    Args:
        values: in the order of the frames; None is absent.
        attempts: of each value.
    """
    points = [(a, v) for a, v in zip(attempts, values, strict=True) if v is not None]
    finite = [v for _, v in points if math.isfinite(v)]
    if not points:
        return ""
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    width = max(1, math.ceil(len(points) / COLUMNS))
    line, cell, current = "", list[float](), points[0][0]
    for attempt, value in points:
        if attempt != current or len(cell) == width:
            line += _bar(cell, low, high) if cell else ""
            line += BACK if attempt != current else ""
            cell, current = [], attempt
        cell.append(value)
    return line + (_bar(cell, low, high) if cell else "")


def _bar(values: Sequence[float], low: float, high: float) -> str:
    if not all(map(math.isfinite, values)):
        return BROKEN
    if high - low <= 1e-3 * max(abs(high), abs(low)):  # flat: noise is no course
        return BARS[1]
    return BARS[round((max(values) - low) / (high - low) * (len(BARS) - 1))]
