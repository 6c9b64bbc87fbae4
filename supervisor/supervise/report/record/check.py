"""Compares a record with the run that it is about, field by field, and with another record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("signal", "id", "fault", "incident", "runbook", "rule", "part")  # what names a list's item
MAX_FIELDS = 20  # named of those that differ
# What is read from the installation and not from the run: another version may say it otherwise.
INSTALLATION = (
    *("made_by", "limits", "fault_injection.design"),
    *("module", "meaning", "unit", "formula", "formula_version", "faults"),
    *("lead_time", "blind_to", "threshold_source", "shown"),
)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, value)` of each leaf; items of a list are named by what identifies them."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        used: set[str] = set()
        for place, inner in enumerate(value):
            named = next((str(inner[key]) for key in KEYS if key in inner), str(place))
            named = f"{named} {place}" if named in used else named
            used.add(named)
            yield from leaves(inner, f"{path}[{named}]")
    else:
        yield path, value


def differences(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return `(path, before, after)` of each leaf that differs; None for one that is missing."""
    old, new = dict(leaves(before)), dict(leaves(after))
    return [
        (path, old.get(path), new.get(path))
        for path in [*old, *(path for path in new if path not in old)]
        if path not in old or path not in new or old[path] != new[path]
    ]


def of_run(recorded: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the fields in which a record differs from the run, and whether all were compared.

    Where another installation wrote it, what comes from that is left out.
    """
    same = recorded.get("made_by") == rebuilt["made_by"]
    found = [path for path, _, _ in differences(recorded, rebuilt) if same or not _of_maker(path)]
    return found, same


def _of_maker(path: str) -> bool:
    parts = path.replace("[", ".").replace("]", "").split(".")
    return path.startswith(INSTALLATION[:3]) or not {*INSTALLATION[3:]}.isdisjoint(parts)


def parse(raw: bytes) -> Any:
    """Return the JSON document in the bytes of a record; ValueError if it is none."""
    return json.loads(raw)


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as the bytes that are signed."""
    return (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
