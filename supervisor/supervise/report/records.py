"""Questions that the records of an audit log answer: incidents and their records, actions and their
outcomes, failures of the job.

It works on the log of a run in progress, and of one whose supervisor was killed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..core.model.failure import KIND, Failure, by_cause

Record = Mapping[str, Any]

# Records without an incident that belong to one if they come from its first or last event.
ATTACHED = frozenset({"rule", "suppressed", "state", "notify_intent", "rebaseline", "near_miss"})

MAX_FAILURES = 8  # in full; the rest follows from one of them as a rule
DONE, FAILED, DOUBT = "done", "failed", "in doubt"
_ENDS = {"commit": DONE, "abort": FAILED, "in_doubt": DOUBT}


def ids(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents, oldest first."""
    return list(
        dict.fromkeys(str(r["incident"]) for r in records if is_of(r, "incident", "opened"))
    )


def order_of(opened: Record) -> tuple[str, ...]:
    """Return the operator whose order opened an incident, and the verb; empty for none."""
    reason = str(opened.get("reason", "")).removeprefix(f"{opened.get('severity')} ")
    match = re.fullmatch(r"(\S+) requested by (.+)", reason)
    return (match[2], match[1]) if match and not opened.get("rule") else ()


def troubles(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents but those that are an operator's order and no more."""
    incidents: dict[str, None] = {}
    for r in records:
        change = (r.get("data") or {}).get("what") if r["kind"] == "incident" else None
        if change in ("joined", "raised") or (change == "opened" and not order_of(r)):
            incidents.setdefault(str(r["incident"]))
    return list(incidents)


def outcomes(records: Iterable[Record]) -> list[tuple[str | None, str]]:
    """Return `(incident, outcome)` of each intended action on the job, oldest first.

    An action without an outcome is in doubt: it is in progress, or its effect is unknown.
    """
    rows: dict[str, tuple[str | None, str]] = {}
    for r in records:
        if r["kind"] == "intent":
            action = r["data"]["action"]
            if action["touches_job"]:
                rows[action["id"]] = (r.get("incident"), DOUBT)
        elif r["kind"] in _ENDS and "action" in (r.get("data") or {}):
            key = r["data"]["action"]["id"]
            if key in rows:
                rows[key] = (rows[key][0], _ENDS[r["kind"]])
    return list(rows.values())


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return "2 actions on the job, 1 failed"."""
    number = counts.get(DONE, 0)
    text = f"{number or 'no'} action{'s' if number > 1 else ''} on the job"
    return text + "".join(f", {counts[end]} {end}" for end in (FAILED, DOUBT) if counts.get(end))


def count_outcomes(records: Iterable[Record]) -> Counter[str]:
    """Return how many actions on the job were done, failed, and are in doubt."""
    return Counter(outcome for _, outcome in outcomes(records))


def records_of(records: Sequence[Record], incident: str) -> list[Record]:
    """Return the records of an incident, and related ones of its first and last event."""
    events = {
        r.get("event")
        for r in records
        if r.get("incident") == incident and r["kind"] == "incident" and r.get("event", -1) >= 0
    }
    over = next(
        (
            r["seq"]
            for r in records
            if r.get("incident") == incident and is_of(r, "incident", "closed")
        ),
        math.inf,
    )
    incident_records = [
        r
        for r in records
        if r.get("incident") == incident
        or (
            not r.get("incident")
            and r.get("event") in events
            and r["kind"] in ATTACHED
            and not (r.get("data") or {}).get("alongside")
            and not (r["kind"] == "rule" and r["seq"] > over)  # it begins the next one
        )
    ]
    return [{**r, "data": r.get("data") or {}} for r in incident_records]


def is_of(r: Record, kind: str, detail: str) -> bool:
    """Return whether a record is of this kind, and has this `what` in its data."""
    return r["kind"] == kind and (r.get("data") or {}).get("what") == detail


def headline(r: Record) -> str:
    """Return "rule: its numbers" of the record that opened an incident, or raised it."""
    reason = str(r.get("reason", ""))
    for prefix in (f"{r.get('severity')} ", f"raised to {r.get('severity')} by "):
        reason = reason.removeprefix(prefix)
    return reason


def failures(records: Iterable[Record]) -> list[Failure]:
    """Return how the processes of the newest launch ended, the one that explains the rest first."""
    ended: list[Failure] = []
    for record in records:
        if is_of(record, "note", "launched"):
            ended.clear()
        elif is_of(record, "note", KIND):
            ended.append(Failure.of(record["data"]["details"]))
    return by_cause(ended)


def failure_lines(failures: Sequence[Failure]) -> Iterator[str]:
    """Yield a heading, and per failure its text, its class and its traceback; nothing for none."""
    if failures:
        yield ""
        yield "errors and signals that ended processes of the job"
    for failure in failures[:MAX_FAILURES]:
        yield f"  {failure.text}"
        if failure.cls:
            yield f"    {failure.cls}: {failure.title}; relaunch: {failure.relaunch}"
        yield from (f"    | {line}" for line in failure.traceback.rstrip().splitlines())
    if len(failures) > MAX_FAILURES:
        yield f"  and {len(failures) - MAX_FAILURES} more"


def clock(wall: Any) -> str:
    """Return the time of day of an ISO-8601 time, to the millisecond; "" for what is none."""
    try:
        return datetime.fromisoformat(str(wall)).strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return ""
