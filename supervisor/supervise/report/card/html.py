"""The document as one HTML file: no script, nothing from elsewhere; a phone, a desktop, paper."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ..records import clock
from . import text
from .plot import plots
from .style import CSS

Part = Mapping[str, Any]

LONG = 40  # moments of a timeline that is closed at first
GOOD = frozenset(("RECOVERED", "CLEARED", "WITHDRAWN", "RELEASED"))
BUSY = frozenset(("OPEN", "ACTING", "WATCHING", "APPROVAL PENDING"))


def page(document: Part) -> str:
    """Return the page."""
    state = document["state"]
    tone = "good" if state in GOOD else "busy" if state in BUSY else "bad"
    title = f"{document['id']} {document['title']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_safe(title)}</title>\n<style>{CSS}</style></head>\n<body><main>\n"
        f'<header><p class="tags"><b class="sev {document["severity"].lower()}">'
        f'{document["severity"]}</b> <b class="state {tone}">{state}</b></p>\n'
        f'<h1>{_safe(document["title"])}</h1>\n<p class="sub">{_safe(_where(document))}</p>'
        f"</header>\n{''.join(_sections(document))}"
        f"<footer>{_safe(_foot(document))}</footer>\n</main></body></html>\n"
    )


def _safe(value: Any) -> str:
    """Return text for HTML, without control characters."""
    return escape("".join(c if c.isprintable() or c == "\n" else " " for c in str(value)))


def _where(document: Part) -> str:
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
    kept = "final" if document["final"] else f"not final: as of step {updated['step']}"
    return f"{kept} · policy {run['policy'] or 'unknown'} ({run['mode']}) · {document['schema']}"


def _sections(document: Part) -> Iterator[str]:
    yield _sentences(document)
    limit = (document["what"]["band"] or {}).get("limit")
    figures = list(plots(document["series"], limit if isinstance(limit, float) else None))
    if any(figures):
        dotted = 'class="limit"' in figures[0]
        undone = any('class="line left"' in figure for figure in figures)
        note = "red: undone by a rollback or restart" if undone else ""
        note += "; dotted: below it the loss counts as recovered" if dotted else ""
        plot = f'<div class="plots">{"".join(figures)}</div>'
        yield _section("Signals", plot, note.removeprefix("; "))
    rows = [(str(one["step"]), _action(one), text.outcome(one)) for one in document["actions"]]
    yield _table("Actions", ("Step", "Action", "Outcome"), rows)
    yield _diagnosis(document["diagnosis"])
    for failure in document["failures"][:2]:
        body = f"<p>{_safe(failure['text'])}</p>"
        if failure["traceback"]:
            body += f"<pre>{_safe(failure['traceback'].rstrip())}</pre>"
        yield _section("Error", body)
    yield _commands(document)
    conditions = [_condition(one) for one in document["conditions"]]
    head = ("", "Detector", "Value", "Limit", "Before")
    yield _table(
        "Conditions", head, conditions, folded=f"{len(conditions)} conditions of its rules"
    )
    yield _timeline(document["timeline"])


def _section(heading: str, body: str, note: str = "") -> str:
    small = f" <small>{_safe(note)}</small>" if note else ""
    return f"<section><h2>{heading}{small}</h2>{body}</section>\n" if body else ""


def _sentences(document: Part) -> str:
    names = (*text.SENTENCES, "next")
    rows = "".join(
        f"<dt>{name.capitalize()}</dt><dd>{_safe(document[name]['text'])}</dd>" for name in names
    )
    return f'<dl class="card">{rows}</dl>\n'


def _condition(one: Part) -> tuple[str, ...]:
    return (one["code"], one["detector"], *text.cells(one))


def _action(one: Part) -> str:
    undo = "undo: " if one["undo"] else ""
    return f"{undo}{one['verb']} {text.inline(one['args'])}".rstrip()


def _table(
    heading: str, head: Sequence[str], rows: Sequence[Sequence[str]], folded: str = ""
) -> str:
    """Return a section with a table, "" without rows; `folded`: the line that unfolds it."""
    if not rows:
        return ""
    top = "".join(f"<th>{_safe(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{_safe(name)}">{_safe(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    if folded:
        table = f"<details><summary>{_safe(folded)}</summary>{table}</details>"
    return _section(heading, table)


def _diagnosis(found: Part | None) -> str:
    if not found:
        return ""
    answers = "".join(
        f"<li>{_safe(name.replace('_', ' '))}: <b>{_safe(one.get('answer'))}</b>, "
        f"{_safe(one.get('text'))}</li>"
        for name, one in (found.get("questions") or {}).items()
    )
    advice = f"<p>Advice: {_safe(found['advice'])}</p>" if found.get("advice") else ""
    head = f"<p><b>{_safe(found.get('class', 'undecided'))}</b></p>"
    return _section("Diagnosis", f"{head}<ul>{answers}</ul>{advice}")


def _commands(document: Part) -> str:
    run, replay = document["run"], document["replay"]
    full = f"supervise why --full {shlex.quote(run['directory'])} {document['id']}"
    lines = [full, *filter(None, replay.values())]
    body = f"<pre>{_safe(chr(10).join(lines))}</pre>"
    if run["command"]:
        body += f"<p>The job: <code>{_safe(shlex.join(run['command']))}</code></p>"
    bundles = "".join(
        f"<li><code>{_safe(one['path'])}</code>, {len(one['files'])} files"
        + (f"; missing: {_safe(', '.join(one['missing']))}" if one["missing"] else "")
        + "</li>"
        for one in document["evidence"]["bundles"]
    )
    return _section("Look closer", f"{body}<ul>{bundles}</ul>" if bundles else body)


def _timeline(moments: Sequence[Part]) -> str:
    rows = "".join(
        f"<tr><td>{one['since_s']:+.1f} s</td><td>{one['step']}</td>"
        f"<td>{_safe(one['kind'])}</td><td>{_safe(one['text'])}</td></tr>"
        for one in moments
    )
    table = f'<table class="times"><tbody>{rows}</tbody></table>'
    shown = "" if len(moments) > LONG else " open"
    body = f"<details{shown}><summary>{len(moments)} records</summary>{table}</details>"
    return _section("Timeline", body)
