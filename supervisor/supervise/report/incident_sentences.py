"""Sentences of a card: what, cause, did, cost, proof, next; from the facts of an incident.

A sentence says what is on record. Where nothing is, it says "unknown" and why; what was not
verified is never called done or over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import UnsetType

from ..core import notices
from ..core.model import formats
from ..core.model.decisions import IncidentOpened, MessageText, Suppressor
from ..core.model.failure import Failure
from ..core.model.interfaces import Advice, AdviceSteps, Lead, Step, sentences
from ..core.model.payload import Outcome, WeightsArgs
from ..core.model.policy import read_usage
from ..core.model.verdicts import NO, YES, ContextEvent, NormChange, Rejoined, SpikeClass, Verdict
from ..core.rule_scope import MACHINE
from ..core.spike_classifier import CLIPPED, NORM_RATIO, OWN_RATE, WIRING, wiring_faults
from .incident_facts import LOSSES, RATE, SIGNALS
from .incident_report import (
    Action,
    Approval,
    Candidate,
    Cause,
    Check,
    Condition,
    Cost,
    Estimate,
    Move,
    Onset,
    Proof,
    Status,
    Suppression,
    UnchangedArea,
)
from .records import describe_timeout

CAUSES = {  # what comes into a title behind "after"
    SpikeClass.SCHEDULE: "a learning-rate jump",
    SpikeClass.DATA: "an unusual batch",
    SpikeClass.CUT: "a change of the batch size",
}
SYMPTOMS = ("attention", "routing", "ranks", "spread of the ranks")  # of a cause, areas
EVENTS = {SpikeClass.SCHEDULE: OWN_RATE, SpikeClass.DATA: "data", SpikeClass.CUT: "batch"}
# Events that explain nothing, or are shown elsewhere.
ROUTINE = ("action", "drill", "checkpoint", "reflex", "skipped", "weights", WIRING)
RECORDED = ("drill", "operator", "standstill", "error")  # a record says so
FINAL = ("operator", "standstill", "error", "host", "statistics")  # what moved explains no more
SKIPPED, SKIP_REASON = "update_skipped", "skip_reason"  # what was done about it
MAX_LISTED = 4  # of several like things in one sentence
OVER = (Status.RECOVERED, Status.DONE)
QUIET = frozenset(("snapshot", "notify", "verify", "check_weights"))  # they change nothing


def format_significant(value: Any) -> str:
    """Return a number with three digits that count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "unknown" if value is None else str(value)
    if isinstance(value, int) or (1000.0 <= abs(value) < 1e6 and value % 1 == 0):
        return str(int(value))
    return "NaN" if math.isnan(value) else "Inf" if value == math.inf else f"{value:.3g}"


# ── What ──────────────────────────────────────────────────────────────────────────────────────────


def describe_observation(
    opened: IncidentOpened,
    moves: Sequence[Move],
    conditions: Sequence[Condition],
    failure: Failure | None,
    skipped: Sequence[int] = (),
) -> str:
    """Return what was observed: the loss first, then how far other signals moved with it.

    Args:
        skipped: steps whose update a safeguard skipped: that its norm is 0 says no more.
    """
    if opened.slow_step is not None:
        return opened.slow_step.describe(opened.step)
    if not opened.rule:
        error = opened.failure if failure is None else ""  # else the cause says it
        return notices.describe_crash(opened.headline, error)
    loss = next((move for move in moves if move.metric in LOSSES), None)
    signals = [move for move in moves if move.metric in SIGNALS]
    judged_metrics = {condition.metric for condition in conditions if condition.is_breach}
    judged_metrics |= {name for condition in conditions for name in condition.nonfinite}
    if judged_metrics - {None} and judged_metrics <= MACHINE | {None}:  # norms vary beside it
        signals = []
    named = {move.metric for move in (loss, *signals) if move is not None}
    signals.sort(key=lambda move: not math.isfinite(move.peak))
    shown = [move for move in signals if not (move.peak == 0.0 and move.peak_step in skipped)]
    parts = [change_text(move) for move in shown]
    text = "; ".join(filter(None, ("" if loss is None else _loss(loss), ", ".join(parts))))
    if not judged_metrics and loss is None:  # what moved beside it is not what the rule saw
        return opened.headline
    if text and judged_metrics <= named | set(LOSSES) | {None}:
        return text
    worst = min((c.severity for c in conditions if c.is_breach), default="")
    texts: dict[str, str] = {}
    numberless = {m.metric for m in (loss, *shown) if m is not None and not math.isfinite(m.peak)}
    for condition in conditions:
        names = {*condition.nonfinite}
        is_named = condition.metric in named or (bool(names) and names <= numberless)
        if condition.is_breach and condition.severity == worst and not is_named:
            clause = describe_condition(condition, opened_at=opened.step)
            texts.setdefault(condition.metric or condition.detector, clause)
    if SKIP_REASON in texts:
        texts.pop(SKIPPED, None)  # its reason says it
    unnamed = list(dict.fromkeys(filter(None, texts.values())))[:MAX_LISTED]
    return "; ".join([*filter(None, [text]), *unnamed]) or opened.headline


def change_text(move: Move) -> str:
    """Return how far a signal went from its healthy value just before: "update norm ×28"."""
    name, ratio = formats.readable_metric(move.metric), move.ratio
    if not math.isfinite(move.peak):
        return f"{name} NaN or Inf"
    if ratio is None or ratio < 0.0 or move.level < 0.0:
        return f"{name} {format_significant(move.level)} → {format_significant(move.peak)}"
    if ratio < 0.001:
        return f"{name} fell to nearly 0"
    if ratio < 1.0:
        return f"{name} fell to {_two_digits(100.0 * ratio)} %"
    return f"{name} ×{_two_digits(ratio)}"


def _two_digits(value: float) -> str:
    """Return a number with two digits that count, without an exponent where that is short."""
    return f"{float(f'{value:.2g}'):.7g}"


def _loss(loss: Move) -> str:
    level, peak = format_significant(loss.level), format_significant(loss.peak)
    if not math.isfinite(loss.peak):
        return f"loss {level} → {peak} at step {loss.peak_step}"
    steps = loss.peak_step - loss.first_step + 1
    span = f"in {steps} steps ({loss.first_step}-{loss.peak_step})"
    return f"loss {level} → {peak} {f'at step {loss.peak_step}' if steps == 1 else span}"


def describe_condition(condition: Condition, *, opened_at: int | None = None) -> str:
    """Return one breach in words: "step time 1.2, limit 0.8; before 0.4".

    A value of a later step than `opened_at`, that of the opening, names that: it may move on.
    """
    if condition.nonfinite:
        return ", ".join(
            f"{formats.readable_metric(name)} is NaN or Inf" for name in condition.nonfinite
        )
    if condition.signal:
        return f"{condition.text}; last step {condition.step}"
    if condition.metric is None:
        return ""
    if text := formats.coded_value_text(condition.metric, condition.value):
        return text
    unit, scale = formats.unit_of(condition.metric)
    value, limit, baseline = (
        format_significant(v * scale if isinstance(v, float) and scale != 1.0 else v)
        for v in (condition.value, condition.limit, condition.baseline)
    )
    text = f"{formats.readable_metric(condition.metric)} {value}{unit}"
    text += f" on {condition.module}" if condition.module else ""
    is_later = opened_at is not None and condition.step > opened_at
    text += f" at step {condition.step}" if is_later else ""
    if condition.measure == "difference" and condition.baseline is None:
        return f"{text} (must be {limit}{unit})"
    if condition.baseline is not None:
        return f"{text} (before {baseline}{unit})"
    if condition.measure == "sum":
        is_low = isinstance(condition.measured, float) and condition.measured < 0.0
        return f"{text} ({'low' if is_low else 'high'} for too long)"
    if condition.measure != "value" or condition.limit is None:
        return text
    at_zero = condition.value == condition.limit == 0.0  # a count, or a norm: none is below
    return f"{text} ({'must be above 0' if at_zero else f'limit {limit}{unit}'})"


# ── Cause ─────────────────────────────────────────────────────────────────────────────────────────


def cause_candidates(
    opened: IncidentOpened,
    moves: Sequence[Move],
    changed: Mapping[str, Move],
    onset: Onset,
    *,
    drill: tuple[str, int] | None = None,
    failure: Failure | None = None,
    standstill: str = "",
    diagnosis: Verdict | None = None,
    operator: str = "",
    inputs: str = "",
) -> list[Candidate]:
    """Return what may have caused it, as far as that is on record, the likeliest first.

    Args:
        moves: of the training, none for an incident of the machine.
        changed: areas that left their course.
        drill: fault and step.
        operator: whose order it is, and what was ordered.
        inputs: what was wrong with the batches, "" for nothing.
    """
    rate = _rate_jump(moves)
    slow, error = opened.slow_step, ""
    if failure is not None:
        error = f"{failure.text}{f': {failure.title}' if failure.title else ''}"
    drilled = "" if drill is None else f"drill {drill[0]} at step {drill[1]}, injected on purpose"
    rows = [
        Candidate("drill", drilled, drill[1] if drill else None, None),
        Candidate("operator", operator, None, None),
        Candidate("standstill", standstill, None, None),  # what ended the job is a consequence
        Candidate("error", error, None, None),
        Candidate("data", "" if rate else inputs or data_change(diagnosis), None, None),
        Candidate("diagnosis", _diagnosed(diagnosis), None, None),
        Candidate("host", "" if slow is None else slow.cause, slow.since if slow else None, None),
    ]
    if rate is not None:
        level, peak = map(format_significant, (rate.level, rate.peak))
        text = f"the learning rate went {level} → {peak} (×{_two_digits(rate.ratio or 0.0)}) "
        text += f"at step {rate.first_step}"
        rows.append(Candidate("rate", text, rate.first_step, rate))
    symptoms: list[Candidate] = []
    for area, move in changed.items():
        if move.earliest_step <= onset.latest and move.metric != RATE:
            seen = " at" if move.earliest_step == move.first_step else ", seen by"
            text = f"{area}: {change_text(move)}{seen} step {move.first_step}"
            candidate = Candidate(area, text, move.first_step, move)
            (symptoms if area in SYMPTOMS else rows).append(candidate)
    rows += () if diagnosis is None else map(_of_wiring, wiring_faults(diagnosis))
    return [candidate for candidate in (*rows, *symptoms) if candidate.text]


def _of_wiring(fault: ContextEvent) -> Candidate:
    text = f"{fault.text}, rule {fault.rule} since step {fault.step}"
    return Candidate(WIRING, text, fault.step, None, fault.rule, fault.tensors)


def _rate_jump(moves: Sequence[Move]) -> Move | None:
    """Return the jump of the learning rate, None for none that came before the loss moved."""
    rate = next((move for move in moves if move.metric == RATE), None)
    loss = next((move for move in moves if move.metric in LOSSES), None)
    return rate if rate is None or loss is None or rate.first_step <= loss.latest_step else None


def _diagnosed(diagnosis: Verdict | None) -> str:
    """Return the event that the class of the spike names as its cause, "" for none."""
    if diagnosis is None or diagnosis.kind not in CAUSES:
        return ""
    kind = EVENTS[diagnosis.kind]
    events = [e for e in diagnosis.questions.else_happened.events if e.kind == kind]
    texts = [f"{event.text} (step {event.step})" for event in events[:2]]
    return ", ".join(texts) or f"class {diagnosis.kind}"


def data_change(diagnosis: Verdict | None) -> str:
    """Return how it is known that the data changed, "" where it is not."""
    events = () if diagnosis is None else diagnosis.questions.else_happened.events
    return next((event.text for event in events if event.kind == "data"), "")


def title_trigger(diagnosis: Verdict | None, candidates: Sequence[Candidate]) -> str:
    """Return what comes into the title behind "after", "" for nothing."""
    if not candidates or candidates[0].kind in FINAL:
        return ""
    named = "" if diagnosis is None else CAUSES.get(diagnosis.kind, "")
    is_rate = any(candidate.kind == "rate" for candidate in candidates)
    return named or ("a learning-rate jump" if is_rate else "")


def describe_cause(
    opened: IncidentOpened,
    moves: Sequence[Move],
    candidates: Sequence[Candidate],
    unchanged: Sequence[UnchangedArea],
    diagnosis: Verdict | None,
) -> Cause:
    """Return why it happened, in a sentence, from the candidates and what stayed as before.

    Args:
        moves: of the training, none for an incident of the machine.
    """
    events = _events(diagnosis)
    first = candidates[0].kind if candidates else ""
    text = candidates[0].text if candidates else ""
    if first == WIRING:  # it has been so before, without this
        faults = [candidate.text for candidate in candidates if candidate.kind == WIRING]
        text = f"perhaps the job's wiring: {'; '.join(faults)}"
    is_known = first not in ("", *SYMPTOMS)
    order = _order(moves, is_explained=is_known and first not in ("rate", *RECORDED))
    unchanged = [area for area in unchanged if area.area not in {c.kind for c in candidates}]
    kind: Any = first if first in RECORDED else "diagnosis"
    if first == "rate":
        kind, text = "order", f"{text}; {order}" if order else text
    elif not is_known:
        kind = "order" if order else "unknown"
        nearby = [part for part in (text, events) if part]
        if not opened.rule:
            text = "no process of the job recorded how it ended"
        else:
            text = order or "nothing on record explains it"
            text += "".join(f"; near it: {part}" for part in nearby)
            text += _looked_at(unchanged)
        text = f"unknown: {text}"
    elif order and first not in FINAL:
        text = f"{text}; {order}"
    return Cause(text, kind, is_known, candidates, unchanged)


def _looked_at(unchanged: Sequence[UnchangedArea]) -> str:
    """Return what stayed as before, so that it is no cause."""
    return f"; {_and([a.area for a in unchanged])} stayed as before" if unchanged else ""


def _order(moves: Sequence[Move], *, is_explained: bool) -> str:
    """Return what moved first: "lr and update norm moved first (150), then loss (151)".

    Signals of which none is known to be the earlier moved together.

    Args:
        is_explained: by something that is no signal of the training, and came before them.
    """
    moves = [move for move in moves if move.metric not in (SKIPPED, SKIP_REASON)]
    if len(moves) < 2:
        return ""
    groups: list[tuple[Move, list[str]]] = []
    for move in moves:
        if not groups or move.earliest_step > groups[-1][0].latest_step:
            groups.append((move, []))
        groups[-1][1].append(formats.readable_metric(move.metric))
    (first, names), *later = groups
    if not later:
        return f"{_and(names)} moved together, in step {first.first_step}"
    parts = (f"{_and(names)} ({move.first_step})" for move, names in later[:MAX_LISTED])
    moved = "moved" if is_explained else "moved first"
    return f"{_and(names)} {moved} ({first.first_step}), then {', then '.join(parts)}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _events(diagnosis: Verdict | None) -> str:
    """Return what else happened near the onset, without our own actions."""
    if diagnosis is None:
        return ""
    texts = [
        f"{event.text} (step {event.step})"
        for event in diagnosis.questions.else_happened.events
        if event.kind not in ROUTINE
    ]
    return ", ".join(texts[:2])


# ── Did ───────────────────────────────────────────────────────────────────────────────────────────


def describe_response(
    actions: Sequence[Action],
    *,
    status: Status,
    mode: str,
    skipped: Sequence[int],
    approval: Approval | None,
    rate_left: str = "",
    suppressed: Sequence[Suppression],
    refusals: Sequence[tuple[int, str]],
    cause: str = "",
    wrong_inputs: str = "",
    unprotected: bool,
    opened_by_rule: bool,
    newest: int,
    hold: str = "",
) -> str:
    """Return what was done, and what was asked or refused where nothing was.

    Args:
        unprotected: the record of the run ended before the incident did.
        rate_left: what the learning rate would still be after what is asked for, "" for as before.
        cause: how the data changed, which is not said twice.
        wrong_inputs: what was wrong with the batches, so that the next ones may be no others.
        skipped: steps whose update a safeguard skipped. newest: step of the newest record.
        hold: why automatic actions are off, "" where they are not.
    """
    rows = action_texts(
        actions,
        newest=math.inf if status == Status.RECOVERED else newest,
        has_new_batches=not wrong_inputs,
    )
    parts = list(dict.fromkeys(text for _, text in sorted([*rows, *refusals[-2:]])))
    if cause:
        parts = [text.replace(cause, "the data changed") for text in parts]
    if skipped:
        parts.insert(0, f"skipped {_updates(skipped)}")
    if approval is not None and approval.answer is None and status == Status.WAITING:
        left = f"; {rate_left}" if rate_left else ""
        parts.append(f"asked: approve {approval.runbook}? ({approval.id}, no answer yet{left})")
    elif approval is not None and approval.answer == "approved":
        parts.insert(0, f"{approval.runbook} approved by {approval.operator} ({approval.id})")
    elif approval is not None and approval.answer is not None:
        wait = f"asked at step {approval.step}, {approval.took_s or 0.0:.0f} s before"
        parts.append(f"{_planned(approval)} not run: {approval.answer_text} ({wait})")
    if parts and any(action.touches_job for action in actions):
        return " · ".join(parts)
    plan = _plan(suppressed)
    if plan is not None:
        parts.append(f"nothing to the job: mode {plan[0]}; enforce would have run {plan[1]}")
    elif not parts:
        reason = hold or "the policy has no action for this"
        if not opened_by_rule:
            reason = "the policy has no job.on_crash, so the job is not started again"
        if unprotected:
            reason = "the record of the run could not be written, and without it nothing is done"
        elif mode in ("observe", "shadow"):
            reason = f"mode {mode}"
        parts.append(f"nothing: {reason}")
    return " · ".join(parts)


def _updates(steps: Sequence[int]) -> str:
    """Return "the updates of steps 120 to 122"."""
    if len(steps) == 1:
        return f"the update of step {steps[0]}"
    if len(steps) == 2:
        return f"the updates of steps {steps[0]} and {steps[1]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"the updates of steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} updates of steps {steps[0]} to {steps[-1]}"


def _noun(steps: Sequence[int]) -> str:
    return "update" if len(steps) == 1 else "updates"


def action_texts(
    actions: Sequence[Action], *, newest: float, has_new_batches: bool
) -> list[tuple[int, str]]:
    """Return what was done, with its record, in order; a pause and its end are one.

    Args:
        newest: step up to which the training is known to have gone on; +Inf: as ordered.
        has_new_batches: those after a rollback are other ones, as far as is known.
    """
    texts: list[tuple[int, str]] = []
    paused = False
    for n, action in enumerate(actions):
        verb, ok = action.verb, action.ok
        if verb == "notify" or (verb == "resume" and ok and not action.is_undo and paused):
            continue
        end = None
        if verb == "pause" and ok:
            paused = True
            end = next((a for a in actions[n:] if a.verb == "resume" and a.ok), None)
        text = _succeeded(end or action) if ok else _failed(action)
        text = f"undo: {text}" if action.is_undo and verb != "resume" else text
        if ok and verb == "rollback" and action.effect.from_step is not None and has_new_batches:
            text += " with the next batches"
        text += _rewarm(action, newest) if ok else ""
        if text not in (previous for _, previous in texts[-1:]):
            texts.append((action.record, text))
    return texts


def _failed(action: Action) -> str:
    name = action.verb.replace("_", " ")
    if action.ok is False:
        return f"{name} FAILED: {action.error or action.outcome}"
    if action.outcome_record is not None:
        return f"{name}: no answer, so its effect is unknown"
    return f"{name} under way"


def _succeeded(action: Action) -> str:
    form = ACTION_TEXTS.get(action.verb)
    return formats.describe_action(action.verb, action.args) if form is None else form(action)


def _snapshot(action: Action) -> str:
    missing = action.effect.missing
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    lacks = f"; missing: {', '.join(missing[:2])}{more}" if missing else ""
    return f"evidence saved{lacks}"


def _rollback(action: Action) -> str:
    restored, step = action.effect.step, action.effect.from_step
    undone = ""
    if restored is not None and step is not None and restored + 1 < step:
        undone = f" (steps {restored + 1} to {step} undone)"
    then = "" if step is None else f" at step {step}{undone}; training goes on at step {step + 1}"
    return f"savepoint of step {_step(restored)} restored{then}"


def _relaunch(action: Action) -> str:
    checkpoint = f"the checkpoint of step {_step(action.order.step)}"
    if not action.effect.resumed:
        return f"started again, NOT from {checkpoint}: it trains from its own start"
    end = action.effect.start_ended
    ended = f"; that start {end} before its first step" if end else ""
    return f"started again from {checkpoint}{ended}"


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)


def _rewarm(action: Action, newest: float) -> str:
    rewarm, effect = action.order.rewarm, action.effect
    if rewarm is None or not rewarm.steps or effect.start_ended:
        return ""
    began = action.order.step if effect.from_step is None else effect.from_step
    if began is not None and newest >= began + rewarm.steps:
        return f" · learning rate raised again over {rewarm.steps} steps"
    return f" (the learning rate rises again over {rewarm.steps} steps)"


def _lr_scale(action: Action) -> str:
    order, since = action.order, action.effect.ack_step
    text = f"learning rate × {format_significant(order.value)}"
    text += "" if since is None else f" from step {since + 1} on"
    return f"{text}, back to × 1 over {order.rewarm_steps} steps" if order.rewarm_steps else text


def _resume(action: Action) -> str:
    paused_s = action.effect.held_s
    return "paused and resumed" if paused_s is None else f"paused {paused_s:.1f} s"


def _check_weights(action: Action) -> str:
    if "loss" not in action.result:
        return "weights tested, without a result"
    outcome, order = action.result.read(Outcome), action.args.read(WeightsArgs)
    loss, limit = outcome.loss, order.within * outcome.loss_before(order.before_step)
    before = [(step, was) for step, was in outcome.was if step < order.before_step][-2:]
    verdict = "unknown"
    if before and loss is not None:
        verdict = "no damage seen" if loss <= limit else "worse"
    at = action.step if outcome.ack_step is None else outcome.ack_step
    points = [min(before, key=lambda point: point[1])] if before else list(outcome.was[-1:])
    losses = [f"{format_significant(was)} at step {step}" for step, was in points]
    losses.append(f"{format_significant(loss)} at step {_step(at)}")
    return f"weights tested, {verdict} (test batch: loss {', '.join(losses)})"


def _hold_rate(action: Action) -> str:
    order, limit, step = action.order, action.effect.rate_limit, action.effect.ack_step
    if order.limit is None and limit is not None:
        since = "" if step is None else f" from step {step + 1} on"
        return f"learning rate capped at {limit:.3g}{since}"
    if order.limit is not None:
        return f"learning rate capped at {order.limit:.3g} ({order.harmful:.3g} did the harm)"
    return "learning-rate cap lifted" if order.lift else "learning rate capped"


def _quarantine(action: Action) -> str:
    names = [shard.name for shard in action.order.add]
    return f"left out {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"


ACTION_TEXTS: Mapping[str, Callable[[Action], str]] = {
    "pause": lambda action: f"paused since step {_step(action.effect.paused_step)}",
    "resume": _resume,
    "snapshot": _snapshot,
    "savepoint": lambda action: "savepoint written",
    "rollback": _rollback,
    "relaunch": _relaunch,
    "stop": lambda action: "job stopped",
    "lr_scale": _lr_scale,
    "hold_rate": _hold_rate,
    "skip_step": lambda action: f"{action.order.count} updates skipped",
    "quarantine": _quarantine,
    "check_weights": _check_weights,
    "profile": lambda action: "profile taken",
}


def _plan(suppressed: Iterable[Suppression]) -> tuple[str, str] | None:
    """Return `(mode, plan)` of the newest runbook that a mode kept from running, None for none."""
    causes = [(Suppressor.from_record(s.suppressed_by), s) for s in suppressed if s.runbook]
    plans = [(mode, _planned(s)) for (cause, mode), s in causes if cause == "mode"]
    return plans[-1] if plans else None


def _planned(intended: Suppression | Approval) -> str:
    """Return a runbook that was not run, with its actions on the job."""
    verbs = ", ".join(step.verb for step in intended.plan if step.verb not in QUIET)
    return f"{intended.runbook}{f' ({verbs})' if verbs else ''}"


# ── Cost, Proof, Next ─────────────────────────────────────────────────────────────────────────────


def describe_cost(
    actions: Sequence[Action],
    *,
    status: Status,
    skipped: int = 0,
    budgets: Mapping[str, str] | None = None,
    spent: Mapping[str, str] | None = None,
    ended_at: int | None = None,
    acted: bool | None,
    unaided: Estimate | None = None,
    lost_s: float = 0.0,
    standing: str = "",
) -> Cost:
    """Return what it cost: repeated steps, pauses, budgets, and the run if that ended.

    Args:
        skipped: updates that a safeguard skipped. budgets: name -> used/limit.
        spent: those of them that the actions counted in.
        standing: what was lost though nothing was done, "" for nothing known.
        ended_at: the step at which the run ended because of it.
        unaided: what nothing would have cost. lost_s: that slow steps took longer.
    """
    budgets, used = budgets or {}, dict(spent or {})
    repeated, progress_lost, relaunches, paused_s, ordered_skips = _losses(actions)
    skipped += ordered_skips
    parts = []
    if ended_at is not None:
        parts.append(f"the run ended at step {ended_at}" if ended_at >= 0 else "the run ended")
    if repeated:
        undone = status in (Status.STOPPED, Status.JOB_ENDED, Status.ASKED)
        parts.append(f"{repeated} steps {'undone' if undone else 'repeated'}")
    if progress_lost:
        parts.append(f"the progress of {progress_lost} steps lost")
    if paused_s >= 0.05:
        parts.append(f"{paused_s:.1f} s paused")
    if skipped:
        parts.append(f"{skipped} update{'s' * (skipped > 1)} skipped")
    if relaunches and used.get("restart", "0/")[:2] == "0/":  # else its budget says it
        parts.append(f"{relaunches} restart{'s' if relaunches > 1 else ''}")
    if lost_s >= 0.5:
        parts.append(f"the steps took {lost_s:.0f} s longer in all")
    if standing and (status == Status.HELD or not parts):
        parts.append(standing)
    elif acted is False and not parts:
        parts.append("nothing: the job was not changed")
    parts += filter(None, [", ".join(_spent(used)), "" if unaided is None else unaided.text])
    unknown = "unknown: an action has no outcome on record"
    return Cost(
        text="; ".join(parts) or (unknown if acted is None else "no steps repeated"),
        steps_repeated=repeated,
        steps_lost=progress_lost,
        paused_s=paused_s,
        skipped=skipped,
        relaunches=relaunches,
        budgets=budgets,
        unaided=unaided,
    )


def _losses(actions: Iterable[Action]) -> tuple[int, int, int, float, int]:
    """Return steps repeated, steps whose progress is lost, relaunches, seconds paused, skips."""
    repeated = progress_lost = relaunches = skipped = 0
    paused_s = 0.0
    for action in actions:
        verb, effect, order = action.verb, action.effect, action.order
        ordered_at = action.step if effect.from_step is None else effect.from_step
        if not action.ok:
            continue
        if verb == "rollback" and effect.step is not None:
            progress_lost += max(0, ordered_at - effect.step)
        elif verb == "relaunch" and order.step is not None:
            repeated += 0 if effect.start_ended else max(0, ordered_at - order.step)
            relaunches += 1
        elif verb == "resume":
            paused_s += effect.held_s or 0.0
        elif verb == "skip_step":
            skipped += order.count
    return repeated, progress_lost, relaunches, paused_s, skipped


def _spent(budgets: Mapping[str, str]) -> Iterable[str]:
    """Yield "1 of 2 rollbacks used" for each budget that was used."""
    for name, text in budgets.items():
        spent, limit = read_usage(text)
        if spent:
            plural = "" if limit == 1 else "s"
            name = "rate change" if name == "lr_scale" else name.replace("_", " ")
            yield f"{spent} of {limit} {name}{plural} used"


def describe_proof(
    *,
    status: Status,
    end: str,
    hold: str,
    verification: Sequence[Check],
    diagnosis: Verdict | None,
    actions: Sequence[Action],
    loss_left: bool,
    skipped: Sequence[int],
    good: tuple[int, int] | None,
    slowness: str = "",
    height: str = "",
) -> Proof:
    """Return what shows that it is over, or that it is not.

    Args:
        end: how it ended, "" while it is open. hold: why automatic actions are off.
        loss_left: the loss was out of its band. skipped: steps whose update a safeguard skipped.
        good: steps without trouble since the actions helped, and how many are required.
        slowness: of an incident about speed, how it is at the end. height: of the loss then.
    """
    passed = [check for check in verification if check.kind == "passed"]
    rejoined = _judged_loss(diagnosis, status)
    back = rejoined is not None and rejoined.answer == YES
    rejoined_step = rejoined.step if rejoined is not None and back and loss_left else None
    course = slowness or _course(rejoined, rejoined_step, height, loss_left=loss_left)
    parts = [course or (passed[-1].text if passed else "")]
    if status in (Status.RECOVERED, Status.DIFFERS):
        parts.append(end)
    has_verdict = diagnosis is not None and (back or status == Status.RECOVERED)
    remaining = [check.text for check in verification if check.kind == "differs"]
    if remaining:
        parts.append(f"but {'; '.join(remaining)}")
    elif not slowness:
        parts += _norms(diagnosis, is_shown=has_verdict)

    def proven(text: str, *, verified: bool) -> Proof:
        steps, required = good or (None, None)
        return Proof(verified, rejoined_step, text, steps, required, remaining)

    if (status == Status.RECOVERED and passed) or status == Status.DIFFERS:
        return proven("; ".join(filter(None, parts)), verified=status == Status.RECOVERED)
    reason = _unproven(status, end, hold, passed)
    if status == Status.CLEARED and skipped:
        reason = f"its rules cleared; the skipped {_noun(skipped)} never reached the weights"
    elif status == Status.CLEARED and any(a.touches_job and a.ok for a in actions):
        reason = "its rules cleared; that the actions caused it was not verified"
    at_end = status in (Status.JOB_ENDED, Status.ASKED) and (rejoined or slowness or good)
    ended = status == Status.UNRECOVERED or at_end
    if ended and good is not None:
        steps = f"{good[0]} good steps of {good[1]}"
        parts.insert(0, steps if remaining else f"recovered so far: {steps}")
        reason = end
    with_parts = ended or status in (Status.CLEARED, Status.NOT_RECOVERED, Status.RELEASED)
    plain = ended or status in (
        *(Status.OPEN, Status.HELD, Status.CLEARED, Status.WATCHING),
        *(Status.WITHDRAWN, Status.STOPPED, Status.JOB_ENDED, Status.ASKED, Status.DOWN),
        Status.DONE,
    )
    reason = reason if plain else f"not verified: {reason}"
    text = "; ".join([*filter(None, parts), reason] if with_parts else [reason])
    return proven(text, verified=False)


def _judged_loss(diagnosis: Verdict | None, status: Status) -> Rejoined | None:
    """Return how the loss is, None where it had nothing to come back to, or is not known."""
    if diagnosis is None:
        return None
    rejoined = diagnosis.questions.rejoined
    is_moot = status == Status.JOB_ENDED and diagnosis.no_objective and rejoined.answer != YES
    return None if is_moot else rejoined


def _course(
    rejoined: Rejoined | None, rejoined_step: int | None, height: str, *, loss_left: bool
) -> str:
    """Return where the loss is, "" where nothing says that."""
    if rejoined is None:
        return ""
    loss = "loss of as many tokens" if rejoined.is_sum is True else "loss"
    if rejoined.answer == YES and not (loss_left and rejoined.is_sum is not True):
        return f"the {loss} stayed in its normal range"
    if rejoined.answer == YES:
        since = "" if rejoined_step is None else f" at step {rejoined_step}"
        return f"loss back in its normal range{since}"
    is_out = rejoined.answer == NO and rejoined.excursion
    return f"the loss did NOT come back into its normal range{height}" if is_out else ""


def describe_probation(verification: Sequence[Check]) -> str:
    """Return the newest check that passed, while a relapse is watched for."""
    texts = [check.text for check in verification if check.kind == "passed"]
    return texts[-1] if texts else "watched for a relapse"


def _unproven(status: Status, end: str, hold: str, passed: Sequence[Check]) -> str:
    """Return why nothing was proven."""
    return {
        Status.OPEN: "none yet: it is not over",
        Status.ACTING: "the actions are under way",
        Status.WATCHING: f"not yet: {describe_probation(passed)}",
        Status.WAITING: "nothing was done yet",
        Status.HELD: f"not recovered: {hold}",
        Status.CLEARED: "its rules cleared; nothing was done, so nothing was verified",
        Status.NOT_RECOVERED: "its rules took the new level as their baseline",
        Status.WITHDRAWN: (
            "none is needed: the job was not changed, and the reason to change it is over"
        ),
        Status.RELEASED: "a person ended the hold; nothing was verified after it",
        Status.SUPERSEDED: "an incident of the training began before it was over",
        Status.SESSION_ENDED: "the training ended before anything could be verified",
        Status.STOPPED: "none: supervise stopped the job, which is down",
        Status.JOB_ENDED: end,
        Status.ASKED: f"{end}, as asked",
        Status.UNRECOVERED: end,
        Status.DOWN: "none: the job is down",
        Status.RECOVERED: "no verification is on record",
        Status.DIFFERS: "",
        Status.DONE: f"none: nothing was wrong before it; {end}",
    }[status]


def _norms(diagnosis: Verdict | None, *, is_shown: bool) -> list[str]:
    """Return how the norms are, compared with those just before."""
    if diagnosis is None or not is_shown:
        return []
    answer = diagnosis.questions.norms_stayed
    norms = {} if isinstance(answer.metrics, UnsetType) else dict(answer.metrics)
    norms.pop(CLIPPED, None)
    if answer.answer not in (YES, NO) or not norms:
        return ["norms: unknown"]
    if up := [_share(name, norm) for name, norm in norms.items() if norm.after > norm.limit]:
        return [f"norms are UP ({', '.join(up)} of just before)"]
    # Lower ones are no trouble, as behind a decay of the rate; and they are not as before.
    is_down = any(norm.after * NORM_RATIO < norm.before for norm in norms.values())
    return [] if is_down else [f"{', '.join(map(formats.readable_metric, norms))} as before"]


def _share(name: str, norm: NormChange) -> str:
    if norm.before <= 0.0:
        before, after = map(format_significant, (norm.before, norm.after))
        return f"{formats.readable_metric(name)} {before} to {after}"
    return f"{formats.readable_metric(name)} ×{_two_digits(norm.after / norm.before)}"


def estimate_unaided_cost(
    status: Status,
    skipped: Sequence[int],
    moves: Sequence[Move],
    actions: Sequence[Action],
    failure: Failure | None,
    *,
    of_statistics: bool = False,
) -> Estimate | None:
    """Return what nothing would have cost, None where no record shows that.

    of_statistics: it was about the running statistics of normalization layers alone.
    """
    helped = status in (Status.RECOVERED, Status.DIFFERS, Status.WATCHING)
    went_back = helped and any(a.verb in ("rollback", "relaunch") and a.ok for a in actions)
    is_broken = any(not math.isfinite(move.peak) for move in moves)
    if skipped and is_broken and not any(a.verb in ("pause", "rollback") for a in actions):
        reason = "an update with NaN or Inf leaves no weight as it was"
        lost = f"the weights would have been lost at step {skipped[0]}"
        return Estimate(f"had the {_noun(skipped)} not been skipped, {lost}", reason)
    if helped and failure is not None and any(a.verb == "relaunch" and a.ok for a in actions):
        return Estimate("without it the run would have ended there", "the process had ended")
    if went_back and of_statistics:
        lost = "without it each later evaluation would have been NaN or Inf"
        return Estimate(lost, "running statistics keep it")
    if went_back and is_broken:
        return Estimate(
            "without it every further step would have been lost", "NaN or Inf does not go away"
        )
    return None


ANSWERS_HOLD = (notices.Held, notices.StillHeld, notices.StillOff, notices.StillUnhelped)


def next_step(
    status: Status,
    messages: Sequence[MessageText],
    failure: Failure | None,
    approval: Approval | None,
) -> AdviceSteps:
    """Return what a person should do."""
    if status == Status.WAITING and approval is not None:
        asked = [message for message in messages if message.request == approval.id]
        if len(asked) > 1:  # the loss came back meanwhile
            return asked[-1].advice.whole
        names = f"RUN {approval.id}"
        until = f"within {describe_timeout(approval.timeout_s, approval.wall)}"
        proof = f"--sha {formats.short_digest(approval.args_sha256)} "
        return (
            Step(f"to approve {approval.runbook}", f"supervise approve {proof}{names}"),
            Step("to deny it", f"supervise deny {names}"),
            Step(f"without an answer {until} the answer is {approval.on_timeout}"),
        )
    messages = [message for message in messages if message.advice]
    if status == Status.HELD:  # later messages are about rules that fire meanwhile
        forms = {form.__name__ for form in ANSWERS_HOLD}
        messages = [message for message in messages if message.form in forms] or messages
    advice = messages[-1].advice if messages else Advice()
    if advice.lead == Lead.NOTHING:
        return (Step("nothing"), *advice.steps)
    steps = Advice(advice.lead, advice.steps).whole if advice.steps else ()
    if failure is not None and status in (Status.DOWN, Status.HELD, Status.OPEN):
        steps = steps if {*failure.remedy} <= {*steps} else failure.remedy + steps
    quiet = status in (*OVER, Status.CLEARED, Status.WITHDRAWN)
    return steps or sentences("nothing" if quiet else "no advice on record")
