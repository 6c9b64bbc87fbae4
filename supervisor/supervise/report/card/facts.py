"""The parts of an incident as its audit records have them: rules, actions, verification, messages.

What has no record is None, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, log
from typing import Any

from ...core.model import format_readings
from ...core.model.policy import Rule
from ...store.audit import decode
from ..records import Record, is_of

RuleOf = Callable[[str], Rule | None]

MOMENTS = 200  # of a timeline: an incident that lasts for days is read at both of its ends
NEAR = 50  # steps before the first breach at which a drill counts as its cause


def moment(r: Record) -> dict[str, Any]:
    """Return when and where a record was made."""
    return {
        "record": r["seq"],
        "step": r["step"],
        "attempt": r.get("attempt", 0),
        "wall": r.get("wall"),
    }


def fired(mine: Iterable[Record], rule_of: RuleOf) -> list[dict[str, Any]]:
    """Return the rules that fired, each with where it is written, in the order of the records."""
    found = []
    for r in mine:
        if not is_of(r, "rule", "fired"):
            continue
        rule = rule_of(r["rule"])
        found.append(
            moment(r)
            | {
                "rule": r["rule"],
                "title": rule.title if rule else "",
                "severity": r["severity"],
                "rank": r["data"].get("rank", 0),
                "when": r["data"].get("when") or "",
                "where": rule.where if rule else "",
                "runbook": rule.runbook if rule else None,
            }
        )
    return found


def conditions(mine: Iterable[Record], series: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return what each detector of the rules measured when it fired: value, limit, and the past.

    Of a detector that several rules read the first breach counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for r in mine:
        if not is_of(r, "rule", "fired"):
            continue
        for name, numbers in (r["data"].get("numbers") or {}).items():
            breach = numbers.get("code") == "BREACH"
            if name not in found or (breach and not found[name]["breach"]):
                found[name] = _condition(name, r, decode(numbers), series)
    return sorted(found.values(), key=lambda one: not one["breach"])


def _condition(
    name: str, r: Record, numbers: Mapping[str, Any], series: Mapping[str, Any] | None
) -> dict[str, Any]:
    key, measured = format_readings.measured(numbers)
    levels = (format_readings.finite(numbers.get(k)) for k in ("median", "reference", "level"))
    level = next((value for value in levels if value is not None), None)
    return {
        "detector": name,
        "rule": r["rule"],
        "severity": r["severity"],
        "step": r["step"],
        "breach": numbers.get("code") == "BREACH",
        "code": str(numbers.get("code", "UNKNOWN")),
        "metric": numbers.get("metric"),
        "value": numbers.get("last_block", numbers.get("value")),
        "measure": key,
        "measured": measured,
        "limit": numbers.get("threshold"),
        "baseline": level,
        "signal": numbers.get("signal"),
        "nonfinite": list(numbers.get("nonfinite", ())),
        "of": numbers.get("where", ""),
        "text": format_readings.reading(numbers),
        "past": _past(numbers, key, measured, series),
    }


def _past(
    numbers: Mapping[str, Any], key: str, measured: Any, series: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return how near the metric was to its limit before: its farthest value, measured as now.

    None where that cannot be known: no frames, no baseline, or a measure that takes many values.
    """
    values = ((series or {}).get("signals") or {}).get(numbers.get("metric"))
    limit, now = format_readings.finite(numbers.get("threshold")), format_readings.finite(measured)
    if series is None or values is None or limit is None or now is None:
        return None
    measure = _measure(numbers, key)
    if measure is None:
        return None
    end = max(0, series["opened_at"] - 1)  # the frame that fired is no past
    past = [
        (measure(v), step)
        for v, step in zip(values[:end], series["steps"][:end], strict=True)
        if v is not None and math.isfinite(v)
    ]
    if not past:
        return None
    upwards = (now >= limit) is (numbers.get("code") == "BREACH")
    far, step = max(past) if upwards else min(past)
    return {"measured": far, "step": step, "steps": len(past)}


def _measure(numbers: Mapping[str, Any], key: str) -> Callable[[float], float] | None:
    """Return the function that makes what is compared with the limit from a value."""
    if key == "value" and "last_block" not in numbers:
        return lambda value: value
    reference = format_readings.finite(numbers.get("reference"))
    if key == "ratio" and reference:
        return lambda value: value / reference
    median = format_readings.finite(numbers.get("median"))
    scale = format_readings.finite(numbers.get("scale"))
    if key != "z" or median is None or not scale:
        return None
    if numbers.get("transform") == "log":
        return lambda value: (log(value) - log(median)) / scale if min(value, median) > 0.0 else inf
    return lambda value: (value - median) / scale if numbers.get("transform") != "abs" else inf


def actions(mine: Iterable[Record]) -> list[dict[str, Any]]:
    """Return every action that was intended, with its outcome and what was observed of it."""
    found: dict[str, dict[str, Any]] = {}
    started: dict[str, int] = {}
    for r in mine:
        data = r["data"]
        if r["kind"] == "note" and data.get("what") == "resume-refused":
            starts = [act for act in found.values() if act["verb"] == "relaunch" and act["ok"]]
            for action in starts[-1:]:
                action["result"] = {**action["result"], "resumed": False}
        if r["kind"] == "intent":
            action = data["action"]
            started[action["id"]] = r["mono_ns"]
            found[action["id"]] = moment(r) | {
                "id": action["id"],
                "verb": action["verb"],
                "runbook": action["runbook"],
                "args": action["args"],
                "touches_job": action["touches_job"],
                "undo": "undo-" in str(action["id"]),
                "outcome": "no outcome on record",
                "ok": None,
                "result": {},
                "took_s": None,
                "outcome_record": None,
            }
        elif r["kind"] in ("commit", "abort", "in_doubt") and "action" in data:
            made = found.get(data["action"]["id"])
            if made is None:
                continue
            made |= {
                "ok": {"commit": True, "abort": False}.get(r["kind"]),
                "outcome": "done" if r["kind"] == "commit" else r["reason"],
                "result": data.get("result") or {},
                "took_s": (r["mono_ns"] - started[made["id"]]) / 1e9,
                "outcome_record": r["seq"],
            }
    return list(found.values())


def verification(mine: Iterable[Record]) -> list[dict[str, Any]]:
    """Return what was verified, refused and withdrawn, in order: `what` is its sort."""
    found = []
    for r in mine:
        what = r["data"].get("what")
        if r["kind"] == "verify" or (r["kind"] == "abort" and what in ("refused", "withdrawn")):
            found.append(moment(r) | {"what": what or "", "text": r["reason"]})
    return found


def suppressed(mine: Iterable[Record]) -> list[dict[str, Any]]:
    """Return what was not done, and what kept it; of modes that do not act, the plan."""
    return [
        moment(r)
        | {
            "rule": r["rule"] or "",
            "text": r["reason"],
            "by": r["data"].get("suppressed_by") or "",
            "runbook": r["data"].get("runbook") or "",
            "would": list(r["data"].get("would", ())),
        }
        for r in mine
        if r["kind"] == "suppressed"
    ]


def approval(mine: Iterable[Record]) -> dict[str, Any] | None:
    """Return the newest request to a person, with its answer; None where nobody was asked."""
    found: dict[str, Any] | None = None
    for r in mine:
        data = r["data"]
        if r["kind"] == "approval_requested":
            found = moment(r) | {
                "id": data["id"],
                "runbook": data["runbook"],
                "plan": list(data["args"]),
                "timeout_s": data["timeout_s"],
                "on_timeout": data["on_timeout"],
                "answer": None,
                "answer_text": "",
            }
        elif r["kind"] == "approval" and found is not None and data["id"] == found["id"]:
            found |= {"answer": data["what"], "answer_text": r["reason"]}
    return found


def messages(records: Iterable[Record], mine: Iterable[Record]) -> list[dict[str, Any]]:
    """Return what people were sent, and what became of it per channel."""
    results: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        data = r.get("data") or {}
        for key in data.get("keys", ()) if r["kind"] == "notify_result" else ():
            sent = {"ok": data["ok"], "tries": data.get("tries"), "text": r["reason"]}
            results.setdefault(str(key).rpartition(":")[2], []).append(sent)
    return [
        moment(r)
        | {
            "severity": r["severity"],
            "title": r["data"]["message"]["title"],
            "next": r["data"]["message"].get("next", ""),
            "delivered": results.get(str(r["seq"]), []),
        }
        for r in mine
        if r["kind"] == "notify_intent"
    ]


def skipped(records: Iterable[Record], breach: int, mine: Sequence[Record]) -> list[int]:
    """Return the steps from the first breach to the end whose update a safeguard skipped."""
    return sorted(
        {
            int(r["data"]["at_step"])
            for r in records
            if is_of(r, "note", "safeguard")
            and r["seq"] <= mine[-1]["seq"]
            and (r["data"].get("details") or {}).get("order") == "skip_nonfinite"
            and r["data"].get("at_step") is not None
            and int(r["data"]["at_step"]) >= breach
        }
    )


def drill(records: Iterable[Record], opened: Record, breach: int) -> dict[str, Any] | None:
    """Return the newest drill that began shortly before the first breach, None without one."""
    found = None
    for r in records:
        if not is_of(r, "note", "drill") or r["seq"] > opened["seq"]:
            continue
        data = r["data"]
        fault, at = (data.get("details") or {}).get("fault"), data.get("at_step")
        step = r["step"] if at is None else int(at)
        refused = (data.get("details") or {}).get("refused")
        if fault and not refused and breach - NEAR <= step <= max(breach, opened["step"]) + 1:
            found = {"fault": str(fault), "step": step, "text": r["reason"]}
    return found


def timeline(mine: Sequence[Record], opened: Record) -> list[dict[str, Any]]:
    """Return what happened in order; the middle of a very long one is counted only."""
    found = []
    for r in mine:
        what = r["data"].get("what")
        found.append(
            moment(r)
            | {
                "kind": f"{r['kind']} {what}" if what else r["kind"],
                "since_s": round((r["mono_ns"] - opened["mono_ns"]) / 1e9, 3),
                "text": r.get("reason", ""),
            }
        )
    if len(found) <= MOMENTS:
        return found
    half, left = MOMENTS // 2, len(found) - MOMENTS
    gap = found[half] | {"kind": "left out", "text": f"{left} records: supervise audit show"}
    return [*found[:half], gap, *found[-half:]]
