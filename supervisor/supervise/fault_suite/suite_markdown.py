"""A suite as Markdown, for a repository or the summary of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .suite_document import FAULTS, MONITORS, Document, doubts, fault_rows, monitor_rows, undetected

READING = """`after`: steps from the fault to the first alarm, of all seeds.
`loss leaves`: steps until the loss left the band around the healthy run of its seed. `lead`: of
the first alarm before that. `harm`: runs that ended worse, without actions. `lost`: nats x steps
against the healthy run, without actions; `with actions`: under the policy. All are medians."""


def markdown(document: Document) -> str:
    """Return the tables, undetected faults, and limits of the suite."""
    lines = [
        *_table(FAULTS, fault_rows(document)),
        "",
        *READING.splitlines(),
        "",
        *_table(MONITORS, monitor_rows(document)),
        "",
        *_listed("Undetected faults", undetected(document), "Nothing that was tried."),
        *_listed("Limits of this suite", doubts(document), ""),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _listed(title: str, texts: Sequence[str], none: str) -> Iterator[str]:
    if texts or none:
        yield from (f"{title}:", "")
        yield from [f"- {_cell(text)}" for text in texts] or [none]
        yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    clean = "".join(c if c.isprintable() else " " for c in text)
    return "".join(f"\\{c}" if c in "\\|`*[]" else c for c in clean).replace("<", "&lt;")
