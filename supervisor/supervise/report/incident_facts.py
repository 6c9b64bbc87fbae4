"""Facts of an incident in its audit records: rules, actions, verification, messages, status.

A fact without a record is None, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, log
from typing import Any

from msgspec.structs import replace

from ..core.model import format_readings
from ..core.model.policy import Rule
from ..store.audit import decode
from .incident_report import (
    Action,
    Approval,
    Bundle,
    Check,
    Condition,
    Delivery,
    FiredRule,
    Moment,
    Past,
    SentMessage,
    Series,
    Status,
    Suppression,
    TimelineEntry,
)
from .records import Record, is_of

RuleOf = Callable[[str], Rule | None]

MOMENTS = 200  # of a timeline: an incident that lasts for days is read at both of its ends
ENDS = {"commit": True, "abort": False, "in_doubt": None}  # kind of record -> outcome
NEAR = 50  # steps before the first breach at which a drill counts as its cause


def moment(record: Record) -> Moment:
    """Return when and where a record was made."""
    return Moment(**moment_fields(record))


def moment_fields(record: Record) -> dict[str, Any]:
    return {
        "record": record["seq"],
        "step": record["step"],
        "attempt": record.get("attempt", 0),
        "wall": record.get("wall"),
    }


def fired_rules(incident: Iterable[Record], rule_of: RuleOf) -> list[FiredRule]:
    """Return the rules that fired, each with where it is written, in the order of the records."""
    rows = []
    for record in incident:
        if is_of(record, "rule", "fired"):
            rule, data = rule_of(record["rule"]), record["data"]
            rows.append(
                FiredRule(
                    **moment_fields(record),
                    rule=record["rule"],
                    title=rule.title if rule else "",
                    severity=record["severity"],
                    rank=data.get("rank", 0),
                    expression=data.get("when") or "",
                    location=rule.where if rule else "",
                    runbook=rule.runbook if rule else None,
                )
            )
    return rows


def readings(incident: Iterable[Record]) -> Iterable[tuple[Record, str, Mapping[str, Any]]]:
    """Yield `(record, detector, numbers)` of each reading of a rule that fired."""
    for record in incident:
        if is_of(record, "rule", "fired"):
            for name, numbers in (record["data"].get("numbers") or {}).items():
                yield record, name, numbers


def metrics_in_breach(incident: Iterable[Record]) -> list[str]:
    """Return the metrics in breach when the rules fired."""
    names: dict[str, None] = {}
    for _, _, numbers in readings(incident):
        if numbers.get("code") == "BREACH":
            metrics = [numbers.get("metric"), *numbers.get("nonfinite", ())]
            names.update((str(name), None) for name in metrics if name)
    return list(names)


def conditions(incident: Iterable[Record], series: Series | None) -> list[Condition]:
    """Return what each detector of the rules measured when it fired: value, limit, and the past.

    Of a detector that several rules read the first breach counts.
    """
    rows: dict[str, Condition] = {}
    for record, name, numbers in readings(incident):
        is_breach = numbers.get("code") == "BREACH"
        if name not in rows or (is_breach and not rows[name].is_breach):
            rows[name] = _condition(name, record, decode(numbers), series)
    return sorted(rows.values(), key=lambda condition: not condition.is_breach)


def _condition(
    name: str, record: Record, numbers: Mapping[str, Any], series: Series | None
) -> Condition:
    key, measured = format_readings.measured(numbers)
    levels = (format_readings.finite(numbers.get(k)) for k in ("median", "reference", "level"))
    return Condition(
        detector=name,
        rule=record["rule"],
        severity=record["severity"],
        step=record["step"],
        is_breach=numbers.get("code") == "BREACH",
        code=numbers.get("code", "UNKNOWN"),
        metric=numbers.get("metric"),
        value=numbers.get("last_block", numbers.get("value")),
        measure=key,
        measured=measured,
        limit=numbers.get("threshold"),
        baseline=next((value for value in levels if value is not None), None),
        signal=numbers.get("signal"),
        nonfinite=list(numbers.get("nonfinite", ())),
        module=numbers.get("where", ""),
        text=format_readings.reading(numbers),
        past=_past(numbers, key, measured, series),
    )


def _past(
    numbers: Mapping[str, Any], key: str, measured: Any, series: Series | None
) -> Past | None:
    """Return how near the metric was to its limit before: its farthest value, measured as now.

    None where that cannot be known: no frames, no baseline, or a measure that takes many values.
    """
    limit, now = format_readings.finite(numbers.get("threshold")), format_readings.finite(measured)
    metric = str(numbers.get("metric"))
    if series is None or metric not in series.signals or limit is None or now is None:
        return None
    measure = _measure(numbers, key)
    if measure is None:
        return None
    end = max(0, series.opened_at - 1)  # the frame that fired is no past
    past = [
        (measure(v), step)
        for v, step in zip(series.signals[metric][:end], series.steps[:end], strict=True)
        if v is not None and math.isfinite(v)
    ]
    if not past:
        return None
    upwards = (now >= limit) is (numbers.get("code") == "BREACH")
    farthest, step = max(past) if upwards else min(past)
    return Past(measured=farthest, step=step, frames=len(past))


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


def actions(incident: Iterable[Record]) -> list[Action]:
    """Return every action that was intended, with its outcome and what was observed of it."""
    rows: dict[str, Action] = {}
    started: dict[str, int] = {}
    for record in incident:
        data = record["data"]
        if record["kind"] == "note" and data.get("what") == "resume-refused":
            starts = [row for row in rows.values() if row.verb == "relaunch" and row.ok]
            for row in starts[-1:]:
                rows[row.id] = replace(row, result={**row.result, "resumed": False})
        if record["kind"] == "intent":
            action = data["action"]
            started[action["id"]] = record["mono_ns"]
            rows[action["id"]] = Action(
                **moment_fields(record),
                id=action["id"],
                verb=action["verb"],
                runbook=action["runbook"],
                args=decode(action["args"]),
                touches_job=action["touches_job"],
                is_undo="undo-" in str(action["id"]),
                outcome="no outcome on record",
                ok=None,
                result={},
                took_s=None,
                outcome_record=None,
            )
        elif record["kind"] in ENDS and data.get("action", {}).get("id") in rows:
            action_id = data["action"]["id"]
            rows[action_id] = replace(
                rows[action_id],
                ok=ENDS[record["kind"]],
                outcome="done" if record["kind"] == "commit" else record["reason"],
                result=decode(data.get("result") or {}),
                took_s=(record["mono_ns"] - started[action_id]) / 1e9,
                outcome_record=record["seq"],
            )
    return list(rows.values())


def bundles(actions: Iterable[Action]) -> list[Bundle]:
    """Return the evidence bundles of the snapshots."""
    return [
        Bundle(
            path=str(action.result["path"]),
            sha256=str(action.result.get("sha256", "")),
            files=list(action.result.get("files", ())),
            missing=list(action.result.get("missing", ())),
        )
        for action in actions
        if action.verb == "snapshot" and action.ok and "path" in action.result
    ]


def verification(incident: Iterable[Record]) -> list[Check]:
    """Return what was verified, refused and withdrawn, in order."""
    rows = []
    for record in incident:
        kind = record["data"].get("what")
        if record["kind"] == "verify" or (
            record["kind"] == "abort" and kind in ("refused", "withdrawn")
        ):
            rows.append(Check(**moment_fields(record), kind=kind or "", text=record["reason"]))
    return rows


def suppressed(incident: Iterable[Record]) -> list[Suppression]:
    """Return what was not done, and what kept it; of modes that do not act, the plan."""
    return [
        Suppression(
            **moment_fields(record),
            rule=record["rule"] or "",
            text=record["reason"],
            reason=record["data"].get("suppressed_by") or "",
            runbook=record["data"].get("runbook") or "",
            plan=list(record["data"].get("would", ())),
        )
        for record in incident
        if record["kind"] == "suppressed"
    ]


def approval(incident: Iterable[Record]) -> Approval | None:
    """Return the newest request to a person, with its answer; None where nobody was asked."""
    request: Approval | None = None
    for record in incident:
        data = record["data"]
        if record["kind"] == "approval_requested":
            request = Approval(
                **moment_fields(record),
                id=data["id"],
                runbook=data["runbook"],
                plan=list(data["args"]),
                timeout_s=data["timeout_s"],
                on_timeout=data["on_timeout"],
                answer=None,
                answer_text="",
            )
        elif record["kind"] == "approval" and request is not None and data["id"] == request.id:
            request = replace(request, answer=data["what"], answer_text=record["reason"])
    return request


def messages(records: Iterable[Record], incident: Iterable[Record]) -> list[SentMessage]:
    """Return what people were sent, and what became of it per channel."""
    results: dict[str, list[Delivery]] = {}
    for record in records:
        data = record.get("data") or {}
        for key in data.get("keys", ()) if record["kind"] == "notify_result" else ():
            delivery = Delivery(ok=data["ok"], tries=data.get("tries"), text=record["reason"])
            results.setdefault(str(key).rpartition(":")[2], []).append(delivery)
    return [
        SentMessage(
            **moment_fields(record),
            severity=record["severity"],
            title=record["data"]["message"]["title"],
            next=record["data"]["message"].get("next", ""),
            delivered=results.get(str(record["seq"]), []),
        )
        for record in incident
        if record["kind"] == "notify_intent"
    ]


def skipped_steps(records: Iterable[Record], breach: int, incident: Sequence[Record]) -> list[int]:
    """Return the steps from the first breach to the end whose update a safeguard skipped."""
    return sorted(
        {
            int(record["data"]["at_step"])
            for record in records
            if is_of(record, "note", "safeguard")
            and record["seq"] <= incident[-1]["seq"]
            and (record["data"].get("details") or {}).get("order") == "skip_nonfinite"
            and record["data"].get("at_step") is not None
            and int(record["data"]["at_step"]) >= breach
        }
    )


def drill(records: Iterable[Record], opened: Record, breach: int) -> tuple[str, int] | None:
    """Return `(fault, step)` of the newest drill that began shortly before the first breach."""
    newest = None
    for record in records:
        if not is_of(record, "note", "drill") or record["seq"] > opened["seq"]:
            continue
        data, details = record["data"], record["data"].get("details") or {}
        step = record["step"] if data.get("at_step") is None else int(data["at_step"])
        is_near = breach - NEAR <= step <= max(breach, opened["step"]) + 1
        if details.get("fault") and not details.get("refused") and is_near:
            newest = str(details["fault"]), step
    return newest


def timeline(incident: Sequence[Record], opened: Record) -> list[TimelineEntry]:
    """Return what happened in order; the middle of a very long one is counted only."""
    rows = []
    for record in incident:
        detail = record["data"].get("what")
        rows.append(
            TimelineEntry(
                **moment_fields(record),
                kind=f"{record['kind']} {detail}" if detail else record["kind"],
                since_s=round((record["mono_ns"] - opened["mono_ns"]) / 1e9, 3),
                text=record.get("reason", ""),
            )
        )
    if len(rows) <= MOMENTS:
        return rows
    half = MOMENTS // 2
    text = f"{len(rows) - MOMENTS} records: supervise audit show"
    return [*rows[:half], replace(rows[half], kind="left out", text=text), *rows[-half:]]


def status_of(incident: Sequence[Record]) -> Status:
    """Return the status of an incident from its records."""
    status, acted, stopped, withdrawn = Status.OPEN, False, False, False
    verified = False
    verbs: dict[str, tuple[str, bool]] = {}
    for record in incident:
        kind, data, detail = record["kind"], record["data"], record["data"].get("what")
        if kind == "intent":
            action = data["action"]
            verbs[action["id"]] = action["verb"], action["touches_job"]
            status = status if status in (Status.HELD, Status.WAITING) else Status.ACTING
        elif kind == "commit" and data.get("action", {}).get("id") in verbs:
            verb, touches = verbs[data["action"]["id"]]
            acted, stopped = acted or touches, stopped or verb == "stop"
        elif kind == "verify" and detail == "passed":
            verified, status = True, Status.WATCHING
        elif kind == "approval_requested":
            status = Status.WAITING
        elif status == {"approval": Status.WAITING, "state": Status.ACTING}.get(kind):
            over = kind == "approval" or data.get("after") == "suspect"
            status = Status.OPEN if over else status
        elif kind == "abort" and detail == "withdrawn":
            withdrawn, status = True, Status.OPEN
        elif kind == "incident" and detail == "held":
            status = Status.HELD
        elif kind == "incident" and detail == "closed":
            if data.get("superseded_by"):
                return Status.SUPERSEDED
            end = _end_of(record["reason"].removeprefix("closed: "))
            if stopped and end == Status.JOB_ENDED:
                return Status.STOPPED
            if end == Status.RECOVERED and not verified:
                return Status.DONE
            return Status.WITHDRAWN if withdrawn and not acted and end == Status.CLEARED else end
    return status


def _end_of(reason: str) -> Status:
    if reason.startswith("recovered: "):
        return Status.RECOVERED
    if reason.startswith("over: not recovered"):
        return Status.NOT_RECOVERED
    if reason.startswith("over: its rules cleared"):
        return Status.CLEARED
    if reason.startswith("over: "):
        return Status.SESSION_ENDED
    return Status.RELEASED if reason.startswith("released") else Status.JOB_ENDED
