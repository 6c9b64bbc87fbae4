"""Builds the stability record of a run from its directory, as plain data.

Every field is read from the audit log, the journal or the policy of the run; what none of them
shows is `{"unknown": why}`. Built twice from an unchanged run it is the same, so a record that was
edited later differs from the run, see `check.py`. `record_form.py` has its form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.model.decisions import plain
from ...core.model.policy import Policy
from ...store import audit, run_records
from ...store.recorder import incomplete
from ...store.run_directory import RunDir
from ..records import Record, troubles
from . import frames as journal_frames
from .frames import Frames, Interval
from .interventions import actions, drills, interventions, of, unknown
from .monitors import Knowledge, monitors, rules
from .record_form import SCHEMA_ID

NO_FRAME = "no step was seen"


def build(run: RunDir, policies: Mapping[str, Policy], known: Knowledge) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        policies: those of the run that can be read, by digest.
        known: what this installation knows about signals, faults and rules.

    Raises:
        StoreError: the audit log or run.json cannot be read; TamperError: the log was changed.
    """
    records = list(audit.read(run.audit_path))
    described = run.read_json("run.json")
    start: Record = next((r["data"] for r in records if r["kind"] == "run_start"), {})
    seen = journal_frames.read(run, _open_intervals(records))
    reloads = [
        {"step": r["step"], "record": r["seq"], "digest": r["data"].get("after"), "by": r["reason"]}
        for r in of(records, "policy_load", "reloaded")
    ]
    digest = str(reloads[-1]["digest"] if reloads else start.get("policy_digest", ""))
    policy = policies.get(digest)
    cites = list(start.get("cites") or ())
    missing_policy = unknown(f"the policy {digest or 'of the run'} cannot be read")
    made = actions(records)
    whole = {
        "schema": SCHEMA_ID,
        "made_by": known.made_by(),
        "run": _run(run, described, start, records, seen),
        "policy": {
            "name": str(start.get("policy", described["policy"])),
            "mode": str(start.get("mode", described["mode"])),
            "digest": str(start.get("policy_digest", "")),
            "reloads": reloads,
        },
        "identity": _identity(records),
        "monitors": missing_policy if policy is None else monitors(policy, seen, known, records),
        "rules": missing_policy if policy is None else rules(policy, seen, known, records, cites),
        "fault_injection": {"in_this_run": drills(records), "design": known.design()},
        "citations": cites,
        "incidents": _incidents(records),
        "interventions": interventions(records, made),
        "recovery": missing_policy if policy is None else _recovery(policy, records, known),
        "gaps": _gaps(records, seen, policy),
        "cost": _cost(made, seen),
        "limits": _limits(described, seen, policy, known),
        "audit": _audited(run, records),
    }
    found: dict[str, Any] = plain(whole)
    return found


def _incidents(records: Sequence[Record]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    known = troubles(records)  # what an operator ordered is an intervention
    for r in records:
        if r["kind"] != "incident" or str(r["incident"]) not in known:
            continue
        what = r["data"].get("what")
        row = rows.setdefault(
            str(r["incident"]),
            {
                "incident": str(r["incident"]),
                "severity": r["severity"],
                "rule": str(r["rule"]),
                "step": r["step"],
                "headline": r["reason"],
                "end": unknown("it is open"),
                "end_step": unknown("it is open"),
            },
        )
        row["severity"] = min(row["severity"], r["severity"] or row["severity"])
        if what == "raised":
            row |= {"rule": str(r["rule"]), "headline": r["reason"]}
        elif what in ("closed", "held"):
            row |= {"end": r["reason"], "end_step": r["step"]}
    return list(rows.values())


def _audited(run: RunDir, records: Sequence[Record]) -> dict[str, Any]:
    """Return what the log and its digests say of the files that all of this is read from."""
    report = audit.verify(run.audit_path, run.id)
    return {
        "status": report.status,
        "records": report.records,
        "head": report.head,
        "parts": [
            {"part": one.part, "status": one.status, "text": one.text}
            for one in run_records.check(run, run_records.taken(records))
        ],
        "not_checked": list(run_records.NOT_CHECKED),
    }


def _open_intervals(records: Sequence[Record]) -> list[Interval]:
    """Return when incidents were open; one that was never closed reaches to the end."""
    opened: dict[str, int] = {}
    found: list[Interval] = []
    for r in records:
        what = (r.get("data") or {}).get("what")
        if r["kind"] == "incident" and what == "opened":
            opened[str(r["incident"])] = r["mono_ns"]
        elif r["kind"] == "incident" and what == "closed":
            since = opened.pop(str(r["incident"]), None)
            found += [] if since is None else [(since, float(r["mono_ns"]))]
    return found + [(since, float("inf")) for since in opened.values()]


def _run(
    run: RunDir, described: Record, start: Record, records: Sequence[Record], seen: Frames
) -> dict[str, Any]:
    end = records[-1] if records and records[-1]["kind"] == "run_end" else None
    previous = start.get("previous")
    no_frame = unknown(seen.unreadable or NO_FRAME)
    return {
        "id": run.id,
        "created": str(described["created"]),
        "host": str(described["host"]),
        "command": list(described["argv"]),
        "previous": str(previous) if previous else unknown("it follows no other run"),
        "state": "ended" if end is not None else "not ended, or its supervisor was killed",
        "exit_code": unknown("no record of the end") if end is None else end["data"]["exit_code"],
        "first_step": seen.first_step if seen.frames else no_frame,
        "last_step": seen.last_step if seen.frames else no_frame,
        "steps_made": seen.frames + seen.missing if seen.frames else no_frame,
        "tokens": seen.tokens if seen.tokens else unknown("no frame holds tokens_per_update"),
        "attempts": len(seen.attempts),
        "ranks": len(seen.ranks),
    }


def _identity(records: Sequence[Record]) -> dict[str, Any]:
    found = [r for r in records if r["kind"] == "identity"]
    why = "no record of it: the run ended at once, or an earlier version recorded it"
    return {
        "first": found[0]["data"]["identity"] if found else unknown(why),
        "changes": [
            {
                "attempt": r["data"]["attempt"],
                "since": r["data"]["since"],
                "step": r["step"],
                "differs": r["data"]["differs"],
            }
            for r in found
            if r["data"].get("differs")
        ],
    }


def _recovery(policy: Policy, records: Sequence[Record], known: Knowledge) -> list[dict[str, Any]]:
    """Return each runbook that a rule runs: what it does, and how often it was verified."""
    used: Counter[str] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    current: dict[str, str] = {}
    for r in records:
        data = r.get("data") or {}
        if r["kind"] == "intent":
            book, incident = str(data["action"].get("runbook")), str(r.get("incident"))
            number = str(data["action"]["id"]).rpartition("/")[0]
            if current.get(incident) != f"{book} {number}":
                used[book] += 1
            current[incident] = f"{book} {number}"
        elif r["kind"] == "verify" and data.get("what") in ("passed", "failed"):
            ends[current.get(str(r.get("incident")), "").partition(" ")[0], data["what"]] += 1
    wanted = {rule.runbook for rule in policy.rules} | {policy.job.get("on_crash")} | set(used)
    wanted |= set(policy.ladder.levels)
    return [
        {
            "runbook": name,
            "procedure": list(book.verbs),
            "used": used[name],
            "verified": ends[name, "passed"],
            "failed": ends[name, "failed"],
            "shown": known.recoveries(book.verbs) or unknown("not shown by the benchmarks"),
        }
        for name, book in policy.runbooks.items()
        if name in wanted
    ]


def _gaps(records: Sequence[Record], seen: Frames, policy: Policy | None) -> dict[str, Any]:
    no_frame = unknown(seen.unreadable or NO_FRAME)
    made = seen.frames + seen.missing
    ended_early = incomplete(records)
    state = "its decisions are on record to the end"
    if seen.unreadable:
        state = seen.unreadable
    elif ended_early is not None:
        state = str(ended_early["reason"])
    inactive = [] if policy is None else _inactive(policy, seen)
    return {
        "unwatched_s": [round(each, 3) for each in seen.unwatched_s],
        "frames_lost": unknown(seen.unreadable) if seen.unreadable else seen.lost,
        "steps_without_frame": seen.missing if seen.frames else no_frame,
        "blind_share": round(seen.missing / made, 6) if seen.frames else no_frame,
        "blind_rules": [
            {"rule": r["rule"], "step": r["step"], "record": r["seq"], "why": r["reason"]}
            for r in records
            if r["kind"] == "blind"
        ],
        "inactive_rules": inactive,
        "journal": state,
    }


def _inactive(policy: Policy, seen: Frames) -> list[str]:
    return [
        rule.id
        for rule in policy.rules
        if (needed := {m for n in policy.detectors_of(rule) for m in policy.detectors[n].metrics})
        and not needed & seen.announced.keys()
    ]


def _cost(made: Sequence[Mapping[str, Any]], seen: Frames) -> dict[str, Any]:
    """Return what was lost: steps that were undone or dropped, and time without training."""
    kept = [
        max(0, seen_at["from_step"] - seen_at["step"])
        for action in made
        if "from_step" in (seen_at := action["observed"])
    ]
    no_frame = unknown(seen.unreadable or NO_FRAME)
    paused_s = sum(float(a["observed"].get("held_s") or 0.0) for a in made)
    step_s = seen.median("step_time")
    steps = seen.redone + sum(kept)
    devices = len(seen.ranks)
    lost_s = paused_s + seen.down_s + steps * (step_s or 0.0)
    own = seen.median("probe_self_time")
    return {
        "steps": steps if seen.frames else no_frame,
        "skipped_updates": seen.skipped if seen.frames else no_frame,
        "tokens": steps * seen.tokens / seen.frames
        if seen.tokens
        else unknown("no frame holds tokens_per_update"),
        "paused_s": round(paused_s, 3),
        "down_s": round(seen.down_s, 3) if seen.frames else no_frame,
        "device_hours": unknown("no healthy step_time")
        if step_s is None
        else round(devices * lost_s / 3600, 6),
        "device_hours_of_run": round(devices * seen.span_s / 3600, 6) if seen.frames else no_frame,
        "probe_share": unknown("no healthy probe_self_time and step_time")
        if own is None or not step_s
        else round(own / step_s, 6),
    }


def _limits(described: Record, seen: Frames, policy: Policy | None, known: Knowledge) -> list[str]:
    found = []
    if described.get("tier_reason"):
        found.append(f"the probe was not active: {described['tier_reason']}")
    if seen.unreadable:
        found.append(f"the journal does not show all steps: {seen.unreadable}")
    found.append("one device per rank is counted, and the steps of the leading rank")
    if policy is not None:
        packs = dict.fromkeys(rule.id.partition(".")[0] for rule in policy.rules)
        found += [f"{pack} also fires on: {text}" for pack in packs for text in known.alarms(pack)]
    return found
