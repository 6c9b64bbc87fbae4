"""The status of a run as one document: what its supervisor wrote, and what its records add."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..errors import StoreError, understood
from ..report.receipt import shown
from ..runtime import late_messages
from ..runtime.status import verdict
from ..store import audit
from ..store.run_directory import RunDir
from ..store.run_records import read_outcome, skim
from ._run_life import life
from ._text import seconds_since

DERIVED = "the file is only a cache of the records; use `supervise why RUN`"


def read_status(run: RunDir, *, verified: bool = True) -> dict[str, Any]:
    """Return the content of `supervise status --json`.

    Args:
        verified: read every record of the audit log, up to its first damage; else skim it, as a
            view does that is drawn again and again.

    Raises:
        StoreError: a file cannot be read, or understood.
    """
    state = run.read_json("state.json") if (run.path / "state.json").exists() else {}
    what = f"the status in {run.path / 'state.json'}"
    if not isinstance(state, dict):
        raise StoreError(f"{what} is not a JSON object", hint=DERIVED)
    with understood(f"the records in {run.audit_path}", "supervise audit show RUN prints them"):
        found = read_outcome(_until_damage(run)) if verified else skim(run.audit_path)
        state = {"run": run.id, **state, **life(run, found)}
    if found.incomplete:
        state["record"] = str(found.incomplete.get("reason"))
    with understood(what, DERIVED):
        live = state["supervisor"] == "running"
        old_s = seconds_since(state.get("updated_wall"), datetime.now(UTC)) if live else None
        state["verdict"] = verdict(state, old_s).replace(" RUN", f" {shown(run)}")
        state["gravest"] = found.gravest[:3]
        if undelivered := late_messages.waiting(run.path):
            state["undelivered"] = len(undelivered)
    return state


def _until_damage(run: RunDir) -> Any:
    try:
        yield from audit.read(run.audit_path)
    except StoreError:  # `audit verify` reports it
        return
