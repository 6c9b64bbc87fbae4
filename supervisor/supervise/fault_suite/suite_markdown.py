"""A suite as Markdown, for a repository or the page of a pipeline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

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


def markdown(document: Document) -> str:
    """Return a summary, the tables, undetected faults, and the limits of the suite."""
    lines = [
        *_wrapped(f"{summary(document)}."),
        "",
        *_table(FAULTS, fault_rows(document)),
        "",
        *_wrapped(READING),
        "",
        *_table(MONITORS, monitor_rows(document)),
        "",
        *_listed("Undetected faults", undetected(document), "None of those that were tried."),
        *_listed("Limits of this suite", limits(document), ""),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_on_hyphens=False)


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
