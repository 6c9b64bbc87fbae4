"""The document as one HTML file: the values of the template `incident`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..page_templates import render
from ..records import clock
from . import text
from .plot import figures

Part = Mapping[str, Any]

GOOD = frozenset(("RECOVERED", "CLEARED", "WITHDRAWN", "RELEASED"))
BUSY = frozenset(("OPEN", "ACTING", "WATCHING", "APPROVAL PENDING"))


def page(document: Part) -> str:
    """Return the page."""
    state, run = document["state"], document["run"]
    limit = (document["what"]["band"] or {}).get("limit")
    plots = figures(document["series"], limit if isinstance(limit, float) else None)
    full = f"supervise why --full {shlex.quote(run['directory'])} {document['id']}"
    return render(
        "incident",
        document=document,
        tone="good" if state in GOOD else "busy" if state in BUSY else "bad",
        subtitle=_subtitle(document),
        sentences=(*text.SENTENCES, "next"),
        figures=plots,
        figure_note="; ".join(
            note
            for note, present in (
                (
                    "red: undone by a rollback or restart",
                    any(line.kind == "line left" for plot in plots for line in plot.lines),
                ),
                (
                    "dotted: below it the loss counts as recovered",
                    any(plot.limits for plot in plots),
                ),
            )
            if present
        ),
        actions=[(str(a["step"]), _action(a), text.outcome(a)) for a in document["actions"]],
        conditions=[(c["code"], c["detector"], *text.cells(c)) for c in document["conditions"]],
        commands=[full, *filter(None, document["replay"].values())],
        job=shlex.join(run["command"]) if run["command"] else "",
        foot=_foot(document),
    )


def _subtitle(document: Part) -> str:
    run, opened, closed = document["run"], document["opened"], document["closed"]
    until = "" if closed is None else f" to {closed['step']}"
    parts = (
        f"{document['id']} of run {run['id']}",
        f"step {opened['step']}{until}",
        f"{str(opened['wall'] or '')[:10]} {clock(opened['wall'])[:8]} UTC",
        f"host {run['host']}" if run["host"] else "",
        "" if document["scope"]["rank"] is None else f"rank {document['scope']['rank']}",
    )
    return " · ".join(filter(None, parts))


def _foot(document: Part) -> str:
    run, updated = document["run"], document["updated"]
    state = "final" if document["final"] else f"not final: as of step {updated['step']}"
    return f"{state} · policy {run['policy'] or 'unknown'} ({run['mode']}) · {document['schema']}"


def _action(action: Part) -> str:
    undo = "undo: " if action["undo"] else ""
    return f"{undo}{action['verb']} {text.inline(action['args'])}".rstrip()
