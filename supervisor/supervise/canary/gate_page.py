"""A judgement as one HTML file: no script, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ..report.card.plot import Scale
from ..report.card.style import CSS
from .ci_reports import SUITE, effect_text, rows

TONES = {"PASS": "good", "FAIL": "bad", "VOID": "bad", "INCONCLUSIVE": "busy"}
OWN_CSS = """
.line.baseline{stroke:var(--dim)}
.band{fill:var(--line);opacity:.18}
line.margin{stroke:var(--red);stroke-width:1.5;vector-effect:non-scaling-stroke}
@media (min-width:40rem){th,td:nth-child(-n+4){white-space:nowrap}}
td.fail,td.void{color:var(--red)}td.inconclusive{color:var(--amber)}td.pass{color:var(--green)}
"""
Point = Sequence[float]


def gate_page(document: Mapping[str, Any]) -> str:
    """Return the page: verdict, effect, both losses, their difference with margin, all checks."""
    verdict = document["verdict"]
    texts = [*document["reasons"], *document["notes"]]
    reasons = "".join(f"<li>{_safe(text)}</li>" for text in texts)
    steps = document["steps"]
    figures = "".join(_figures(document))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{SUITE}: {verdict}</title>\n<style>{CSS}{OWN_CSS}</style></head>\n<body><main>\n"
        f'<header><p class="tags"><b class="state {TONES[verdict]}">{verdict}</b></p>\n'
        f'<h1>{_safe(effect_text(document))}</h1>\n<p class="sub">steps {steps["first"]} to '
        f"{steps['end'] - 1} · margin {document['margin']:g} · alpha {document['alpha']:g}</p>"
        f"</header>\n<ul>{reasons}</ul>\n"
        "<section><h2>Loss <small>gray: the baseline; red: the margin; shaded: the interval"
        f'</small></h2><div class="plots">{figures}</div></section>\n'
        f"{_checks(document)}<footer>{_safe(document['schema'])}</footer>\n</main></body></html>\n"
    )


def _safe(value: Any) -> str:
    return escape("".join(c if c.isprintable() else " " for c in str(value)))


def _figures(document: Mapping[str, Any]) -> Iterator[str]:
    effect = document["effect"]
    for number, pair in enumerate(document["pairs"], 1):
        series = pair["series"]
        names = f"{pair['baseline']} and {pair['candidate']}"
        lines = [("line baseline", series["baseline"]), ("line", series["candidate"])]
        yield _figure(f"Pair {number}: {names}", lines)
        band = None if effect is None else (effect["low"], effect["high"])
        title = f"Pair {number}: candidate minus baseline"
        yield _figure(title, [("line", series["difference"])], document["margin"], band)


def _figure(
    title: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    margin: float | None = None,
    band: tuple[float, float] | None = None,
) -> str:
    points = [point for _, series in lines for point in series if math.isfinite(point[1])]
    if not points:
        return ""
    marks = [] if margin is None else [0.0, margin]
    values = [*(value for _, value in points), *marks]
    scale = Scale(min(values), max(values), False)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    width = max(1.0, last - first)
    drawn = "" if band is None or not all(map(math.isfinite, band)) else _band(scale, *band)
    for mark, kind in zip(marks, ("limit", "margin"), strict=False):
        y = scale.at(mark)
        drawn += f'<line class="{kind}" x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}"/>'
    for kind, series in lines:
        path = " ".join(
            f"{100.0 * (step - first) / width:.2f},{scale.at(value):.2f}"
            for step, value in series
            if math.isfinite(value)
        )
        drawn += f'<polyline class="{kind}" points="{path}"/>' if path else ""
    return (
        f'<figure class="plot"><figcaption>{_safe(title)} <span class="range">'
        f'{scale.low:.4g} to {scale.high:.4g}</span></figcaption><div class="frame">'
        f'<svg role="img" aria-label="{_safe(title)}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none">{drawn}</svg></div><div class="axis">'
        f"<span>step {first:g}</span><span>step {last:g}</span></div></figure>"
    )


def _band(scale: Scale, low: float, high: float) -> str:
    top, bottom = scale.at(high), scale.at(low)
    height = max(0.5, bottom - top)
    return f'<rect class="band" x="0" width="100" y="{top:.2f}" height="{height:.2f}"/>'


def _checks(document: Mapping[str, Any]) -> str:
    head = ("Check", "Result", "Baseline", "Candidate", "")
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{name}"{_tone(name, status)}>{_safe(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows(document)
        for status in (row[1],)
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<section><h2>Guards and invariants</h2>{table}</section>\n"


def _tone(column: str, status: str) -> str:
    return f' class="{status}"' if column == "Result" else ""
