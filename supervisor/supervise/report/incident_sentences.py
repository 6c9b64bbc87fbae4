"""Sentences of a card: what, cause, did, cost, proof, next; from the facts of an incident.

A sentence says what is on record. Where nothing is, it says "unknown" and why; what was not
verified is never called done or over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import UnsetType

from ..core.model import formats
from ..core.model.decisions import Advice, IncidentOpened, Lead, MessageText
from ..core.model.failure import Failure
from ..core.model.payload import Rewarm
from ..core.model.verdicts import NO, YES, NormChange, SpikeClass, Verdict
from ..core.rule_scope import INPUTS
from ..core.spike_classifier import CLIPPED, NORM_RATIO, OWN_RATE
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
    FiredRule,
    Move,
    Onset,
    Proof,
    Status,
    Suppression,
    UnchangedArea,
)

CAUSES = {  # what comes into a title behind "after"
    SpikeClass.SCHEDULE: "a learning-rate jump",
    SpikeClass.DATA: "an unusual batch",
    SpikeClass.CUT: "a change of the batch size",
}
SELF = re.compile(r";? ?(the numbers|all reasons|evidence): supervise why RUN inc-\d+")
SYMPTOMS = ("attention", "routing", "ranks", "spread of the ranks")  # of a cause, areas
SKIPS = ("update_skipped", "skip_reason")  # what was done about it
EVENTS = {SpikeClass.SCHEDULE: OWN_RATE, SpikeClass.DATA: "data", SpikeClass.CUT: "batch"}
ROUTINE = ("action", "drill", "checkpoint")  # events that explain nothing, or are shown elsewhere
RECORDED = ("drill", "operator", "standstill", "error")  # a record says so
FINAL = ("operator", "standstill", "error", "host")  # nothing that moved explains more
SKIPPED, SKIP_REASON = "update_skipped", "skip_reason"
MAX_LISTED = 4  # of several like things in one sentence
QUIET = frozenset(("snapshot", "notify", "verify", "check_weights"))  # they change nothing

# Metrics in words, as people read them on a card. A metric without words is named by its id.
METRIC_NAMES: Mapping[str, str] = {
    "train_loss": "loss",
    "grad_global_norm": "grad norm",
    "learning_rate": "lr",
    "dataloader_stall_frac": "share of time waiting for data (%)",
    "host_mem_growth": "host memory growth (bytes/h)",
    "host_mem_used": "host memory in use (%)",
    "param_digest_mismatch": "parameter digests that differ between ranks",
    "rank_probe_dispersion": "spread of the ranks on one batch",
    "opt_state_finite": "optimizer moments finite (1 is yes)",
    "rerun_mismatch": "steps that did not repeat",
    "straggler_ratio": "step time of the slowest rank over the median",
    "loss_dispersion": "spread of the loss over ranks",
    "batch_dispersion": "spread of the token entropy over ranks",
    "gpu_util": "GPU utilization",
    "tokens_per_second": "tokens per second",
    "ckpt_verified": "checkpoint verified (1 is yes)",
    "update_skipped": "update skipped",
}


def metric_name(metric: str) -> str:
    """Return a metric in words."""
    name = METRIC_NAMES.get(metric) or formats.metric_in_words(metric)
    return name if name != metric else metric.replace("_", " ")


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
) -> str:
    """Return what was observed: the loss first, then how far other signals moved with it."""
    if opened.slow_step is not None:
        return opened.slow_step.text
    if not opened.rule:
        headline = opened.headline
        return headline if failure is None else headline.removesuffix(f": {failure.text}")
    loss = next((move for move in moves if move.metric in LOSSES), None)
    signals = [move for move in moves if move.metric in SIGNALS]
    judged_metrics = {condition.metric for condition in conditions if condition.is_breach}
    judged_metrics |= {name for condition in conditions for name in condition.nonfinite}
    named = {move.metric for move in signals}
    named |= set() if loss is None else {loss.metric}
    signals.sort(key=lambda move: not math.isfinite(move.peak))
    parts = [change_text(move) for move in signals]
    text = "; ".join(filter(None, ("" if loss is None else _loss(loss), ", ".join(parts))))
    if not judged_metrics and loss is None:  # what moved beside it is not what the rule saw
        return opened.headline
    if text and judged_metrics <= named | set(LOSSES) | {None}:
        return text
    worst = min((c.severity for c in conditions if c.is_breach), default="")
    texts: dict[str, str] = {}
    for condition in conditions:
        is_named = condition.metric is not None and condition.metric in named
        if condition.is_breach and condition.severity == worst and not is_named:
            texts.setdefault(condition.metric or condition.detector, _condition(condition))
    if SKIP_REASON in texts:
        texts.pop(SKIPPED, None)  # its reason says it
    unnamed = list(dict.fromkeys(filter(None, texts.values())))[:MAX_LISTED]
    return "; ".join([*filter(None, [text]), *unnamed]) or opened.headline


def change_text(move: Move) -> str:
    """Return how far a signal went from its healthy value just before: "update norm ×28"."""
    name, ratio = metric_name(move.metric), move.ratio
    if not math.isfinite(move.peak):
        return f"{name} NaN or Inf too"
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


def _condition(condition: Condition) -> str:
    """Return one breach in words: "step time 1.2, limit 0.8; before 0.4"."""
    if condition.nonfinite:
        return ", ".join(f"{metric_name(name)} is NaN or Inf" for name in condition.nonfinite)
    limit = format_significant(condition.limit)
    if condition.signal:
        return f"{condition.text}, newest step {condition.step}"
    if condition.metric is None:
        return ""
    if text := formats.coded_value_text(condition.metric, condition.value):
        return text
    text = f"{metric_name(condition.metric)} = {format_significant(condition.value)}"
    text += f" on {condition.module}" if condition.module else ""
    if condition.measure == "difference" and condition.baseline is None:
        return f"{text} (must be {limit})"
    if condition.baseline is not None:
        return f"{text} (before {format_significant(condition.baseline)})"
    if condition.measure != "value":
        return text
    at_zero = condition.value == condition.limit == 0.0  # a count, or a norm: none is below
    return f"{text} ({'must be above 0' if at_zero else f'limit {limit}'})"


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
        Candidate("data", "" if rate else inputs, None, None),
        Candidate("diagnosis", _diagnosed(diagnosis), None, None),
        Candidate("host", "" if slow is None else slow.cause, slow.since if slow else None, None),
    ]
    if rate is not None:
        text = f"{change_text(rate)} at step {rate.first_step}"
        rows.append(Candidate("rate", text, rate.first_step, rate))
    for area, move in changed.items():
        if move.earliest_step <= onset.latest and move.metric != RATE:
            text = f"{area}: {change_text(move)} at step {move.first_step}"
            rows.append(Candidate(area, text, move.first_step, move))
    return [candidate for candidate in rows if candidate.text]


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
    events, order = _events(diagnosis), _order(moves)
    first = candidates[0].kind if candidates else ""
    text = candidates[0].text if candidates else ""
    is_known = first not in ("", *SYMPTOMS)
    unchanged = [area for area in unchanged if area.area not in {c.kind for c in candidates}]
    kind: Any = first if first in RECORDED else "diagnosis"
    if first == "rate" or (not is_known and order):
        kind, text = "order", order or text
        events = "" if first == "rate" else events
        text += f"; also near it: {events}" if events else ""
        text += "" if is_known else f"; what moved them is unknown{_looked_at(unchanged)}"
    elif not is_known:
        kind = "unknown"
        reason = f"nothing on record explains it{_looked_at(unchanged)}"
        reason += f"; near it: {'; '.join(filter(None, (text, events)))}" if text or events else ""
        if not opened.rule:
            reason = "no process of the job recorded how it ended"
        text = f"unknown: {reason}"
    elif order and first not in FINAL:
        text = f"{text}; {order}"
    return Cause(text, kind, is_known, candidates, unchanged)


def _looked_at(unchanged: Sequence[UnchangedArea]) -> str:
    """Return what stayed as before, so that it is no cause."""
    return f" ({_and([a.area for a in unchanged])} stayed as before)" if unchanged else ""


def describe_bad_inputs(rules: Sequence[FiredRule], conditions: Sequence[Condition]) -> str:
    """Return what was wrong with the batches by the gravest rule about them, "" for nothing."""
    by_rule: dict[str, list[Condition]] = {}
    for condition in conditions:
        by_rule.setdefault(condition.rule, []).append(condition)
    about_inputs = [
        rule
        for rule in rules
        if rule.rule in by_rule and {c.metric for c in by_rule[rule.rule]} <= INPUTS
    ]
    if not about_inputs:
        return ""
    rule = min(about_inputs, key=lambda rule: (rule.severity, rule.step))
    breach = next((_condition(c) for c in by_rule[rule.rule] if c.is_breach), "")
    title = rule.title[:1].lower() + rule.title[1:] or f"rule {rule.rule}"
    return f"{title}, from step {rule.step}{f': {breach}' if breach else ''}"


def _order(moves: Sequence[Move]) -> str:
    """Return what moved first: "lr and update norm moved first (150), then loss (151)".

    Signals of which none is known to be the earlier moved together.
    """
    moves = [move for move in moves if move.metric not in SKIPS]
    if len(moves) < 2:
        return ""
    groups: list[tuple[Move, list[str]]] = []
    for move in moves:
        if not groups or move.earliest_step > groups[-1][0].latest_step:
            groups.append((move, []))
        groups[-1][1].append(metric_name(move.metric))
    (first, names), *later = groups
    if not later:
        return f"{_and(names)} moved together, in step {first.first_step}"
    parts = (f"{_and(names)} ({move.first_step})" for move, names in later[:MAX_LISTED])
    return f"{_and(names)} moved first ({first.first_step}), then {', then '.join(parts)}"


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
    suppressed: Sequence[Suppression],
    refusals: Sequence[tuple[int, str]],
    unprotected: bool,
) -> str:
    """Return what was done, and what was asked or refused where nothing was.

    Args:
        unprotected: the record of the run ended before the incident did.
        skipped: steps whose update a safeguard skipped.
    """
    rows = action_texts(actions, verified=status == Status.RECOVERED)
    parts = [text for _, text in sorted([*rows, *refusals[-2:]])]
    if skipped:
        further = f" and {len(skipped) - 1} more, to {skipped[-1]}" if len(skipped) > 1 else ""
        parts.insert(0, f"skipped the update of step {skipped[0]}{further}")
    if approval is not None and approval.answer is None and status == Status.WAITING:
        parts.append(f"asked: approve {approval.runbook}? ({approval.id}, no answer yet)")
    elif approval is not None and approval.answer not in (None, "approved"):
        parts.append(f"{approval.runbook} not run: {approval.answer_text}")
    if parts and any(action.touches_job for action in actions):
        return " · ".join(parts)
    plan = _plan(suppressed)
    if plan is not None:
        parts.append(f"nothing to the job: mode {plan[0]}; enforce would have run {plan[1]}")
    elif not parts:
        reason = "none of its rules has an action"
        if unprotected:
            reason = "the record of the run could not be written, and without it nothing is done"
        elif mode in ("observe", "shadow"):
            reason = f"mode {mode}"
        parts.append(f"nothing: {reason}")
    return " · ".join(parts)


def action_texts(actions: Sequence[Action], *, verified: bool) -> list[tuple[int, str]]:
    """Return what was done, with its record, in order; a pause and its end are one.

    Args:
        verified: the training went on as ordered, so that a re-warm was completed.
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
        text += _rewarm(action.order.rewarm, verified=verified) if ok else ""
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
    return (
        f"evidence saved (missing: {', '.join(missing[:2])}{more})" if missing else "evidence saved"
    )


def _relaunch(action: Action) -> str:
    checkpoint = f"the checkpoint of step {_step(action.order.step)}"
    if not action.effect.resumed:
        return f"started again, NOT from {checkpoint}: it trains from its own start"
    return f"started again from {checkpoint}"


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)


def _rewarm(rewarm: Rewarm | None, *, verified: bool) -> str:
    if rewarm is None or not rewarm.steps:
        return ""
    if verified:
        return f" · lr re-warmed over {rewarm.steps} steps"
    return f" (lr to re-warm in {rewarm.steps} steps)"


def _resume(action: Action) -> str:
    paused_s = action.effect.held_s
    return "paused and resumed" if paused_s is None else f"paused {paused_s:.1f} s"


def _hold_rate(action: Action) -> str:
    order = action.order
    if order.limit is not None:
        return f"lr held at {order.limit:.3g} at most ({order.harmful:.3g} did the harm)"
    return "learning rate free again" if order.lift else "learning rate held"


def _quarantine(action: Action) -> str:
    names = [shard.name for shard in action.order.add]
    return f"left out {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"


ACTION_TEXTS: Mapping[str, Callable[[Action], str]] = {
    "pause": lambda action: f"paused since step {_step(action.effect.paused_step)}",
    "resume": _resume,
    "snapshot": _snapshot,
    "savepoint": lambda action: "savepoint written",
    "rollback": lambda action: (
        f"weights of step {_step(action.effect.step)} restored; the loop went on"
    ),
    "relaunch": _relaunch,
    "stop": lambda action: "job stopped",
    "lr_scale": lambda action: f"learning rate × {action.order.value}",
    "hold_rate": _hold_rate,
    "skip_step": lambda action: f"{action.order.count} updates skipped",
    "quarantine": _quarantine,
    "check_weights": lambda action: (
        "weights compared on the probe batch"
        if "loss" in action.result
        else "the weights could not be judged"
    ),
    "profile": lambda action: "profile taken",
}


def _plan(suppressed: Iterable[Suppression]) -> tuple[str, str] | None:
    """Return `(mode, plan)` of the newest runbook that a mode kept from running, None for none."""
    newest = None
    for suppression in suppressed:
        cause, _, mode = suppression.suppressed_by.partition(":")
        if cause == "mode" and suppression.runbook:
            verbs = ", ".join(step.verb for step in suppression.plan if step.verb not in QUIET)
            newest = mode, f"{suppression.runbook}{f' ({verbs})' if verbs else ''}"
    return newest


# ── Cost, Proof, Next ─────────────────────────────────────────────────────────────────────────────


def describe_cost(
    actions: Sequence[Action],
    *,
    status: Status,
    skipped: int = 0,
    budgets: Mapping[str, str] | None = None,
    ended_at: int | None = None,
    acted: bool | None,
    unaided: Estimate | None = None,
) -> Cost:
    """Return what it cost: repeated steps, pauses, budgets, and the run if that ended.

    Args:
        skipped: updates that a safeguard skipped. budgets: name -> used/limit.
        ended_at: the step at which the run ended because of it.
        unaided: what nothing would have cost.
    """
    budgets = budgets or {}
    repeated, progress_lost, relaunches, paused_s, ordered_skips = _losses(actions)
    skipped += ordered_skips
    parts = []
    if ended_at is not None:
        parts.append(f"the run ended at step {ended_at}" if ended_at >= 0 else "the run ended")
    if repeated:
        undone = status in (Status.STOPPED, Status.JOB_ENDED)
        parts.append(f"{repeated} steps {'undone' if undone else 'repeated'}")
    if progress_lost:
        parts.append(f"the progress of {progress_lost} steps lost")
    if paused_s >= 0.05:
        parts.append(f"{paused_s:.1f} s paused")
    if skipped:
        parts.append(f"{skipped} update{'s' * (skipped > 1)} skipped")
    if relaunches:
        parts.append(f"{relaunches} restart{'s' if relaunches > 1 else ''}")
    if acted is False and not parts:
        parts.append("nothing: the job was not changed")
    parts += filter(None, [", ".join(_spent(budgets, actions))])
    parts += [] if unaided is None else [unaided.text]
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
            repeated += max(0, ordered_at - order.step)
            relaunches += 1
        elif verb == "resume":
            paused_s += effect.held_s or 0.0
        elif verb == "skip_step":
            skipped += order.count
    return repeated, progress_lost, relaunches, paused_s, skipped


def _spent(budgets: Mapping[str, str], actions: Iterable[Action]) -> Iterable[str]:
    """Yield "1 of 2 rollbacks used" for each budget that an action counted in, but for `all`."""
    names = {name for a in actions if a.touches_job for name in (a.verb, a.runbook)}
    for name, text in budgets.items():
        spent, _, limit = str(text).partition("/")
        if name in names and limit and spent != "0":
            plural = "" if limit == "1" else "s"
            yield f"{spent} of {limit} {name.replace('_', ' ')}{plural} used"


def describe_proof(
    *,
    status: Status,
    end: str,
    hold: str,
    verification: Sequence[Check],
    diagnosis: Verdict | None,
    actions: Sequence[Action],
    loss_left: bool,
    skipped: bool,
    good: tuple[int, int] | None,
) -> Proof:
    """Return what shows that it is over.

    Args:
        end: how it ended, "" while it is open. hold: why automatic actions are off.
        loss_left: the loss was out of its band. skipped: a safeguard skipped updates.
        good: steps without trouble since the actions helped, and how many are required.
    """
    passed = [check for check in verification if check.kind == "passed"]
    rejoined = None if diagnosis is None else diagnosis.questions.rejoined
    back = rejoined is not None and rejoined.answer == YES
    rejoined_step = rejoined.step if rejoined is not None and back and loss_left else None
    parts = []
    if back and not loss_left:
        parts.append("the loss stayed in its band")
    elif back:
        step = "" if rejoined_step is None else f" at step {rejoined_step}"
        parts.append(f"loss back in its band{step}")
    elif rejoined is not None and rejoined.answer == NO and rejoined.excursion:
        parts.append("loss NOT back in its band")
    elif passed:
        parts.append(passed[-1].text)
    if status == Status.RECOVERED:
        parts.append(end.removeprefix("recovered: "))
    has_verdict = diagnosis is not None and (back or status == Status.RECOVERED)
    remaining = [check.text for check in verification if check.kind == "differs"]
    parts += [f"but {'; '.join(remaining)}"] if remaining else _norms(diagnosis, told=has_verdict)

    def proven(text: str, *, verified: bool) -> Proof:
        steps, required = good or (None, None)
        return Proof(verified, rejoined_step, text, steps, required, remaining)

    if status == Status.RECOVERED and passed:
        return proven("; ".join(parts), verified=True)
    reason = _unproven(status, end, hold, passed, back=back)
    if status == Status.CLEARED and skipped:
        reason = "its rules cleared; the skipped updates never reached the weights"
    elif status == Status.CLEARED and any(a.touches_job and a.ok for a in actions):
        reason = "its rules cleared; that the actions caused it was not verified"
    ended = (back or good is not None) and status == Status.JOB_ENDED
    if ended and good is not None:
        parts.insert(0, f"recovered so far: {good[0]} good steps of {good[1]}")
        reason = end
    with_parts = ended or status in (Status.CLEARED, Status.NOT_RECOVERED, Status.RELEASED)
    plain = ended or status in (
        *(Status.HELD, Status.CLEARED, Status.WATCHING),
        *(Status.WITHDRAWN, Status.STOPPED, Status.JOB_ENDED, Status.DONE),
    )
    reason = reason if plain else f"not verified: {reason}"
    text = "; ".join([*filter(None, parts), reason] if with_parts else [reason])
    return proven(text, verified=False)


def describe_probation(verification: Sequence[Check]) -> str:
    """Return the newest check that passed, while a relapse is watched for."""
    texts = [check.text for check in verification if check.kind == "passed"]
    return texts[-1] if texts else "watched for a relapse"


def _unproven(status: Status, end: str, hold: str, passed: Sequence[Check], *, back: bool) -> str:
    """Return why nothing was proven; `back`: the loss is in its band."""
    return {
        Status.OPEN: "it is not over",
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
        Status.STOPPED: f"none: the job was stopped; {end}",
        Status.JOB_ENDED: end if back else f"none: {end}",
        Status.RECOVERED: "no verification is on record",
        Status.DONE: f"none: nothing was wrong before it; {end.removeprefix('recovered: ')}",
    }[status]


def _norms(diagnosis: Verdict | None, *, told: bool) -> list[str]:
    """Return how the norms are, compared with those just before."""
    if diagnosis is None or not told:
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
    return [] if is_down else ["norms as before"]


def _share(name: str, norm: NormChange) -> str:
    if norm.before <= 0.0:
        before, after = format_significant(norm.before), format_significant(norm.after)
        return f"{metric_name(name)} {before} to {after}"
    return f"{metric_name(name)} ×{_two_digits(norm.after / norm.before)}"


def estimate_unaided_cost(
    status: Status,
    skipped: Sequence[int],
    moves: Sequence[Move],
    actions: Sequence[Action],
    failure: Failure | None,
) -> Estimate | None:
    """Return what nothing would have cost, None where no record shows that."""
    helped = status in (Status.RECOVERED, Status.WATCHING)
    went_back = helped and any(a.verb in ("rollback", "relaunch") and a.ok for a in actions)
    is_broken = any(not math.isfinite(move.peak) for move in moves)
    if skipped and is_broken:
        reason = "an update with NaN or Inf leaves no weight as it was"
        return Estimate(f"with no action the weights are lost at step {skipped[0]}", reason)
    if helped and failure is not None and any(a.verb == "relaunch" and a.ok for a in actions):
        return Estimate("with no action the run ends there", "the process had ended")
    if went_back and is_broken:
        return Estimate("with no action every further step is lost", "NaN or Inf does not go away")
    return None


def describe_next_step(
    status: Status,
    messages: Sequence[MessageText],
    failure: Failure | None,
    approval: Approval | None,
    remaining: Sequence[str],
    run: str,
) -> str:
    """Return what a person should do, with commands to paste.

    Args:
        remaining: what to do about what goes on otherwise than before. run: as people name it.
    """
    if status == Status.WAITING and approval is not None:
        asked = [message for message in messages if message.request == approval.id]
        if len(asked) > 1:  # the loss came back meanwhile
            return _named(asked[-1].advice.text, run)
        timeout = (
            f"without an answer within {approval.timeout_s:.0f} s "
            f"the answer is {approval.on_timeout}"
        )
        deny = f"supervise deny {run} {approval.id}"
        return f"supervise approve {run} {approval.id} (or: {deny}); {timeout}"
    messages = [message for message in messages if message.advice]
    if status == Status.HELD:  # later messages are about rules that fire meanwhile
        messages = [m for m in messages if "supervise release" in m.next] or messages
    advice = messages[-1].advice if messages else Advice()
    text = SELF.sub("", advice.rest).strip("; ")
    done = status in (Status.RECOVERED, Status.DONE)
    if remaining and advice.lead == Lead.NOTHING:
        return _named("; ".join(remaining), run)
    if done and (advice.lead == Lead.NOTHING or not text):
        return "nothing"
    ended = status in (Status.JOB_ENDED, Status.HELD, Status.OPEN)
    if failure is not None and ended and failure.then not in text:
        text = "; ".join(filter(None, (failure.then, text)))
    elif advice.lead == Lead.NOTHING:
        text = "; ".join(filter(None, ("nothing", text)))
    if not text:
        quiet = status in (Status.CLEARED, Status.WITHDRAWN)
        return "nothing is asked of you" if quiet else "no advice on record"
    return _named(text, run)


def _named(text: str, run: str) -> str:
    return re.sub(r"\bRUN\b", lambda _: run, text)
