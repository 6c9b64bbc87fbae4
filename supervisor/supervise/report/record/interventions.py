"""Interventions in a job, from audit records: drills, actions with their outcomes, safeguards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..records import DONE, DOUBT, FAILED, Record, is_of

ENDS = {"commit": DONE, "abort": FAILED, "in_doubt": DOUBT}
OBSERVED = ("ack_step", "step", "from_step", "attempt", "held_s", "path", "sha256", "pid")


def unknown(why: str) -> dict[str, str]:
    """Return the value of a field that is not known."""
    return {"unknown": why}


def of(records: Sequence[Record], kind: str, what: str) -> list[Record]:
    """Return the records of a kind with `what` in their data."""
    return [r for r in records if is_of(r, kind, what)]


def drills(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each fault that was injected, and how many steps later what followed."""
    found = []
    for r in of(records, "note", "drill"):
        data = r["data"]
        fault = (data.get("details") or {}).get("fault")
        step = r["step"] if data.get("at_step") is None else int(data["at_step"])
        if fault is None or "refused" in (data.get("details") or {}):
            continue
        later = [one for one in records if one["seq"] > r["seq"]]
        fired = next((o for o in later if is_of(o, "rule", "fired")), None)
        acted = next((o for o in later if _touches(o)), None)
        found.append(
            {
                "fault": fault,
                "step": step,
                "record": r["seq"],
                "params": (data.get("details") or {}).get("params", {}),
                "rule": unknown("no rule fired") if fired is None else fired["rule"],
                "reported_after": _after(fired, step, "no rule fired"),
                "acted_after": _after(acted, step, "no action on the job"),
            }
        )
    return found


def _after(record: Record | None, step: int, why: str) -> Any:
    return unknown(why) if record is None else max(0, record["step"] - step)


def _touches(record: Record) -> bool:
    return record["kind"] == "intent" and bool(record["data"]["action"]["touches_job"])


def actions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each action on the job and its outcome, oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for r in records:
        if _touches(r):
            action = r["data"]["action"]
            found[action["id"]] = {
                "id": action["id"],
                "action": action["verb"],
                "runbook": action.get("runbook") or unknown("an operator ordered it"),
                "incident": r.get("incident") or unknown("of no incident"),
                "step": r["step"],
                "outcome": DOUBT,
                "observed": {},
                "record": r["seq"],
            }
        elif r["kind"] in ENDS and "action" in (r.get("data") or {}):
            made = found.get(r["data"]["action"]["id"])
            if made is not None:
                result = r["data"].get("result") or {}
                made["outcome"] = ENDS[r["kind"]]
                made["observed"] = {name: result[name] for name in OBSERVED if name in result}
    return list(found.values())


def interventions(records: Sequence[Record], made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_name: dict[str, Counter[str]] = {}
    for action in made:
        by_name.setdefault(action["action"], Counter())[action["outcome"]] += 1
    safeguards = Counter(
        str((r["data"].get("details") or {}).get("order", "safeguard"))
        for r in of(records, "note", "safeguard")
    )
    return {
        "by_name": {name: dict(sorted(count.items())) for name, count in sorted(by_name.items())},
        "safeguards": dict(sorted(safeguards.items())),
        "operators": [
            {"step": r["step"], "record": r["seq"], "command": r["reason"]}
            for r in of(records, "note", "operator")
        ],
        "actions": list(made),
    }
