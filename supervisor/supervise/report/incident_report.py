"""The report of an incident, collected from audit records as JSON-ready data.

    observed -> rules -> suppressed -> runbooks and actions -> verification -> end

`render.py` prints it. It works on the log of a run in progress, and of one whose supervisor was
killed: what has no record is reported as unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..core.model import format_readings
from ..core.model.policy import Policy
from ..store.hash_chain import decode

Record = Mapping[str, Any]

# Records without an incident that belong to one if they come from its first or last event.
ATTACHED = frozenset({"rule", "suppressed", "state", "notify_intent", "rebaseline", "near_miss"})

DONE, FAILED, DOUBT = "done", "failed", "in doubt"
_ENDS = {"commit": DONE, "abort": FAILED, "in_doubt": DOUBT}
WOULD = ("runbook", "would", "used", "max")  # what a suppressed record tells of the runbook
COUNTS = {DONE: "actions", FAILED: "failed", DOUBT: "in_doubt"}  # keys of a row


def ids(records: Iterable[Record]) -> list[str]:
    """Return the ids of all incidents, oldest first."""
    return list(dict.fromkeys(str(r["incident"]) for r in records if _is(r, "incident", "opened")))


def table(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row per incident: severity, rule, steps, end, and counts of actions."""
    rows: dict[str, dict[str, Any]] = {}
    for r in records:
        row = rows.get(str(r.get("incident")))
        if _is(r, "incident", "opened"):
            rows[str(r["incident"])] = {
                "incident": r["incident"],
                "severity": r["severity"],
                "step": r["step"],
                "wall": r.get("wall"),
                "rule": r["rule"],
                "headline": _headline(r),
                "actions": 0,
                "failed": 0,
                "in_doubt": 0,
                "phase": "open",
                "end": None,
                "end_step": None,
            }
        elif row is None:
            continue
        elif r["kind"] == "incident":
            what = r["data"]["what"]
            if what == "raised":
                row |= {"rule": r["rule"], "headline": _headline(r)}
            row["severity"] = min(row["severity"], r["severity"] or row["severity"])
            if what in ("closed", "held"):
                row |= {"phase": what, "end": r["reason"], "end_step": r["step"]}
    for incident, how in outcomes(records):
        if (row := rows.get(str(incident))) is not None:
            row[COUNTS[how]] += 1
    return list(rows.values())


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


def collect(
    records: Sequence[Record], incident: str, policies: Mapping[str, Policy], ending: str
) -> dict[str, Any]:
    """Return the report of one incident as plain data.

    Args:
        policies: those of the run that can be read, by digest: they have the place of each rule.
        ending: the state of the run, for an incident that is not closed.
    """
    mine = records_of(records, incident)
    opened = next(r for r in mine if _is(r, "incident", "opened"))
    eras = _eras(records)
    fired = [
        _fired(r, policies.get(_digest(eras, r["seq"]))) for r in mine if _is(r, "rule", "fired")
    ]
    report: dict[str, Any] = {
        "incident": incident,
        "run": opened.get("run"),
        "severity": min(r["severity"] for r in mine if r["kind"] == "incident" and r["severity"]),
        "headline": _headline(
            next(
                r
                for r in reversed(mine)
                if _is(r, "incident", "opened") or _is(r, "incident", "raised")
            )
        ),
        "seen": _seen(opened, fired),
        "rules": fired,
        "suppressed": [
            _short(r)
            | {"by": r["data"].get("suppressed_by")}
            | {key: r["data"][key] for key in WOULD if key in r["data"]}
            for r in mine
            if r["kind"] == "suppressed"
        ],
        "runbooks": _runbooks(mine),
        "budgets": next((r["data"]["budget"] for r in reversed(mine) if r["kind"] == "intent"), {}),
        "messages": _messages(records, mine),
        "spike": next((r["data"]["spike"] for r in reversed(mine) if r["data"].get("spike")), None),
        "end": _end(mine, ending),
        "timeline": [_moment(r, opened) for r in mine],
    }
    return dict(decode(report))


def records_of(records: Sequence[Record], incident: str) -> list[Record]:
    """Return the records of an incident, and related ones of its first and last event."""
    events = {
        r.get("event")
        for r in records
        if r.get("incident") == incident and r["kind"] == "incident" and r.get("event", -1) >= 0
    }
    found = [
        r
        for r in records
        if r.get("incident") == incident
        or (not r.get("incident") and r.get("event") in events and r["kind"] in ATTACHED)
    ]
    return [{**r, "data": r.get("data") or {}} for r in found]


def _headline(r: Record) -> str:
    """Return "rule: its numbers" of the record that opened an incident, or raised it."""
    reason = str(r.get("reason", ""))
    for prefix in (f"{r.get('severity')} ", f"raised to {r.get('severity')} by "):
        reason = reason.removeprefix(prefix)
    return reason


# ── its parts ─────────────────────────────────────────────────────────────────────────────────────


def _fired(r: Record, policy: Policy | None) -> dict[str, Any]:
    rule = next((one for one in policy.rules if one.id == r["rule"]), None) if policy else None
    readings = {
        name: {**numbers, "text": format_readings.reading(decode(numbers))}
        for name, numbers in (r["data"].get("numbers") or {}).items()
    }
    return _short(r) | {
        "rule": r["rule"],
        "severity": r["severity"],
        "rank": r["data"].get("rank", 0),
        "when": r["data"].get("when"),
        "where": rule.where if rule else None,
        "runbook": rule.runbook if rule else None,
        "for": rule.for_steps if rule else None,
        "numbers": readings,
    }


def _seen(opened: Record, fired: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first breach: the numbers of the rule that opened the incident."""
    first = next((one for one in fired if one["rule"] == opened["rule"]), None)
    found = _short(opened) | {
        "rule": opened["rule"],
        "breach_step": opened["data"].get("breach_step"),
        "band": opened["data"].get("band"),
        "readings": [],
    }
    numbers: Mapping[str, Any] = first["numbers"] if first is not None else {}
    for name, reading in numbers.items():
        if reading.get("code") != "BREACH" or ("metric" not in reading and "values" not in reading):
            continue
        key, value = format_readings.measured(reading)
        found["readings"].append(
            {
                "detector": name,
                "metric": reading.get("metric"),
                "value": reading.get("value"),
                key: value,
                "baseline": reading.get("median", reading.get("reference")),
                "scale": reading.get("scale"),
                "threshold": reading.get("threshold"),
                "text": reading["text"],
            }
        )
    return found


def _runbooks(mine: Sequence[Record]) -> list[dict[str, Any]]:
    """Return every runbook with its actions and its verification, in order."""
    books: list[dict[str, Any]] = []
    actions: dict[str, dict[str, Any]] = {}
    for r in mine:
        data = r["data"]
        if r["kind"] == "state" and data.get("event") == "run":
            books.append(_book(r, r["reason"].removeprefix("runbook ").partition(": ")))
        elif _is(r, "abort", "refused"):
            if "runbook" in data:
                books.append(_book(r, (data["runbook"], "", "")))
            if books:
                books[-1]["refused"] = r["reason"]
        elif r["kind"] == "intent":
            action = data["action"]
            number = str(action["id"]).split("/")[1]  # of the runbook within its incident
            if not books or books[-1]["number"] not in (None, number):
                books.append(_book(r, (action["runbook"], "", "")))  # changes no state: no record
            books[-1]["number"] = number
            made = _short(r) | dict(action) | {"ok": None, "ack_step": None, "result": {}}
            actions[action["id"]] = made
            books[-1]["actions"].append(made)
        elif r["kind"] in ("commit", "abort", "in_doubt") and "action" in data:
            made = actions.get(data["action"]["id"], {})
            result = data.get("result") or {}
            took_s = (r["mono_ns"] - made["mono_ns"]) / 1e9 if "mono_ns" in made else None
            made |= {
                "ok": {"commit": True, "abort": False}.get(r["kind"]),
                "outcome": r["reason"],
                "outcome_record": r["seq"],
                "ack_step": result.get("ack_step"),
                "result": result,
                "took_s": took_s,
            }
        elif r["kind"] == "verify" and books:
            books[-1]["verification"].append(_short(r) | {"what": data.get("what")})
    return books


def _book(r: Record, named: tuple[str, str, str]) -> dict[str, Any]:
    name, _, why = named
    return _short(r) | {
        "runbook": name,
        "number": None,
        "why": why,
        "refused": None,
        "actions": [],
        "verification": [],
    }


def _messages(records: Sequence[Record], mine: Sequence[Record]) -> list[dict[str, Any]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        if r["kind"] == "notify_result":
            for key in r["data"].get("keys", ()):
                result = {
                    "ok": r["data"]["ok"],
                    "tries": r["data"].get("tries"),
                    "detail": r["reason"],
                }
                results.setdefault(str(key).rpartition(":")[2], []).append(result)
    return [
        _short(r)
        | {
            "severity": r["severity"],
            "title": r["data"]["message"]["title"],
            "delivered": results.get(str(r["seq"]), []),
        }
        for r in mine
        if r["kind"] == "notify_intent"
    ]


def _end(mine: Sequence[Record], ending: str) -> dict[str, Any]:
    last = next((r for r in reversed(mine) if _is(r, "incident", "closed")), None)
    made = count_outcomes(mine)
    acted = True if made[DONE] else None if made[DOUBT] else False
    done = {"acted": acted, "failed": made[FAILED]}
    if last is not None:
        return _short(last) | {"how": "closed", **done}
    held = any(_is(r, "incident", "held") for r in mine)
    how = "automatic actions are off; a person is needed" if held else "open"
    return _short(mine[-1]) | {"how": how, "reason": f"{how}; {ending}", **done}


def _moment(r: Record, opened: Record) -> dict[str, Any]:
    since_s = (r["mono_ns"] - opened["mono_ns"]) / 1e9
    kind = r["kind"] if not (what := r["data"].get("what")) else f"{r['kind']} {what}"
    return _short(r) | {"kind": kind, "since_s": round(since_s, 3)}


def _eras(records: Sequence[Record]) -> list[tuple[int, str]]:
    """Return `(record, digest)` from which each policy was in force."""
    found = []
    for r in records:
        data = r.get("data") or {}
        if r["kind"] == "run_start":
            found.append((int(r["seq"]), str(data.get("policy_digest", ""))))
        elif _is(r, "policy_load", "reloaded"):
            found.append((int(r["seq"]), str(data["after"])))
    return found


def _digest(eras: Sequence[tuple[int, str]], record: int) -> str:
    return next((digest for since, digest in reversed(eras) if since < record), "")


def _short(r: Record) -> dict[str, Any]:
    return {
        "record": r["seq"],
        "step": r["step"],
        "attempt": r.get("attempt", 0),
        "wall": r.get("wall"),
        "mono_ns": r["mono_ns"],
        "reason": r.get("reason", ""),
    }


def _is(r: Record, kind: str, what: str) -> bool:
    return r["kind"] == kind and (r.get("data") or {}).get("what") == what


def clock(wall: Any) -> str:
    """Return the time of day of an ISO-8601 time, to the millisecond; "" for what is none."""
    try:
        return datetime.fromisoformat(str(wall)).strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return ""
