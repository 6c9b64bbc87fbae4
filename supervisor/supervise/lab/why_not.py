"""Reasons for which a rule did not fire or act at a step of a recorded run.

The journal is replayed through the policies of the run up to that frame, with the code that ran
live; then the detectors and the rule are read. What would block the runbook the engine itself
answers, in a copy of the state. The run is not changed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType
from msgspec import field as key
from msgspec.structs import replace

from ..catalog.diagnostics import did_you_mean
from ..catalog.rules import Tree, parse_expression
from ..core import engine, rule_fired, rule_scope
from ..core.model import formats
from ..core.model.decisions import (
    ACTING_MODES,
    BREACH,
    CODE_NAMES,
    OK,
    UNKNOWN,
    Decision,
    IncidentHeld,
    PolicyReloaded,
    RuleFired,
    RunbookRefused,
    Suppressed,
)
from ..core.model.events import Event, Frame, Gap, LateFrame, Tick
from ..core.model.interfaces import Detector, Reading, ReadingValue, yaml_name
from ..core.model.policy import Policy, Rule
from ..core.rank_monitor import RankMonitor
from ..core.run_state import State, StepContext
from ..errors import UsageError


class Leaf(NamedTuple):
    """A detector that does not read as the rule needs it; `any`: one of several would do."""

    name: str
    target_code: int
    any: bool


class LoggedDecision(NamedTuple):
    """A decision in the audit log: the numbers of its record and of its event."""

    number: int
    event: int
    decision: Decision


class Comparison(NamedTuple):
    """A measure beside its limit; `needs` is None where the two do not compare."""

    measure: str
    measured: float | str | None
    limit: float | None
    short_by: float | None = None
    needs: str | None = None


class Condition(Struct, frozen=True, kw_only=True):
    """The reading of one detector, its inputs included.

    Attributes:
        target: the code that the rule needs. text: the reading as a sentence.
        needs: the comparison with the limit. alternative: one of several conditions would do.
    """

    detector: str
    kind: str
    code: str
    raw: str
    target: str = key(name="wanted")
    numbers: Reading
    measure: str
    measured: float | str | None
    limit: float | None
    short_by: float | None
    needs: str | UnsetType = UNSET
    inputs: Sequence[Condition]
    text: str = ""
    alternative: bool | UnsetType = key(name="any", default=UNSET)


class Obstacle(Struct, frozen=True):
    """An obstacle to a runbook: the gate, and a sentence."""

    gate: str = key(name="by")
    text: str


class PhaseSeverity(Struct, frozen=True):
    """The phase of the run that changes a rule, and the severity of the rule outside it."""

    name: str
    off: bool
    base_severity: str = key(name="else")


class Consequence(Struct, frozen=True):
    """A decision of the same event, and the number of its audit record."""

    kind: str
    reason: str
    record: int | None


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to a question; `record` is the audit record of the firing at or before the step.

    Attributes:
        event: number of the frame in the journal. inactive: the reason for no evaluation at all.
        since_step: of a rule that fired before the step and fires on.
    """

    rule: str
    step: int
    rank: int
    attempt: int
    attempts: Sequence[int]
    event: int
    expression: str = key(name="when")
    location: str = key(name="where")
    severity: str
    phase: PhaseSeverity | None
    runbook: str | None
    policy: str
    mode: str
    code: str
    fired: bool
    firing: bool
    record: int | None = None
    missing: Sequence[Condition]
    inactive: str | None
    obstacles: Sequence[Obstacle]
    consequences: Sequence[Consequence] = key(name="then")
    since_step: int | UnsetType = UNSET
    verdict: str = ""


def find_unmet_conditions(rule: Rule, policy: Policy, monitor: RankMonitor) -> list[Condition]:
    """Return the conditions of a rule that were not met, unknown ones first."""
    codes = {name: monitor.codes[i] for name, i in monitor.index.items()}
    tree = parse_expression(rule.text, limit=len(rule.text)).tree
    conditions = [
        replace(
            describe_detector(leaf.name, policy, monitor, target_code=leaf.target_code),
            alternative=leaf.any,
        )
        for leaf in dict.fromkeys(_missing_leaves(tree, BREACH, codes, several=False))
    ]
    return sorted(conditions, key=lambda condition: condition.code != "UNKNOWN")


def describe_detector(
    name: str, policy: Policy, monitor: RankMonitor, *, target_code: int = BREACH
) -> Condition:
    """Return one detector's reading: numbers, what it needed, and a sentence; inputs included."""
    position, spec = monitor.index[name], policy.detectors[name]
    code, watch = monitor.codes[position], monitor.watches[position]
    numbers: dict[str, ReadingValue] = dict(watch.numbers())
    if len(spec.metrics) == 1:
        numbers["metric"] = spec.metrics[0]
    comparison = _distance(spec, numbers)
    condition = Condition(
        detector=name,
        kind=yaml_name(type(spec)),
        code=CODE_NAMES[code],
        raw=CODE_NAMES[watch.raw],
        target=CODE_NAMES[target_code],
        numbers=numbers,
        measure=comparison.measure,
        measured=comparison.measured,
        limit=comparison.limit,
        short_by=comparison.short_by,
        needs=UNSET if comparison.needs is None else comparison.needs,
        inputs=[describe_detector(inner, policy, monitor) for inner in spec.detectors],
    )
    return replace(condition, text=_sentence(spec, monitor, condition, code, target_code))


# ── the tree ──────────────────────────────────────────────────────────────────────────────────────


def _missing_leaves(
    tree: Tree | str, target_code: int, codes: Mapping[str, int], *, several: bool
) -> Iterator[Leaf]:
    """Yield the leaves that keep `tree` from being `wanted` (BREACH or OK)."""
    kind, parts = tree[0], tree[1:]
    if kind == "name":
        name = str(parts[0])
        if codes[name] != target_code:
            yield Leaf(name, target_code, several)
    elif kind == "not":
        yield from _missing_leaves(parts[0], 2 - target_code, codes, several=several)
    else:
        any_suffices = (kind == "or") == (target_code == BREACH)
        if any_suffices and any(_code(part, codes) == target_code for part in parts):
            return
        for part in parts:
            yield from _missing_leaves(part, target_code, codes, several=several or any_suffices)


def _code(tree: Tree | str, codes: Mapping[str, int]) -> int:
    kind, parts = tree[0], tree[1:]
    if kind == "name":
        return codes[str(parts[0])]
    if kind == "not":
        return 2 - _code(parts[0], codes)
    return (min if kind == "and" else max)(_code(part, codes) for part in parts)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def _distance(spec: Detector, numbers: Reading) -> Comparison:
    """Return what was measured, the comparison it needed, and how far off it was."""
    measure, value = formats.measured_number(numbers)
    limit = formats.finite_number(numbers.get("slack" if "slack" in numbers else "threshold"))
    comparison = Comparison(measure, value, limit)
    if "last_breach" in numbers or "nonfinite" in numbers or limit is None:
        return comparison
    lower = any(_is_configured(spec, name) for name in ("lt", "lte", "slope_per_1k_lt"))
    side = getattr(spec, "side", "high") if measure in ("z", "distance") else "high"
    is_both = side == "both" or numbers.get("law") == "constant"
    if side == "low" or numbers.get("law") in ("nondecreasing", "increasing"):
        lower, limit = True, -limit
    # A rate breaches at its bound, most others beyond it.
    equal = (
        "=" if any(_is_configured(spec, n) for n in ("gte", "lte")) or "sample" in numbers else ""
    )
    needs = f"{'<' if lower else '>'}{equal} {formats.format_number(limit)}"
    if is_both:
        needs = f"{needs} either way"
    finite_value = formats.finite_number(value)
    if finite_value is None:
        return comparison._replace(needs=needs)
    short = (
        finite_value - limit if lower else limit - (abs(finite_value) if is_both else finite_value)
    )
    is_short = short > 0.0 or math.isclose(short, 0.0)
    return comparison._replace(needs=needs, short_by=short if is_short else None)


def _is_configured(spec: Detector, name: str) -> bool:
    return getattr(spec, name, None) is not None


# ── sentences ─────────────────────────────────────────────────────────────────────────────────────


def _sentence(
    spec: Detector, monitor: RankMonitor, condition: Condition, code: int, target_code: int
) -> str:
    numbers = condition.numbers
    if code == UNKNOWN:
        return f"UNKNOWN: {_unknown(spec, monitor, condition)}"
    if target_code == OK or code == BREACH:
        against = ", and the rule requires that it is not" if code == BREACH != target_code else ""
        state = "in breach" if code == BREACH else "OK"
        return f"{state}{against}: {formats.format_reading(numbers)}"
    if condition.inputs:
        reading = f"no match; {formats.format_reading(numbers)}"
        return "; ".join([reading, *_unmatched(spec, numbers)])
    if condition.needs is UNSET:
        return formats.format_reading(numbers)
    form = formats.MEASURES.get(condition.measure, "{}")
    named = f"{numbers.get('metric', 'value')} {formats.format_number(numbers.get('value'))}"
    text = f"{named}: " + form.format(formats.format_number(condition.measured))
    if condition.measure == "value":
        text = named
    if "signal" in numbers:
        text = f"{formats.format_silence(numbers, limited=False)},"
    text += f" {'is' if condition.raw == 'BREACH' else 'needs'} {condition.needs}"
    if condition.short_by is not None:
        text += f", short by {formats.format_number(condition.short_by)}"
    if formats.reading_integer(numbers, "needed", 1) > 1:
        text += (
            f"; {numbers['breaching']} of the {numbers['needed']} breaches it needs in the newest "
            f"{numbers['of']} samples"
        )
    return "; ".join(filter(None, [text, formats.format_baseline(numbers)]))


def _unmatched(spec: Detector, numbers: Reading) -> Iterator[str]:
    """Yield what came in another order, too late, or not at all, of a sequence or a join."""
    now, within = (
        formats.reading_integer(numbers, "step", -1),
        formats.reading_integer(numbers, "within", 0),
    )
    last_step = formats.reading_integer(formats.reading_table(numbers, "match"), "last_step", -1)
    breaches = {
        name: step
        for name, step in formats.reading_table(numbers, "last_breach").items()
        if isinstance(step, int) and step > last_step
    }
    if last_step >= 0 and not breaches:
        yield f"its match ended at step {last_step}, and is a breach of that step only"
    elif "match" in numbers:
        yield from _out_of_order(
            spec.detectors[: len(getattr(spec, "steps", ()))], breaches, now, within
        )
    else:
        for name in spec.detectors:
            if name not in breaches:
                yield f"{name} has not breached"
            elif now - breaches[name] > within:
                ago = now - breaches[name]
                step = breaches[name]
                yield f"{name} at step {step} was {ago} steps ago: {ago - within} too long"


def _out_of_order(
    stages: Sequence[str], breaches: Mapping[str, int], now: int, within: int
) -> Iterator[str]:
    """Yield why the newest breaches of the stages of a sequence are no match."""
    reached = [name for name in stages if name in breaches]
    wrong = [(a, b) for a, b in itertools.pairwise(reached) if breaches[b] < breaches[a]]
    for earlier, name in wrong:
        yield (
            f"{name} at step {breaches[name]} came before {earlier} at step {breaches[earlier]},"
            " and must follow it"
        )
    lacking = next((name for name in stages if name not in breaches), None)
    if wrong or not reached:
        return
    opening, final = reached[0], reached[-1]
    late = breaches[final] - breaches[opening] - within
    if lacking == stages[0]:
        yield f"{lacking} did not come before {opening} at step {breaches[opening]}"
    elif late > 0:
        yield (
            f"{final} at step {breaches[final]} came {late + within} steps after {opening}"
            f" at step {breaches[opening]}: {late} too late"
        )
    elif now - breaches[opening] >= within and lacking:
        step = breaches[opening]
        yield f"{lacking} did not follow {opening} at step {step} within {within} steps"
    elif lacking:
        until = breaches[opening] + within
        yield f"{lacking} may still follow {opening} at step {breaches[opening]} until step {until}"


def _unknown(spec: Detector, monitor: RankMonitor, condition: Condition) -> str:
    """Return why nothing could be measured."""
    unsure = [reading.detector for reading in condition.inputs if reading.code == "UNKNOWN"]
    if unsure:
        return f"it depends on {', '.join(unsure)}"
    if spec.reads == "clock":
        return "no heartbeat of this rank's probe was received"
    problems = list(filter(None, (_metric_problem(metric, monitor) for metric in spec.metrics)))
    if problems and (spec.reads != "metrics" or len(problems) == len(spec.metrics)):
        return "; ".join(problems)
    numbers = condition.numbers
    if few := monitor.watches[monitor.index[condition.detector]].lacks(1):
        return f"warming up, {few}"
    value = formats.finite_number(numbers.get("value"))
    if numbers.get("transform") == "log" and value is not None and value <= 0.0:
        return f"{formats.format_number(value)} has no logarithm"
    return f"undecided so far; {formats.format_reading(numbers)}"


def _metric_problem(metric: str, monitor: RankMonitor) -> str | None:
    is_late = any(metric in late.latest for late in monitor.late.values())
    if metric not in monitor.names and not is_late:
        return f"{metric} was never announced by the job"
    value = monitor.value(metric)
    if value is None:
        return f"{metric} is absent in this frame"
    if not math.isfinite(value):
        return f"{metric} is {'NaN' if math.isnan(value) else 'infinite'}"
    return None


def find_blocking_conditions(
    rule: Rule, policy: Policy, decisions: Iterable[Decision]
) -> list[Obstacle]:
    """Return everything in the way of a rule's runbook.

    Args:
        decisions: what the engine decided when the rule fired, or would have (`if_fired`).
    """
    gates = dict(_decided(rule, decisions)) | dict(_static(rule, policy))
    return [Obstacle(gate, text) for gate, text in gates.items()]


def answer_if_fired(
    rule: Rule, policy: Policy, state: State, machine_before: str, rank: int
) -> list[Decision]:
    """Return what the engine would decide if the rule fired on a rank; `state` stays as it is.

    Args:
        state: after the event of the moment. machine_before: state of the machine before that
            event.
    """
    state = copy.deepcopy(state)
    state.machine = machine_before
    ctx = StepContext(state.phase.policy_in_phase(policy), state, Tick(state.at_ns))
    index, monitor = policy.rules.index(rule), state.monitors[rank]
    monitor.rules[index].firing, monitor.rules[index].answered = True, False
    rule_fired.on_rules_changed(ctx, monitor, rank, [(index, True)])
    return ctx.decisions


def _decided(rule: Rule, decisions: Iterable[Decision]) -> Iterator[tuple[str, str]]:
    for decision in decisions:
        if decision.rule not in (None, rule.id):
            continue
        if isinstance(decision, Suppressed) and decision.cause != "mode":
            yield decision.suppressed_by, decision.reason
        elif isinstance(decision, RunbookRefused):
            yield "refused", decision.reason
        elif isinstance(decision, IncidentHeld):
            yield "hold", decision.reason


def _static(rule: Rule, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield what the policy says about the rule at any moment."""
    if rule.runbook is None:
        yield "runbook", "it has no runbook: when it fires it only notifies people"
        return
    mode = policy.mode_of(rule)
    if mode not in ACTING_MODES:
        whose = "the rule's own mode" if mode != policy.mode else "the policy's mode"
        yield f"mode:{mode}", f"{whose} is {mode}: {rule.runbook} is not run"


SHOWN = 8  # spans of steps in a message
AFTERWARDS = ("incident", "suppressed", "state", "intent", "abort")  # what a firing rule leads to

Events = Callable[[], Iterable[tuple[int, Event]]]


@dataclass(frozen=True, slots=True)
class Question:
    """Attributes: `attempt` None means the newest one that made the step."""

    rule: str
    step: int
    rank: int = 0
    attempt: int | None = None


@dataclass(slots=True)
class Moment:
    """The state of the engine right after the frame in question."""

    number: int  # of the frame's event
    policy: Policy
    state: State
    machine_before: str  # state of the machine before the frame
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    last_firing: tuple[int, int] | None = (
        None  # (event, step) where the rule last fired on this rank
    )


def answer_question(
    question: Question,
    policy: Policy,
    events: Events,
    records: Sequence[LoggedDecision],
    policies: engine.Loader | None = None,
) -> Answer:
    """Return whether the rule fired, the conditions that it lacked, and what blocked its runbook.

    Args:
        events: returns a fresh iterator over the journal; it is read twice.
        records: the decisions in the audit log, for the record numbers.

    Raises:
        UsageError: the run has no such step or rule; the hint lists what it has.
    """
    named = next((rule for rule in policy.rules if rule.id == question.rule), None)
    metrics = frozenset(() if named is None else rule_scope.rule_metrics(policy, named))
    target, attempt, attempts = find_event(question, events(), metrics)
    moment = _fold(question, target, policy, events(), policies)
    policy, monitor = moment.policy, moment.state.monitors[question.rank]
    index = _rule_index(question.rule, policy, records)
    rule, watch = policy.rules[index], monitor.rules[index]
    phased = moment.state.phase.policy_in_phase(policy).rules[index]
    now = next((d for _, d in moment.decisions if _is_fired(d, question)), None)
    record: int | None = None
    since_step: int | UnsetType = UNSET
    if now is not None:
        record = _record(records, moment.number, now)
    elif watch.firing and moment.last_firing is not None:
        event, since_step = moment.last_firing
        record = _firing_record(records, event, question)
    answer = Answer(
        rule=rule.id,
        step=question.step,
        rank=question.rank,
        attempt=attempt,
        attempts=attempts,
        event=target,
        expression=rule.text,
        location=rule.location,
        severity=phased.severity,
        phase=PhaseSeverity(phased.phase, phased.off, rule.severity) if phased.phase else None,
        runbook=rule.runbook,
        policy=policy.name,
        mode=policy.mode,
        code=CODE_NAMES[watch.code],
        fired=now is not None,
        firing=watch.firing,
        record=record,
        missing=[] if watch.code == BREACH else find_unmet_conditions(rule, policy, monitor),
        inactive=explain_inactive(monitor, index),
        obstacles=find_blocking_conditions(rule, policy, _answered(moment, rule, question, now)),
        consequences=[] if now is None else _consequences(moment, rule, now, records),
        since_step=since_step,
    )
    return replace(answer, verdict=_verdict(answer, rule, monitor, index))


def _answered(
    moment: Moment, rule: Rule, question: Question, firing: Decision | None
) -> list[Decision]:
    """Return what the engine decided when the rule fired; else what it would have decided."""
    if firing is not None:
        return [decision for _, decision in moment.decisions]
    return answer_if_fired(rule, moment.policy, moment.state, moment.machine_before, question.rank)


def find_event(
    question: Question, events: Iterable[tuple[int, Event]], metrics: Set[str] = frozenset()
) -> tuple[int, int, list[int]]:
    """Return the number of the event that holds the step, its attempt, and all attempts with it.

    Args:
        metrics: where one of these was measured later, that is the event.

    Raises:
        UsageError: there is none; the hint lists the steps of the run.
    """
    steps: list[tuple[int, int]] = []
    events_by_attempt: dict[int, int] = {}  # attempt -> event
    ranks: set[int] = set()
    gaps = 0
    for number, event in events:
        if isinstance(event, LateFrame):
            if event.step == question.step and not metrics.isdisjoint(event.values):
                events_by_attempt[event.attempt] = number
        elif isinstance(event, Gap):
            gaps += event.count if event.rank == question.rank else 0
        elif isinstance(event, Frame):
            ranks.add(event.rank)
            if event.rank == question.rank:
                steps.append((event.attempt, event.step))
                if event.step == question.step:
                    events_by_attempt[event.attempt] = number
    attempt = (
        question.attempt if question.attempt is not None else max(events_by_attempt, default=-1)
    )
    if attempt in events_by_attempt:
        return events_by_attempt[attempt], attempt, sorted(events_by_attempt)
    if question.rank not in ranks:
        rank_list = ", ".join(map(str, sorted(ranks))) or "none: no frame was received"
        raise UsageError(f"no rank {question.rank} in this run", hint=f"it has {rank_list}")
    text = f"rank {question.rank} has no step {question.step}"
    if question.attempt is not None:
        text += f" in attempt {question.attempt}"
    lost = f"; {gaps} frames were lost before they were read" if gaps else ""
    raise UsageError(text, hint=f"it has {_ranges(steps)}{lost}")


def explain_inactive(monitor: RankMonitor, index: int) -> str | None:
    """Return why a rule is not evaluated in this job at all; None when it is."""
    if monitor.has_needed_metrics(index):
        return None
    if monitor.probe_off:
        return "the probe of this rank is off, or its segment cannot be read"
    return f"the job never announced {', '.join(monitor.missing(index))}"


def _consequences(
    moment: Moment, rule: Rule, firing: Decision, records: Sequence[LoggedDecision]
) -> list[Consequence]:
    """Return what else the engine decided in this event, except about other rules."""
    return [
        Consequence(decision.kind, decision.reason, _record(records, number, decision))
        for number, decision in moment.decisions
        if decision is not firing
        and decision.kind in AFTERWARDS
        and decision.rule in (None, rule.id)
    ]


def _fold(
    question: Question,
    target: int,
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    policies: engine.Loader | None,
) -> Moment:
    """Fold to the frame; for a rule that watches the clock on to the event before the next one."""
    moment: Moment | None = None
    last_firing: tuple[int, int] | None = None
    machine_before = ""

    def selected_events() -> Iterator[tuple[int, Event]]:
        for number, event in events:
            later = number > target and moment is not None
            framed = isinstance(event, Frame) and event.rank == question.rank
            if later and (framed or not _by_clock(question.rule, moment)):
                return
            yield number, event

    for number, _, now, state, decisions in engine.fold_events(
        policy, selected_events(), None, policies
    ):
        if any(_is_fired(decision, question) for decision in decisions):
            last_firing = (number, state.step)
        if number == target:
            moment = Moment(number, now, state, machine_before)
        if moment is not None:
            moment.policy, moment.state, moment.last_firing = now, state, last_firing
            moment.decisions += [(number, decision) for decision in decisions]
        machine_before = state.machine
    assert moment is not None
    return moment


def _by_clock(rule_id: str, moment: Moment | None) -> bool:
    policy = moment.policy if moment is not None else None
    rule = next((r for r in policy.rules if r.id == rule_id), None) if policy else None
    if policy is None or rule is None:
        return False
    return any(policy.detectors[name].reads == "clock" for name in policy.detectors_of(rule))


def _is_fired(decision: Decision, question: Question) -> bool:
    is_firing = isinstance(decision, RuleFired) and decision.rank == question.rank
    return is_firing and decision.rule == question.rule


def _rule_index(rule_id: str, policy: Policy, records: Sequence[LoggedDecision]) -> int:
    """Return the place of the rule in the policy that was in force."""
    rule_ids = [rule.id for rule in policy.rules]
    if rule_id in rule_ids:
        return rule_ids.index(rule_id)
    for record in records:  # a reload may have added it later, or removed it
        if not isinstance(record.decision, PolicyReloaded):
            continue
        rules = record.decision.changes.rules
        for section, ids in (("added", rules.added), ("removed", rules.removed)):
            if rule_id in ids:
                raise UsageError(
                    f"rule {rule_id!r} was not in force at that step",
                    hint=f"a reload at step {record.decision.step} (record {record.number}) has "
                    f"{section} it",
                )
    raise UsageError(f"no rule {rule_id!r} in the policy", hint=did_you_mean(rule_id, rule_ids))


def _record(records: Sequence[LoggedDecision], number: int, decision: Decision) -> int | None:
    """Return the number of the audit record of a decision, None when it is not in the log."""
    for record in records:
        logged = record.decision
        is_same = record.event == number and logged.kind == decision.kind
        if is_same and (logged.rule, logged.reason) == (decision.rule, decision.reason):
            return record.number
    return None


def _firing_record(
    records: Sequence[LoggedDecision], number: int, question: Question
) -> int | None:
    for record in records:
        if record.event == number and _is_fired(record.decision, question):
            return record.number
    return None


def _verdict(answer: Answer, rule: Rule, monitor: RankMonitor, index: int) -> str:
    watch = monitor.rules[index]
    record = f"record {answer.record}" if answer.record is not None else "it has no record"
    if answer.fired:
        return f"it fired at this step: {record}"
    if answer.inactive:
        return f"it is not evaluated in this run: {answer.inactive}"
    if watch.firing:
        since = f" since step {answer.since_step}" if answer.since_step is not UNSET else ""
        return f"it was firing already{since} ({record}); it can fire again only after it cleared"
    if watch.code == BREACH or (watch.code == UNKNOWN and rule.unknown == "breach"):
        return (
            f"its condition held for {watch.held} of the {rule.for_steps} steps that `for` requires"
        )
    condition = answer.missing[0] if answer.missing else None
    text = f": {condition.detector}: {condition.text}" if condition else ""
    if watch.code == UNKNOWN:
        return f"its condition is unknown{text}"
    return f"its condition did not hold{text}"


def _ranges(steps: Sequence[tuple[int, int]]) -> str:
    """Return "steps 0..119 (attempt 0), 90..200 (attempt 1)"."""
    spans: list[list[int]] = []
    for attempt, step in steps:
        if spans and spans[-1][0] == attempt and step == spans[-1][2] + 1:
            spans[-1][2] = step
        elif not spans or (attempt, step) != (spans[-1][0], spans[-1][2]):
            spans.append([attempt, step, step])
    spans_text = [f"{start}..{end} (attempt {attempt})" for attempt, start, end in spans[-SHOWN:]]
    tail = f", and {len(spans) - SHOWN} earlier spans" if len(spans) > SHOWN else ""
    return f"steps {', '.join(spans_text)}{tail}" if spans_text else "none"
