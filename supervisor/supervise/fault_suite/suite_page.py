"""A suite as one HTML file: no script, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Any

from ..report.card.plot import LOG, Scale
from ..report.card.style import CSS
from .suite_document import (
    FAULTS,
    MONITORS,
    READING,
    Document,
    fault_rows,
    limits,
    monitor_rows,
    summary,
    undetected,
)

OWN_CSS = """
main{max-width:75rem}
.line.healthy{stroke:var(--dim);stroke-width:1.5}.line.unattended{stroke:var(--red)}
.line.acting{stroke:var(--green)}
line.injected{stroke:var(--fg);stroke-width:1}line.departed{stroke:var(--red);stroke-width:1;
stroke-dasharray:2 4}line.alarm{stroke:var(--amber);stroke-width:1.5}
line.injected,line.departed,line.alarm{vector-effect:non-scaling-stroke}
.matrix td,.matrix th{padding:.2rem .45rem;text-align:center;white-space:nowrap}
.matrix th:not(:first-child){writing-mode:vertical-rl;transform:rotate(180deg);text-align:left}
.matrix th:first-child,.matrix td:first-child{text-align:left}
.scroll{overflow-x:auto}
@media (min-width:40rem){td[data-of="fault"],td[data-of="monitor"],td[data-of="sev"],
td[data-of="best monitor"]{white-space:nowrap;overflow-wrap:normal}}
td.ahead{background:color-mix(in srgb,var(--green) 25%,transparent)}
td.behind{background:color-mix(in srgb,var(--amber) 25%,transparent)}
td.alone{background:color-mix(in srgb,var(--line) 15%,transparent)}
td.false{background:color-mix(in srgb,var(--red) 25%,transparent)}
.key b{font-weight:600}
@media (max-width:40rem){.matrix thead{display:table-header-group!important}
.matrix tr{display:table-row!important}.matrix td{display:table-cell!important}}
"""
LINES = ("healthy", "unattended", "acting")
MARKS = ("injected", "alarm", "departed")


def suite_page(document: Document) -> str:
    """Return the page: faults, undetected ones, monitors, their matrix, and a plot per fault."""
    policy = document["policy"]
    sub = (
        f"policy {policy['name']} ({policy['digest'][:12]}) · {document['steps']} steps, the fault "
        f"at {document['at']} · seeds {', '.join(map(str, document['seeds']))}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Drill suite: {_safe(policy['name'])}</title>\n"
        f"<style>{CSS}{OWN_CSS}</style></head>\n<body><main>\n"
        f'<header><h1>{_safe(summary(document))}</h1>\n<p class="sub">{_safe(sub)}</p>'
        f'<p class="sub"><code>{_safe(" ".join(document["command"]))}</code></p></header>\n'
        f"{_section('Faults', READING, _table(FAULTS, fault_rows(document)))}"
        f"{_section('What was injected', '', _list(_meanings(document), ''))}"
        f"{_section('Undetected faults', '', _list(undetected(document), 'None.'))}"
        f"{_section('Monitors', 'best first', _table(MONITORS, monitor_rows(document)))}"
        f"{_section('Monitors by fault', MATRIX, _matrix(document))}"
        f"{_section('Losses', KEY, _plots(document))}"
        f"{_section('Limits of this suite', '', _list(limits(document), 'Nothing was noticed.'))}"
        f"<footer>{_safe(document['schema'])} · {_safe(document['suite'])}</footer>\n"
        "</main></body></html>\n"
    )


MATRIX = (
    "steps from the fault to the alarm, the median; green: ahead of the loss, amber: with or "
    "behind it, blue: the loss stays in its band; red: how many false alarms in healthy runs"
)
KEY = (
    "of the first seed that was judged. Gray: healthy; red: without actions; green: with actions. "
    "Vertical lines: the fault, amber the first alarm, dotted red the loss leaves its band"
)


def _meanings(document: Document) -> list[str]:
    return [f"{fault}: {text}" for fault, text in document["means"].items()]


def _safe(value: Any) -> str:
    return escape("".join(c if c.isprintable() else " " for c in str(value)))


def _section(title: str, about: str, body: str) -> str:
    note = f" <small>{_safe(about)}</small>" if about else ""
    return f"<section><h2>{_safe(title)}{note}</h2>{body}</section>\n"


def _list(texts: Sequence[str], none: str) -> str:
    items = "".join(f"<li>{_safe(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else f"<p>{_safe(none)}</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_safe(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{_safe(name)}">{_safe(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _matrix(document: Document) -> str:
    faults = [one["fault"] for one in document["faults"] if not one["excluded"]]
    runs = {one["fault"]: one["runs"] for one in document["faults"]}
    head = "".join(f"<th>{_safe(name)}</th>" for name in ("", "healthy", *faults))
    body = ""
    for one in document["monitors"]:
        count = one["false_alarms"]
        cells = f'<td class="false">{count}</td>' if count else "<td></td>"
        cells += "".join(_cell(one, fault, runs[fault]) for fault in faults)
        body += f"<tr><td>{_safe(one['rule'])}</td>{cells}</tr>"
    table = f'<table class="matrix"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell(monitor: Document, fault: str, runs: int) -> str:
    delays = monitor["delays"].get(fault)
    if not delays:
        return "<td></td>"
    leads = monitor["leads"].get(fault)
    kind = "alone" if not leads else "ahead" if median(leads) > 0 else "behind"
    share = "" if len(delays) == runs else f" <small>({len(delays)} of {runs})</small>"
    return f'<td class="{kind}">{median(delays):g}{share}</td>'


def _plots(document: Document) -> str:
    return f'<div class="plots">{"".join(_figures(document))}</div>'


def _figures(document: Document) -> Iterator[str]:
    for fault, plot in document["plots"].items():
        points = [p for series in plot["series"].values() for p in series if math.isfinite(p[1])]
        if not points:
            continue
        low, high = min(v for _, v in points), max(v for _, v in points)
        scale = Scale(low, high, low > 0.0 and high > LOG * low)
        first, last = min(s for s, _ in points), max(s for s, _ in points)
        width = max(1.0, last - first)
        drawn = "".join(
            f'<line class="{mark}" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="100"/>'
            for mark in MARKS
            if plot[mark] is not None
            for x in (100.0 * (plot[mark] - first) / width,)
        )
        for name in LINES:
            path = " ".join(
                f"{100.0 * (step - first) / width:.2f},{scale.at(value):.2f}"
                for step, value in plot["series"].get(name, ())
                if math.isfinite(value)
            )
            drawn += f'<polyline class="line {name}" points="{path}"/>' if path else ""
        ends = "".join(f"; a run {text}" for text in plot["ends"])
        title = f"{fault}, seed {plot['seed']}{', log scale' if scale.is_log else ''}{ends}"
        yield (
            f'<figure class="plot"><figcaption>{_safe(title)} <span class="range">'
            f'{low:.4g} to {high:.4g}</span></figcaption><div class="frame">'
            f'<svg role="img" aria-label="{_safe(title)}" viewBox="0 0 100 100" '
            f'preserveAspectRatio="none">{drawn}</svg></div><div class="axis">'
            f"<span>step {first:g}</span><span>step {last:g}</span></div></figure>"
        )
