"""Sentences of a card: what, cause, did, cost, proof, next; from the parts of a document.

A sentence says what is on record. Where nothing is, it says "unknown" and why; what was not
verified is never called done or over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.analysis.slow_step import SlowStep
from ...core.model.failure import Failure
from ...core.state.rule_scope import INPUTS
from . import deeds
from .metric_names import named
from .series import LOSSES, SIGNALS
from .standing import (
    ACTING,
    CLEARED,
    DONE,
    HELD,
    JOB_ENDED,
    NOT_RECOVERED,
    OPEN,
    RECOVERED,
    RELEASED,
    SESSION_ENDED,
    STOPPED,
    SUPERSEDED,
    WAITING,
    WATCHING,
    WITHDRAWN,
    headline,
)

Part = Mapping[str, Any]
TIMINGS = ("step_time", "tokens_per_sec", "mfu", "dataloader_stall_frac", "comm_time_frac")

CAUSES = {  # class of the spike classifier -> what comes into a title behind "after"
    "learning rate jump": "a learning-rate jump",
    "data event": "an unusual batch",
    "batch size change": "a change of the batch size",
}
JUMP = 2.0  # times its level: a learning rate jumped
SELF = re.compile(r";? ?(the numbers|all reasons|evidence): supervise why RUN inc-\d+")
MOST = 4  # of several like things in one sentence


def number(value: Any) -> str:
    """Return a number with three digits that count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "unknown" if value is None else str(value)
    if isinstance(value, int) or (1000.0 <= abs(value) < 1e6 and value % 1 == 0):
        return str(int(value))
    return "NaN" if math.isnan(value) else "Inf" if value == math.inf else f"{value:.3g}"


# ── What ──────────────────────────────────────────────────────────────────────────────────────────


def what(
    opened: Part, moves: Sequence[Part], conditions: Sequence[Part], failure: Failure | None
) -> str:
    """Return what was observed: the loss first, then how far other signals moved with it."""
    if (slow := SlowStep.of(opened["data"].get("slow_step"))) is not None:
        return slow.text
    if not opened["rule"]:
        text = headline(opened)
        return text if failure is None else text.partition(f": {failure.text}")[0]
    loss = next((one for one in moves if one["metric"] in LOSSES), None)
    others = [one for one in moves if one["metric"] in SIGNALS]
    judged = {one["metric"] for one in conditions if one["breach"]}
    judged |= {name for one in conditions for name in one["nonfinite"]}
    text = _loss(loss) if loss is not None else ""
    shown_already = {loss["metric"]} if loss is not None else set()
    ratios = [one for one in others if one["ratio"] is not None]
    broken = [one["metric"] for one in others if not math.isfinite(one["peak"])]
    moved = [f"{named(one['metric'])} ×{one['ratio']:.2g}" for one in ratios]
    shown_already |= {one["metric"] for one in ratios} | set(broken)
    moved += [f"{named(name)} NaN or Inf too" for name in broken]
    text = "; ".join(filter(None, (text, ", ".join(moved))))
    if not judged and loss is None:  # what moved beside it is not what the rule saw
        return headline(opened)
    if text and judged <= shown_already | set(LOSSES) | {None}:
        return text
    worst = min((one["severity"] for one in conditions if one["breach"]), default="")
    left: dict[str, str] = {}
    for one in conditions:
        known = one["metric"] is not None and one["metric"] in shown_already
        if one["breach"] and one["severity"] == worst and not known:
            left.setdefault(one["metric"] or one["detector"], _condition(one))
    shown = list(dict.fromkeys(filter(None, left.values())))[:MOST]
    return "; ".join([*filter(None, [text]), *shown]) or headline(opened)


def _loss(loss: Part) -> str:
    before, peak = number(loss["before"]), number(loss["peak"])
    first, at = loss["first_step"], loss["peak_step"]
    if not math.isfinite(loss["peak"]):
        return f"loss {before} → {peak} at step {at}"
    steps = at - first + 1
    where = f"at step {at}" if steps == 1 else f"in {steps} steps ({first}-{at})"
    return f"loss {before} → {peak} {where}"


def _condition(one: Part) -> str:
    """Return one breach in words: "step time 1.2, limit 0.8; before 0.4"."""
    if one["nonfinite"]:
        return ", ".join(f"{named(name)} is NaN or Inf" for name in one["nonfinite"])
    if one["signal"]:
        silent = f"no {one['signal']} for {number(one['value'])} s"
        return f"{silent} (limit {number(one['limit'])} s), newest step {one['step']}"
    if one["metric"] is None:
        return ""
    text = f"{named(one['metric'])} = {number(one['value'])}"
    text += f" on {one['of']}" if one["of"] else ""
    if one["measure"] == "difference":
        return f"{text} (must be {number(one['limit'])})"
    if one["baseline"] is not None:
        return f"{text} (before {number(one['baseline'])})"
    return f"{text} (limit {number(one['limit'])})" if one["measure"] == "value" else text


# ── Cause ─────────────────────────────────────────────────────────────────────────────────────────


def cause(
    opened: Part,
    moves: Sequence[Part],
    *,
    drill: Part | None,
    failure: Failure | None,
    standstill: str,
    diagnosis: Part | None,
    operator: str,
    inputs: str = "",
) -> dict[str, Any]:
    """Return why it happened as far as that is on record.

    Args:
        inputs: what was wrong with the batches, "" for nothing.

    Returns:
        `text`; `kind` (`drill`, `error`, `standstill`, `operator`, `diagnosis`, `order`: only what
        moved first is known, `unknown`); `known`; and `after`: what came first, for the title.
    """
    order, rate = _order(moves), _rate_jump(moves)
    named = CAUSES.get(str((diagnosis or {}).get("class")), "")
    after = named or ("a learning-rate jump" if rate else "")
    if drill is not None:
        text = f"drill {drill['fault']} at step {drill['step']}, injected on purpose"
        return _cause(f"{text}{f'; {order}' if order else ''}", "drill", after)
    if operator:
        operator_name, _, verb = operator.partition(": ")
        return _cause(f"{operator_name} ordered {verb}", "operator")
    if standstill:  # what ended the job then is a consequence, such as a timeout or our own stop
        return _cause(standstill, "standstill")
    if failure is not None:
        meaning = f": {failure.title}" if failure.title else ""
        return _cause(f"{failure.text}{meaning}", "error")
    if inputs and not rate:
        return _cause(f"{inputs}{f'; {order}' if order else ''}", "diagnosis", after)
    if named:
        events = _events(diagnosis)
        text = events or f"class {diagnosis['class']}" if diagnosis else ""
        return _cause(f"{text}{f'; {order}' if order else ''}", "diagnosis", after)
    slow = SlowStep.of(opened["data"].get("slow_step"))
    if slow is not None and slow.cause:
        return _cause(slow.cause, "diagnosis")
    if order:
        events = _events(diagnosis)
        near = f"; also near it: {events}" if events else ""
        why = "" if rate else "; what moved them is unknown"
        return _cause(f"{order}{near}{why}", "order", after, known=bool(rate))
    reason = "nothing on record explains it"
    if not opened["rule"]:
        reason = "no process of the job recorded how it ended"
    elif events := _events(diagnosis):
        reason = f"nothing on record explains it; near it: {events}"
    return _cause(f"unknown: {reason}", "unknown", known=False)


def _cause(text: str, kind: str, after: str = "", *, known: bool = True) -> dict[str, Any]:
    return {"text": text, "kind": kind, "known": known, "after": after}


def inputs(fired: Sequence[Part], conditions: Sequence[Part]) -> str:
    """Return what was wrong with the batches by the gravest rule about them, "" for nothing."""
    read: dict[str, list[Part]] = {}
    for one in conditions:
        read.setdefault(one["rule"], []).append(one)
    about = [
        rule
        for rule in fired
        if read.get(rule["rule"]) and {one["metric"] for one in read[rule["rule"]]} <= INPUTS
    ]
    if not about:
        return ""
    rule = min(about, key=lambda one: (one["severity"], one["step"]))
    found = next((_condition(one) for one in read[rule["rule"]] if one["breach"]), "")
    title = rule["title"][:1].lower() + rule["title"][1:] or f"rule {rule['rule']}"
    return f"{title}, from step {rule['step']}{f': {found}' if found else ''}"


def _rate_jump(moves: Sequence[Part]) -> Part | None:
    """Return the move of a learning rate that doubled, and not behind the loss."""
    rate = next((one for one in moves if one["metric"] == "learning_rate"), None)
    loss = next((one for one in moves if one["metric"] in LOSSES), None)
    if rate is None or rate["ratio"] is None or rate["ratio"] < JUMP:
        return None
    return rate if loss is None or rate["first_step"] <= loss["first_step"] else None


def _order(moves: Sequence[Part]) -> str:
    """Return what moved first: "lr and update norm moved first (150), then loss (151)"."""
    # What takes longer on a busy host moves no loss.
    moves = [one for one in moves if one["metric"] not in TIMINGS] or moves
    if len(moves) < 2:
        return ""
    groups: dict[int, list[str]] = {}
    for one in moves:
        groups.setdefault(one["first_step"], []).append(named(one["metric"]))
    if len(groups) == 1:
        (step, names), *_ = groups.items()
        return f"{_and(names)} moved together, in step {step}"
    (first, names), *rest = groups.items()
    later = ", then ".join(f"{_and(found)} ({step})" for step, found in rest[:MOST])
    return f"{_and(names)} moved first ({first}), then {later}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _events(diagnosis: Part | None) -> str:
    """Return what else happened near the onset, without our own actions."""
    found = ((diagnosis or {}).get("questions") or {}).get("else_happened") or {}
    texts = [
        f"{one['text']} (step {one['step']})"
        for one in found.get("events", ())
        if one["kind"] not in ("action", "drill")
    ]
    return ", ".join(texts[:2])


# ── Did, Cost, Proof, Next ────────────────────────────────────────────────────────────────────────


def did(
    actions: Sequence[Part],
    *,
    state: str,
    mode: str,
    skipped: Sequence[int] = (),
    approval: Part | None,
    suppressed: Sequence[Part],
    verification: Sequence[Part],
    unprotected: bool,
) -> str:
    """Return what was done, and what was asked or refused where nothing was.

    Args:
        unprotected: the record of the run ended before the incident did.
        skipped: steps whose update a safeguard skipped.
    """
    parts = deeds.did(actions, verified=state == RECOVERED)
    if skipped:
        last = f" and {len(skipped) - 1} more, to {skipped[-1]}" if len(skipped) > 1 else ""
        parts.insert(0, f"skipped the update of step {skipped[0]}{last}")
    if approval is not None and approval["answer"] is None and state == WAITING:
        parts.append(f"asked: approve {approval['runbook']}? ({approval['id']}, no answer yet)")
    elif approval is not None and approval["answer"] not in (None, "approved"):
        parts.append(f"{approval['runbook']} not run: {approval['answer_text']}")
    # Of a runbook that was withdrawn twice the newest reason counts.
    refused = {
        one["text"].partition(":")[0]: one["text"]
        for one in verification
        if one["what"] in ("refused", "withdrawn")
    }
    parts += list(refused.values())[-2:]
    if parts and any(action["touches_job"] for action in actions):
        return " · ".join(parts)
    would = deeds.would(suppressed)
    if would is not None:
        parts.append(f"nothing to the job: mode {would[0]}; enforce would have run {would[1]}")
    elif not parts:
        reason = "none of its rules has an action"
        if unprotected:
            reason = "the record of the run could not be written, and without it nothing is done"
        elif mode in ("observe", "shadow"):
            reason = f"mode {mode}"
        parts.append(f"nothing: {reason}")
    return " · ".join(parts)


def cost(
    found: Part, budgets: Sequence[str], *, state: str, ended_at: int | None, acted: bool | None
) -> str:
    """Return what it cost: repeated steps, pauses, budgets, and the run if that ended."""
    parts = []
    if found["steps_repeated"]:
        how = "undone" if state in (STOPPED, JOB_ENDED) else "repeated"
        parts.append(f"{found['steps_repeated']} steps {how}")
    if found["steps_lost"]:
        parts.append(f"the progress of {found['steps_lost']} steps lost")
    if found["paused_s"] >= 0.05:
        parts.append(f"{found['paused_s']:.1f} s paused")
    if found["skipped"]:
        parts.append(f"{found['skipped']} update{'s' * (found['skipped'] > 1)} skipped")
    if found["relaunches"]:
        parts.append(f"{found['relaunches']} restart{'s' if found['relaunches'] > 1 else ''}")
    if ended_at is not None:
        parts.insert(0, f"the run ended at step {ended_at}" if ended_at >= 0 else "the run ended")
    if budgets:
        parts.append(", ".join(budgets))
    if acted is False and not parts[: len(parts) - bool(budgets)]:
        parts.insert(0, "nothing: the job was not changed")
    if parts:
        return "; ".join(parts)
    if acted is None:
        return "unknown: an action has no outcome on record"
    return "no steps repeated"


def _unlike_before(verification: Sequence[Part], questions: Part, *, judged: bool) -> list[str]:
    """Return what the job does otherwise than before it was started again, else its norms."""
    differs = [one["text"] for one in verification if one["what"] == "differs"]
    if differs:
        return [f"but {'; '.join(differs)}"]
    answer = str((questions.get("norms_stayed") or {}).get("answer"))
    norms = {"yes": "norms as before", "no": "norms are UP"}.get(answer, "norms: unknown")
    return [norms] if judged else []


def proof(
    *,
    state: str,
    end: str,
    held: str,
    verification: Sequence[Part],
    diagnosis: Part | None,
    actions: Sequence[Part],
) -> dict[str, Any]:
    """Return what shows that it is over, `{"text", "verified", "rejoined_step"}`."""
    passed = [one for one in verification if one["what"] == "passed"]
    questions = (diagnosis or {}).get("questions") or {}
    rejoined = questions.get("rejoined") or {}
    back = rejoined.get("answer") == "yes"
    parts = []
    if back:
        step = rejoined.get("rejoined_step")
        parts.append(f"loss back in its band{f' at step {step}' if step is not None else ''}")
    elif rejoined.get("answer") == "no" and rejoined.get("excursion"):
        parts.append("loss NOT back in its band")
    elif passed:
        parts.append(passed[-1]["text"])
    if state == RECOVERED:
        parts.append(end.removeprefix("recovered: "))
    parts += _unlike_before(
        verification, questions, judged=diagnosis is not None and (back or state == RECOVERED)
    )
    verified = state == RECOVERED and bool(passed)
    answer = {
        "verified": verified,
        "rejoined_step": rejoined.get("rejoined_step") if back else None,
    }
    if verified:
        return answer | {"text": "; ".join(parts)}
    why = {
        OPEN: "it is not over",
        ACTING: "the actions are under way",
        WATCHING: f"not yet: {passed[-1]['text'] if passed else 'watched for a relapse'}",
        WAITING: "nothing was done yet",
        HELD: f"not recovered: {held.removeprefix('held: ')}",
        CLEARED: "its rules cleared; nothing was done, so nothing was verified",
        NOT_RECOVERED: "its rules took the new level as their baseline",
        WITHDRAWN: "none is needed: the job was not changed, and the reason to change it is over",
        RELEASED: "a person ended the hold; nothing was verified after it",
        SUPERSEDED: "an incident of the training began before it was over",
        SESSION_ENDED: "the training ended before anything could be verified",
        STOPPED: f"none: the job was stopped; {end}",
        JOB_ENDED: end if back else f"none: {end}",
        RECOVERED: "no verification is on record",
        DONE: f"none: nothing was wrong before it; {end.removeprefix('recovered: ')}",
    }[state]
    if state == CLEARED and any(one["touches_job"] and one["ok"] for one in actions):
        why = "its rules cleared; that the actions caused it was not verified"
    ended = back and state == JOB_ENDED
    head = "; ".join(parts) if ended or state in (CLEARED, NOT_RECOVERED, RELEASED) else ""
    plain = ended or state in (HELD, CLEARED) or why.startswith(("none", "not yet"))
    prefix = "" if plain else "not verified: "
    return answer | {"text": "; ".join(filter(None, (head, prefix + why)))}


def following(
    *,
    state: str,
    messages: Sequence[Part],
    failure: Failure | None,
    approval: Part | None,
    run: str,
) -> str:
    """Return what a person should do, with commands to paste. `run`: the run as they name it."""
    if state == WAITING and approval is not None:
        name, silence = approval["id"], approval["on_timeout"]
        late = f"without an answer within {approval['timeout_s']:.0f} s the answer is {silence}"
        return f"supervise approve {run} {name} (or: supervise deny {run} {name}); {late}"
    advice = [one["next"] for one in messages if one["next"]]
    if state == HELD:  # later messages are about rules that fire meanwhile
        advice = [text for text in advice if "supervise release" in text] or advice
    newest = advice[-1] if advice else ""
    text = SELF.sub("", newest).strip("; ")
    if state in (RECOVERED, DONE) and (not text or text.startswith("nothing to do")):
        return "nothing"
    text = text.removeprefix("no automatic action yet; ")
    if failure is not None and state in (JOB_ENDED, HELD, OPEN) and failure.then not in text:
        text = "; ".join(filter(None, (failure.then, text)))
    if state == STOPPED and text.startswith("start it again from a good checkpoint: "):
        text = f"start the job again from a good checkpoint: {text.partition(': ')[2]}"
    if not text:
        return "nothing is asked of you" if state in (CLEARED, WITHDRAWN) else "no advice on record"
    if text.startswith("nothing to do"):
        text = "nothing" + text.removeprefix("nothing to do")
    return re.sub(r"\bRUN\b", lambda _: run, text)
