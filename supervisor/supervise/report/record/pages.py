"""A record as Markdown and as one HTML page without any other file, from the same blocks.

Texts of a job may hold anything: both forms escape them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.model.format_readings import number
from ..page_templates import render

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """A section: its heading, then a table."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_of(value: Any) -> str:
    """Return a value of a record as one line of text."""
    if isinstance(value, Mapping):
        if value.keys() == {"unknown"}:
            return f"unknown: {value['unknown']}"
        return "; ".join(f"{name}: {text_of(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(text_of, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, float):
        return number(value)
    return "".join(c if c.isprintable() else " " for c in str(value))


def _pairs(title: str, fields: Fields) -> Block:
    named = [(name.replace("_", " "), text_of(value)) for name, value in fields.items()]
    return Block(title, ("field", "value"), named)


def _table(title: str, rows: Any) -> Block:
    """Return a table of objects with the same fields, or why there is none."""
    if not isinstance(rows, list):
        return Block(title, ("field", "value"), [(title, text_of(rows))])
    head = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text_of(row.get(name)) for name in head] for row in rows]
    return Block(title, [name.replace("_", " ") for name in head], cells)


def blocks(record: Fields) -> Iterator[Block]:
    """Yield the sections of a record."""
    yield _pairs("Run", record["run"])
    yield _pairs("Policy", record["policy"])
    first = record["identity"]["first"]
    short = {
        name: value if name != "packages" else _packages(value) for name, value in first.items()
    }
    yield _pairs("Identity of the job at its first launch", short)
    yield _table("Changes of the identity", record["identity"]["changes"])
    yield _table("Monitored signals", record["monitors"])
    yield _table("Rules, thresholds and lead times", record["rules"])
    yield _table("Faults injected in this run", record["fault_injection"]["in_this_run"])
    yield _table("Trials cited", [_cited(one) for one in record["citations"]])
    yield _table("Fault-injection design", record["fault_injection"]["design"])
    yield _table("Incidents", record["incidents"])
    done = record["interventions"]
    yield _pairs(
        "Interventions", {name: done[name] for name in ("by_name", "safeguards", "operators")}
    )
    yield _table("Actions on the job", done["actions"])
    yield _table("Recovery procedures", record["recovery"])
    yield _pairs("Gaps", record["gaps"])
    yield _pairs("Cost", record["cost"])
    yield Block("Limits", ("limit",), [[text_of(each)] for each in record["limits"]])
    yield _pairs("Audit", {k: v for k, v in record["audit"].items() if k != "parts"})
    yield _table("Audited parts", record["audit"]["parts"])
    yield _pairs("Written by", record["made_by"])


def _cited(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return a citation less what its rules have shown, which is with the rules."""
    return {name: value for name, value in trial.items() if name not in ("monitors", "runs")}


def _packages(found: Any) -> Any:
    if not isinstance(found, Mapping) or "versions" not in found:
        return found
    return {
        "source": found["source"],
        "number": len(found["versions"]),
        "sha256": found["sha256"],
    }


def markdown(record: Fields) -> str:
    """Return a record as Markdown."""
    lines = [f"# Stability record of run {record['run']['id']}", ""]
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


def page(record: Fields) -> str:
    """Return a record as an HTML page."""
    return render("record", run=str(record["run"]["id"]), blocks=list(blocks(record)))
