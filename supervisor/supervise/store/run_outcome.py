"""Outcome of a run in its audit log: its incidents, its end, its last action."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.model.decisions import SEVERITIES
from . import hash_chain
from .recorder import incomplete

Record = Mapping[str, Any]
OUTCOMES = ("commit", "abort", "in_doubt")
_INCIDENT = b'"kind":"incident"'  # as `hash_chain` writes it; quotes inside of a text are escaped


@dataclass(slots=True)
class RunOutcome:
    """How far a run has come.

    Attributes:
        last: the newest record. end: the same, if the run ended with it.
        incidents: id -> `id severity phase step wall headline`, oldest first; `phase` is `open`,
            `held` or `closed`.
        relaunching: the newest action on the job is a relaunch without an outcome.
        incomplete: see `recorder.incomplete`.
    """

    last: Record | None = None
    end: Record | None = None
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)
    relaunching: bool = False
    incomplete: Record | None = None

    def take(self, record: Record) -> None:
        """Take the next record."""
        kind, data = record["kind"], record.get("data") or {}
        self.last = record
        self.end = record if kind == "run_end" else None
        if kind in OUTCOMES and "action" in data:
            self.relaunching = False
        elif kind == "intent":
            self.relaunching = bool(data["action"]["verb"] == "relaunch")
        elif kind == "incident":
            self._take_incident(record, str(data.get("what")))

    def _take_incident(self, record: Record, what: str) -> None:
        name, severity = str(record["incident"]), record.get("severity")
        if what == "opened":
            self.incidents[name] = {
                "id": name,
                "severity": severity,
                "phase": "open",
                "step": record["step"],
                "wall": record.get("wall"),
                "headline": record["reason"],
            }
        elif (found := self.incidents.get(name)) is not None:
            if severity in SEVERITIES:
                found["severity"] = min(found["severity"], severity)
            if what in ("closed", "held"):
                found["phase"] = what

    @property
    def gravest(self) -> list[dict[str, Any]]:
        """The incidents: open ones first, then by severity, then the newest."""
        newest_first = reversed(self.incidents.values())
        return sorted(newest_first, key=lambda i: (i["phase"] == "closed", i["severity"]))

    @property
    def worst(self) -> dict[str, Any] | None:
        """The incident of the highest severity in the whole run, the newest of these."""
        found = list(reversed(self.incidents.values()))
        return min(found, key=lambda i: str(i["severity"]), default=None)


def read_outcome(records: Iterable[Record]) -> RunOutcome:
    """Fold all records of a log."""
    found = RunOutcome()

    def taken() -> Iterator[Record]:
        for record in records:
            found.take(record)
            yield record

    found.incomplete = incomplete(taken())
    return found


def skim(path: Path) -> RunOutcome:
    """Return the incidents and the end from a log that is neither verified nor read in full.

    For lists of many runs. A damaged line is passed over: `audit verify` reports it.

    Raises:
        StoreError: the file cannot be read.
    """
    found, last = RunOutcome(), b""
    for line, _ in hash_chain.lines(path):
        if line.endswith(b"\n"):
            last = line
            if _INCIDENT in line:
                _take(found, line)
    if last and _INCIDENT not in last:
        _take(found, last)
    return found


def _take(found: RunOutcome, line: bytes) -> None:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        found.take(json.loads(line[65:]))
