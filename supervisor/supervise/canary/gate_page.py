"""A judgement as one HTML file: the values of the template `gate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..report.pages import Figure, figure_over_steps, render
from .ci_reports import SUITE, effect_text, rows

TONES = {"PASS": "good", "FAIL": "bad", "VOID": "bad", "INCONCLUSIVE": "busy"}


def gate_page(document: Mapping[str, Any]) -> str:
    """Return the page: verdict, effect, both losses, their difference with margin, all checks."""
    return render(
        "gate",
        document=document,
        suite=SUITE,
        tone=TONES[document["verdict"]],
        effect=effect_text(document),
        figures=[plot for plot in _figures(document) if plot is not None],
        rows=list(rows(document)),
    )


def _figures(document: Mapping[str, Any]) -> Iterator[Figure | None]:
    effect = document["effect"]
    band = None if effect is None else (effect["low"], effect["high"])
    for number, pair in enumerate(document["pairs"], 1):
        series = pair["series"]
        names = f"{pair['baseline']} and {pair['candidate']}"
        losses = [("line baseline", series["baseline"]), ("line", series["candidate"])]
        yield figure_over_steps(f"Pair {number}: {names}", losses)
        yield figure_over_steps(
            f"Pair {number}: candidate minus baseline",
            [("line", series["difference"])],
            limits=[("limit", 0.0), ("margin", document["margin"])],
            band=band,
        )
