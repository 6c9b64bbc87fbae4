"""Sources of an incident's document in a run directory: frames, facts of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StoreError
from ..store import run_records
from ..store.run_directory import RunDir
from .card.series import Tapes
from .records import Record, is_of

NEAR = 100_000  # events before an incident that hold the frames it shows, also of many ranks


def described(run: RunDir) -> Mapping[str, Any]:
    """Return the content of run.json, as far as it can be read."""
    with contextlib.suppress(StoreError):
        found = run.read_json("run.json")
        if isinstance(found, dict):
            return found
    return {"run": run.id}


def tapes(run: RunDir, records: Sequence[Record], incident: str) -> Tapes | None:
    """Return the frames around an incident from the journal, None where it cannot be read."""
    mine = [r for r in records if r.get("incident") == incident and r["kind"] == "incident"]
    first = next(r["event"] for r in mine if is_of(r, "incident", "opened"))
    last = next((r["event"] for r in mine if is_of(r, "incident", "closed")), None)
    found = Tapes()
    try:
        for number, frame, names in run_records.numbered(run, last):
            if number > first - NEAR:
                found.add(frame, names, opened=number > first)
    except StoreError:
        return None
    return found
