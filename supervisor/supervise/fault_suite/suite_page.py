"""A suite as one HTML file: the values of the template `suite`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ..report.pages import Figure, figure_over_steps, render
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

LINES = ("healthy", "unattended", "acting")
MARKS = ("injected", "alarm", "departed")
MATRIX = (
    "steps from the fault to the alarm, the median; green: ahead of the loss, amber: with or "
    "behind it, blue: the loss stays in its band; red: how many false alarms in healthy runs"
)
KEY = (
    "of the first seed that was judged. Gray: healthy; red: without actions; green: with actions. "
    "Vertical lines: the fault, amber the first alarm, dotted red the loss leaves its band"
)


class Cell(NamedTuple):
    """One cell of the matrix; `kind` is its class, `share` the runs that it is of."""

    text: str = ""
    kind: str = ""
    share: str = ""


class Row(NamedTuple):
    """One monitor of the matrix; the first cell is of the healthy runs."""

    rule: str
    cells: list[Cell]


def suite_page(document: Document) -> str:
    """Return the page: faults, undetected ones, monitors, their matrix, and a plot per fault."""
    policy = document["policy"]
    faults = [fault["fault"] for fault in document["faults"] if not fault["excluded"]]
    return render(
        "suite",
        document=document,
        summary=summary(document),
        subtitle=(
            f"policy {policy['name']} ({policy['digest'][:12]}) · {document['steps']} steps, the "
            f"fault at {document['at']} · seeds {', '.join(map(str, document['seeds']))}"
        ),
        reading=READING,
        fault_head=list(FAULTS),
        faults=list(fault_rows(document)),
        meanings=[f"{fault}: {text}" for fault, text in document["means"].items()],
        undetected=list(undetected(document)),
        monitor_head=list(MONITORS),
        monitors=list(monitor_rows(document)),
        matrix_note=MATRIX,
        matrix_head=["", "healthy", *faults],
        matrix=list(_matrix(document, faults)),
        figure_note=KEY,
        figures=list(_figures(document)),
        limits=list(limits(document)),
    )


def _matrix(document: Document, faults: list[str]) -> Iterator[Row]:
    runs = {fault["fault"]: fault["runs"] for fault in document["faults"]}
    for monitor in document["monitors"]:
        count = monitor["false_alarms"]
        healthy = Cell(str(count), "false") if count else Cell()
        yield Row(monitor["rule"], [healthy, *(_cell(monitor, f, runs[f]) for f in faults)])


def _cell(monitor: Document, fault: str, runs: int) -> Cell:
    delays = monitor["delays"].get(fault)
    if not delays:
        return Cell()
    leads = monitor["leads"].get(fault)
    kind = "alone" if not leads else "ahead" if median(leads) > 0 else "behind"
    share = "" if len(delays) == runs else f"({len(delays)} of {runs})"
    return Cell(f"{median(delays):g}", kind, share)


def _figures(document: Document) -> Iterator[Figure]:
    for fault, plot in document["plots"].items():
        ends = "".join(f"; a run {text}" for text in plot["ends"])
        figure = figure_over_steps(
            f"{fault}, seed {plot['seed']}{ends}",
            [(f"line {name}", plot["series"].get(name, ())) for name in LINES],
            marks=[(mark, plot[mark]) for mark in MARKS if plot[mark] is not None],
            log=True,
        )
        if figure is not None:
            yield figure
