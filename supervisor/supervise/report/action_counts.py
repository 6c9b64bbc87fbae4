"""What became of the actions that touch the job: done, failed, or in doubt. From records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

DONE, FAILED, DOUBT = "done", "failed", "in doubt"
_ENDS = {"commit": DONE, "abort": FAILED, "in_doubt": DOUBT}


def actions(records: Iterable[Mapping[str, Any]]) -> list[tuple[str | None, str]]:
    """Return `(incident, what became of it)` of each intended action on the job, oldest first.

    One without an outcome is in doubt: what it did is not known, or it is under way.
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


def told(counts: Mapping[str, int]) -> str:
    """Return "2 actions on the job, 1 failed"; what was not done is named where there is any."""
    number = counts.get(DONE, 0)
    text = f"{number or 'no'} action{'s' if number > 1 else ''} on the job"
    return text + "".join(f", {counts[how]} {how}" for how in (FAILED, DOUBT) if counts.get(how))


def count(records: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return how many were done, failed, and are in doubt."""
    return Counter(how for _, how in actions(records))
