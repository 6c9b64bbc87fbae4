"""A stability record as Markdown and as one HTML page without any other file, from one table each.

Texts of a job may hold anything: both forms escape them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.model.format_readings import number
from .pages import render
from .stability_record import StabilityRecord


@dataclass(frozen=True, slots=True)
class Block:
    """A section: its heading, then a table."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_of(value: Any) -> str:
    """Return a value of a record as one line of text."""
    if isinstance(value, msgspec.Struct):
        return text_of(msgspec.to_builtins(value))
    if isinstance(value, Mapping):
        if value.keys() == {"unknown"}:
            return f"unknown: {value['unknown']}"
        return "; ".join(f"{name}: {text_of(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text_of, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, float):
        return number(value)
    return "".join(c if c.isprintable() else " " for c in str(value))


def _pairs(title: str, fields: Any) -> Block:
    rows = [(key.replace("_", " "), text_of(value)) for key, value in _items(fields).items()]
    return Block(title, ("field", "value"), rows)


def _table(title: str, values: Any) -> Block:
    """Return a table of objects with the same fields, or why there is none."""
    if not isinstance(values, (list, tuple)):
        return Block(title, ("field", "value"), [(title, text_of(values))])
    rows = [_items(value) for value in values]
    head = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text_of(row.get(name)) for name in head] for row in rows]
    return Block(title, [name.replace("_", " ") for name in head], cells)


def _items(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else dict(msgspec.to_builtins(value))


def blocks(record: StabilityRecord) -> Iterator[Block]:
    """Yield the sections of a record."""
    yield _pairs("Run", record.run)
    yield _pairs("Policy", record.policy)
    identity = {
        name: _packages(value) if name == "packages" else value
        for name, value in record.identity.initial.items()
    }
    yield _pairs("Identity of the job at its first launch", identity)
    yield _table("Changes of the identity", record.identity.changes)
    yield _table("Monitored signals", record.monitors)
    yield _table("Rules, thresholds and lead times", record.rules)
    yield _table("Faults injected in this run", record.fault_injection.in_this_run)
    yield _table("Trials cited", [_citation(trial) for trial in record.citations])
    yield _table("Fault-injection design", record.fault_injection.design)
    yield _table("Incidents", record.incidents)
    interventions = _items(record.interventions)
    actions = interventions.pop("actions")
    yield _pairs("Interventions", interventions)
    yield _table("Actions on the job", actions)
    yield _table("Recovery procedures", record.recovery)
    yield _pairs("Gaps", record.gaps)
    yield _pairs("Cost", record.cost)
    yield Block("Limits", ("limit",), [[text_of(limit)] for limit in record.limits])
    audit = _items(record.audit)
    parts = audit.pop("parts")
    yield _pairs("Audit", audit)
    yield _table("Audited parts", parts)
    yield _pairs("Written by", record.made_by)


def _citation(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return a citation less what its rules have shown, which is with the rules."""
    return {name: value for name, value in trial.items() if name not in ("monitors", "runs")}


def _packages(packages: Any) -> Any:
    if not isinstance(packages, Mapping) or "versions" not in packages:
        return packages
    return {
        "source": packages["source"],
        "number": len(packages["versions"]),
        "sha256": packages["sha256"],
    }


def markdown(record: StabilityRecord) -> str:
    """Return a record as Markdown."""
    lines = [f"# Stability record of run {record.run.id}", ""]
    for block in blocks(record):
        lines += [f"## {block.title}", ""]
        if not block.rows:
            lines += ["none", ""]
            continue
        lines.append(f"| {' | '.join(block.head)} |")
        lines.append("| --- " * len(block.head) + "|")
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in block.rows]
        lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)


def page(record: StabilityRecord) -> str:
    """Return a record as an HTML page."""
    return render("record", run=record.run.id, blocks=list(blocks(record)))
