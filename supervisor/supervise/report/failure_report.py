"""Reasons for the end of a job, from audit records, the cause first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.model.failure import KIND, Failure, by_cause

MOST = 8  # failures in full; the rest follows from one of them as a rule


def failures(records: Sequence[Mapping[str, Any]]) -> list[Failure]:
    """Return how the processes of the newest launch ended, the one that explains the rest first."""
    found: list[Failure] = []
    for record in records:
        data = record.get("data") or {}
        if record["kind"] == "note" and data.get("what") == "launched":
            found.clear()
        elif record["kind"] == "note" and data.get("what") == KIND:
            found.append(Failure.of(data["details"]))
    return by_cause(found)


def lines(found: Sequence[Failure]) -> Iterator[str]:
    """Yield a heading, and per failure its text, its class and its traceback; nothing for none."""
    if found:
        yield ""
        yield "errors and signals that ended processes of the job"
    for failure in found[:MOST]:
        yield f"  {failure.text}"
        if failure.cls:
            yield f"    {failure.cls}: {failure.title}; relaunch: {failure.relaunch}"
        yield from (f"    | {line}" for line in failure.traceback.rstrip().splitlines())
    if len(found) > MOST:
        yield f"  and {len(found) - MOST} more"
