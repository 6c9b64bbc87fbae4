"""Questions that the records of an audit log answer: which incidents, which of them belong to one,
how many actions, and how they ended.

It works on the log of a run in progress, and of one whose supervisor was killed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

Record = Mapping[str, Any]

# Records without an incident that belong to one if they come from its first or last event.
ATTACHED = frozenset({"rule", "suppressed", "state", "notify_intent", "rebaseline", "near_miss"})

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
    found = re.fullmatch(r"(\S+) requested by (.+)", reason)
    return (found[2], found[1]) if found and not opened.get("rule") else ()


def troubles(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents but those that are an operator's order and no more."""
    found: dict[str, None] = {}
    for r in records:
        what = (r.get("data") or {}).get("what") if r["kind"] == "incident" else None
        if what in ("joined", "raised") or (what == "opened" and not order_of(r)):
            found.setdefault(str(r["incident"]))
    return list(found)


def outcomes(records: Iterable[Record]) -> list[tuple[str | None, str]]:
    """Return `(incident, outcome)` of each intended action on the job, oldest first.

    An action without an outcome is in doubt: it is in progress, or its effect is unknown.
    """
    found: dict[str, tuple[str | None, str]] = {}
    for r in records:
        if r["kind"] == "intent":
            action = r["data"]["action"]
            if action["touches_job"]:
                found[action["id"]] = (r.get("incident"), DOUBT)
        elif r["kind"] in _ENDS and "action" in (r.get("data") or {}):
            key = r["data"]["action"]["id"]
            if key in found:
                found[key] = (found[key][0], _ENDS[r["kind"]])
    return list(found.values())


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return "2 actions on the job, 1 failed"."""
    number = counts.get(DONE, 0)
    text = f"{number or 'no'} action{'s' if number > 1 else ''} on the job"
    return text + "".join(f", {counts[how]} {how}" for how in (FAILED, DOUBT) if counts.get(how))


def count_outcomes(records: Iterable[Record]) -> Counter[str]:
    """Return how many actions on the job were done, failed, and are in doubt."""
    return Counter(how for _, how in outcomes(records))


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
    found = [
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
    return [{**r, "data": r.get("data") or {}} for r in found]


def is_of(r: Record, kind: str, what: str) -> bool:
    """Return whether a record is of this kind, and of this sort of it."""
    return r["kind"] == kind and (r.get("data") or {}).get("what") == what


def clock(wall: Any) -> str:
    """Return the time of day of an ISO-8601 time, to the millisecond; "" for what is none."""
    try:
        return datetime.fromisoformat(str(wall)).strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return ""
